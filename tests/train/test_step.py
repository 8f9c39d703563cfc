"""One training step: the same as by hand with torch's Adam, and nothing changed where something is not finite."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import structvi as vi
from structvi.optim.adam import FACTOR_RATE, make_optimizer
from structvi.train.step import LossFactor, Step

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
T = torch.randn(12, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
FAMILIES = [vi.MeanField(), vi.LowRankNormal(2), vi.LowRankPrecision(2), vi.Mixture(vi.MeanField(), 2)]


def posterior(family: vi.Family) -> vi.Posterior:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    generator = torch.Generator().manual_seed(2)
    return vi.variationalize(net, vi.likelihoods.Gaussian(noise=0.3), family, num_data=40, generator=generator)


def flat(bayes: vi.Posterior) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in bayes.parameters()])


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("family", [*FAMILIES, vi.Mixture(vi.LowRankNormal(1), 2)], ids=repr)
def test_equals_a_loop_by_hand(family, clip):
    ours, plain = posterior(family), posterior(family)
    adam = make_optimizer(ours, None, 0.01)
    step = Step(ours, adam, torch.Generator().manual_seed(5), estimator=vi.Estimator(groups=3), clip=clip)
    assert step.reason == "not on a CUDA device"
    rates = {id(p): group["lr"] for group in adam.param_groups for p in group["params"]}
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    optimizer = torch.optim.Adam([{"params": [p], "lr": rates[id(other)]} for p, other in pairs])
    generator = torch.Generator().manual_seed(5)
    for start in (0, 4, 8):
        batch = (X[start : start + 4], T[start : start + 4])
        outcome = step([batch])
        optimizer.zero_grad()
        terms = plain.terms(batch, estimator=vi.Estimator(groups=3), generator=generator)
        (-(terms.fit - terms.complexity).mean() / 40).backward()
        norm = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        if clip is not None and norm > clip:
            for parameter in plain.parameters():
                parameter.grad *= clip / norm
        optimizer.step()
        torch.testing.assert_close(outcome.elbo, (terms.fit - terms.complexity).detach(), rtol=1e-9, atol=0)
        assert outcome.norm == pytest.approx(float(norm), rel=1e-9)
    torch.testing.assert_close(flat(ours), flat(plain), rtol=1e-9, atol=1e-10)


class DividesAsCUDA(TorchDispatchMode):
    """A tensor over a number is x·(1/N) there: in float64 not always the bits of x/N."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.div.Tensor and not (isinstance(args[1], torch.Tensor) and args[1].ndim):
            return torch.ops.aten.mul.Tensor(args[0], 1.0 / float(args[1]))
        return func(*args, **(kwargs or {}))


def test_the_weights_of_a_captured_step_give_the_bits_of_numbers():
    """8 of 21 observations, 7 in a step on average: (8/7)/21 and (8/7)·(1/21) differ."""
    gradients = []
    for number in (float, lambda x: torch.tensor(x, dtype=torch.float64)):
        bayes = posterior(vi.MeanField())
        bayes.model.num_data = 21
        step = Step(bayes, make_optimizer(bayes, None, 0.01), torch.Generator().manual_seed(5))
        with DividesAsCUDA():
            step.gradients([(X[:8], T[:8])], (number(8 / 7),), number(0.3), torch.Generator().manual_seed(5))
        gradients.append(torch.cat([p.grad.reshape(-1) for p in bayes.parameters()]))
    assert torch.equal(*gradients)


def test_several_batches_share_a_step():
    one, several = posterior(vi.LowRankNormal(2)), posterior(vi.LowRankNormal(2))
    generators = [torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)]
    adam = make_optimizer(several, None, 0.01)
    step = Step(several, adam, generators[0])
    outcome = step([(X[:6], T[:6]), (X[6:], T[6:])], weights=(0.5, 0.5), kl_weight=0.5)
    loss = sum(
        one.loss(batch, kl_weight=0.5, generator=generators[1]) / 2 for batch in ((X[:6], T[:6]), (X[6:], T[6:]))
    )
    loss.backward()
    *rest, factor = one.parameters()
    torch.optim.Adam([{"params": rest}, {"params": [factor], "lr": adam.param_groups[1]["lr"]}], lr=0.01).step()
    torch.testing.assert_close(flat(several), flat(one), rtol=1e-9, atol=1e-10)
    assert outcome.elbo.shape == (1,)


def test_a_compiled_network_gives_the_same(monkeypatch):
    """torch.compile without a compiler: the network's graph is traced and run as it is."""
    compile, asked = torch.compile, []

    def eagerly(function):
        asked.append(function)
        return compile(function, backend="eager")

    monkeypatch.setattr(torch, "compile", eagerly)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, T), batch_size=4)
    runs = []
    for option in (False, True):
        bayes = posterior(vi.LowRankNormal(2))
        bayes.fit(loader, steps=6, estimator=vi.Estimator(groups=2), compute=vi.Compute(compile=option), progress=False)
        runs.append(flat(bayes))
    torch.testing.assert_close(*runs, rtol=1e-9, atol=1e-10)
    assert asked == [torch.func.functional_call]
    assert bayes.model.compiled is None


def test_a_factor_learns_slower_the_more_weights_there_are():
    for size, rate in ((4, 1.0), (400, FACTOR_RATE / 20)):
        net = nn.Linear(size, 1, bias=False)
        bayes = vi.variationalize(net, vi.likelihoods.Gaussian(noise=1.0), vi.LowRankPrecision(2))
        rates = {id(p): group["lr"] for group in make_optimizer(bayes, None, 0.1).param_groups for p in group["params"]}
        assert rates[id(bayes.family.factor)] == pytest.approx(0.1 * rate)
        assert rates[id(bayes.family.mean)] == rates[id(bayes.family.log_scale)] == 0.1


def test_a_step_without_memory_is_explained_and_nothing_is_lost(tmp_path, monkeypatch):
    """The posterior is that of the last step, and a fit resumed from the checkpoint ends as one never stopped."""
    options = {"steps": 12, "progress": False, "schedule": vi.Schedule(stop=False)}
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, T), batch_size=4, shuffle=True)
    whole, bayes, again, seen = *(posterior(vi.LowRankNormal(2)) for _ in range(3)), {}
    for one in (whole, bayes, again):
        one.model.num_data = 12
    whole.fit(loader, **options)

    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    def fail_later(history):
        if len(history) == 7:
            seen["flat"] = flat(bayes)
            monkeypatch.setattr(Step, "gradients", no_memory)

    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
        bayes.fit(loader, **options, checkpoint=vi.Checkpoint(tmp_path, every=5), callback=fail_later)
    notes = "; ".join(caught.value.__notes__)
    assert "with P = 21 weights, 2 draws and batches of 4." in notes
    assert "after step 7; go on from" in notes
    assert torch.equal(seen["flat"], flat(bayes))
    monkeypatch.undo()
    result = again.fit(loader, **options, checkpoint=vi.Checkpoint(tmp_path, resume=True))
    assert any("resumed at step 5" in note for note in result.notes)
    assert torch.equal(flat(whole), flat(again))


def test_small_gradients_survive_float16():
    """A gradient of 1e-8 at the output is zero in float16; that of c times the loss, divided by c, is that of float32.

    The norm, and what the optimizer takes, are those of the loss itself.
    """
    x, t = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 1)
    gradients, norms = [], []
    for precision, c in ((None, 1.0), (torch.float16, 2.0**16), (torch.float16, 1.0)):
        torch.manual_seed(0)
        likelihood, prior = vi.likelihoods.Gaussian(noise=2e4), vi.priors.NormalPrior(1e8)
        bayes = vi.variationalize(nn.Linear(3, 1), likelihood, vi.MAP(), prior, num_data=8, evaluation="loop")
        bayes.model.precision = precision
        step = Step(bayes, torch.optim.SGD(bayes.parameters(), lr=0.0), torch.Generator().manual_seed(0))
        step.factor.set(c)
        norms.append(step([(x, t)]).norm)
        gradients.append(torch.cat([1e9 * p.grad.flatten() for p in bayes.parameters()]))
    full, scaled, unscaled = gradients
    torch.testing.assert_close(scaled, full, rtol=0, atol=0.03 * full.norm().item())
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)
    assert unscaled[:3].norm() < 0.5 * full[:3].norm()


def test_a_gradient_that_no_factor_makes_finite_ends_the_fit(monkeypatch):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, *gradients):
            return gradients[0] * torch.inf

    monkeypatch.setattr(LossFactor, "LOWEST", 2.0**16)
    bayes = vi.variationalize(
        nn.Linear(3, 1), vi.likelihoods.Gaussian(1.0), vi.MeanField(), num_data=8,
        forward=lambda net, batch: (Broken.apply(net(batch[0])), batch[1]),
    )  # fmt: skip
    batch = torch.ones(8, 3), torch.ones(8, 1)
    with pytest.raises(vi.NonFiniteError, match="5 batches in a row"):
        bayes.fit([batch], steps=10, compute=vi.Compute(precision=torch.float16), progress=False)
