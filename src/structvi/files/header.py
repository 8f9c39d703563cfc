"""The header of a safetensors file, within bounds: it has to fit the file before anything is made of what it says."""

import json
import re
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

#: The most bytes of a header, as in safetensors itself: 10⁸.
HEADER = 100_000_000
#: The most lists and objects in each other, and in all, in its JSON.
NESTING = 100
CONTAINERS = 1_000_000

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64, "BOOL": torch.bool,
}  # fmt: skip
#: a string, closed or not, or a bracket
_TOKENS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)


class CheckpointError(ValueError):
    """A file that cannot be read, is damaged, or is not one of ours; the message says which."""


class MissingFile(CheckpointError, FileNotFoundError):
    """There is no file of that name."""


class Entry(NamedTuple):
    """A tensor in a file: what it is, and where its bytes lie behind the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(file: BinaryIO, size: int, path: Path) -> dict[str, Any]:
    """The header's JSON; its length is checked against the file before it is read."""
    if size == 0:
        raise CheckpointError(f"{path} is empty")
    start = file.read(9)
    if len(start) < 8:
        raise CheckpointError(f"{path} is truncated: {len(start)} bytes are too few for a safetensors file")
    length = int.from_bytes(start[:8], "little")
    if length > size - 8 or start[8:] != b"{":
        if start[:2] == b"PK" or (start[0] == 0x80 and start[1] <= 5):
            raise CheckpointError(
                f"{path} is no safetensors file but looks like a pickle or a zip, as torch.save writes: structvi does "
                "not unpickle; use posterior.save"
            )
        raise CheckpointError(f"{path} is truncated, damaged or no safetensors file: its header does not fit")
    if length > HEADER:
        raise CheckpointError(f"{path} is damaged: its header has {length} bytes, at most {HEADER} are read")
    file.seek(8)
    header = parse(file.read(length), path, "header")
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is damaged: its header is no object")
    return header


def parse(data: bytes | str, path: Path, what: str) -> Any:
    """JSON within the bounds, where no object has a key twice."""
    try:
        text = data if isinstance(data, str) else data.decode()
        check_nesting(text)
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{path} is damaged: its {what} is not JSON as structvi writes it ({error})") from None


def check_nesting(text: str) -> None:
    """Of JSON that has not been parsed: how deep it goes and how much it would make."""
    depth = containers = 0
    for token in _TOKENS.finditer(text):
        first = text[token.start()]
        if first in "[{":
            depth, containers = depth + 1, containers + 1
            if depth > NESTING or containers > CONTAINERS:
                raise ValueError(f"more than {NESTING} lists and objects in each other, or {CONTAINERS} in all")
        elif first in "]}":
            depth -= 1


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key is there twice")
    return result


def read_table(header: dict[str, Any], size: int, path: Path) -> dict[str, Entry]:
    """The tensors in the order of their bytes, which have to be all that there are behind the header."""
    entries = {name: _entry(name, entry, path) for name, entry in header.items() if name != "__metadata__"}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    position = 0
    for name, entry in ordered.items():
        if entry.start != position:
            raise CheckpointError(f"{path} is damaged: {brief(name)} does not begin where the tensor before it ends")
        position = entry.stop
    if position != size:
        raise CheckpointError(
            f"{path} is truncated or damaged: its header speaks of {position} bytes of tensors, it has {size}"
        )
    return ordered


def _entry(name: str, entry: Any, path: Path) -> Entry:
    wrong = f"{path} is damaged: its header says of the tensor {brief(name)} {brief(entry)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{wrong}; expected dtype, shape and data_offsets")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in _DTYPES:
        raise CheckpointError(f"{wrong}; its dtype is none that structvi knows")
    dtype, shape, offsets = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
            raise CheckpointError(f"{wrong}; expected lists of whole numbers")
    if len(shape) > 64 or prod(max(n, 1) for n in shape) * dtype.itemsize >= 2**63 or len(offsets) != 2:
        raise CheckpointError(f"{wrong}; there is no such tensor")
    if prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
        raise CheckpointError(f"{wrong}; its shape and its bytes do not agree")
    return Entry(dtype, tuple(shape), *offsets)


def brief(value: object, length: int = 80) -> str:
    """What came, for a message: short, and without control characters, whatever a file holds.

    Example:
        >>> brief("a" * 100, 8)
        "'aaaaaa…"
    """
    text = repr(value)
    return text if len(text) <= length else f"{text[: length - 1]}…"
