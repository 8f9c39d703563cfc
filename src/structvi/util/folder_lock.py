"""A folder that one piece of work at a time writes to, with an owner that dies with its process."""

import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # no POSIX: there are owner files alone
    fcntl = None

#: the file whose lock is the folder's; it says who has it, and means nothing while nobody has the lock
LOCK_FILE = ".structvi-lock"
#: where there is no flock, the file that is the lock
OWNER_FILE = ".structvi-owner"
#: what a file system answers that has no flock
_UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}

#: folders locked by this process, by device and inode: the open file with the lock (None without flock), and the owner
_held: dict[tuple[int, int], tuple[int | None, dict]] = {}
_guard = threading.Lock()


class FolderInUse(RuntimeError):
    """Another process, or another call in this one, works in the folder; the message says which, and since when."""


@contextmanager
def folder_lock(directory: str | os.PathLike[str], what: str = "a fit") -> Iterator[None]:
    """Inside, nobody else gets the lock of `directory`: no other process, thread or call.

    The lock is flock's on a file held open, so that the kernel releases it with the process, also by SIGKILL. Processes
    forked inside do not keep it. Where a file system has no flock, the rule is: a file with the owner's name is the
    lock; it is taken over where the owner is a process of this host that is gone, and otherwise respected until
    somebody removes it.

    Args:
        directory: made where it is not there.
        what: is done in it, for the message to others.

    Raises:
        FolderInUse: at once, where somebody has it.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with folder_lock(folder):
        ...     try:
        ...         with folder_lock(folder):
        ...             pass
        ...     except FolderInUse:
        ...         print("not twice")
        not twice
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    about = directory.stat()
    key = about.st_dev, about.st_ino
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "what": what,
    }
    with _guard:  # asked first: some flocks, those of NFS, are a process's, and two calls in one would both get it
        if key in _held:
            raise _in_use(directory, _held[key][1])
        _held[key] = _acquire(directory, owner), owner
    try:
        yield
    finally:
        with _guard:
            if key in _held and _held[key][1] is owner:  # not in a fork of the owner that leaves the block too
                _release(directory, *_held.pop(key))


def _acquire(directory: Path, owner: dict) -> int | None:
    """The open file with the lock; None where there is no flock, and a file itself is the lock."""
    path = directory / LOCK_FILE
    while fcntl is not None:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(path, handle):
                os.ftruncate(handle, 0)
                os.pwrite(handle, json.dumps(owner).encode(), 0)
                return handle
        except BlockingIOError:
            other = _read(path)
            os.close(handle)
            raise _in_use(directory, other) from None
        except OSError as error:
            os.close(handle)
            if error.errno not in _UNSUPPORTED:
                raise
            path.unlink(missing_ok=True)
            break
        os.close(handle)  # removed by an owner that has just left: once more
    _acquire_without_flock(directory / OWNER_FILE, directory, owner)
    return None


def _release(directory: Path, handle: int | None, owner: dict) -> None:
    path = directory / (OWNER_FILE if handle is None else LOCK_FILE)
    if handle is None:
        if _read(path) == owner:
            path.unlink(missing_ok=True)
        return
    if _is(path, handle):
        path.unlink(missing_ok=True)  # first: who has opened it before sees that it is no longer there
    os.close(handle)


def _is(path: Path, handle: int) -> bool:
    """Whether the open file is the one that stands there."""
    try:
        there, here = os.stat(path), os.fstat(handle)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _acquire_without_flock(path: Path, directory: Path, owner: dict) -> None:
    """The file is the lock: who makes it has it, and that of a process that is gone is put aside first."""
    other = _read(path)
    if path.exists():
        if other is None or not _is_gone(other):
            raise _in_use(directory, other, by_hand=path)
        aside = path.with_name(f"{OWNER_FILE}.{secrets.token_hex(4)}")
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            aside = None
        if aside is not None and _read(aside) != other:  # that of somebody who was quicker: back with it
            os.rename(aside, path)
        elif aside is not None:
            aside.unlink()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        raise _in_use(directory, _read(path), by_hand=path) from None
    os.write(handle, json.dumps(owner).encode())
    os.close(handle)


def _is_gone(owner: dict) -> bool:
    """Whether an owner is known to have ended: a process of this host of which there is none of that number.

    This process has none of its own here, so that one of its number was another before it, as in a container.
    """
    if os.name != "posix" or owner["host"] != socket.gethostname():
        return False
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return owner["pid"] == os.getpid()


def _read(path: Path) -> dict | None:
    """The owner; None where the file does not say."""
    try:
        owner = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    known = isinstance(owner, dict) and isinstance(owner.get("pid"), int) and {"host", "since", "what"} <= set(owner)
    return owner if known else None


def _in_use(directory: Path, owner: dict | None, by_hand: Path | None = None) -> FolderInUse:
    who = "another process"
    if owner is not None:
        here = "this process" if owner["pid"] == os.getpid() and owner["host"] == socket.gethostname() else "process"
        who = f"{here} {owner['pid']} on {owner['host']}, {owner['what']} since {owner['since']}"
    hand = ""
    if by_hand is not None:
        hand = f"; this file system has no locks: if that process has ended, remove {by_hand}"
    return FolderInUse(
        f"the folder {directory} is in use by {who}: two at once would mix their files; wait for it to end, or give "
        f"another folder{hand}"
    )


def _forget() -> None:
    """In a forked child: the locks are its parent's. Closing its copies of the files releases none of them."""
    for handle, _ in _held.values():
        if handle is not None:
            os.close(handle)
    _held.clear()
    _guard.release()


if os.name == "posix":  # no fork between the opening of a file and the note of it
    os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_forget)
