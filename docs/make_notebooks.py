"""The tutorials as executed notebooks: a hook of mkdocs.

Code and text come from the pages in docs/tutorials, which jupytext reads as Markdown notebooks, and so do the outputs:
the pages were written by one run of the tutorials (`docs/make_tutorials.py`), whose prints and pictures the notebook
has in its cells. Nothing is run twice. The notebooks are files of the site, not of the repository.
"""

import base64
import re
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from mkdocs.structure.files import File, Files
from nbformat.v4 import new_output

PAGES = Path(__file__).parent / "tutorials"
#: code with what it printed and the pictures it showed
PIECE = re.compile(
    r"(?P<code>```python\n.*?\n```)"
    r'(?:\n\n```\{ \.text \.no-copy title="prints" \}\n(?P<printed>.*?)\n```)?'
    r"(?P<pictures>(?:\n\n!\[[^\]]*\]\(images/[^)]+\))*)",
    flags=re.DOTALL,
)
#: code that is shown and not run: jupytext leaves it in the text
SHOWN, LEFT = re.compile(r"^```(bash|py)$", flags=re.MULTILINE), " .noeval"


def notebook(page: str, pictures: Path = PAGES / "images") -> nbformat.NotebookNode:
    """The page as a notebook, with its outputs.

    Example:
        >>> printed = '```{ .text .no-copy title="prints" }\\n1\\n```'
        >>> made = notebook(f"# Title\\n\\n```python\\nprint(1)\\n```\\n\\n{printed}\\n")
        >>> [(cell.cell_type, cell.source) for cell in made.cells]
        [('markdown', '# Title'), ('code', 'print(1)')]
        >>> made.cells[1].outputs
        [{'output_type': 'stream', 'name': 'stdout', 'text': '1\\n'}]
    """
    outputs: list[list[Any]] = []

    def taken(match: re.Match[str]) -> str:
        found = []
        if match["printed"]:
            found.append(new_output("stream", name="stdout", text=match["printed"] + "\n"))
        for file in re.findall(r"\(images/([^)]+)\)", match["pictures"]):
            picture = base64.b64encode((pictures / file).read_bytes()).decode()
            found.append(new_output("display_data", {"image/png": picture, "text/plain": "<Figure>"}))
        outputs.append(found)
        return match["code"]

    plain = SHOWN.sub(rf"```\1{LEFT}", PIECE.sub(taken, page))
    made = jupytext.reads(plain, fmt="md")
    code = [cell for cell in made.cells if cell.cell_type == "code"]
    for count, (cell, found) in enumerate(zip(code, outputs, strict=True), 1):
        cell.execution_count, cell.outputs = count, found
    for number, cell in enumerate(made.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
        if cell.cell_type == "markdown":
            cell.source = cell.source.replace(LEFT, "")
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made.metadata = nbformat.from_dict({"kernelspec": kernel, "language_info": {"name": "python"}})
    nbformat.validate(made)
    return made


def on_files(files: Files, config: Any) -> Files:
    """Called by mkdocs: one notebook for each tutorial."""
    for page in sorted(PAGES.glob("*.md")):
        content = nbformat.writes(notebook(page.read_text()), version=4)
        files.append(File.generated(config, f"tutorials/{page.stem}.ipynb", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Called by mkdocs: a tutorial says where its notebook is."""
    path = Path(page.file.src_uri)
    if path.parent.name != "tutorials":
        return markdown
    file = f"{path.stem}.ipynb"
    link = f'[This page as an executed notebook]({file}){{ download="{file}" }}'
    title, _, rest = markdown.partition("\n\n")
    return f"{title}\n\n{link}\n\n{rest}"
