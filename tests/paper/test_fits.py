"""The stochastic fit, and the quality of table 1's fits on fixed draws."""

from dataclasses import replace

import torch

from structvi_paper import table1
from structvi_paper.methods import KEEP, Batched, Method, fit
from structvi_paper.processes import processes
from structvi_paper.regression import CENTRES, data_set
from structvi_paper.settings import Settings, quick


def test_stochastic_dropout_reaches_its_closed_form():
    # masks are random: what Adam leaves after its rate has decayed is the noise of about a hundred averaged steps,
    # a fraction of the posterior's standard deviation, which is 0.06
    settings, data = Settings(), data_set(Settings(), 0)
    target, generator = Batched(data.log_joint, theta=CENTRES), torch.Generator().manual_seed(0)
    density = fit(Method("MC dropout"), 0.1, target, settings, generator, 300, 0.1)
    assert (density.point - data.dropout_optimum(KEEP)).abs().max() < 0.06


def test_table1_meets_its_targets():
    # one of the targets, without the stochastic fits, which have no target to meet
    settings = replace(quick(seed=2), targets=1, steps=0)
    with processes(1) as starmap:
        rows = table1.compute(settings, starmap)["table1"]["rows"]
    for row in rows:
        if row["method"] in ("MAP", "MC dropout"):
            assert row["kl_p_q"] == row["kl_q_p"] == float("inf")
        else:
            contains = row["method"] == "full" or row["rank"] == table1.P
            assert row["excess"] <= (1e-5 if contains else 0.05), row
            assert row["kl_p_q"] < float("inf")
