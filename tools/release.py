"""`make release VERSION=0.2.0`: the changelog's section and the version, in a clean tree; nothing is committed or sent.

What stands under [Unreleased] becomes the section of the version, with the date, and a new, empty [Unreleased] stands
above it. The version is written to pyproject.toml, src/structvi/util/__init__.py and CITATION.cff.
"""

import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

HEADING = "## [Unreleased]"
#: file → the line that has the version
PLACES = {
    "pyproject.toml": r'(?m)^(version = ")[^"]+(")$',
    "src/structvi/util/__init__.py": r'(?m)^(__version__ = ")[^"]+(")$',
    "CITATION.cff": r"(?m)^(version: )\S+()$",
}


def sectioned(changelog: str, version: str, date: str) -> str:
    """The changelog with [Unreleased] as the section of a version.

    Example:
        >>> sectioned("## [Unreleased]\\n\\n- new\\n\\n## [0.1.0]\\n", "0.2.0", "2030-01-02")
        '## [Unreleased]\\n\\n## [0.2.0] - 2030-01-02\\n\\n- new\\n\\n## [0.1.0]\\n'
    """
    if changelog.count(HEADING) != 1:
        raise ValueError(f"the changelog must have one line {HEADING!r}, it has {changelog.count(HEADING)}")
    if f"## [{version}]" in changelog:
        raise ValueError(f"the changelog has a section of {version} already")
    new = changelog.split(HEADING, 1)[1].split("\n## [", 1)[0]
    if not new.strip():
        raise ValueError("nothing is under [Unreleased]: there is nothing to release")
    return changelog.replace(HEADING, f"{HEADING}\n\n## [{version}] - {date}", 1)


def release(root: Path, version: str, date: str) -> list[Path]:
    """Write the version everywhere; the files that changed. ValueError where something is not as it should be."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        raise ValueError(f"the version must be like 0.2.0 or 0.2.0rc1, got {version!r}")
    dirty = subprocess.run(
        ["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.strip()
    if dirty:
        raise ValueError(f"the tree has changes that are not committed; commit or stash them first:\n{dirty}")
    texts = {root / "CHANGELOG.md": sectioned((root / "CHANGELOG.md").read_text(), version, date)}
    for name, pattern in PLACES.items():
        text, count = re.subn(pattern, rf"\g<1>{version}\g<2>", (root / name).read_text())
        if count != 1:
            raise ValueError(f"{name} must have its version in one line, it has {count}")
        texts[root / name] = text
    for path, text in texts.items():
        path.write_text(text)
    return list(texts)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("make release VERSION=0.2.0")
    try:
        changed = release(Path.cwd(), sys.argv[1], datetime.now(UTC).date().isoformat())
    except ValueError as error:
        sys.exit(f"release: {error}")
    print("written: " + ", ".join(path.name for path in changed))
    print(f"look at the difference, then: make lint test dist; commit; git tag v{sys.argv[1]}")


if __name__ == "__main__":
    main()
