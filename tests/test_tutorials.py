"""Every tutorial runs, with the small numbers of its `# quick:` lines, and its page shows the code that it has now."""

import base64
import doctest
import re

import pytest

from docs import make_notebooks, make_tutorials
from docs.make_tutorials import PAGES, ROOT, SOURCES, cells, quick, run

NAMES = sorted(path.stem for path in SOURCES.glob("*.py"))


def source(name):
    return (SOURCES / f"{name}.py").read_text()


def test_there_are_the_tutorials_of_the_site():
    listed = re.findall(r"tutorials/(\w+)\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == NAMES
    assert len(NAMES) == 5


@pytest.mark.parametrize("name", NAMES)
def test_a_tutorial_runs_and_shows_pictures(name):
    small = quick(source(name))
    assert small != source(name)  # it has numbers to make small
    found = run(small, name)
    assert any(cell.printed for cell in found)
    pictures = [picture for cell in found for picture in cell.pictures]
    assert pictures
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_the_code_as_it_is(name):
    page = (PAGES / f"{name}.md").read_text()
    assert "Traceback" not in page
    at = 0
    for cell in cells(source(name)):
        shown = f"```python\n{cell.source}\n```" if cell.kind == "code" else cell.source
        at = page.find(shown, at)
        assert at >= 0, f"make it again: python docs/make_tutorials.py {name}\n{shown}"


def test_examples_of_the_converter():
    assert doctest.testmod(make_tutorials).failed == 0
    assert doctest.testmod(make_notebooks).failed == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_the_code_of_the_tutorial_and_what_it_printed(name):
    page = (PAGES / f"{name}.md").read_text()
    made = make_notebooks.notebook(page)
    code = [cell for cell in made["cells"] if cell["cell_type"] == "code"]
    assert ["".join(cell["source"]) for cell in code] == [
        one.source for one in cells(source(name)) if one.kind == "code"
    ]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert sum(output["output_type"] == "stream" for output in outputs) == page.count('title="prints"')
    shown = [base64.b64decode(o["data"]["image/png"]) for o in outputs if o["output_type"] == "display_data"]
    assert shown == [(PAGES / "images" / file).read_bytes() for file in re.findall(r"\]\(images/(\S+)\)", page)]
