"""The statistical examples run and find what is known, the page runs as written, eight schools are calibrated."""

import re
import runpy
from functools import partial
from pathlib import Path

import pytest
import torch

import structvi as vi
from benchmarks.schools_calibration import Draws, simulate
from structvi.diagnostics import sbc

ROOT = Path(__file__).parents[1]


def table(text: str) -> dict[str, list[float]]:
    """Rows by name: mean, sd, 5 %, 50 %, 95 %, error."""
    found = re.findall(r"^(\S.*?)((?:\s+-?\d\S*){6})$", text, flags=re.MULTILINE)
    return {name: [float(x) for x in numbers.split()] for name, numbers in found}


#: what the data were made with, or what integration over a grid gives (tests/density/test_drawing.py)
KNOWN = {
    "eight_schools": {"mu": 4.4, "tau": 3.6, "theta[0]": 6.2},
    "logistic_glmm": {"beta[0]": -0.5, "beta[1]": 1.0, "sd[0]": 0.8, "sd[1]": 0.5, "L[1, 0]": 0.6},
    "gaussian_process": {"noise": 0.3, "f(2.5)": 1.35, "f(7.5)": 3.19},
    "state_space": {"phi": 0.9, "step": 0.3, "noise": 0.3},
}


@pytest.mark.parametrize("example", KNOWN)
def test_an_example_runs_and_its_table_holds_what_is_known(example, capsys):
    runpy.run_path(str(ROOT / "examples" / f"{example}.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "converged" in out
    assert "Of the posterior: " in out
    rows = table(out)
    for name, value in KNOWN[example].items():
        mean, sd = rows[name][:2]
        assert abs(mean - value) < 3 * sd, name


def test_draws_of_a_hierarchy_are_calibrated():
    """Two schools and few replications: enough to see a spread that is three times too large."""
    draws = Draws({}, corrected=True, starts=1, draws=32)
    kept = {}

    def right(y):
        kept[tuple(y.tolist())] = drawn = draws(y)
        return drawn

    def wrong(y):
        drawn = kept[tuple(y.tolist())]
        return {**drawn, "tau": 3 * drawn["tau"]}

    two = partial(simulate, schools=2)
    assert sbc(two, right, replications=20).passed
    assert draws.refused == 0
    assert not sbc(two, wrong, replications=20).passed


def test_what_the_page_shows_runs_as_written(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "statistics.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) >= 4
    torch.manual_seed(0)
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, "statistics.md", "exec"), namespace)
    assert "Of the posterior: " in capsys.readouterr().out


def test_a_fit_says_why_draws_were_evaluated_one_by_one():
    space = vi.Parameters({"z": torch.zeros(1, dtype=torch.float64)})
    target = vi.LogDensity(lambda p: -p["z"].square().sum() if p["z"].sum() < 1e9 else p["z"].sum(), space)
    result = vi.fit_density(target, vi.MeanField(), progress=False, draws=8, starts=1)
    assert "one by one: vmap cannot run it" in result.details
    assert "validate_args=False" in result.details
