"""The two ways to fit, and their quality on table 1's targets."""

from dataclasses import replace

import pytest
import torch

from structvi import LowRankNormal, MCDropout
from structvi_paper import table1
from structvi_paper.fits import Batched, fit, groups_for, median, space
from structvi_paper.methods import KEEP
from structvi_paper.regression import CENTRES, data_set
from structvi_paper.settings import Settings, quick


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("rank", "groups"), [(1, 16), (8, 2), (20, 1)])
def test_groups_for_comes_near_the_number_of_evaluations(rank, groups):
    assert groups_for(LowRankNormal(rank).bind(space(z=20))(), 64) == groups


def test_median():
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5
    assert median([float("inf"), float("inf")]) == float("inf")


def test_stochastic_dropout_reaches_its_closed_form():
    # masks are random: what Adam leaves after its rate has decayed is the noise of about a hundred averaged steps,
    # a fraction of the posterior's standard deviation, which is 0.06
    settings, data = Settings(), data_set(Settings(), 0)
    target = Batched(space(theta=CENTRES), data.log_joint)
    density = fit(MCDropout(keep=KEEP), target, settings, generator(), steps=300, rate=0.1)
    point = density.weights.mean
    assert (point - data.dropout_optimum(KEEP)).abs().max() < 0.06


def test_table1_meets_its_targets():
    # one of the targets, without the stochastic fits, which have no target to meet
    settings = replace(quick(seed=2), targets=1, steps=0)
    rows = table1.assemble(settings, [job.function(*job.arguments) for job in table1.jobs(settings)])["rows"]
    for row in rows:
        if row["method"] in ("MAP", "MC dropout"):
            assert row["kl_p_q"] == row["kl_q_p"] == float("inf")
        else:
            contains = row["method"] == "full" or row["rank"] == table1.P
            assert row["excess"] <= (1e-5 if contains else 0.05), row
            assert row["kl_p_q"] < float("inf")
