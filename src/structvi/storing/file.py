"""One file of tensors and a description: written whole or not at all, and believed only where its SHA-256 agrees.

The format is safetensors with one entry of metadata, "structvi": the canonical JSON of {"description", "format",
"sha256"}. Reading it never runs code.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as serialise
from torch import Tensor

#: The version of the format that this module writes, and the only one it reads.
FORMAT = 1

_ENTRY = "structvi"


class CheckpointError(ValueError):
    """A file that cannot be read, is damaged, or is not one of ours; the message says which."""


def write(path: str | os.PathLike, tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
    """Write one file atomically: afterwards `path` holds all of it, or what it held before.

    A temporary file in the same directory is written, flushed to the disk and renamed. Where one of these steps fails,
    the temporary file is removed and the error passed on.

    Args:
        path: the file; one that is there is replaced.
        tensors: by name, on any device.
        description: JSON values: strings, numbers, booleans, None, lists and dicts with strings as keys.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.safetensors"
        >>> write(path, {"x": torch.ones(2)}, {"step": 3})
        >>> read(path)
        ({'x': tensor([1., 1.])}, {'step': 3})
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no directory {path.parent}; make it first")
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a directory; give the name of a file in it")
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise TypeError(f"{name}: expected a dense tensor, got {tensor!r}")
    # clones: safetensors refuses tensors that share memory
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    description = json.loads(_canonical(dict(description)))
    envelope = {"description": description, "format": FORMAT, "sha256": _digest(plain, description)}
    data = serialise(plain, metadata={_ENTRY: _canonical(envelope)})
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            _write_bytes(file, data)
            _fsync(file)
        _rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _fsync_directory(path.parent)


def read(path: str | os.PathLike) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors, on the CPU, and the description of a file that `write` wrote.

    Raises:
        CheckpointError: the file is missing, damaged, of another version or of another kind.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    metadata = _metadata(data, path)
    envelope = _envelope(metadata, path)
    if envelope["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format version {envelope['format']!r}, this structvi reads {FORMAT}: "
            "read it with the structvi that wrote it"
        )
    try:
        tensors = parse_tensors(data)
    # what safetensors raises for entries that do not fit together: its own error, or torch's on the way to tensors
    except (SafetensorError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: its tensors cannot be read ({error})") from None
    if envelope["sha256"] != _digest(tensors, envelope["description"]):
        raise CheckpointError(f"{path} is damaged: its content does not have the SHA-256 that was written with it")
    return tensors, envelope["description"]


def digest(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of names, dtypes, shapes and bytes of tensors, in the order of their names.

    Example:
        >>> digest({"a": torch.zeros(2)}) == digest({"a": torch.zeros(2, 1)})
        False
    """
    return _digest(tensors, None)


def _digest(tensors: Mapping[str, Tensor], description: Any) -> str:
    sha = hashlib.sha256(_canonical(description).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        sha.update(_canonical([name, str(tensor.dtype), list(tensor.shape)]).encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _metadata(data: bytes, path: Path) -> dict[str, Any]:
    """The header's metadata; lengths are checked against the file before anything is parsed."""
    if not data:
        raise CheckpointError(f"{path} is empty")
    if len(data) < 8:
        raise CheckpointError(f"{path} is truncated: {len(data)} bytes are too few for a safetensors file")
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8 or data[8:9] != b"{":
        if data[:2] == b"PK" or (data[0] == 0x80 and data[1] <= 5):
            raise CheckpointError(
                f"{path} is no safetensors file but looks like a pickle or a zip, as torch.save writes: structvi does "
                "not unpickle; use posterior.save"
            )
        raise CheckpointError(f"{path} is truncated, damaged or no safetensors file: its header does not fit")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is damaged: its header is not JSON") from None
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or not isinstance(metadata.get(_ENTRY), str):
        raise CheckpointError(
            f'{path} was not written by structvi, or is damaged: its metadata lack the entry "{_ENTRY}"'
        )
    return metadata


def _envelope(metadata: dict[str, Any], path: Path) -> dict[str, Any]:
    text = metadata[_ENTRY]
    try:
        envelope = json.loads(text)
        # another spelling of the same JSON was not written by us
        canonical = _canonical(envelope) == text
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is damaged: its description is not JSON") from None
    if not isinstance(envelope, dict) or not isinstance(envelope.get("description"), dict) or not canonical:
        raise CheckpointError(f"{path} is damaged: its description is not as structvi writes it")
    missing = [field for field in ("format", "sha256") if field not in envelope]
    if missing or len(envelope) != 3 or len(metadata) != 1:
        raise CheckpointError(f"{path} is damaged: its description lacks {missing} or has more than structvi writes")
    return envelope


# The steps of `write` to the disk, each a function of its own so that tests can make one fail.


def _write_bytes(file: BinaryIO, data: bytes) -> None:
    file.write(data)


def _fsync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _rename(source: Path, target: Path) -> None:
    os.replace(source, target)


def _fsync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
