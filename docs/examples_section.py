"""For the reference: griffe knows the section "Examples:", our docstrings say "Example:"; one row for each argument."""

import re
from typing import Any

import griffe


class ExamplesSection(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"^( +)(\w+(?:, \w+)+): ", _rows, text, flags=re.MULTILINE)


def _rows(found: re.Match[str]) -> str:
    """Return `a, b: ` as a row of a that points to b, and the beginning of the row of b.

    Example:
        >>> print(re.sub(r"^( +)(\\w+(?:, \\w+)+): ", _rows, "    epochs, steps: the length"))
            epochs: see `steps`.
            steps: the length
    """
    indent, *names = found[1], *found[2].split(", ")
    return "".join(f"{indent}{name}: see `{names[-1]}`.\n" for name in names[:-1]) + f"{indent}{names[-1]}: "
