"""A report from few steps and targets, made once: for what does not depend on the quality of the fits."""

from functools import partial

import pytest

from structvi_paper import table1
from structvi_paper.reproduce import PARTS, compute, record, write
from structvi_paper.settings import Settings

TINY = Settings(
    targets=1,
    optimum_starts=1,
    tolerance=0.1,
    steps=8,
    regression_steps=8,
    kl_draws=256,
    coupling_targets=1,
    coupling_repeats=2,
    coupling_steps=22,  # early is after 20
)


@pytest.fixture(scope="session")
def settings():
    return TINY


@pytest.fixture(scope="session")
def tiny(settings, made_once):
    """What was computed, and the content of results.json."""

    def make():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(table1, "best_kl", partial(table1.best_kl, steps=10))
            patch.setattr(table1, "fit_density", partial(table1.fit_density, starts=1))
            found = compute(list(PARTS), settings, workers=1)
        return found, record(found, settings)

    return made_once("paper-tiny", make)


@pytest.fixture(scope="session")
def report(tiny, settings, tmp_path_factory):
    """The folder of a whole report."""
    folder = tmp_path_factory.mktemp("report")
    write(tiny[0], settings, folder)
    return folder
