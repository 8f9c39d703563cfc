"""`make release`: a clean tree or nothing; one version everywhere."""

import importlib.util
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from structvi import __version__

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("release", ROOT / "tools" / "release.py")
assert spec is not None
assert spec.loader is not None
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


@pytest.fixture
def checkout(tmp_path):
    for name in ("CHANGELOG.md", *tool.PLACES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n- new\n\n## [0.1.0]\n\n- old\n")
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def test_the_version_is_the_same_everywhere():
    for name, pattern in tool.PLACES.items():
        (line,) = (match[0] for match in re.finditer(pattern, (ROOT / name).read_text()))
        assert __version__ in line, name


def test_the_oldest_versions_are_those_that_are_asked_for():
    """`make test-oldest` is a test of what pyproject.toml promises."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["sklearn"]]
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if not line.startswith("#"))
    for requirement in asked:
        name, least = requirement.split(">=")
        assert tested[name].startswith(least), requirement
    assert project["requires-python"] == ">=3.11"
    assert "PYTHON_OLDEST ?= python3.11" in (ROOT / "Makefile").read_text()


def test_a_release_is_written(checkout):
    assert len(tool.release(checkout, "9.8.7", "2030-01-02")) == 4
    text = (checkout / "CHANGELOG.md").read_text()
    assert text == "# Changelog\n\n## [Unreleased]\n\n## [9.8.7] - 2030-01-02\n\n- new\n\n## [0.1.0]\n\n- old\n"
    for name in tool.PLACES:
        assert "9.8.7" in (checkout / name).read_text()


@pytest.mark.parametrize(
    ("change", "version", "says"),
    [
        (lambda path: (path / "new.txt").write_text(""), "9.8.7", "not committed"),
        (lambda path: None, "9.8", "must be like"),
        (lambda path: None, "0.1.0", "section of 0.1.0 already"),
    ],
)
def test_what_is_not_as_it_should_be_is_refused(checkout, change, version, says):
    change(checkout)
    before = (checkout / "CHANGELOG.md").read_text()
    with pytest.raises(ValueError, match=says):
        tool.release(checkout, version, "2030-01-02")
    assert (checkout / "CHANGELOG.md").read_text() == before
