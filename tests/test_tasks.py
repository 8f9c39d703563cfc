"""The ten lines of every task page run as written."""

import re
from pathlib import Path

import matplotlib as mpl
import pytest

mpl.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(path.stem for path in (DOCS / "tasks").glob("*.md"))


def page(name):
    return (DOCS / "tasks" / f"{name}.md").read_text()


def test_every_task_has_its_page():
    """The table has had a page of its own, with the same parts."""
    assert PAGES == ["classifier", "log_density", "segmentation", "transformer"]
    listed = (DOCS.parent / "mkdocs.yml").read_text()
    first = (DOCS / "index.md").read_text()
    for file in [*(f"tasks/{name}.md" for name in PAGES), "tables.md"]:
        assert file in listed
        assert f"({file})" in first


@pytest.mark.parametrize("name", PAGES)
def test_the_ten_lines_run_as_written(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    yours, ten = re.findall(r"```python\n(.*?)```", page(name), flags=re.DOTALL)
    lines = [line for line in ten.splitlines() if line.strip()]
    assert len(lines) <= 10
    namespace: dict = {}
    exec(compile(yours, f"{name}.md", "exec"), namespace)
    exec(compile(ten, f"{name}.md", "exec"), namespace)
    plt.close("all")
    printed = capsys.readouterr().out
    assert "\nnext: " in printed
    shown = namespace.get("predictive")
    if shown is not None:
        assert shown.mean.isfinite().all()
        assert (shown.mutual_information >= -1e-6).all()
