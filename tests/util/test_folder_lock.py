"""One at a time in a folder: other processes, threads and calls are refused, and a killed owner leaves no lock."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from structvi.util import folder_lock as module
from structvi.util.folder_lock import LOCK_FILE, OWNER_FILE, FolderInUse, folder_lock

#: of other processes: the module without the package, whose import would take nearly all of their time
BY_ITSELF = f"import sys; sys.path.append({str(Path(module.__file__).parent)!r})\n"
#: holds the lock, says so, and waits to be told to leave
HOLDER = """
import sys
from folder_lock import folder_lock
with folder_lock(sys.argv[1], what="a fit of another"):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that has the lock of tmp_path."""
    process = subprocess.Popen(
        [sys.executable, "-c", BY_ITSELF + HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def taken(folder) -> bool:
    try:
        with folder_lock(folder):
            return False
    except FolderInUse:
        return True


def test_it_is_free_before_and_after_and_leaves_nothing(tmp_path):
    folder = tmp_path / "not" / "there yet"
    for _ in range(2):
        with folder_lock(folder):
            assert [path.name for path in folder.iterdir()] == [LOCK_FILE]
    assert list(folder.iterdir()) == []


def test_another_process_is_named(tmp_path, holder):
    with pytest.raises(FolderInUse) as error, folder_lock(tmp_path):
        pytest.fail("two owners")
    says = str(error.value)
    assert (
        f"the folder {tmp_path} is in use by process {holder.pid} on {socket.gethostname()}, a fit of another" in says
    )
    assert " since 20" in says
    assert "wait for it to end, or give another folder" in says
    assert isinstance(error.value, RuntimeError)


def test_an_owner_that_leaves_frees_it(tmp_path, holder):
    assert taken(tmp_path)
    holder.communicate("leave\n")
    assert not taken(tmp_path)


def test_a_killed_owner_frees_it_without_a_hand(tmp_path, holder):
    assert taken(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / LOCK_FILE).exists()  # nobody could clean up
    assert not taken(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_second_call_and_another_thread_are_refused(tmp_path):
    seen = []
    with folder_lock(tmp_path, what="a first call"):
        with pytest.raises(FolderInUse, match=f"by this process {os.getpid()} on .*, a first call since"):
            folder_lock(tmp_path).__enter__()
        thread = threading.Thread(target=lambda: seen.append(taken(tmp_path)))
        thread.start()
        thread.join()
        (tmp_path / "link").symlink_to(tmp_path)
        assert taken(tmp_path / "link")  # the same folder under another name
    assert seen == [True]
    assert not taken(tmp_path)


def test_an_error_inside_frees_it(tmp_path):
    with pytest.raises(KeyError), folder_lock(tmp_path):
        raise KeyError
    assert not taken(tmp_path)


#: forks inside the block; the child waits for ever, the parent as before
FORKING = """
import os, signal, sys
from folder_lock import folder_lock
ready, tell = os.pipe()
with folder_lock(sys.argv[1]):
    if os.fork() == 0:
        os.write(tell, b".")  # what Python does in a child after a fork is done
        signal.pause()
    os.read(ready, 1)
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_a_fork_does_not_keep_the_lock(tmp_path):
    """Workers of a loader outlive a killed fit for a while: the lock is not theirs."""
    process = subprocess.Popen(
        [sys.executable, "-c", BY_ITSELF + FORKING, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "held\n"
        assert taken(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not taken(tmp_path)  # the child lives on
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


#: the child is refused, and frees nothing when it leaves the block
LEAVING = """
import os, sys
from pathlib import Path
from folder_lock import LOCK_FILE, FolderInUse, folder_lock
folder = Path(sys.argv[1])
with folder_lock(folder):
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (folder / LOCK_FILE).exists()
    else:
        try:
            folder_lock(folder).__enter__()
        except FolderInUse as error:
            assert str(os.getppid()) in str(error)
        else:
            os._exit(1)
"""


def test_a_fork_that_leaves_the_block_frees_nothing(tmp_path):
    subprocess.run([sys.executable, "-c", BY_ITSELF + LEAVING, str(tmp_path)], check=True)
    assert list(tmp_path.iterdir()) == []


def test_a_removed_file_is_not_anothers(tmp_path):
    """Who removes the lock file by hand and takes the folder keeps it when the first owner leaves."""
    context = folder_lock(tmp_path)
    context.__enter__()
    (tmp_path / LOCK_FILE).unlink()
    (tmp_path / LOCK_FILE).write_text("{}")
    context.__exit__(None, None, None)
    assert (tmp_path / LOCK_FILE).exists()


def test_a_folder_that_cannot_be_is_passed_on(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        folder_lock(tmp_path / "file").__enter__()


# file systems without flock


@pytest.fixture(params=["no flock here", "no fcntl"])
def without_flock(request, monkeypatch):
    if request.param == "no fcntl":
        monkeypatch.setattr(module, "fcntl", None)
        return

    def refuse(handle, how):
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(module.fcntl, "flock", refuse)


def leave_owner(folder: Path, **owner):
    usual = {"pid": 2**22 + 1, "host": socket.gethostname(), "since": "2024-01-01 00:00:00", "what": "a fit"}
    (folder / OWNER_FILE).write_text(json.dumps(usual | owner))


@pytest.mark.usefixtures("without_flock")
def test_without_flock_the_owners_file_is_the_lock(tmp_path):
    with folder_lock(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [OWNER_FILE]
        assert taken(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_flock")
@pytest.mark.parametrize("pid", [2**22 + 1, os.getpid()], ids=["beyond the largest of Linux", "of another before us"])
def test_without_flock_an_owner_that_is_gone_is_followed(tmp_path, pid):
    leave_owner(tmp_path, pid=pid)
    assert not taken(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_flock")
@pytest.mark.parametrize("owner", [{"host": "elsewhere"}, {"pid": os.getppid()}, {"pid": None}])
def test_without_flock_what_may_live_is_respected(tmp_path, owner):
    leave_owner(tmp_path, **owner)
    with pytest.raises(FolderInUse, match=f"if that process has ended, remove {tmp_path / OWNER_FILE}"):
        folder_lock(tmp_path).__enter__()
    assert (tmp_path / OWNER_FILE).exists()


def test_other_errors_of_the_file_system_are_passed_on(tmp_path, monkeypatch):
    def fail(handle, how):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(module.fcntl, "flock", fail)
    with pytest.raises(OSError, match="input/output"):
        folder_lock(tmp_path).__enter__()
