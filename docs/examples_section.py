"""For the reference: griffe knows the section "Examples:", our docstrings say "Example:"."""

import re
from typing import Any

import griffe


class ExamplesSection(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
