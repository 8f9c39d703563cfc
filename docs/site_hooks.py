"""The site's own parts, hooks of mkdocs: its version and repository, and formulas as MathML, which needs no script."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert


def on_config(config: Any) -> Any:
    """Name the version at the foot of each page; link the repository if STRUCTVI_REPOSITORY is its address."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    config.copyright = f"structvi {project['version']}, {project['license']} licence"
    config.repo_url = os.environ.get("STRUCTVI_REPOSITORY")
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with each `$$formula$$` as a block of MathML."""

    def typeset(found: re.Match[str]) -> str:
        return f'<div class="formula">{convert(found[1], display="block")}</div>'

    return re.sub(r"^\$\$(.+?)\$\$$", typeset, markdown, flags=re.MULTILINE)
