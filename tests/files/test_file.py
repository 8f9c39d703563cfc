"""Files are written whole or not at all, read back to the bit, and refused in whatever way they are damaged."""

import errno
import io
import json
import os
import pickle
import random
import socket
import stat
import sys
import zipfile

import pytest
import torch
from safetensors.torch import load as parse
from safetensors.torch import save as serialise

from structvi.files import file as checkpoint
from structvi.files.file import CheckpointError, digest, read, write
from structvi.files.header import CONTAINERS, HEADER, NESTING
from tests.children import python

TENSORS = {
    "family.mean": torch.arange(12.0).reshape(3, 4) / 7,
    "family.scale": torch.arange(5.0).double() / 3,
    "network.steps": torch.tensor(41),
    "network.mask": torch.tensor([True, False, True]),
}
DESCRIPTION = {"kind": "test", "names": ["a", "é", '"quoted"'], "scale": 0.1, "nested": {"none": None, "n": [1, 2.5]}}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.safetensors"
    write(path, TENSORS, DESCRIPTION)
    return path


def assert_bits_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert a[name].shape == b[name].shape
        flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a[name], b[name])]
        assert torch.equal(*flat), name


def header_and_payload(data):
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def assemble(header, payload):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + payload


def assemble_text(text, payload, encoding="utf-8"):
    data = text.encode(encoding)
    return len(data).to_bytes(8, "little") + data + payload


# What is written is what is read


def test_round_trip(path):
    tensors, description = read(path)
    assert_bits_equal(tensors, TENSORS)
    assert description == DESCRIPTION


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]
)
def test_every_dtype_and_shape_comes_back_to_the_bit(tmp_path, dtype):
    base = (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    tensors = {
        "scalar": base[0, 0],
        "empty": base[:0],
        "strided": base.T[1:, ::2],
        "shared": base,
        "same memory": base.view(-1)[:4],
    }
    write(tmp_path / "x", tensors, {})
    assert_bits_equal(read(tmp_path / "x")[0], tensors)


def test_values_that_compare_badly_come_back(tmp_path):
    tensors = {"x": torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-45])}
    write(tmp_path / "x", tensors, {"largest": float("inf"), "third": 1 / 3})
    read_tensors, description = read(tmp_path / "x")
    assert_bits_equal(read_tensors, tensors)
    assert description == {"largest": float("inf"), "third": 1 / 3}


def test_nothing_but_a_description(tmp_path):
    write(tmp_path / "x", {}, {"step": 1})
    assert read(tmp_path / "x") == ({}, {"step": 1})


def test_the_same_content_is_the_same_file(path, tmp_path):
    write(tmp_path / "again", dict(reversed(TENSORS.items())), dict(reversed(DESCRIPTION.items())))
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_digest_sees_names_dtypes_shapes_and_values():
    one = {"a": torch.zeros(2, 3)}
    others = [
        {"b": torch.zeros(2, 3)},
        {"a": torch.zeros(2, 3, dtype=torch.int32)},
        {"a": torch.zeros(3, 2)},
        {"a": -torch.zeros(2, 3)},
        {},
    ]
    assert len({digest(tensors) for tensors in [one, *others]}) == 6
    assert digest({"a": torch.zeros(3, 2).T}) == digest(one)


def test_what_would_not_be_read_is_not_written(tmp_path):
    deep = None
    for _ in range(NESTING):
        deep = [deep]
    with pytest.raises(ValueError, match=rf"cannot write .* more than {NESTING} lists and objects in each other"):
        write(tmp_path / "x", {}, {"deep": deep})
    with pytest.raises(ValueError, match=rf"its description takes 100000\d+ bytes, at most {HEADER} are read"):
        write(tmp_path / "x", {}, {"long": "x" * HEADER})
    assert list(tmp_path.iterdir()) == []


def test_what_is_within_the_bounds_is_read(tmp_path):
    deep = "bottom"
    for _ in range(NESTING - 2):  # and the description itself, and what is written around it
        deep = [deep]
    description = {"deep": deep, "[{": '"]}\\', "many": [[]] * 100_000}
    write(tmp_path / "x", {}, description)
    assert read(tmp_path / "x") == ({}, description)


def test_booleans_are_zero_or_one(path):
    """Of a file with the right hash: what torch does with other bytes is undefined."""
    data = torch.tensor([0, 2, 1], dtype=torch.uint8)
    sha = checkpoint._digest({"mask": data.view(torch.bool)}, {})
    entry = {"dtype": "BOOL", "shape": [3], "data_offsets": [0, 3]}
    envelope = json.dumps({"description": {}, "format": 1, "sha256": sha}, separators=(",", ":"))
    path.write_bytes(assemble({"__metadata__": {"structvi": envelope}, "mask": entry}, data.numpy().tobytes()))
    with pytest.raises(CheckpointError, match="boolean tensor has bytes that are neither 0 nor 1"):
        read(path)


@pytest.mark.parametrize("tensors", [{"x": 1.0}, {"x": torch.eye(2).to_sparse()}])
def test_what_is_no_dense_tensor_is_refused(tmp_path, tensors):
    with pytest.raises(TypeError, match="x: expected a dense tensor"):
        write(tmp_path / "x", tensors, {})
    assert list(tmp_path.iterdir()) == []


def test_a_description_that_is_no_json_is_refused(tmp_path):
    with pytest.raises(TypeError, match="not JSON serializable"):
        write(tmp_path / "x", {}, {"function": read})
    assert list(tmp_path.iterdir()) == []


# Written whole or not at all


class Fault(BaseException):
    """Like KeyboardInterrupt: no handler for ordinary errors catches it."""


STEPS = ("_write_bytes", "_fsync", "_rename", "_fsync_directory")


def test_the_steps_come_in_order(tmp_path, monkeypatch):
    done = []
    for step in STEPS:
        original = getattr(checkpoint, step)
        monkeypatch.setattr(
            checkpoint, step, lambda *a, step=step, original=original: (done.append(step), original(*a))
        )
    write(tmp_path / "x", TENSORS, {})
    assert tuple(done) == STEPS


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", [Fault, OSError])
def test_a_fault_leaves_the_old_file_or_the_new_one(path, monkeypatch, step, when, error):
    original = getattr(checkpoint, step)

    def faulty(*arguments):
        if when == "after":
            original(*arguments)
        raise error("injected")

    monkeypatch.setattr(checkpoint, step, faulty)
    with pytest.raises(error, match="injected"):
        write(path, {"new": torch.ones(3)}, {"new": True})
    renamed = (step, when) in (("_rename", "after"), ("_fsync_directory", "before"), ("_fsync_directory", "after"))
    assert read(path)[1] == ({"new": True} if renamed else DESCRIPTION)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_half_a_write_leaves_the_old_file(path, monkeypatch):
    def full(file, data):
        file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write(path, {"new": torch.ones(3)}, {})
    assert read(path)[1] == DESCRIPTION
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_directory_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "nowhere" / "x", {}, {})


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("old", [True, False])
def test_a_disk_that_takes_no_more_is_named_with_what_is_left(path, monkeypatch, code, old):
    if not old:
        path.unlink()

    def full(file, data):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(checkpoint, "_write_bytes", full)
    left = "the file that was there is untouched" if old else "no file was made"
    with pytest.raises(OSError, match=f"cannot write {path}: {os.strerror(code)}; {left}") as caught:
        write(path, {"new": torch.ones(3)}, {})
    assert caught.value.errno == code
    assert [file.name for file in path.parent.iterdir()] == [path.name] * old


LIMITED = """
import resource, signal, sys, torch
from structvi.files.file import write
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write(sys.argv[1], {"x": torch.zeros(1_000_000)}, {})
except OSError as error:
    print(error)
"""


def test_a_limit_on_the_size_of_files(path):
    said = run(LIMITED, path)
    assert f"cannot write {path}: File too large; the file that was there is untouched" in said
    assert read(path)[1] == DESCRIPTION
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def run(code, *arguments):
    """What a process of its own prints."""
    done = python(code, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Links stay links, and what is no file is left alone


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_its_target_is_written(path, tmp_path, there):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    target = elsewhere / "target"
    if there:
        path.rename(target)
    first, second = tmp_path / "first", tmp_path / "second"
    first.symlink_to("elsewhere/target")
    second.symlink_to(first)
    write(second, {"new": torch.ones(3)}, {"new": True})
    assert first.is_symlink()
    assert second.is_symlink()
    assert not target.is_symlink()
    for name in (first, second, target):
        assert read(name)[1] == {"new": True}
    assert [file.name for file in elsewhere.iterdir()] == ["target"]


def test_a_fault_leaves_what_a_link_leads_to(path, tmp_path, monkeypatch):
    link = tmp_path / "link"
    link.symlink_to(path)
    monkeypatch.setattr(checkpoint, "_rename", lambda *names: (_ for _ in ()).throw(OSError(5, "injected")))
    with pytest.raises(OSError, match=r"cannot write .*link: injected; the file that was there is untouched"):
        write(link, {"new": torch.ones(3)}, {})
    assert link.is_symlink()
    assert read(path)[1] == DESCRIPTION
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([path.name, "link"])


def special(kind, path):
    """A file that is none; skips where the system makes none."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's name may have 100 letters
        try:
            socket.socket(socket.AF_UNIX).bind(path.name)
        finally:
            os.chdir(here)
    elif kind == "link to a device":
        path.symlink_to("/dev/null")
    elif kind == "link to an endless device":
        path.symlink_to("/dev/zero")
    elif kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only the superuser makes devices")
    elif kind == "link to itself":
        path.symlink_to(path)
    else:
        path.mkdir()


SPECIAL = {
    "pipe": "it is a pipe",
    "socket": "it is a socket",
    "device": "it is a device",
    "link to a device": "it is a device",
    "link to an endless device": "it is a device",
    "link to itself": "Too many levels of symbolic links",
    "directory": "it is a directory",
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of the socket
@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file_is_not_written(tmp_path, kind):
    path = tmp_path / "x"
    special(kind, path)
    before = os.lstat(path)
    with pytest.raises(OSError, match=f"cannot write {path}: {SPECIAL[kind]}"):
        write(path, TENSORS, {})
    after = os.lstat(path)
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


READ = """
import resource, sys
from structvi.files.file import CheckpointError, read
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
with open("/proc/self/statm") as file:
    limit = int(file.read().split()[0]) * resource.getpagesize() + 2**28
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in sys.argv[1:]:
    try:
        read(path)
    except CheckpointError as error:
        print(error, flush=True)
"""


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.skipif(sys.platform != "linux", reason="the limits are those of Linux")
def test_what_is_no_file_is_not_read_and_does_not_block(tmp_path):
    paths = {}
    for kind in SPECIAL:
        path = tmp_path / kind
        if kind != "device" or os.geteuid() == 0:
            special(kind, path)
            paths[kind] = path
    # nothing is waited for: the time limit is there for a pipe that blocks
    done = python(READ, *paths.values(), timeout=120)
    assert [line.startswith("cannot read") for line in done.stdout.splitlines()] == [True] * len(paths)
    for (kind, path), line in zip(paths.items(), done.stdout.splitlines(), strict=True):
        assert f"{path}: {SPECIAL[kind]}" in line


def sparse(path, start, size):
    """A file of this size with these bytes at its start, which takes no place on the disk."""
    with open(path, "wb") as file:
        file.write(start)
        file.truncate(size)


def claims(size):
    """The start of a file whose header speaks of one tensor of so many bytes, and is right otherwise."""
    envelope = '{"description":{},"format":1,"sha256":"' + "0" * 64 + '"}'
    entry = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    return assemble({"__metadata__": {"structvi": envelope}, "x": entry}, b"")


GB = 10**9
LARGE = {
    "zeros": (b"", 200 * GB, "header does not fit"),
    "a header of 5 GB": ((5 * GB).to_bytes(8, "little") + b"{", 6 * GB, "its header has 5000000000 bytes, at most"),
    "5 GB behind the tensors": (claims(400) + b"\0" * 400, 5 * GB, "speaks of 400 bytes of tensors, it has 49999"),
    "200 GB that the header speaks of": (claims(200 * GB), len(claims(200 * GB)) + 200 * GB, "bytes of tensors"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="the limits are those of Linux")
def test_large_files_are_refused_in_little_memory(tmp_path):
    try:
        for name, (start, size, _) in LARGE.items():
            sparse(tmp_path / name, start, size)
    except OSError:
        pytest.skip("no files of this size here")
    lines = run(READ, *(tmp_path / name for name in LARGE)).splitlines()
    for (name, (*_, message)), line in zip(LARGE.items(), lines, strict=True):
        assert str(tmp_path / name) in line
        assert message in line


# Damage


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def header_variants(data):
    """Files that are well-formed safetensors, with some of the content another."""
    header, payload = header_and_payload(data)
    envelope = json.loads(header["__metadata__"]["structvi"])

    def with_envelope(changed, **dump):
        settings = {"sort_keys": True, "separators": (",", ":"), **dump}
        return assemble({**header, "__metadata__": {"structvi": json.dumps(changed, **settings)}}, payload)

    yield "no metadata", assemble({k: v for k, v in header.items() if k != "__metadata__"}, payload)
    yield "other metadata", assemble({**header, "__metadata__": {"format": "pt"}}, payload)
    yield "more metadata", assemble({**header, "__metadata__": {**header["__metadata__"], "more": "x"}}, payload)
    yield "metadata no dict", assemble({**header, "__metadata__": "structvi"}, payload)
    yield "entry no string", assemble({**header, "__metadata__": {"structvi": envelope}}, payload)
    yield "entry no JSON", assemble({**header, "__metadata__": {"structvi": "{"}}, payload)
    yield "entry deep", assemble({**header, "__metadata__": {"structvi": "[" * 100_000}}, payload)
    yield "entry a list", with_envelope([envelope])
    yield "entry spelt otherwise", with_envelope(envelope, separators=(", ", ": "))
    for field in envelope:
        yield f"without {field}", with_envelope({k: v for k, v in envelope.items() if k != field})
        yield f"{field} is null", with_envelope({**envelope, field: None})
        yield f"{field} is a list", with_envelope({**envelope, field: [envelope[field]]})
    for version in (0, 2, -1, 10**400, "1", 1.5, "true"):
        yield f"version {str(version)[:5]}", with_envelope({**envelope, "format": version})
    yield "extra field", with_envelope({**envelope, "extra": 1})
    for field in envelope["description"]:
        rest = {k: v for k, v in envelope["description"].items() if k != field}
        yield f"description without {field}", with_envelope({**envelope, "description": rest})
        yield f"description: {field}", with_envelope({**envelope, "description": {**rest, field: "other"}})
    names = [name for name in header if name != "__metadata__"]
    for name in names:
        entry = header[name]
        yield f"without {name}", assemble({k: v for k, v in header.items() if k != name}, payload)
        yield f"{name} renamed", assemble({**{k: v for k, v in header.items() if k != name}, "x": entry}, payload)
        changes = [{"shape": [7]}, {"shape": [2**62, 2**62]}, {"shape": [-1]}, {"shape": "x"}, {"dtype": "F8_E8M0"}]
        changes += [{"dtype": "I32"}, {"dtype": "nonsense"}, {"data_offsets": [0, 2**63]}, {"data_offsets": [9, 1]}]
        changes += [{"data_offsets": None}, {"shape": [*entry["shape"], 1]}]
        for change in changes:
            yield f"{name}: {change}", assemble({**header, name: {**entry, **change}}, payload)
        size = len(payload) + 10**12
        yield f"{name}: 10^12 bytes", assemble({**header, name: {**entry, "data_offsets": [0, size]}}, payload)
        yield f"{name}: more said", assemble({**header, name: {**entry, "stride": [1]}}, payload)
        yield f"{name}: no entry", assemble({**header, name: None}, payload)
        yield f"{name}: digits", assemble({**header, name: {**entry, "shape": [10**400]}}, payload)
        yield f"{name}: true", assemble({**header, name: {**entry, "shape": [True]}}, payload)
        yield f"{name}: empty and vast", assemble({**header, name: {**entry, "shape": [0, 2**62, 2**62]}}, payload)
    overlapping = {name: {**header[name], "data_offsets": header[names[0]]["data_offsets"]} for name in names}
    yield "overlapping", assemble({**header, **overlapping}, payload)
    moved = {n: {**header[n], "data_offsets": [8 + x for x in header[n]["data_offsets"]]} for n in names}
    yield "a gap before the first", assemble({**header, **moved}, b"\0" * 8 + payload)
    text = json.dumps(header)
    twice = text[:-1] + f', "{names[0]}": {json.dumps(header[names[0]])}' + "}"
    yield "a tensor twice", len(twice).to_bytes(8, "little") + twice.encode() + payload
    yield "digits", assemble_text(text[:-1] + ', "x": ' + "1" * 5000 + "}", payload)
    yield "a key of half a letter", assemble({**header, "\ud800": header[names[0]]}, payload)
    yield "UTF-16", assemble_text(text, payload, "utf-16-le")
    yield "version true", with_envelope({**envelope, "format": True})
    yield "version 1.0", with_envelope({**envelope, "format": 1.0})
    deep = "[" * NESTING + "]" * NESTING
    yield "nested", assemble_text(text[:-1] + f', "x": {deep}' + "}", payload)
    yield "many", assemble_text(text[:-1] + ', "x": [' + "[]," * CONTAINERS + "0]}", payload)
    yield "not an object", assemble([header], payload)
    yield "deep", (100_000).to_bytes(8, "little") + b'{"a":' * 20_000 + payload
    yield "nan shape", assemble({**header, names[0]: {**header[names[0]], "shape": float("nan")}}, payload)
    tensors = parse(data)
    text = {"structvi": header["__metadata__"]["structvi"]}
    yield "extra tensor", serialise({**tensors, "extra": torch.ones(2)}, text)
    yield "scaled", serialise({**tensors, "family.mean": 2 * tensors["family.mean"]}, text)
    turned = {**tensors, "family.mean": tensors["family.mean"].T.contiguous()}
    yield "transposed", serialise(turned, text)
    yield "other dtype", serialise({**tensors, "family.mean": tensors["family.mean"].double()}, text)
    swapped = {**tensors, "family.mean": tensors["family.scale"], "family.scale": tensors["family.mean"]}
    yield "swapped", serialise(swapped, text)


def foreign_variants(trap):
    """Other files in disguise."""
    value = Trap(trap)
    for protocol in range(6):
        yield f"pickle {protocol}", pickle.dumps(value, protocol=protocol)
    yield "pickle, long", pickle.dumps([value, b"0" * 5000], protocol=2)
    for zipped in (True, False):
        stream = io.BytesIO()
        torch.save({"state": torch.ones(3), "trap": value}, stream, _use_new_zipfile_serialization=zipped)
        yield f"torch.save {zipped}", stream.getvalue()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("data.pkl", pickle.dumps(value))
    yield "zip", stream.getvalue()
    payload = pickle.dumps(value)
    entry = {"dtype": "U8", "shape": [len(payload)], "data_offsets": [0, len(payload)]}
    yield "pickle as a tensor", assemble({"x": entry}, payload)
    yield "empty", b""
    yield "seven bytes", b"\0" * 7
    yield "zeros", b"\0" * 1000
    yield "text", b"import os\n" * 50
    yield "header length 2^64-1", b"\xff" * 8 + b"{}"
    yield "plain safetensors", serialise({"x": torch.ones(2)})
    generator = random.Random(0)
    for n in range(20):
        yield f"random bytes {n}", generator.randbytes(generator.randrange(1, 2000))


def damaged_variants(data, trap):
    generator = random.Random(0)
    header_end = 8 + int.from_bytes(data[:8], "little")
    lengths = {*range(0, 17), header_end - 1, header_end, header_end + 1, len(data) - 1}
    lengths |= {generator.randrange(len(data)) for _ in range(40)}
    for length in sorted(lengths):
        yield f"first {length} bytes", data[:length]
    for length in (1, 8, 1000):
        yield f"{length} bytes more", data + b"\0" * length
        yield f"{length} bytes before", b"\0" * length + data
    bits = [(byte, bit) for byte in range(8) for bit in range(8)]  # of the header's length
    bits += [(generator.randrange(8, header_end), generator.randrange(8)) for _ in range(200)]
    bits += [(generator.randrange(header_end, len(data)), generator.randrange(8)) for _ in range(100)]
    for byte, bit in bits:
        flipped = bytearray(data)
        flipped[byte] ^= 1 << bit
        yield f"bit {bit} of byte {byte}", bytes(flipped)
    for n in range(30):
        start = generator.randrange(len(data) - 16)
        noise = generator.randbytes(16)
        yield f"noise {n} at {start}", data[:start] + noise + data[start + 16 :]
    yield from header_variants(data)
    yield from foreign_variants(trap)


def test_every_kind_of_damage_is_refused(path, tmp_path):
    data, trap, damaged = path.read_bytes(), tmp_path / "trap", tmp_path / "damaged"
    refused, accepted = {}, []
    for name, variant in damaged_variants(data, trap):
        assert variant != data, name
        damaged.write_bytes(variant)
        try:
            read(damaged)
        except CheckpointError as error:
            refused[variant] = str(error)
        else:
            accepted.append(name)
    assert accepted == []
    assert all(str(damaged) in message for message in refused.values())
    assert len(refused) >= 500  # distinct files; 200 are asked for
    assert not trap.exists()


def test_every_single_bit_of_a_small_file_counts(tmp_path):
    path = tmp_path / "x"
    write(path, {"x": torch.ones(2)}, {"a": "ü"})
    data = path.read_bytes()
    for position in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError):
            read(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.unlink(), "cannot read .*No such file"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot read .*directory"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_bytes(b"1234"), "truncated: 4 bytes"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "damaged"),
        (lambda path: path.write_bytes(pickle.dumps([1.0] * 99)), "does not unpickle"),
        (lambda path: torch.save(torch.ones(2), path), "does not unpickle"),
        (lambda path: path.write_bytes(serialise({"x": torch.ones(2)})), "not written by structvi"),
    ],
)
def test_what_the_error_says(path, make, message):
    make(path)
    with pytest.raises(CheckpointError, match=message):
        read(path)


def test_another_version_is_named(path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    with pytest.raises(CheckpointError, match="version 1, this structvi reads 2"):
        read(path)


def test_an_absurd_header_length_takes_no_memory(path):
    data = bytearray(path.read_bytes())
    data[:8] = (2**50).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="header does not fit"):
        read(path)


def test_a_missing_file_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match="No such file"):
        read(tmp_path / "gone.safetensors")
