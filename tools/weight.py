"""The weight of the package: how much a person has to hold in mind.

    python tools/weight.py          prints the table; `make weight` calls it

Code lines have no blanks, comments and docstrings. A warm step is one in the middle of a fit of a small network, on a
CPU. Goals are totals to look at; no single file or function has a limit.
"""

import ast
import inspect
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import structvi as vi

SOURCE = Path(vi.__file__).parents[1]
PACKAGE = SOURCE / "structvi"
#: folders of the package that are not the core; the packages beside it are not, either
BESIDE = ("imaging",)
#: an option of `fit`, at the end of its way: the modules that name it are what one more option would touch
OPTION = "clip"


def code_lines(path: Path) -> int:
    """Count the lines with code: neither blank, nor comment, nor docstring."""
    text = path.read_text()
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                prose |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    none = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in none:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - prose)


def hand_set_numbers(path: Path) -> int:
    """Count the numbers in assignments at module level."""
    found = 0
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            constants = [each for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
            found += sum(isinstance(each.value, int | float) and not isinstance(each.value, bool) for each in constants)
    return found


def modules_that_name(option: str) -> int:
    """Count the modules with a parameter, attribute, keyword or field of this name."""
    found = 0
    for path in PACKAGE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {node.arg for node in nodes if isinstance(node, ast.arg | ast.keyword)}
        names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        names |= {node.id for node in nodes if isinstance(node, ast.Name)}
        found += option in names
    return found


class Crossed:
    """Modules of the package that ran, and how many of its calls were open at once."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.depth = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            self.stop()

    def start(self) -> None:
        sys.setprofile(self._saw)

    def stop(self) -> None:
        sys.setprofile(None)

    def _saw(self, frame: Any, event: str, _: Any) -> None:
        if event != "call" or not _own(frame):
            return
        self.modules.add(frame.f_code.co_filename)
        depth = 0
        while frame is not None:
            depth += _own(frame)
            frame = frame.f_back
        self.depth = max(self.depth, depth)


def _own(frame: Any) -> bool:
    return frame.f_code.co_filename.startswith(str(PACKAGE))


def crossed() -> tuple[Crossed, Crossed]:
    """Watch one step in the middle of a fit, and one prediction after it."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 3), torch.randint(2, (64,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    bayes = vi.variationalize(net, vi.likelihoods.Categorical(), vi.LowRankNormal(rank=2))
    step, prediction = Crossed(), Crossed()

    made = iter(range(1, 1000))

    def watch(_: Any) -> None:
        step.stop()
        if next(made) == 21:
            step.start()

    bayes.fit(loader, epochs=5, progress=False, callback=watch)
    bayes.predict(data.tensors[0])
    with prediction.watching():
        bayes.predict(data.tensors[0])
    return step, prediction


def table() -> list[tuple[str, int, int]]:
    """Return rows of (what, number, goal)."""
    paths = sorted(SOURCE.rglob("*.py"))
    lines = {path: code_lines(path) for path in paths}
    core = [path for path in paths if path.is_relative_to(PACKAGE) and path.relative_to(PACKAGE).parts[0] not in BESIDE]
    folders = Counter(path.parent for path in paths)
    options = len(inspect.signature(vi.Posterior.fit).parameters) - 1
    public = [name for name, value in vars(vi.Family).items() if not name.startswith("_") and _is_method(value)]
    step, prediction = crossed()
    return [
        ("code lines of src", sum(lines.values()), 18_000),
        ("code lines of the core", sum(lines[path] for path in core), 12_500),
        ("modules", len(paths), 190),
        ("most modules in one folder", max(folders.values()), 20),
        ("arguments of bayes.fit", options, 16),
        ("modules to touch for one more option", modules_that_name(OPTION), 3),
        ("names in structvi.__all__", len(vi.__all__), 48),
        ("modules that a warm step crosses", len(step.modules), 15),
        ("call depth of a warm step", step.depth, 10),
        ("modules that predict crosses", len(prediction.modules), 12),
        ("public methods of Family beyond forward", len(public) - 1, 8),
        ("hand-set numbers at module level", sum(map(hand_set_numbers, paths)), 250),
    ]


def _is_method(value: Callable[..., Any] | property | object) -> bool:
    return callable(value) or isinstance(value, property | classmethod | staticmethod)


def rooms() -> list[tuple[str, int, int]]:
    """Return rows of (folder or module, code lines, modules), the largest first; a package beside the core is one."""
    lines, count = Counter[str](), Counter[str]()
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).parts
        room = "/".join(parts[: 2 if parts[0] == "structvi" else 1])
        lines[room] += code_lines(path)
        count[room] += 1
    return [(room, size, count[room]) for room, size in lines.most_common()]


def main() -> None:
    """Print both tables."""
    for room, size, count in rooms():
        print(f"{size:7,}  {count:4}  {room}")
    print(f"\n{'':44}{'today':>8}{'goal':>9}")
    for what, number, goal in table():
        print(f"{what:44}{number:8,}{goal:9,}{'' if number <= goal else '   over'}")


if __name__ == "__main__":
    main()
