"""Draws led from q to the posterior: where the truth is known, and where there is something to be said against them."""

import pytest
import torch

import structvi as vi
from structvi.density import smc
from structvi.density.importance import Unavailable
from structvi.density.smc import Annealing, nested_r_hat, next_temperature

F64 = torch.float64


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def normal_family(mean, sd):
    """A full normal of independent numbers."""
    space = vi.Parameters({"z": torch.zeros(len(mean), dtype=F64)})
    family = vi.FullNormal().bind(space)
    family = vi.fit_density(
        vi.LogDensity(lambda p: -0.5 * ((p["z"] - mean) / sd).square().sum(), space), family, progress=False
    ).family
    return family.requires_grad_(False), space


def test_a_normal_far_from_q_has_its_moments_and_its_evidence():
    """q is three of its deviations aside and half as wide; importance weights of q alone have hardly a draw there."""
    mean, root = torch.tensor([3.0, -3.0, 0.0], dtype=F64), torch.tensor([2.0, 0.5, 1.0], dtype=F64)
    family, _ = normal_family(torch.zeros(3, dtype=F64), 0.5 * torch.ones(3, dtype=F64))

    def log_p(theta):
        return -0.5 * ((theta - mean) / root).square().sum(-1)

    found = Annealing(family(), log_p, seeded()).run(4000)
    assert found.r_hat < smc.AGREE
    # 128 draws at least know nothing of each other: four standard errors
    assert ((found.theta.mean(0) - mean) / root).abs().max() < 4 / 128**0.5
    assert (found.theta.std(0) / root - 1).abs().max() < 4 / (2 * 128) ** 0.5
    exact = 1.5 * torch.tensor(2 * torch.pi).log() + root.log().sum()  # ∫ p = (2π)^(3/2) Π sd
    # four populations of 32, some ten t's: log evidences differ by about √(10/32), their mean by half of it
    assert abs(sum(found.log_evidence) / 4 - float(exact)) < 4 * (10 / 32) ** 0.5 / 2


def test_two_modes_get_the_shares_that_they_have():
    """q is wide over both; the narrow one holds a quarter."""
    at, sd = torch.tensor([-4.0, 4.0], dtype=F64), torch.tensor([1.0, 0.5], dtype=F64)
    log_weight = torch.tensor([0.75, 0.25], dtype=F64).log() - sd.log()
    family, _ = normal_family(torch.zeros(1, dtype=F64), 3 * torch.ones(1, dtype=F64))

    def log_p(theta):
        return (log_weight - 0.5 * ((theta - at) / sd).square()).logsumexp(-1)

    runs = [Annealing(family(), log_p, seeded(seed)).run(1000) for seed in range(4)]
    share = sum((found.theta > 0).double().mean().item() for found in runs) / 4
    # resampled draws decide together: shares of single runs differ by 0.065 (24 runs), three errors of four are 0.1
    assert abs(share - 0.25) < 0.1


def test_a_neck_is_told():
    """Neal's funnel of ten, which annealing does not fill either."""
    space = vi.Parameters({"v": torch.zeros((), dtype=F64), "x": torch.zeros(9, dtype=F64)})
    target = vi.LogDensity(
        lambda p: -p["v"].square() / 18 - 4.5 * p["v"] - 0.5 * p["x"].square().sum() * (-p["v"]).exp(), space
    )
    result = vi.fit_density(target, vi.FullNormal(), progress=False)
    with pytest.warns(UserWarning, match="paths broke off"):
        draws = result.sample(500, corrected="annealed", generator=seeded())
    assert draws["x"].shape == (500, 9)


def test_populations_that_do_not_agree_are_told(monkeypatch):
    """Two modes that no path joins, and one t: each population keeps the share that chance gave it."""
    monkeypatch.setattr(smc, "ENOUGH", 0)
    space = vi.Parameters({"z": torch.zeros(1, dtype=F64)})
    target = vi.LogDensity(lambda p: torch.logaddexp(-50 * (p["z"] - 3) ** 2, -50 * (p["z"] + 3) ** 2).sum(), space)
    family = vi.FullNormal().bind(space).requires_grad_(False)
    monkeypatch.setattr(smc, "EACH", 4)
    found = [Annealing(family(), target.log_joint, seeded(seed)).run(64) for seed in range(3)]
    assert max(one.r_hat for one in found) > smc.AGREE
    assert any("z" in one.doubts(space) for one in found)


def test_the_same_generator_gives_the_same_draws_of_values():
    target = vi.LogDensity(
        lambda p: 2 * p["s"].log() - p["s"], vi.Parameters({"s": vi.constraints.positive(1.0)})
    )  # Γ(3, 1)
    result = vi.fit_density(target, vi.FullNormal(), progress=False)
    one, two = (result.sample(700, corrected="annealed", generator=seeded(1))["s"] for _ in range(2))
    assert bool((one > 0).all())
    assert torch.equal(one, two)
    assert abs(one.mean() - 3) < 4 * 3**0.5 / 128**0.5
    assert result.to_arviz(200, corrected="annealed").posterior["s"].shape == (1, 200)


def test_what_is_no_number_is_refused():
    family, _ = normal_family(torch.zeros(2, dtype=F64), torch.ones(2, dtype=F64))
    with pytest.raises(Unavailable, match="not finite at any draw"):
        Annealing(family(), lambda theta: theta.sum(-1) * torch.nan, seeded()).run(100)
    target = vi.LogDensity(lambda p: -p["z"].square().sum(), vi.Parameters({"z": torch.zeros(2, dtype=F64)}))
    with pytest.raises(ValueError, match='True, False or "annealed"'):
        vi.fit_density(target, vi.FullNormal(), progress=False).sample(10, corrected="anneal")  # pyright: ignore


def test_half_of_the_draws_stay_effective():
    ratio = torch.randn(2, 50, generator=seeded(), dtype=F64) * 5
    t = next_temperature(ratio, 0.0)
    least = (1 / (t * ratio).softmax(-1).square().sum(-1)).min().item()
    assert 0 < t < 1
    assert abs(least - 25) < 0.01


def test_r_hat_sees_drift_and_populations_apart():
    draws = torch.randn(20, 4, 30, 1, generator=seeded(), dtype=F64)
    assert nested_r_hat(draws).item() < 1.02
    assert nested_r_hat(draws + torch.linspace(0, 2, 20).view(-1, 1, 1, 1)).item() > 1.1
    assert nested_r_hat(draws + torch.arange(4.0).view(1, 4, 1, 1)).item() > 1.3
