"""λ at training's own pace: it waits where the likelihood falls, ends at its value, and is resumed where it was."""

import json
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.train.pace import FASTEST, SLOWEST, Pace

TOTAL = 1000
FASTEST_STEPS, SLOWEST_STEPS, WINDOW = round(FASTEST * TOTAL), round(SLOWEST * TOTAL), round(FASTEST * TOTAL / 10)


def paces(log_likelihood, total=TOTAL):
    """λ, as a part of its value, at every step of a fit whose log likelihood is that function of the step."""
    pace, risen = Pace(), []
    for step in range(total):
        risen.append(pace.at(step, total))
        pace = pace.after(step, total, log_likelihood(step))
    return risen


def test_where_the_likelihood_bears_it_the_rise_takes_the_fastest_time():
    for risen in (paces(lambda step: -1.0), paces(lambda step: step / 100)):
        expected = [min(1.0, (step + 1) / FASTEST_STEPS) for step in range(TOTAL)]
        assert risen == pytest.approx(expected, rel=1e-9)
        assert risen[FASTEST_STEPS] == 1.0


def test_where_it_falls_all_the_time_the_rise_takes_the_slowest_time():
    risen = paces(lambda step: -float(step))
    slowest = [min(1.0, (step + 1) / SLOWEST_STEPS) for step in range(TOTAL)]
    # the first fall is seen after the second window: a fifth of the rise is made, which the slowest has later
    late = round((2 * WINDOW + 1) / FASTEST_STEPS * SLOWEST_STEPS)
    assert len(set(risen[2 * WINDOW : late])) == 1
    assert risen[late:] == pytest.approx(slowest[late:], rel=1e-9)
    assert risen[SLOWEST_STEPS - 2] < 1 == risen[SLOWEST_STEPS]


def test_after_one_fall_it_waits_for_one_window():
    """A fall at the third window: the fourth has the same λ throughout, and then it goes on where it was."""
    risen = paces(lambda step: -1.0 if step < 2 * WINDOW else -2.0)
    free = paces(lambda step: -1.0)
    begin, end = 3 * WINDOW, 4 * WINDOW
    assert risen[: begin + 1] == free[: begin + 1]
    assert set(risen[begin : end + 1]) == {risen[begin]}
    assert risen[end + 1 : end + 50] == pytest.approx(free[begin + 1 : begin + 50], rel=1e-9)


def test_a_fall_within_the_noise_is_none():
    """Windows of ±1 in turn, each lower by a tenth: the standard error of the difference is 0.47, √(2 · 1.11/10)."""
    bears = paces(lambda step: (-1) ** step - 0.1 * (step // WINDOW))
    assert bears == paces(lambda step: -1.0)
    waits = paces(lambda step: (-1) ** step - 0.5 * (step // WINDOW))
    assert waits[2 * WINDOW + 1] == waits[3 * WINDOW - 1] < bears[3 * WINDOW - 1]


def test_a_fall_by_a_little_of_what_was_learned_is_none():
    """Ten nats are learned in two windows; a twentieth of them is borne in a window."""
    learning = [-10.0, 0.0]
    falls = {size: [*learning, *(-size * k for k in range(1, 98))] for size in (0.49, 0.51)}
    bears, waits = (paces(lambda step, means=means: means[min(step // WINDOW, 98)]) for means in falls.values())
    assert bears == paces(lambda step: -1.0)
    assert waits[3 * WINDOW] == waits[4 * WINDOW] < bears[4 * WINDOW]


def test_of_a_few_steps_it_ends_at_its_value_too():
    for total in (1, 2, 5, 20):
        risen = paces(lambda step: -float(step), total)
        assert all(a <= b for a, b in pairwise(risen))
        assert total < 4 or risen[-1] == 1.0


# ------------------------------------------------------------------------------------------------------------ in fits


def made():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    # a prior that is much narrower than what the data say: the likelihood falls as λ rises
    return vi.variationalize(net, vi.likelihoods.Gaussian(noise=0.1), vi.MeanField(), vi.priors.NormalPrior(0.02))


def loader():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(48, 3, generator=g)
    return DataLoader(TensorDataset(x, x[:, :1].sin() + x[:, 1:2]), batch_size=16, shuffle=True)


def fit(bayes, **options):
    settings = {"steps": 200, "lr": 0.02, "kl_warmup": "paced", "stop": False, "restarts": 0, "temperature": 0.5}
    return bayes.fit(loader(), progress=False, **settings | options)


def test_a_fit_waits_and_ends_at_its_temperature():
    bayes = made()
    fit(bayes, temperature=1e-4, kl_warmup=0.0, steps=100)  # all that is learned is lost as λ rises
    result = fit(bayes)
    lam = result.history["temperature"]
    assert bool((lam.diff() >= 0).all())
    assert lam[0] == 0.5 / (FASTEST * 200)
    assert float(lam[round(FASTEST * 200) + 1]) < 0.5  # where nothing falls it has risen by then
    assert bool((lam[round(SLOWEST * 200) :] == 0.5).all())
    assert result.temperature == 0.5


def test_a_resumed_fit_has_the_bits_of_one_never_stopped(tmp_path):
    """Stopped in the middle of the rise, and of a window."""
    whole, stopped, resumed = made(), made(), made()
    expected = fit(whole)

    def stop(history):
        if len(history) == 37:
            raise KeyboardInterrupt

    fit(stopped, checkpoint=tmp_path, every=5, callback=stop)
    result = fit(resumed, resume=tmp_path)
    assert any("resumed at step 3" in note for note in result.notes)
    assert torch.equal(result.history["temperature"], expected.history["temperature"])
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_it_cannot_be_resumed_with_another_rise(tmp_path):
    fit(made(), steps=20, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="paced: True then, False now"):
        fit(made(), steps=20, resume=tmp_path, kl_warmup=SLOWEST)


def test_a_state_of_an_older_version_has_no_pace(tmp_path):
    from structvi.files import fit_checkpoint
    from structvi.train.state import FitState

    fit(made(), steps=20, checkpoint=tmp_path)
    found = fit_checkpoint.latest(tmp_path)
    assert FitState.unpack(found.tensors, found.description).pace.risen == 1.0
    older = {name: value for name, value in found.description.items() if name != "pace"}
    older["settings"] = {name: value for name, value in older["settings"].items() if name != "paced"}
    state = FitState.unpack(found.tensors, json.loads(json.dumps(older)))
    assert (state.pace, state.settings.paced) == (Pace(), False)


def test_members_are_fitted_one_after_another():
    result = made().fit(loader(), steps=20, kl_warmup="paced", members=2, restarts=0, progress=False)
    assert all(any("kl_warmup='paced'" in note for note in one.notes) for one in result.members)


def test_bad_words():
    with pytest.raises(ValueError, match=r"kl_warmup must be .*paced.*slow"):
        fit(made(), kl_warmup="slow")
