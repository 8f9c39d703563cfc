"""What `diagnose` hands back: one line for each thing looked at, with a verdict in plain words."""

import textwrap
import unicodedata
from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["good", "note", "bad", "not available"]

_MARKS: dict[Level, str] = {"good": "✓", "note": "·", "bad": "✗", "not available": "–"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: what came out and what it means."""

    name: str
    value: str
    level: Level
    meaning: str


@dataclass(frozen=True)
class Report:
    """All findings. `print(report)` is a table, `report["k̂"]` one finding.

    Attributes:
        findings: in the order in which they were looked at.
        sound: False where something is bad; None where what decides could not be had.
        verdict: the whole in a sentence.
        parts: name → the object a finding comes from: `Estimate`, `Importance`, `Moments`, `GradientNoise`, ..
    """

    findings: list[Finding]
    sound: bool | None
    verdict: str
    parts: dict[str, Any] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> Finding:
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(f"{name!r} was not looked at; there are {[finding.name for finding in self.findings]}")

    def __str__(self) -> str:
        names = max(_width(finding.name) for finding in self.findings)
        values = min(36, max(_width(finding.value) for finding in self.findings))
        indent = " " * (names + values + 6)
        lines = []
        for finding in self.findings:
            head = f"{_MARKS[finding.level]} {_padded(finding.name, names)}  {_padded(finding.value, values)}  "
            meaning = textwrap.fill(finding.meaning, 120 - len(indent)).replace("\n", "\n" + indent)
            too_long = _width(finding.value) > values and meaning
            lines.append((f"{head.rstrip()}\n{indent}{meaning}" if too_long else head + meaning).rstrip())
        return "\n".join([*lines, "", self.verdict])

    __repr__ = __str__  # a notebook shows what print does


def _width(text: str) -> int:
    """Columns on a screen: the hat of k̂ takes none."""
    return sum(not unicodedata.combining(character) for character in text)


def _padded(text: str, width: int) -> str:
    return text + " " * (width - _width(text))
