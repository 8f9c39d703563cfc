"""Sharded posteriors: what each rank holds, and that all ranks together compute what one process computes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.distributed import gather, shard
from tests.distributed.launching import launch

N, D, K = 21, 3, 2
FAMILIES = {
    "covariance": vi.LowRankNormal(rank=K),
    "precision": vi.LowRankPrecision(rank=K),
    "mean field": vi.MeanField(),
}
ESTIMATORS = ("path", "log_q", "entropy")


def data():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(N, D, generator=g, dtype=torch.float64)
    return TensorDataset(x, x[:, :1].sin() + 0.1 * torch.randn(N, 1, generator=g, dtype=torch.float64))


def loader(size=1):
    return DataLoader(data(), batch_size=8 // size, shuffle=True)


def make(family, seed=0):
    """P = 21: no multiple of 2 or 4."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    prior = vi.priors.NormalPrior(1.0, learn=True)
    likelihood = vi.likelihoods.Gaussian("point")
    posterior = vi.variationalize(net, likelihood, FAMILIES[family], prior, num_data=N).double()
    if family != "mean field":
        with torch.no_grad():
            posterior.family.unit.mul_(1.3)  # other than the scale, as after some steps
    return posterior


def generator():
    return torch.Generator().manual_seed(3)


def learned(posterior):
    buffers = {f"family.{name}": buffer for name, buffer in posterior.family.named_buffers()}
    return {**dict(posterior.named_parameters()), **buffers}


def copied(posterior):
    return {name: tensor.detach().clone() for name, tensor in learned(posterior).items()}


def close(a, b, tolerance=1e-9):
    """In float64; sums in another order differ by rounding alone."""
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=tolerance, rtol=tolerance)


def measured(posterior):
    """What a density says of itself, and of given weights."""
    density = posterior.family()
    theta = torch.randn(3, posterior.space.size, generator=generator(), dtype=torch.float64)
    with torch.no_grad():
        return {
            "mean": density.mean,
            "variance": density.variance,
            "entropy": density.entropy(),
            "log_prob": density.log_prob(theta),
            "score": density.score(theta),
            "draws": density.draw(2, vi.couplings.unscented, generator()).theta,
            "elbo": posterior.elbo(loader(), groups=4, generator=generator()).per_group,
            "prediction": posterior.predict(data().tensors[0], generator=generator()).mean,
        }


#: plain descent: after a step the parameters say what the gradient was; clipped, so that its norm counts too
PLAIN = {"steps": 3, "clip": 0.5, "schedule": vi.Schedule(warmup=0.0, staged=False, stop=False), "progress": False}
ADAM = {"epochs": 4, "estimator": vi.Estimator(groups=2), "schedule": vi.Schedule(staged=False), "progress": False}


def descent(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


def moments(optimizer):
    return sum(x.numel() for state in optimizer.state.values() for x in state.values() if x.ndim)


def ranks_of_a_fit(rank, size, directory):
    out = {}
    for family in FAMILIES:
        posterior = shard(make(family, seed=rank))
        assert posterior.family.mean.shape != (posterior.space.size,)
        out[family, "numel"] = sum(parameter.numel() for parameter in posterior.family.parameters())
        out[family, "rows"] = tuple(posterior.family.mean.shape)
        out[family, "measured"] = measured(posterior)
        for estimator in ESTIMATORS:
            posterior = shard(make(family, seed=rank))
            history = posterior.fit(loader(size), optimizer=descent, estimator=vi.Estimator(estimator), **PLAIN).history
            out[family, estimator] = copied(gather(posterior)), history
        posterior, saved = shard(make(family, seed=rank)), directory / f"fit-{family}-{size}"
        optimizer = adam(posterior.parameters())
        result = posterior.fit(loader(size), optimizer=optimizer, checkpoint=vi.Checkpoint(saved, every=7), **ADAM)
        out[family, "fit"] = copied(gather(posterior)), result.elbo.value, result.kept
        out[family, "moments"] = moments(optimizer)
        if rank == 0:
            (saved / "fit-0000000012.safetensors").unlink()  # of the end: what is resumed is the one before
        dist.barrier()
        posterior = shard(make(family, seed=rank))
        posterior.fit(loader(size), optimizer=adam, checkpoint=vi.Checkpoint(saved, every=7, resume=True), **ADAM)
        out[family, "resumed"] = copied(gather(posterior))
    # from rank 0's values to these ranks, to a file, and to other ranks
    file = directory / f"{size}.safetensors"
    whole = gather(shard(make("precision", seed=rank)))
    if rank == 0:
        whole.save(file)
    dist.barrier()
    out["loaded"] = copied(gather(shard(vi.load(file, make("precision", seed=5).net))))
    with pytest.raises(ValueError, match="need each other for every draw"):
        shard(make("covariance")).fit(loader(size), epochs=1, compute=vi.Compute(parallel=None))
    with pytest.raises(ValueError, match="gather"):
        shard(make("covariance")).save(f"{directory}/whole.safetensors")
    return out


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def two(directory):
    return launch(ranks_of_a_fit, 2, 2, directory)


@pytest.fixture(scope="module")
def four(directory, two):
    return launch(ranks_of_a_fit, 4, 4, directory)


@pytest.fixture(scope="module", params=["two", pytest.param("four", marks=pytest.mark.slow)])
def ranks(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_rank_holds_its_rows_and_the_optimizer_those_of_its_moments(ranks, family):
    size, P, columns = len(ranks), 21, 2 if family == "mean field" else K + 2
    most = -(-P // size)
    rows = [min(P, (r + 1) * most) - min(P, r * most) for r in range(size)]
    assert [out[family, "rows"] for out in ranks] == [(n,) for n in rows]
    assert [out[family, "numel"] for out in ranks] == [n * columns for n in rows]
    # two moments of each, and of the learned noise and prior scale
    assert [out[family, "moments"] for out in ranks] == [2 * (n * columns + 1) for n in rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sharded_density_says_what_the_whole_one_says(ranks, family):
    expected = measured(make(family))
    for out in ranks:
        close(out[family, "measured"], expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_values_and_gradients_are_those_of_one_process(ranks, family, estimator):
    posterior = make(family)
    history = posterior.fit(loader(), optimizer=descent, estimator=vi.Estimator(estimator), **PLAIN).history
    assert bool((history["gradient_norm"] > 0.5).all())
    for out in ranks:
        theirs, their_history = out[family, estimator]
        close(theirs, copied(posterior))
        for column in ("elbo", "gradient_norm"):
            torch.testing.assert_close(their_history[column], history[column], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fit_agrees_with_that_of_one_process_and_goes_on_where_it_was_stopped(ranks, family):
    posterior = make(family)
    result = posterior.fit(loader(), optimizer=adam, **ADAM)
    for out in ranks:
        theirs, elbo, kept = out[family, "fit"]
        # a dozen steps of Adam, which divides by the size of small gradients, magnify rounding
        close(theirs, copied(posterior), 1e-6)
        assert (elbo, kept) == (pytest.approx(result.elbo.value, rel=1e-6), result.kept)
        close(out[family, "resumed"], theirs, 1e-12)


# ------------------------------------------------------------------------------------------- other numbers of ranks


def test_a_gathered_posterior_is_saved_loaded_and_sharded_again(ranks):
    for out in ranks:
        close(out["loaded"], copied(make("precision")), 0.0)


def test_a_fit_goes_on_whole_in_one_process(ranks, directory):
    """A fit's checkpoint is one file whatever the number of ranks."""
    posterior, saved = make("precision"), directory / f"fit-precision-{len(ranks)}"
    (saved / "fit-0000000012.safetensors").unlink()
    result = posterior.fit(
        loader(),
        optimizer=adam,
        checkpoint=vi.Checkpoint(saved, every=7, resume=True),
        **ADAM,
    )
    assert "resumed at step 7 from fit-0000000007.safetensors" in result.notes
    close(copied(posterior), ranks[0]["precision", "fit"][0], 1e-9)
