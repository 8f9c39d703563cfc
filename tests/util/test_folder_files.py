"""The files of a run: together or not at all."""

import pytest

from structvi.util.folder_files import check_folder, write_together


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


def test_a_run_that_fails_leaves_the_old_files(tmp_path):
    (tmp_path / "a").write_text("old")

    def fails(hidden):
        make(hidden)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_together(tmp_path, fails)
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_a_folder_is_made_and_tried(tmp_path):
    check_folder(tmp_path / "x" / "y")
    assert names(tmp_path / "x" / "y") == []
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        check_folder(tmp_path / "file")
