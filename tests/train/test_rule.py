"""Which of the candidates around a trained network is kept."""

from math import inf

import pytest
import torch

from structvi.predict.temperature import ONE, temperature_losses
from structvi.train.candidates import Candidate
from structvi.train.held_out import HeldOut
from structvi.train.rule import HARM, Rule


def held_out(*log_probs):
    return HeldOut(torch.tensor(log_probs).double(), torch.ones(len(log_probs)).double())


@pytest.mark.parametrize(("is_unsure", "expected"), [(False, "wide"), (True, "narrow")])
def test_a_network_that_is_not_sure_enough_is_left_only_for_a_gain(is_unsure, expected):
    """The wide one is as good as the best to within half a standard error, and gains nothing over the network."""
    alone = Candidate("the network", None, True, 1.0, held_out=held_out(*[-1.0] * 1600), density=-1.0)
    narrow, wide = Candidate("narrow", 0.1, True, 1.0), Candidate("wide", 0.3, True, 1.0)
    narrow.measured(held_out(*[-0.9996, -0.9998] * 800), alone.held_out)
    wide.measured(held_out(*[-0.9, -1.1, -0.99, -1.01] * 400), alone.held_out)
    rule = Rule(alone, is_unsure, HARM)
    assert rule.widest([narrow, wide]).name == expected
    assert rule.best([narrow, wide]).name == "narrow"
    wide.measured(held_out(*[-1.1, -1.1, -1.1, -1.2] * 400), alone.held_out)
    assert rule.widest([wide]).name == rule.best([wide]).name == "the network"


def test_few_rows_do_not_let_a_posterior_be_worse_than_the_network():
    """Both are best by the mean; of four rows nobody can tell that the second is not .01 nats worse, of 400 anybody."""
    gains = torch.tensor([0.03, -0.025, 0.02, -0.015]).double()
    for copies, expected in ((1, "the network"), (100, "wide")):
        alone = Candidate("the network", None, True, 1.0, held_out=held_out(*[-1.0] * 4 * copies), density=-1.0)
        wide = Candidate("wide", 0.3, True, 1.0)
        wide.measured(held_out(*(gains - 1).repeat(copies)), alone.held_out)
        assert Rule(alone, is_unsure=False, harm=HARM).widest([wide]).name == expected
        assert Rule(alone, is_unsure=False, harm=inf).widest([wide]).name == "wide"  # a prior of the user's


def test_one_row_tells_of_no_other():
    """It has no spread: by its own figures a gain on it would be certain."""
    alone = Candidate("the network", None, True, 1.0, held_out=held_out(-1.0), density=-1.0)
    wide = Candidate("wide", 0.3, True, 1.0)
    wide.measured(held_out(-0.5), alone.held_out)
    for is_unsure in (True, False):
        assert Rule(alone, is_unsure, HARM).widest([wide]).name == "the network"


@pytest.mark.parametrize(("gain", "expected"), [(0.004, "wide"), (0.001, "narrow")])
def test_what_gains_more_than_it_loses_is_as_good_as_the_best(gain, expected):
    """Of so many rows every difference is certain: the wide one is .003 below the best, and above the network."""
    alone = Candidate("the network", None, True, 1.0, held_out=held_out(*[-1.0] * 400), density=-1.0)
    narrow, wide = Candidate("narrow", 0.1, True, 1.0), Candidate("wide", 0.3, True, 1.0)
    narrow.measured(held_out(*[-0.997 + gain] * 400), alone.held_out)
    wide.measured(held_out(*[-0.9995 + gain, -1.0005 + gain] * 200), alone.held_out)
    assert Rule(alone, is_unsure=False, harm=HARM).widest([narrow, wide]).name == expected
    # a gain of .0036 ± .0038 over the network, .004 below the best, is none for certain
    narrow.measured(held_out(*[-0.9924] * 400), alone.held_out)
    wide.measured(held_out(*[-0.9204, -1.0724] * 200), alone.held_out)
    assert Rule(alone, is_unsure=False, harm=inf).widest([narrow, wide]).name == "narrow"


def test_draws_do_not_choose_between_those_that_need_none():
    """The drawn one is best; it is better for certain only beyond the noise of its draws."""
    alone = Candidate("the network", None, True, 1.0, held_out=held_out(*[-1.0] * 6), density=-1.0)
    narrow, wide, drawn = (Candidate(name, width, True, 1.0) for name, width in (("n", 0.1), ("w", 0.3), ("d", 0.1)))
    narrow.measured(held_out(-0.9, -0.9, -0.9, -0.9, -0.9, -0.9), alone.held_out)
    wide.measured(held_out(-0.7, -1.0, -1.0, -1.0, -1.0, -1.0), alone.held_out)
    drawn.measured(held_out(-0.7, -0.99), alone.held_out)
    narrow.is_exact = wide.is_exact = True
    rule = Rule(alone, is_unsure=False, harm=inf)
    assert drawn.density > narrow.density > wide.density
    assert rule.widest([narrow, wide, drawn]).name == "n"
    assert not rule.is_certain(drawn, narrow)  # better by less than two standard errors
    for error, is_certain in ((0.0, True), (0.16, False)):  # of a gain of .295
        drawn.measured(held_out(-0.6, -0.61)._replace(error=error), alone.held_out)
        assert rule.is_certain(drawn, narrow) is is_certain
    careful = Rule(alone, is_unsure=False, harm=HARM)
    drawn.measured(held_out(*[-0.5] * 5, -3.0), alone.held_out)  # no worse for certain than the network is asked of it
    assert careful.widest([drawn]).name == "the network"
    assert not careful.is_certain(drawn, narrow)


def test_drawn_weights_must_be_better_than_the_network_on_the_rows_that_they_have_seen():
    """A wide one gains on every tenth row, none of which is among the first 40: there all that is narrow is better."""
    alone = Candidate("the network", None, True, 1.0, held_out=held_out(*[-1.0] * 100), density=-1.0)
    wide, drawn = Candidate("wide", 0.9, True, 1.0, is_exact=True), Candidate("drawn", 0.4, False, 1.0)
    wide.measured(held_out(*[-1.02, -1.021] * 20, *([-0.02] + [-1.02] * 5) * 10), alone.held_out)
    rule = Rule(alone, is_unsure=False, harm=HARM)
    assert rule.widest([wide]) is wide
    for gain, is_certain in ((-0.002, False), (0.0, False), (0.01, True)):
        drawn.measured(held_out(*[-0.9999 + gain, -1.0001 + gain] * 20), alone.held_out)
        assert rule.is_certain(drawn, wide) is is_certain


def of_labels(logits, labels):
    """As `of_networks` has it of such logits [B, C]."""
    losses = temperature_losses(logits.double().log_softmax(-1), labels)
    return HeldOut(-losses[:, ONE], torch.ones(len(labels)).double(), losses)


def candidates_at(truth, gains, rows, seed=0):
    """Labels drawn from softmax(truth); candidates whose logits are so many times those of the truth."""
    generator = torch.Generator().manual_seed(seed)
    y = truth * torch.randn(rows, 3, generator=generator)
    labels = torch.multinomial(y.softmax(-1), 1, generator=generator).squeeze(-1)
    alone = Candidate("the network", None, True, 1.0, is_network=True)
    alone.measured(of_labels(y * gains[0], labels), of_labels(y * gains[0], labels))
    found = [Candidate(f"prior {width}", width, True, 1.0, is_exact=True) for width in range(1, len(gains))]
    for one, gain in zip(found, gains[1:], strict=True):
        one.measured(of_labels(y * gain, labels), alone.held_out)
    return alone, found


@pytest.mark.parametrize(
    ("gain", "rows", "is_tempered"), [(2.0, 2000, True), (1.0, 2000, False), (2.0, 12, False), (0.5, 2000, False)]
)
def test_a_temperature_mends_what_is_wrong_with_all_inputs_alike(gain, rows, is_tempered):
    """All candidates are too sure by one factor: that is their temperature, to 10 %; one below one is not for this."""
    alone, found = candidates_at(2.0, [gain] * 4, rows)
    kept = Rule(alone, is_unsure=False, harm=HARM).tempered(found, "widest")
    assert (kept is not None) is is_tempered
    if kept is not None:
        assert kept.width == 3  # with their temperatures all are the same: the widest
        assert kept.adjustment.value == pytest.approx(gain, rel=0.1)
        assert kept.name == f"prior 3, temperature {kept.adjustment.value:.3g}"
        assert kept.density > alone.density


def test_a_temperature_is_not_for_what_a_width_mends():
    """The network is twice too sure, and the second of the candidates right: with none on top it is as good."""
    alone, found = candidates_at(2.0, [2.0, 1.4, 1.0, 0.6], 2000)
    assert Rule(alone, is_unsure=False, harm=HARM).tempered(found, "widest") is None
    alone, found = candidates_at(2.0, [2.0, 1.9, 1.8, 1.7], 2000)  # none of them is right
    kept = Rule(alone, is_unsure=False, harm=HARM).tempered(found, "widest")
    assert (kept.width, kept.adjustment.value) == (3, pytest.approx(1.7, rel=0.1))


def test_the_network_may_be_kept_with_a_temperature():
    """The only spread is far too wide."""
    alone, found = candidates_at(2.0, [2.0, 0.02], 2000)
    kept = Rule(alone, is_unsure=False, harm=HARM).tempered(found, "widest")
    assert kept.is_network
    assert kept.adjustment.value == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize(("keep", "width"), [("widest", 1), ("best", None)])
def test_with_temperatures_too_the_widest_that_is_as_good_is_kept(keep, width):
    """Twice too sure all of them, and the network, whose logits have no error of their own, the best by a little."""
    generator = torch.Generator().manual_seed(0)
    y = 2.0 * torch.randn(2000, 3, generator=generator)
    labels = torch.multinomial(y.softmax(-1), 1, generator=generator).squeeze(-1)
    error = 0.2 * torch.randn(2000, 3, generator=generator)
    alone = Candidate("the network", None, True, 1.0, is_network=True)
    alone.measured(of_labels(2 * y, labels), of_labels(2 * y, labels))
    wide = Candidate("prior 1", 1, True, 1.0, is_exact=True)
    wide.measured(of_labels(2 * y + error, labels), alone.held_out)
    kept = Rule(alone, is_unsure=False, harm=HARM).tempered([wide], keep)
    assert kept.width == width
    assert kept.adjustment.value == pytest.approx(2.0, rel=0.1)


def test_around_several_networks_a_posterior_is_not_below_their_average():
    """A loss within the margin and the noise: borne around one network, which is less sure with a spread."""
    total = torch.linspace(-2, 0, 40).double()
    alone = Candidate("the network", None, True, 1.0, is_network=True)
    alone.measured(held_out(*total.tolist()), held_out(*total.tolist()))
    lost = total - 0.001 + 0.02 * torch.tensor([1.0, -1.0] * 20)
    wide = Candidate("prior 1", 1, True, 1.0, is_exact=True)
    wide.measured(held_out(*lost.tolist()), alone.held_out)
    assert Rule(alone, is_unsure=False, harm=HARM).widest([wide]) is wide
    assert Rule(alone, is_unsure=False, harm=HARM, several=True).widest([wide]) is alone


def test_numbers_have_no_temperature():
    alone = Candidate("the network", None, True, 1.0, held_out=held_out(*[-1.0] * 40), density=-1.0)
    assert Rule(alone, is_unsure=False, harm=HARM).tempered([], "widest") is None
