"""The tutorials as executed notebooks: a hook of mkdocs.

Code and text come from the pages in docs/tutorials, and so do the outputs: the pages were written by one run of the
tutorials (`docs/make_tutorials.py`), whose prints and pictures the notebook has in its cells. Nothing is run twice, and
nothing but the standard library is needed. The notebooks are files of the site, not of the repository.
"""

import base64
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

PAGES = Path(__file__).parent / "tutorials"
#: text, or code with what it printed and the pictures it showed
PIECE = re.compile(
    r"```python\n(?P<code>.*?)\n```"
    r'(?:\n\n```\{ \.text \.no-copy title="prints" \}\n(?P<printed>.*?)\n```)?'
    r"(?P<pictures>(?:\n\n!\[[^\]]*\]\(images/[^)]+\))*)",
    flags=re.DOTALL,
)


def notebook(page: str, pictures: Path = PAGES / "images") -> dict[str, Any]:
    """The page as a notebook of format 4.5, with its outputs.

    Example:
        >>> printed = '```{ .text .no-copy title="prints" }\\n1\\n```'
        >>> made = notebook(f"# Title\\n\\n```python\\nprint(1)\\n```\\n\\n{printed}\\n")
        >>> [(cell["cell_type"], "".join(cell["source"])) for cell in made["cells"]]
        [('markdown', '# Title'), ('code', 'print(1)')]
        >>> made["cells"][1]["outputs"]
        [{'name': 'stdout', 'output_type': 'stream', 'text': ['1\\n']}]
    """
    cells: list[dict[str, Any]] = []
    at = 0
    for match in PIECE.finditer(page):
        _add_text(cells, page[at : match.start()])
        at = match.end()
        outputs: list[dict[str, Any]] = []
        if match["printed"]:
            outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(match["printed"] + "\n")})
        for file in re.findall(r"\(images/([^)]+)\)", match["pictures"]):
            picture = base64.b64encode((pictures / file).read_bytes()).decode()
            data = {"image/png": picture, "text/plain": ["<Figure>"]}
            outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
        count = 1 + sum(cell["cell_type"] == "code" for cell in cells)
        code = {"cell_type": "code", "execution_count": count, "metadata": {}, "outputs": outputs}
        cells.append(code | {"source": _lines(match["code"])})
    _add_text(cells, page[at:])
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _add_text(cells: list[dict[str, Any]], text: str) -> None:
    if text.strip():
        cells.append({"cell_type": "markdown", "metadata": {}, "source": _lines(text.strip())})


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def on_files(files: Files, config: Any) -> Files:
    """Called by mkdocs: one notebook for each tutorial."""
    for page in sorted(PAGES.glob("*.md")):
        content = json.dumps(notebook(page.read_text()), ensure_ascii=False, indent=1)
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
