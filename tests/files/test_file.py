"""Files of tensors: every bit comes back, a write is whole or not at all, and damage is refused."""

import contextlib
import errno
import json
import os
import pickle
import random

import pytest
import torch
from safetensors.torch import load_file

from structvi.files.file import FORMAT, CheckpointError, read, write

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([True, False]), "empty": torch.zeros(0, 3)}
DESCRIPTION = {"kind": "test", "steps": [1, 2], "deep": {"x": None, "y": "ü"}}


@pytest.fixture
def path(tmp_path):
    write(tmp_path / "a.safetensors", TENSORS, DESCRIPTION)
    return tmp_path / "a.safetensors"


def same(one, other):
    return one.keys() == other.keys() and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        for a, b in ((one[name], other[name]) for name in one)
    )


def test_round_trip(path):
    tensors, description = read(path)
    assert same(tensors, TENSORS)
    assert description == DESCRIPTION
    assert same(load_file(path), TENSORS)  # safetensors reads it too


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool], ids=str)
def test_every_dtype_and_shape_comes_back_to_the_bit(tmp_path, dtype):
    raw = torch.randint(0, 2, (3, 4)) if dtype == torch.bool else torch.randint(-100, 100, (3, 4))
    tensors = {"x": raw.to(dtype), "t": raw.to(dtype).T, "part": raw.to(dtype)[1, ::2], "one": raw.to(dtype)[0, 0]}
    x = torch.tensor([torch.nan, -0.0, torch.inf, -torch.inf])  # values that compare badly
    write(tmp_path / "q", {**tensors, "odd": torch.ones(3, dtype=torch.int8), "bad": x}, {})
    found = read(tmp_path / "q")[0]
    assert torch.equal(found.pop("odd"), torch.ones(3, dtype=torch.int8))
    assert torch.equal(found.pop("bad").view(torch.int32), x.view(torch.int32))
    assert same(found, tensors)


def test_the_same_content_is_the_same_file_and_what_is_read_is_its_own(path, tmp_path):
    write(tmp_path / "b", dict(reversed(TENSORS.items())), dict(reversed(DESCRIPTION.items())))
    assert (tmp_path / "b").read_bytes() == path.read_bytes()
    tensors, _ = read(path)
    write(path, {"a": torch.zeros(2, 3)}, {})
    assert same(tensors, TENSORS)


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("old", [True, False])
def test_a_fault_leaves_the_old_file_or_none(path, tmp_path, monkeypatch, step, fault, old):
    before = path.read_bytes()

    def fails(*arguments):
        raise fault

    monkeypatch.setattr(os, step, fails)
    with pytest.raises(type(fault)) as caught:
        write(path if old else tmp_path / "new", {"x": torch.ones(3)}, {})
    if isinstance(fault, OSError):
        assert caught.value.errno == errno.ENOSPC
        assert ("untouched" if old else "no file was made") in str(caught.value)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_without_what_windows_lacks(path, tmp_path, monkeypatch):
    """Neither a flush of the directory nor flags of POSIX."""
    monkeypatch.setattr(os, "name", "nt")
    monkeypatch.setattr("structvi.files.file.Path", type(path))
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("a directory cannot be opened"))
    write(path, TENSORS, {"x": 1})
    assert read(path)[1] == {"x": 1}


def header_of(data):
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(header, body):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def crafted(data):
    """Headers that do not fit the file, and descriptions that are none."""
    for name in TENSORS:
        for field, value in [
            ("dtype", "F65"), ("dtype", "F8_E4M3"), ("shape", [2**62, 2**62]), ("shape", [-1]), ("shape", "x"),
            ("data_offsets", [0, 10**12]), ("data_offsets", [8, 0]), ("data_offsets", [0]),
        ]:  # fmt: skip
            header, body = header_of(data)
            header[name] = {**header[name], field: value}
            yield with_header(header, body)
    header, body = header_of(data)
    envelope = json.loads(header["__metadata__"]["structvi"])
    texts = ["", "{}", "[]", "7", "[" * 100_000, "x", "9" * 5000]
    texts += [json.dumps({**envelope, "format": version}) for version in (0, 1, FORMAT + 1, True, None, "2")]
    texts += [json.dumps({**envelope, "sha256": other}) for other in (None, "0" * 64)]
    texts += [json.dumps({**envelope, "description": other}) for other in (None, [], {"kind": "other"})]
    for text in texts:
        yield with_header({**header, "__metadata__": {"structvi": text}}, body)
    yield with_header({name: entry for name, entry in header.items() if name != "__metadata__"}, body)
    yield (2**63).to_bytes(8, "little") + b"{"
    yield (10**8 + 1).to_bytes(8, "little") + b"{" * 1000
    yield data + b"\0"
    yield pickle.dumps([1.0] * 99)
    yield b""


def test_every_kind_of_damage_is_refused(path, tmp_path):
    """Crafted headers, and every byte of a small file, changed or the last one."""
    data, generator, damaged = path.read_bytes(), random.Random(0), tmp_path / "damaged"
    cases = [*crafted(data), *(data[:n] for n in range(0, len(data), 7))]
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << generator.randrange(8)
        cases.append(bytes(flipped))
    for case in cases:
        damaged.write_bytes(case)
        with contextlib.suppress(CheckpointError):
            tensors, description = read(damaged)
            assert same(tensors, TENSORS)  # a change of the JSON's spaces is none of its content
            assert description == DESCRIPTION


@pytest.mark.skipif(os.name != "posix", reason="pipes and devices")
def test_pipes_and_devices_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for where in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(CheckpointError, match="not a file"):
            read(where)
        with pytest.raises(OSError, match="a device"):
            write(where, {}, {})
