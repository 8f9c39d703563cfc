"""One file of tensors and a description: written whole or not at all, and believed only where its SHA-256 agrees.

The format is safetensors with one entry of metadata, "structvi": the canonical JSON of {"description", "format",
"sha256"}. Reading it never runs code. The header is read first, with bounds, and has to account for every byte of the
file before a tensor is read.
"""

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import save as serialise
from torch import Tensor

from .header import HEADER, CheckpointError, Entry, MissingFile, brief, check_nesting, parse, read_header, read_table

#: The version of the format that this module writes, and the only one it reads.
FORMAT = 1
_ENTRY = "structvi"


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
    """Write one file atomically: afterwards `path` holds all of it, or what it held before.

    A temporary file in the same directory is written, flushed to the disk and renamed. Where one of these steps fails,
    the temporary file is removed; the error says that what was there is untouched. A symbolic link stays, and the file
    that it leads to is written.

    Args:
        path: the file; one that is there is replaced. Devices, pipes and sockets are refused.
        tensors: by name, on any device.
        description: JSON values: strings, numbers, booleans, None, lists and dicts with strings as keys.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.safetensors"
        >>> write(path, {"x": torch.ones(2)}, {"step": 3})
        >>> read(path)
        ({'x': tensor([1., 1.])}, {'step': 3})
    """
    target = _target(Path(path))
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise TypeError(f"{name}: expected a dense tensor, got {tensor!r}")
    # clones: safetensors refuses tensors that share memory
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    description = json.loads(_canonical(dict(description)))
    envelope = {"description": description, "format": FORMAT, "sha256": _digest(plain, description)}
    text = _canonical(envelope)
    try:
        check_nesting(text)
    except ValueError as error:
        raise ValueError(f"cannot write {path}: its description has {error}, which would not be read") from None
    if len(text) > HEADER:
        raise ValueError(f"cannot write {path}: its description takes {len(text)} bytes, at most {HEADER} are read")
    try:
        data = serialise(plain, metadata={_ENTRY: text})
    except SafetensorError as error:  # with the names it is longer than that
        raise ValueError(f"cannot write {path}: {error}") from None
    except KeyError as error:  # complex numbers, before 0.5
        raise ValueError(f"cannot write {path}: this safetensors writes no {error}, a newer one may") from None
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            _write_bytes(file, data)
            _fsync(file)
        _rename(temporary, target)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            left = "the file that was there is untouched" if target.exists() else "no file was made"
            raise _unwritten(path, error, f"; {left}") from error
        raise
    _fsync_directory(target.parent)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors, on the CPU, and the description of a file that `write` wrote.

    Raises:
        CheckpointError: the file is missing, damaged, of another version or of another kind.
    """
    with opened(path) as stored:
        return stored.tensors(), stored.description


class Stored:
    """An open file whose header has been read and fits it; its tensors have not been read, nor is its SHA-256 checked.

    Args:
        file: a regular file, open for reading, at its first byte.
        path: its name, for messages.
    """

    def __init__(self, file: BufferedReader, path: Path):
        self._file, self._path = file, path
        size = os.fstat(file.fileno()).st_size
        header = read_header(file, size, path)
        envelope = _envelope(header, path)
        #: what was written with the tensors
        self.description: dict[str, Any] = envelope["description"]
        self._sha = envelope["sha256"]
        #: name → what the header says of a tensor, in the order of their bytes
        self.table = read_table(header, size - file.tell(), path)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, on the CPU; once."""
        size = sum(entry.stop - entry.start for entry in self.table.values())
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if size > memory:
            raise CheckpointError(f"{self._path} has {size} bytes of tensors, more than this machine's {memory}")
        try:
            tensors = {name: self._next(entry) for name, entry in self.table.items()}
            sha = _digest(tensors, self.description)
        except OSError as error:
            raise CheckpointError(f"cannot read {self._path}: {error.strerror or error}") from None
        except (MemoryError, RuntimeError):  # torch's own for memory that it does not get
            raise CheckpointError(f"there is no memory for the {size} bytes of tensors in {self._path}") from None
        if self._sha != sha:
            raise CheckpointError(
                f"{self._path} is damaged: its content does not have the SHA-256 that was written with it"
            )
        return tensors

    def _next(self, entry: Entry) -> Tensor:
        data = torch.empty(entry.stop - entry.start, dtype=torch.uint8)
        rest = data.numpy().data
        while rest:
            count = self._file.readinto(rest)
            if not count:
                raise CheckpointError(f"{self._path} is truncated: it became shorter while it was read")
            rest = rest[count:]
        if entry.dtype == torch.bool and len(data) and data.max() > 1:
            raise CheckpointError(f"{self._path} is damaged: a boolean tensor has bytes that are neither 0 nor 1")
        return data.view(entry.dtype).reshape(entry.shape)


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Stored]:
    """A file with its header read and checked, for who wants to see it before memory is taken for the tensors.

    Raises:
        CheckpointError: as `read`, but for damage that only the SHA-256 shows.
    """
    path = Path(path)
    try:
        _check_regular(os.stat(path), path)  # before it is opened: to open a device may do something already
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe put there since would block
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise MissingFile(f"cannot read {path}: No such file or directory") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise CheckpointError(f"cannot read {path}: {reason}") from None
    with open(handle, "rb") as file:
        _check_regular(os.fstat(file.fileno()), path)
        try:
            stored = Stored(file, path)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
        except MemoryError:
            raise CheckpointError(f"there is no memory for the header of {path}") from None
        yield stored


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


def _envelope(header: dict[str, Any], path: Path) -> dict[str, Any]:
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or not isinstance(metadata.get(_ENTRY), str):
        raise CheckpointError(
            f'{path} was not written by structvi, or is damaged: its metadata lack the entry "{_ENTRY}"'
        )
    envelope = parse(metadata[_ENTRY], path, "description")
    # another spelling of the same JSON was not written by us
    canonical = _canonical(envelope) == metadata[_ENTRY]
    if not isinstance(envelope, dict) or not isinstance(envelope.get("description"), dict) or not canonical:
        raise CheckpointError(f"{path} is damaged: its description is not as structvi writes it")
    missing = [field for field in ("format", "sha256") if field not in envelope]
    if missing or len(envelope) != 3 or len(metadata) != 1:
        raise CheckpointError(f"{path} is damaged: its description lacks {missing} or has more than structvi writes")
    if type(envelope["format"]) is not int or envelope["format"] != FORMAT:  # true is 1, too
        raise CheckpointError(
            f"{path} has format version {brief(envelope['format'])}, this structvi reads {FORMAT}: "
            "read it with the structvi that wrote it"
        )
    return envelope


# Which files are read and written


def _check_regular(status: os.stat_result, path: Path) -> None:
    if kind := _other_kind(status.st_mode):
        raise CheckpointError(f"cannot read {path}: it is {kind}, not a file")


def _other_kind(mode: int) -> str | None:
    """What it is in place of a regular file."""
    if stat.S_ISREG(mode):
        return None
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _target(path: Path) -> Path:
    """The file to write: behind a symbolic link the one that it leads to, whether it is there or not."""
    kind = None
    try:
        target = Path(os.path.realpath(path)) if path.is_symlink() else path
        if not target.parent.is_dir():
            raise FileNotFoundError(f"cannot write {path}: there is no directory {target.parent}; make it first")
        with suppress(FileNotFoundError):
            kind = _other_kind(os.stat(target).st_mode)
    except OSError as error:
        raise error if error.errno is None else _unwritten(path, error) from None
    if kind == "a directory":
        raise IsADirectoryError(f"cannot write {path}: it is a directory; give the name of a file in it")
    if kind is not None:
        raise OSError(f"cannot write {path}: it is {kind}, not a file; give the name of a file")
    return target


def _unwritten(path: str | os.PathLike[str], error: OSError, left: str = "") -> OSError:
    text = f"cannot write {path}: {error.strerror or error}{left}"
    return OSError(text) if error.errno is None else OSError(error.errno, text)


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
