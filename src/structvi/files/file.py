"""One file of tensors and a description, written whole or not at all, and read only if its SHA-256 agrees.

The format is safetensors with one entry of metadata, "structvi": the JSON of {"description", "format", "sha256"}.
Reading never runs code, and takes no more memory than the file has bytes.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

#: the version of the format that this module writes, and the only one that it reads
FORMAT = 2
#: bytes of a tensor that are looked at, and copied, at once
PIECE = 4_000_000


class CheckpointError(ValueError):
    """A file cannot be read, is damaged, or was not written by structvi; the message says which."""


class MissingFile(CheckpointError, FileNotFoundError):
    """No file has that name."""


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
    """Write one file atomically: afterwards `path` holds all of it, or the old content.

    A temporary file in the same directory is written, flushed to the disk and renamed. Tensors are written from their
    memory: one on a GPU, or with gaps, is copied.

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
    target = Path(os.path.realpath(path))  # a symbolic link stays
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no directory {Path(path).parent}; make it first")
    if target.exists() and not target.is_file():
        raise IsADirectoryError(f"cannot write {path}: it is a directory or a device; give the name of a file in it")
    text = _canonical({"description": description, "format": FORMAT, "sha256": digest(tensors, description)})
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        save_file({name: _alone(tensor) for name, tensor in tensors.items()}, temporary, {"structvi": text})
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except (OSError, SafetensorError) as error:
        left = "the file that was there is untouched" if target.exists() else "no file was made"
        number = error.errno if isinstance(error, OSError) else None
        raise OSError(number, f"cannot write {path}: {error}; {left}") from error
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # the rename itself, which Windows has no way to flush
        handle = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors, on the CPU, and the description of a file that `write` wrote.

    Raises:
        CheckpointError: the file is missing, damaged, of another version or of another kind.
    """
    if not os.path.exists(path):
        raise MissingFile(f"cannot read {path}: there is no such file")
    if not os.path.isfile(path):  # a pipe would wait, a device may have no end
        raise CheckpointError(f"cannot read {path}: it is a directory, a pipe or a device, not a file")
    try:
        with safe_open(path, framework="pt") as file:
            envelope = json.loads((file.metadata() or {}).get("structvi", "{}"))
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    except (SafetensorError, ValueError, KeyError, RecursionError) as error:
        said = brief(str(error), 200)
        raise CheckpointError(
            f"{path} is damaged, or no safetensors file ({said}); structvi does not unpickle what torch.save writes"
        ) from None
    if not isinstance(envelope, dict) or "format" not in envelope:
        raise CheckpointError(f'{path} was not written by structvi: its metadata have no description in "structvi"')
    if envelope["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format version {brief(envelope['format'])}, this structvi reads {FORMAT}: read it with the "
            "structvi that wrote it"
        )
    description = envelope.get("description")
    if not isinstance(description, dict) or digest(tensors, description) != envelope.get("sha256"):
        raise CheckpointError(f"{path} is damaged: its content does not have the SHA-256 that was written with it")
    return tensors, description


def digest(tensors: Mapping[str, Tensor], description: Any = None) -> str:
    """Return the SHA-256 of a description, and of names, dtypes, shapes and bytes of tensors.

    Example:
        >>> digest({"a": torch.zeros(2)}) == digest({"a": torch.zeros(2, 1)})
        False
    """
    sha = hashlib.sha256(_canonical(description).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(_canonical([name, str(tensor.dtype), list(tensor.shape)]).encode())
        for part in _bytes(tensor):
            sha.update(part)
    return sha.hexdigest()


def brief(value: object, length: int = 80) -> str:
    """Return a value as text for a message: short, and without control characters, whatever a file holds.

    Example:
        >>> brief("a" * 100, 8)
        "'aaaaaa…"
    """
    text = repr(value)
    return text if len(text) <= length else f"{text[: length - 1]}…"


def all_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite."""
    return all(bool(part.isfinite().all()) for part in _parts(tensor))


def _alone(tensor: Tensor) -> Tensor:
    """Return the tensor in the host's memory without gaps; a part of a larger one is copied."""
    whole = tensor.detach().cpu().contiguous()
    return whole if whole.nbytes == whole.untyped_storage().nbytes() else whole.clone()


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Give the tensor in parts of a few rows: a copy of one takes little memory."""
    rows = tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach()
    yield from rows.split(max(1, PIECE // max(1, rows[:1].nbytes)))


def _bytes(tensor: Tensor) -> Iterator[memoryview]:
    """Give the tensor's bytes, row by row."""
    for part in _parts(tensor):
        yield part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
