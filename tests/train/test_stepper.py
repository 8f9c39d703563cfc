"""The step of a fit in a loop of the user's own: the same bits, and what its arguments mean."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.train.data import Batches
from structvi.train.fit import rate_factor

#: 21 = 8 + 8 + 5: the last batch of an epoch is shorter
N, D = 21, 3


def loader():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(N, D, generator=g)
    return DataLoader(TensorDataset(x, x[:, :1].sin()), batch_size=8, shuffle=True)


def make(family, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
    prior = vi.priors.NormalPrior(
        1.0, learn=not isinstance(family, vi.PerLayer)
    )  # point masses let no scale be learned
    return vi.variationalize(net, vi.likelihoods.Gaussian("point"), family, prior, num_data=N, **options)


def batches(steps, accumulate=1):
    """Those of a fit, as it takes them."""
    read, epoch = Batches(loader(), seed=5), 0
    while steps > 0:
        every = list(read.epoch(epoch))
        for start in range(0, len(every), accumulate):
            if steps > 0:
                yield every[start : start + accumulate]
                steps -= 1
        epoch += 1


PLAIN = {"schedule": vi.Schedule(warmup=0.0, kl_warmup=0.25, staged=False), "progress": False}
FAMILIES = {
    "mean field": vi.MeanField(),
    "covariance": vi.LowRankNormal(2),
    "precision": vi.LowRankPrecision(2),
    "mixture": vi.Mixture(vi.LowRankNormal(1), 2),
    "head": vi.PerLayer({"3.*": vi.FullNormal(), "*": vi.MAP()}),
    "rotated": vi.Rotated(vi.MeanField()),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_the_step_of_fit_bit_for_bit(name, accumulate):
    """Adam with a rate that falls, clipped gradients, dropout on, batches of two sizes: 5 steps."""
    fitted, stepped = (make(FAMILIES[name], dropout="on") for _ in range(2))
    common = {"lr": 0.05, "clip": 0.5, "estimator": vi.Estimator(groups=2), "seed": 5}
    result = fitted.fit(loader(), steps=5, accumulate=accumulate, **common, **PLAIN)
    step = stepped.stepper(observations=N / math.ceil(3 / accumulate), **common)
    losses, norms, highest = [], [], [group["lr"] for group in step.optimizer.param_groups]
    for n, several in enumerate(batches(5, accumulate)):
        for group, rate in zip(step.optimizer.param_groups, highest, strict=True):
            group["lr"] = rate * rate_factor(n, 5, 0.0)
        losses.append(step(*several, kl_weight=result.history["kl_weight"][n].item()))
        norms.append(step.gradient_norm)
    assert [-loss * N for loss in losses] == pytest.approx(result.history["elbo"].tolist(), rel=1e-12)
    assert norms == result.history["gradient_norm"].tolist()
    for (key, a), b in zip(fitted.named_parameters(), stepped.parameters(), strict=True):
        assert torch.equal(a, b), key
    assert step.steps == 5
    assert step.elbo.value == result.history["elbo"][-1].item()


def test_without_observations_every_step_counts_the_same():
    """A batch of five has the gradient norm of a plain loss; with observations=8 five eighths of it."""
    x, t = loader().dataset[:5]
    norms = {}
    for observations in (None, 8):
        step = make(vi.MeanField()).stepper(observations=observations, seed=3)
        step((x, t))
        norms[observations] = step.gradient_norm
    assert norms[8] == pytest.approx(5 / 8 * norms[None], rel=1e-6)


def test_the_loss_is_at_temperature_one_and_the_step_at_its_own():
    batch = loader().dataset[:8]
    cold, warm = (make(vi.MeanField()) for _ in range(2))
    one, two = cold.stepper(seed=3), warm.stepper(seed=3)
    assert one(batch, kl_weight=0.1) == two(batch)
    assert one.gradient_norm != two.gradient_norm


def test_a_float16_step_that_overflows_is_left_out():
    """A factor that cannot hold is halved at every step, and the posterior stays until one fits."""
    bayes = make(vi.MeanField())
    step = bayes.stepper(compute=vi.Compute(precision=torch.float16))
    factor = step.factor
    factor.set(2.0**40)
    before = [p.detach().clone() for p in bayes.parameters()]
    assert math.isnan(step(loader().dataset[:8]))
    assert step.steps == 0
    assert factor.value == 2.0**39
    assert all(torch.equal(a, b) for a, b in zip(before, bayes.parameters(), strict=True))


def test_it_drops_a_calibration_and_leaves_the_global_stream():
    bayes = make(vi.MeanField(), dropout="on")
    bayes.fit(loader(), steps=2, progress=False)
    bayes.calibrate(loader(), draws=2)
    assert bayes.calibration is not None
    step = bayes.stepper()
    before = torch.get_rng_state()
    step(loader().dataset[:8])
    assert torch.equal(before, torch.get_rng_state())
    assert bayes.calibration is None


def test_what_it_refuses():
    bayes = make(vi.MeanField())
    with pytest.raises(ValueError, match="got none"):
        bayes.stepper()()
    with pytest.raises(ValueError, match="kl_weight must be a positive number"):
        bayes.stepper()(loader().dataset[:8], kl_weight=0.0)
    with pytest.raises(ValueError, match="observations must be a positive number"):
        bayes.stepper(observations=-1)
    with pytest.raises(ValueError, match="weight_decay"):
        bayes.stepper(optimizer=lambda p: torch.optim.AdamW(p))
    unknown = vi.variationalize(nn.Linear(3, 1), vi.likelihoods.Gaussian("point"), vi.MeanField())
    with pytest.raises(ValueError, match="num_data"):
        unknown.stepper()
    assert repr(bayes.stepper(compute=vi.Compute(capture=False))) == "Stepper(Adam, 0 steps, not captured: as asked)"
