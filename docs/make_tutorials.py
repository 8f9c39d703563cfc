"""Run tutorials and write them as pages: code, text, what was printed, pictures.

    python docs/make_tutorials.py [NAME ..]        all of examples/tutorials by default, into docs/tutorials

A tutorial is a Python file that runs by itself. Its docstring is the page's title and introduction, which says how long
it takes; a comment block at the margin between blank lines is text, in Markdown; `plt.show()` puts the picture on the
page. A line `STEPS = 500  # quick: 5` has the second value in the tests. Code that is shown and not run is fenced with
```py. `make docs` makes executed notebooks of the pages (`docs/make_notebooks.py`).
"""

import contextlib
import io
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "examples" / "tutorials"
PAGES = ROOT / "docs" / "tutorials"
DPI = 80


@dataclass
class Cell:
    """A piece of a page: text, or code with what it printed and the pictures it showed (PNG)."""

    kind: Literal["text", "code"]
    source: str
    line: int = 1
    printed: str = ""
    pictures: list[bytes] = field(default_factory=list)


def quick(source: str) -> str:
    """The source with the values of its tests.

    Example:
        >>> quick("STEPS = 500  # quick: 5")
        'STEPS = 5'
    """
    return re.sub(r"= [^=\n]*?  # quick: (.*)$", r"= \1", source, flags=re.MULTILINE)


def cells(source: str) -> list[Cell]:
    """Text and code in turns.

    Example:
        >>> found = cells('\"\"\"Title.\\n\\nMore.\\n\"\"\"\\n\\n# Some *text*.\\n\\n# a remark\\nx = 1  # quick: 0\\n')
        >>> [(cell.kind, cell.source) for cell in found]
        [('text', '# Title\\n\\nMore.'), ('text', 'Some *text*.'), ('code', '# a remark\\nx = 1')]
    """
    match = re.match(r'"""(.*?)\.?\n(.*?)"""\n', source, flags=re.DOTALL)
    if match is None:
        raise ValueError("a tutorial begins with a docstring: a title, an empty line, an introduction")
    found = [Cell("text", f"# {match[1]}\n\n{match[2].strip()}")]
    line = 1 + source[: match.end()].count("\n")
    for block in re.split(r"(\n{2,})", source[match.end() :]):
        lines = block.strip("\n").split("\n")
        if block.strip() and all(one.startswith("#") for one in lines):
            found.append(Cell("text", "\n".join(one.removeprefix("#").removeprefix(" ") for one in lines), line))
        elif block.strip() and found[-1].kind == "code":  # blank lines inside code
            gap = line - found[-1].line - found[-1].source.count("\n")
            found[-1].source += "\n" * gap + block.strip("\n")
        elif block.strip():
            found.append(Cell("code", block.strip("\n"), line + len(block) - len(block.lstrip("\n"))))
        line += block.count("\n")
    for cell in found:
        cell.source = re.sub(r"  # quick: .*$", "", cell.source, flags=re.MULTILINE)
    return found


def run(source: str, name: str) -> list[Cell]:
    """The cells after they were executed in one namespace, in order, in a folder that is gone afterwards."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found, namespace = cells(source), {"__name__": name}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for cell in found:
            if cell.kind == "code":
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed), _shown(plt, cell.pictures):
                    exec(compile("\n" * (cell.line - 1) + cell.source, f"{name}.py", "exec"), namespace)
                cell.printed = "\n".join(text.rstrip() for text in printed.getvalue().rstrip().split("\n"))
    return found


@contextlib.contextmanager
def _shown(plt, pictures: list[bytes]) -> Iterator[None]:
    """Inside, `plt.show()` appends the open figures as PNG and closes them."""

    def show() -> None:
        for number in plt.get_fignums():
            out = io.BytesIO()
            plt.figure(number).savefig(out, dpi=DPI, format="png", metadata={"Software": None})
            pictures.append(out.getvalue())
        plt.close("all")

    original, plt.show = plt.show, show
    try:
        yield
    finally:
        plt.show = original
        plt.close("all")


def page(found: list[Cell], name: str) -> tuple[str, dict[str, bytes]]:
    """The page in Markdown, and its pictures by file name."""
    parts, pictures = [], {}
    for index, cell in enumerate(found):
        if cell.kind == "text":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        if cell.printed:
            parts.append(f'```{{ .text .no-copy title="prints" }}\n{cell.printed}\n```')
        title = next((c.source for c in reversed(found[:index]) if c.kind == "text"), "")
        for picture in cell.pictures:
            file = f"{name}-{len(pictures) + 1}.png"
            pictures[file] = picture
            # the sentence before the picture says what it shows
            parts.append(f"![{_alt(title)}](images/{file})")
    end = f"*This page is what `python examples/tutorials/{name}.py` does.*"
    return "\n\n".join([*parts, end]) + "\n", pictures


def _alt(text: str) -> str:
    """The last paragraph without its markup."""
    return " ".join(re.sub(r"[`*\[\]]|\(.*?\)", "", text.split("\n\n")[-1]).split())


def main() -> None:
    (PAGES / "images").mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or sorted(path.stem for path in SOURCES.glob("*.py")):
        text, pictures = page(run((SOURCES / f"{name}.py").read_text(), name), name)
        (PAGES / f"{name}.md").write_text(text)
        for file, picture in pictures.items():
            (PAGES / "images" / file).write_bytes(picture)
        print(f"{name}: {len(pictures)} pictures, {sum(map(len, pictures.values())) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
