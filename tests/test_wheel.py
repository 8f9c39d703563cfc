"""The wheel and the sdist: what is in them, and README's first example from the wheel with the core's packages alone.

`make dist` does the same with fresh environments and pip, which takes minutes; this takes seconds, on every change.
"""

import importlib.metadata as metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

pytest.importorskip("hatchling")
ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def test_the_wheel_has_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
    sources = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    own = {name for name in names if ".dist-info/" not in name}
    assert own == sources
    assert "structvi/py.typed" in own


def test_the_metadata_say_what_pyproject_says(built):
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
        found = HeaderParser().parsestr(wheel.read(name).decode())
        (entries,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
        assert "structvi = structvi.cli:main" in wheel.read(entries).decode()
    assert (found["Name"], found["Version"]) == ("structvi", PROJECT["version"])
    assert found["Requires-Python"] == PROJECT["requires-python"]
    assert set(found.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    core = {line for line in found.get_all("Requires-Dist") if "extra ==" not in line}
    assert core == set(PROJECT["dependencies"])
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload().strip() == (ROOT / "README.md").read_text().strip()


def test_the_sdist_has_what_builds_and_tests_it(built):
    with tarfile.open(built[1]) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames()}
    assert {"pyproject.toml", "tests/test_wheel.py", "docs/index.md", "Makefile", "LICENSE", "CHANGELOG.md"} <= names


def needed(names):
    """These distributions and what they need, without extras."""
    found, left = {}, list(names)
    while left:
        name = re.split(r"[ ;<>=!~(\[]", left.pop(), maxsplit=1)[0]
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # of another platform
            continue
        left += [one for one in found[name].requires or () if "extra ==" not in one]
    return list(found.values())


def test_readmes_first_example_runs_from_the_wheel_with_the_core_alone(built, tmp_path):
    venv.create(tmp_path / "bare", with_pip=False)
    (site,) = (tmp_path / "bare" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(site)
    for distribution in needed(PROJECT["dependencies"]):  # links to what is installed here
        for top in {Path(file).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                os.symlink(distribution.locate_file(top), site / top)
    environment = {"OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    command = [str(tmp_path / "bare/bin/python"), "-W", "error::ImportWarning", str(ROOT / "tools/try_wheel.py")]
    done = subprocess.run(
        [*command, str(ROOT / "README.md")], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "README's first example ran" in done.stdout
