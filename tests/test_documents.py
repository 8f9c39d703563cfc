"""What README, CONTRIBUTING and the guide show runs as written, and their numbers are those of the result files."""

import re
import runpy
from pathlib import Path

import pytest

from docs.make_results import filled, pages

ROOT = Path(__file__).parents[1]


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)


def test_the_readme_runs_and_prints_as_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    for block in blocks("README.md"):
        exec(compile(block, "README.md", "exec"), namespace)
    (shown,) = re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    printed = capsys.readouterr().out
    assert re.sub(r"-?\d[\d.]*", "", shown).strip() == re.sub(r"-?\d[\d.]*", "", printed).strip()


@pytest.mark.parametrize("page", ["diagnostics", "scratch", "speed"])
def test_a_page_of_the_guide_runs_as_written(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    for block in blocks(f"docs/{page}.md"):
        few = re.sub(r"epochs=\d+", "epochs=2", block)
        exec(compile(few, f"{page}.md", "exec"), namespace)


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_numbers_in_a_page_are_those_of_the_result_files(path):
    text = path.read_text()
    assert text == filled(text), "python docs/make_results.py writes them"
    assert len(text.split()) <= 2000


def test_the_manual_is_short():
    """Words for users, and for developers."""
    words = {path.relative_to(ROOT).as_posix(): len(path.read_text().split()) for path in pages()}
    developing = {"docs/architecture.md", "docs/measuring.md"}
    assert sum(count for name, count in words.items() if name not in developing) <= 28_000
    assert sum(words[name] for name in developing) + len((ROOT / "CONTRIBUTING.md").read_text().split()) <= 4_000
    assert sum(len(path.read_text().split()) for path in (ROOT / "lab").glob("*.md")) <= 12_000


def test_the_skeleton_of_a_family_obeys_every_law():
    from structvi.testing import check_family

    namespace: dict = {}
    exec(compile(blocks("CONTRIBUTING.md")[0], "CONTRIBUTING.md", "exec"), namespace)
    verdicts = check_family(namespace["Logistic"]())
    held = {law for law, verdict in verdicts.items() if verdict == "held"}
    assert held >= {"normalised", "score", "unbiased", "path_zero", "moments"}


def test_no_local_link_is_broken():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_architecture_names_every_room_and_only_files_that_are_there():
    """By the path in the package, or by the name if the folder was named before it."""
    source = ROOT / "src" / "structvi"
    there = {path.relative_to(source).as_posix() for path in source.rglob("*.py")}
    there |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")}
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert len(page.split()) <= 1500
    named = set(re.findall(r"`([\w/]+\.py)`", page))
    assert {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in there)} == set()
    rooms = {path.name + ("/" if path.is_dir() else "") for path in source.iterdir()} - {
        "__init__.py",
        "__pycache__/",
        "py.typed",
    }
    assert {room for room in rooms if f"`{room}`" not in page} == set()


@pytest.mark.parametrize("example", ["quickstart", "flow"])
def test_an_example_draws_its_picture(example, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    out = tmp_path / "picture.png"
    monkeypatch.setattr("sys.argv", [f"{example}.py", "--steps", "20", "--out", str(out)])
    runpy.run_path(str(ROOT / "examples" / f"{example}.py"), run_name="__main__")
    assert out.read_bytes().startswith(b"\x89PNG")
