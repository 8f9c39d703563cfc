"""Dice, calibration and referral against counts by hand."""

import pytest
import torch
from torch import nn

import structvi as vi
from structvi import imaging
from structvi import likelihoods as lk
from structvi.imaging.maps import Maps
from structvi.imaging.structures import StructureMetrics


def probabilities(n=3, C=3, side=5, seed=0):
    p = 2 * torch.randn(n, C, side, side, side, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    p = p.softmax(1)
    t = torch.multinomial(p.movedim(1, -1).reshape(-1, C), 1, generator=torch.Generator().manual_seed(seed + 1))
    return p, t.reshape(n, side, side, side)


def found_of(p, t, **options):
    zeros = torch.zeros(p.shape[2:])
    return imaging.by_structure(
        [(Maps(a.float(), zeros, zeros, "classes"), b) for a, b in zip(p, t, strict=True)], **options
    )


def test_dice_expected_dice_and_volume_are_those_of_the_definitions():
    p, t = probabilities()
    found, label = found_of(p, t, names=["liver", "spleen"]), p.argmax(1)
    for n in range(3):
        for k, c in enumerate((1, 2)):
            a, b = label[n] == c, t[n] == c
            assert found.dice[n, k] == pytest.approx(2 * (a & b).sum().item() / (a.sum() + b.sum()).item())
            expected = 2 * p[n, c][a].sum() / (a.sum() + p[n, c].sum())
            assert found.expected_dice[n, k] == pytest.approx(expected.item(), rel=1e-6)
            assert found.volume[n, k] == (a.sum() - b.sum()).item()
    assert str(found).splitlines()[1].split()[:2] == ["liver", "3"]


def test_what_is_expected_is_found_where_the_probabilities_are_true():
    """Labels drawn from them; a Dice of 576 voxels has a standard deviation of about 0.015, the mean of six 0.006."""
    found = found_of(*probabilities(side=12))
    assert found.dice.mean() == pytest.approx(found.expected_dice.mean().item(), abs=0.03)


def test_calibration_of_each_structure_is_over_voxels_that_speak_of_it():
    p, t = probabilities(n=4)
    found = found_of(p, t)
    assert found.names == ("class 1", "class 2")
    for k, c in enumerate((1, 2)):
        own, hit = p[:, c].float().double().flatten(), (t == c).double().flatten()
        some = own >= 0.01
        bins = (own[some] * 15).long().clamp(max=14)
        gap = torch.zeros(15, dtype=torch.float64).index_add(0, bins, own[some] - hit[some])
        assert found.ece[k] == pytest.approx((gap.abs().sum() / some.sum()).item(), rel=1e-6)
        assert found.missed[k] == pytest.approx((hit[~some].sum() / hit.sum()).item(), rel=1e-6)
        assert found.reliability[k].count.sum() == some.sum()


def test_a_structure_that_is_neither_there_nor_found_does_not_count():
    p = torch.zeros(2, 3, 4, 4, 4)
    p[:, 0] = 1.0
    p[0, 0, 0], p[0, 1, 0] = 0.0, 1.0  # the first case has class 1 in one plane
    t = p.argmax(1)
    found = found_of(p, t)
    assert found.dice[0, 0] == 1.0
    assert found.dice.isnan().tolist() == [[False, True], [True, True]]
    assert found.expected_dice.isnan().tolist() == [[False, True], [True, True]]
    assert found.referral().share.tolist() == [0.0]  # of the one case that has any
    assert found.ece.isnan().tolist() == [False, True]
    vi.plots.reliability_diagram(found)
    with pytest.raises(ValueError, match="no case has a structure"):
        found_of(p[1:], t[1:]).referral()


def made(dice, expected):
    columns = (torch.tensor(values).unsqueeze(1) for values in (dice, expected, [0.0] * len(dice)))
    return StructureMetrics(("a",), *columns, torch.zeros(1), torch.zeros(1), ())


def test_referral_hands_over_the_most_uncertain_first():
    found = made([0.9, 0.5, 0.7, 0.3], [0.8, 0.6, 0.9, 0.2])
    curve = found.referral()
    assert curve.share.tolist() == pytest.approx([0.0, 0.25, 0.5, 0.75])
    assert curve.dice.tolist() == pytest.approx([0.6, 0.7, 0.8, 0.7])
    assert curve.ideal.tolist() == pytest.approx([0.6, 0.7, 0.8, 0.9])


def posterior(likelihood=None, channels=3):
    torch.manual_seed(0)
    net = nn.Conv2d(1, channels, 3, padding=1)
    return vi.variationalize(net, likelihood or lk.Categorical(), vi.MeanField(initial_scale=0.5), num_data=9)


def test_voxels_without_a_label_are_left_out():
    bayes, x = posterior(lk.Categorical(ignore_index=255)), torch.randn(2, 1, 6, 7)
    t = torch.randint(3, (2, 6, 7))
    pred = bayes.predict(x, 16)
    whole = imaging.by_structure([(pred, t)])
    masked = t.clone()
    masked[:, 3:] = 255
    found, same = (imaging.by_structure([(pred, target)]) for target in (masked, (t, masked != 255)))
    assert not torch.equal(whole.dice, found.dice)
    for name in ("dice", "expected_dice", "ece", "missed"):
        torch.testing.assert_close(getattr(found, name), getattr(same, name))
