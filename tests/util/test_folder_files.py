"""The files of a run: together or not at all, and of one run at a time."""

import os
import signal
import subprocess
import sys
import time

import pytest

from structvi.util.folder_files import MAKING, READY, write_together
from structvi.util.folder_lock import FolderInUse, folder_lock
from structvi_paper import run
from structvi_paper.jobs import Job
from structvi_paper.settings import Settings
from tests.children import python


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def make(hidden):
    (hidden / "a").write_text("new")
    (hidden / "b").write_text("new")


def test_files_are_replaced_and_others_stay(tmp_path):
    (tmp_path / "a").write_text("old")
    (tmp_path / "c").write_text("old")
    assert write_together(tmp_path, make) == [tmp_path / "a", tmp_path / "b"]
    assert names(tmp_path) == ["a", "b", "c"]
    assert [(tmp_path / name).read_text() for name in "abc"] == ["new", "new", "old"]


KILLED = """
import os, pathlib, signal, sys
from structvi.util import folder_files as files
folder, when = pathlib.Path(sys.argv[1]), sys.argv[2]
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
def make(hidden):
    for name in "ab":
        (hidden / name).write_text("new")
        if when == "making": die()
usual, count = os.replace, 0
def replace(source, target):
    global count
    count += 1
    if when == "moving" and count == 3: die()
    usual(source, target)
os.replace = replace
files.write_together(folder, make)
"""


@pytest.mark.parametrize("when", ["making", "moving"])
def test_a_killed_run_leaves_the_old_files_or_has_its_own_moved_by_the_next(tmp_path, when):
    for name in "ab":
        (tmp_path / name).write_text("old")
    done = python(KILLED, tmp_path, when)
    assert done.returncode == -signal.SIGKILL
    if when == "making":
        assert [(tmp_path / name).read_text() for name in "ab"] == ["old", "old"]
        assert any(name.startswith(MAKING) for name in names(tmp_path))
    else:
        assert READY in names(tmp_path)
    write_together(tmp_path, lambda hidden: (hidden / "c").write_text("next") and None)
    assert names(tmp_path) == ["a", "b", "c"]
    expected = "old" if when == "making" else "new"
    assert [(tmp_path / name).read_text() for name in "ab"] == [expected, expected]


def test_a_second_run_in_one_folder_is_refused_before_computing(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "compute", lambda *_: pytest.fail("computed"))
    with (
        folder_lock(tmp_path, "structvi reproduce"),
        pytest.raises(FolderInUse, match=r"in use by this process .* structvi reproduce since"),
    ):
        run.reproduce(["figure1"], Settings(), tmp_path, workers=1)


def test_the_folder_is_locked_while_computing_and_free_afterwards(tmp_path, monkeypatch):
    def compute(*_):
        with pytest.raises(FolderInUse), folder_lock(tmp_path):
            pass
        return {}

    monkeypatch.setattr(run, "compute", compute)
    monkeypatch.setattr(run, "record", lambda *_: {})
    monkeypatch.setattr(run, "write", lambda *_: [])
    run.reproduce(["figure1"], Settings(), tmp_path, workers=1)
    assert names(tmp_path) == []


INTERRUPTED = """
import time
from structvi_paper.jobs import Job, run
if __name__ == "__main__":
    print("begun", flush=True)
    run([Job(str(i), time.sleep, (1000,)) for i in range(3)], workers=2)
"""


def test_an_interrupt_ends_the_workers_at_once(tmp_path):
    assert Job("a", max, (1,)).weight == 1
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    parent.stdout.readline()
    end = time.monotonic() + 60
    while len(_children(parent.pid)) < 3 and time.monotonic() < end:  # two workers, and what keeps track of them
        time.sleep(0.05)
    os.kill(parent.pid, signal.SIGINT)
    _, err = parent.communicate(timeout=60)
    assert "KeyboardInterrupt" in err


def _children(pid):
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    return found.stdout.split()
