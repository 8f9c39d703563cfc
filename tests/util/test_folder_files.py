"""The files of a run: together or not at all."""

import signal

import pytest

from structvi.util.folder_files import MAKING, READY, write_together
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
