"""Two checkouts side by side: which other one, and what is printed of both."""

import subprocess
import sys

import pytest

from benchmarks import checkouts


def git(folder, *arguments):
    names = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    """Two commits of a benchmark that says 1 and 2; the first is tagged."""
    git(tmp_path, "init", "--quiet")
    (tmp_path / "benchmarks").mkdir()
    for value in (1, 2):
        (tmp_path / "benchmarks" / "step_cost.py").write_text(
            "import json, sys\n"
            f"row = dict(method='MeanField', rank=0, draws=1, ratio={value}.0)\n"
            "json.dump(dict(rows=[row]), open(sys.argv[sys.argv.index('--out') + 1], 'w'))\n"
        )
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "--quiet", "-m", str(value))
        if value == 1:
            git(tmp_path, "tag", "v1")
    return tmp_path


def test_the_other_checkout_is_the_last_release_a_revision_or_a_folder(repository):
    assert checkouts.last_release(repository) == "v1"
    for of, expected in ((None, 1.0), ("v1", 1.0), ("HEAD", 2.0), (str(repository), 2.0)):
        with checkouts.checkout(of, repository) as place:
            assert checkouts.measure(place, []) == {"MeanField, rank 0, 1 draws": expected}
    with pytest.raises(ValueError, match="no-such"), checkouts.checkout("no-such", repository):
        pass
    git(repository, "tag", "-d", "v1")
    with pytest.raises(ValueError, match="no release is tagged"), checkouts.checkout(None, repository):
        pass


def test_ratios_are_this_checkout_over_the_other(repository, monkeypatch, capsys):
    monkeypatch.setattr(checkouts, "HERE", repository)
    monkeypatch.setattr(checkouts.checkout.__wrapped__, "__defaults__", (repository,))
    monkeypatch.setattr(sys, "argv", ["checkouts", "v1", "--rounds", "2", "--limit", "1.5"])
    with pytest.raises(SystemExit, match=r"slower than 1\.5"):
        checkouts.main()
    assert "MeanField, rank 0, 1 draws" in (said := capsys.readouterr().out)
    assert "2.000  (2.000 … 2.000)" in said
