"""A captured step is the eager one, bit for bit; a network that cannot be captured is fitted all the same."""

import pytest
import torch

import structvi as vi
from structvi.train.data import Batches
from structvi.train.fit import rate_factor
from tests.gpu.gpu_cases import (
    CASES,
    ReadsValues,
    check_same_bits,
    data,
    data_of,
    fitted,
    loader,
    make,
    values,
    was_captured,
)

pytestmark = pytest.mark.gpu


def both(name, device, dtype=torch.float32, **options):
    """The fit captured and eager: (result, values) of each."""
    results = []
    for capture in (True, False):
        bayes = make(name, dtype)
        result = fitted(bayes, device, data_of(name, dtype), capture=capture, **options)
        results.append((result, values(bayes)))
    return results


@pytest.mark.parametrize("name", CASES)
def test_captured_is_eager_bit_for_bit(name, device):
    (captured, own), (eager, others) = both(name, device)
    assert device.type != "cuda" or was_captured(captured), captured.notes
    assert torch.equal(captured.history["elbo"], eager.history["elbo"])
    assert torch.equal(captured.history["gradient_norm"], eager.history["gradient_norm"])
    check_same_bits(own, others)


@pytest.mark.parametrize("name", ["mean field", "covariance", "precision", "mixture"])
def test_clipped_tempered_and_in_stages_too(name, device):
    """A gradient that is clipped at every step, λ < 1, and a change of what learns on the way."""
    options = {
        "clip": 1e-3,
        "kl_weight": 0.3,
        "steps": 15,
        "estimator": vi.Estimator(groups=2),
        "schedule": vi.Schedule(kl_warmup=0.5, staged=True),
    }
    (captured, own), (eager, others) = both(name, device, **options)
    assert bool((eager.history["gradient_norm"] > 1e-3).all())
    assert device.type != "cuda" or was_captured(captured), captured.notes
    check_same_bits(own, others)


@pytest.mark.parametrize("how", [{"dtype": torch.float64}, {"precision": torch.bfloat16}, {"precision": torch.float16}])
@pytest.mark.parametrize("name", ["mean field", "covariance", "convolutional"])
def test_in_other_precisions_too(name, how, device):
    if name == "convolutional" and "dtype" in how:
        pytest.skip("its images are in float32")
    (captured, own), (_, others) = both(name, device, **how)
    assert device.type != "cuda" or was_captured(captured), captured.notes
    check_same_bits(own, others)


def test_a_batch_that_is_not_finite_changes_nothing_in_a_graph(gpu):
    """The graph itself leaves everything as it is: the step is left out, and the fit goes on."""
    broken = data()
    broken.tensors[0][4] = torch.nan
    bayes = make("covariance")
    result = fitted(bayes, gpu, broken, steps=12)
    assert was_captured(result)
    assert len(result.skipped) >= 3  # one in each epoch of three steps
    assert all(bool(torch.isfinite(p).all()) for p in bayes.parameters())


def test_a_network_that_cannot_be_captured_is_fitted_all_the_same(device):
    def fit(capture):
        torch.manual_seed(0)
        bayes = vi.variationalize(
            ReadsValues(), vi.likelihoods.Categorical(), vi.LowRankNormal(3), num_data=21, evaluation="loop",
            generator=torch.Generator().manual_seed(1),
        )  # fmt: skip
        return fitted(bayes, device, data(), capture=capture), values(bayes)

    (result, own), (_, others) = fit(True), fit(False)
    if device.type == "cuda":
        assert any("the step was not captured as a CUDA graph: the step cannot be captured" in n for n in result.notes)
    check_same_bits(own, others)


@pytest.mark.parametrize("name", ["mean field", "covariance", "precision", "dropout layers"])
def test_a_stepper_is_the_step_of_fit(name, device):
    """One epoch of three batches of two shapes; a rate that changes reaches the graph."""

    one, two = make(name), make(name)
    result = fitted(
        one, device, data(), steps=3, clip=0.1, schedule=vi.Schedule(warmup=0.0, kl_warmup=0.0, staged=False)
    )
    two.to(device)
    step = two.stepper(clip=0.1, observations=7, seed=3)
    losses, highest = [], [group["lr"] for group in step.optimizer.param_groups]
    for n, batch in enumerate(Batches(loader(), seed=3).epoch(0)):
        for group, rate in zip(step.optimizer.param_groups, highest, strict=True):
            group["lr"] = rate * rate_factor(n, 3, 0.0)
        losses.append(step(batch))
    assert step.captured == (device.type == "cuda")
    assert [-loss * 21 for loss in losses] == pytest.approx(result.history["elbo"].tolist(), rel=1e-9)
    check_same_bits(values(one), values(two))
