"""A fit over several processes: it computes what one process computes, and ends cleanly where a rank is lost."""

import os
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import structvi as vi
from structvi.distributed import LossModule, LostRankError, average_gradients
from structvi.models.bayesian_model import rows as rows_in
from structvi.train.data import Batches
from tests.distributed.launching import launch

#: 21 = 8 + 8 + 5: the ranks' parts of the last batch differ in length
N, D, BATCH = 21, 3, 8


def data(n=N):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, D, generator=g, dtype=torch.float64)
    return TensorDataset(x, x[:, :1].sin() + 0.1 * torch.randn(n, 1, generator=g, dtype=torch.float64))


def loader(size=1, n=N, **options):
    return DataLoader(data(n), batch_size=BATCH // size, shuffle=True, **options)


def make(family=None, seed=0, **options):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    recipe = vi.LowRankPrecision(rank=2) if family is None else family
    prior = vi.priors.NormalPrior(1.0, learn=True)
    return vi.variationalize(net, vi.likelihoods.Gaussian("point"), recipe, prior, **options).double()


def learned(posterior):
    return {name: tensor.detach().clone() for name, tensor in posterior.named_parameters()}


def gradients(posterior):
    return {name: parameter.grad.clone() for name, parameter in posterior.named_parameters()}


def close(a, b, tolerance=1e-9):
    """In float64; sums in another order differ by rounding alone."""
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=tolerance, rtol=tolerance)


#: plain descent: after one step the parameters say what the gradient was
PLAIN = {
    "clip": None,
    "schedule": vi.Schedule(warmup=0.0, kl_warmup=0.0, staged=False, stop=False),
    "progress": False,
}


def descent(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


def plain_fit(posterior, loader, steps=3, **options):
    return posterior.fit(loader, steps=steps, optimizer=descent, **PLAIN, **options)


ADAM = {
    "epochs": 10,
    "accumulate": 2,
    "estimator": vi.Estimator(groups=2),
    "lr": 0.05,
    "schedule": vi.Schedule(staged=True),
    "progress": False,
}


def broken(n=N):
    """One observation has no finite likelihood."""
    x, t = data(n).tensors
    t[5] = torch.nan
    return DataLoader(TensorDataset(x, t), batch_size=BATCH)


class Refusing(vi.likelihoods.Gaussian):
    """Fails on the rank that meets the first observation."""

    def forward(self, output, target):
        if bool((target == data().tensors[1][0]).any()):
            raise TypeError("no such target")
        return super().forward(output, target)


class Interrupting(vi.likelihoods.Gaussian):
    """Ctrl-C on rank 1, at its tenth draw: in the second step, of four draws, after the first, of eight."""

    rank, calls = 0, 0

    def forward(self, output, target):
        self.calls += 1
        if self.rank == 1 and self.calls == 10:
            os.kill(os.getpid(), signal.SIGINT)
        return super().forward(output, target)


class Stream(IterableDataset):
    """These rows of the data, in this order."""

    def __init__(self, order):
        x, t = data().tensors
        self.rows = list(zip(x[order], t[order], strict=True))

    def __iter__(self):
        return iter(self.rows)


# ------------------------------------------------------------------------------------------------------- the ranks


def ranks_of_a_fit(rank, size):
    """Everything that is looked at below, from one start of the processes."""
    out = {}
    # networks and factors start differently on each rank: those of rank 0 hold
    posterior = make(seed=rank)
    out["data result"], out["data"] = plain_fit(posterior, loader(size)).history, learned(posterior)
    posterior = make(seed=rank)
    out["fit result"], out["fit"] = posterior.fit(loader(size), **ADAM), learned(posterior)
    posterior = make(seed=rank)
    out["empty result"], out["empty"] = plain_fit(posterior, loader(size, n=17)).history, learned(posterior)
    with pytest.raises(ValueError, match=r"the same options.*groups: 1 on rank 0, 2 on rank 1"):
        plain_fit(make(), loader(size), estimator=vi.Estimator(groups=1 + rank))
    posterior = make()
    sequential = DataLoader(broken().dataset, batch_size=BATCH // size)
    out["broken result"], out["broken"] = plain_fit(posterior, sequential), learned(posterior)
    posterior = make()
    posterior.model.likelihood = Refusing(noise=1.0)
    with pytest.raises((TypeError, LostRankError)) as caught:
        plain_fit(posterior, loader(size))
    out["failure"] = repr(caught.value)
    posterior = make(evaluation="loop")
    posterior.model.likelihood = Interrupting("point").double()
    posterior.model.likelihood.rank = rank
    out["stopped result"], out["stopped"] = posterior.fit(loader(size), **ADAM), learned(posterior)
    return out


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request):
    return launch(ranks_of_a_fit, request.param, request.param)


@pytest.mark.parametrize(("name", "n"), [("data", N), ("empty", 17)])
def test_the_union_of_the_parts_gives_the_gradient_of_one_process(ranks, name, n):
    """Of 17 observations a rank's part of the last batch is empty: it takes part all the same."""
    posterior = make()
    history = plain_fit(posterior, loader(n=n)).history
    for out in ranks:
        close(out[name], learned(posterior))
        for column in ("elbo", "gradient_norm"):
            torch.testing.assert_close(out[f"{name} result"][column], history[column])


def test_a_fit_agrees_with_that_of_one_process(ranks):
    posterior = make()
    result = posterior.fit(loader(), **ADAM)
    for out in ranks:
        theirs = out["fit result"]
        close(out["fit"], ranks[0]["fit"], 0.0)
        # 20 steps of Adam, which divides by the size of small gradients, magnify rounding
        close(out["fit"], learned(posterior), 1e-6)
        assert (theirs.kept, theirs.verdict, theirs.steps) == (result.kept, result.verdict, result.steps)
        assert theirs.elbo.value == pytest.approx(result.elbo.value, rel=1e-6)
        assert any(f"{len(ranks)} ranks" in note for note in theirs.notes)
        for column in ("elbo", "standard_error", "gradient_norm", "lr"):
            torch.testing.assert_close(theirs.history[column], ranks[0]["fit result"].history[column], atol=0, rtol=0)
            torch.testing.assert_close(theirs.history[column], result.history[column], atol=1e-6, rtol=1e-6)


def test_what_is_not_finite_on_one_rank_is_undone_on_all(ranks):
    posterior = make()
    result = plain_fit(posterior, broken())
    assert [one.index for one in result.skipped] == [0]
    for out in ranks:
        close(out["broken"], learned(posterior))
        theirs = out["broken result"].skipped
        assert [(one.epoch, one.index) for one in theirs] == [(0, 0)]
        assert theirs == ranks[0]["broken result"].skipped
        assert "the loss is not finite" in theirs[0].reason


def test_an_error_on_one_rank_ends_all_with_its_message(ranks):
    failures = [out["failure"] for out in ranks]
    assert sum("TypeError" in one and "LostRank" not in one for one in failures) == 1
    assert sum("failed, and the fit with it: TypeError: no such target" in one for one in failures) == len(ranks) - 1


def test_an_interruption_of_one_rank_stops_all_after_the_same_step(ranks):
    # a step that has begun is finished; what came in the second is told in the third
    for out in ranks:
        assert (out["stopped result"].verdict, out["stopped result"].steps) == ("stopped by you", 3)
        close(out["stopped"], ranks[0]["stopped"], 0.0)


# ------------------------------------------------------------------------------------- loaders and loops of your own


def own_loops(rank):
    out, (x, t) = {}, data().tensors
    parts = {"equal": slice(rank * 4, rank * 4 + 4), "unequal": slice(0, 3) if rank == 0 else slice(3, 8)}
    batches = {name: (x[part], t[part]) for name, part in parts.items()}

    def generator():
        return torch.Generator().manual_seed(3)

    posterior = make(num_data=N)
    posterior.loss(batches["unequal"], generator=generator()).backward()
    average_gradients(posterior, rows_in(batches["unequal"]))
    out["average"] = gradients(posterior)

    posterior = make(num_data=N)
    module = DistributedDataParallel(LossModule(posterior))
    module(batches["equal"], generator=generator()).backward()
    out["ddp"] = gradients(posterior)

    sampler = DistributedSampler(data(), shuffle=False, drop_last=True)
    posterior = make()
    plain_fit(posterior, DataLoader(data(), batch_size=4, sampler=sampler), steps=1)
    out["sampler"] = learned(posterior)
    posterior = make(num_data=N)
    # rank 1 has more
    stream = plain_fit(posterior, DataLoader(Stream(range(8) if rank == 0 else range(8, N)), batch_size=4), steps=5)
    out["stream epochs"], out["stream"] = stream.history["epoch"].tolist(), learned(posterior)
    return out


@pytest.fixture(scope="module")
def loops():
    return launch(own_loops, 2)


def test_loops_of_your_own_get_the_gradient_of_the_union(loops):
    x, t = data().tensors
    posterior = make(num_data=N)
    posterior.loss((x[:8], t[:8]), generator=torch.Generator().manual_seed(3)).backward()
    expected = gradients(posterior)
    for out in loops:
        close(out["average"], expected)
        close(out["ddp"], expected)


def test_a_loader_with_an_order_of_its_own_gives_each_rank_its_part(loops):
    # rank 0 has 0, 2, .., 18 of 20, rank 1 the others, in batches of 4, 4 and 2
    cut = [[*range(start, stop, 2), *range(start + 1, stop, 2)] for start, stop in ((0, 8), (8, 16), (16, 20))]
    posterior = make(num_data=N)
    # a list, not a TensorDataset: code of the user's may draw random numbers, as that of the sampler may
    order = [row for batch in cut for row in batch]
    plain_fit(posterior, DataLoader(list(data()), batch_size=BATCH, sampler=order), steps=1)
    for out in loops:
        close(out["sampler"], learned(posterior))
    # rank 0 has two batches, rank 1 has four: an epoch is two steps for both
    posterior = make(num_data=N)
    union = [*range(4), *range(8, 12), *range(4, 8), *range(12, 16)]
    plain_fit(posterior, DataLoader(Stream(union), batch_size=BATCH), steps=5)
    for out in loops:
        assert out["stream epochs"] == [0, 0, 1, 1, 2]
        close(out["stream"], learned(posterior))


# ----------------------------------------------------------------------------------------------------- a rank is lost


def with_a_death(rank, directory, who, at):
    posterior = make(seed=rank, evaluation="loop")  # loop: a call a draw
    likelihood, calls = posterior.model.likelihood, count(1)
    forward = likelihood.forward

    def dying(output, target):
        if rank == who and next(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(output, target)

    likelihood.forward = dying
    with pytest.raises(LostRankError) as caught:
        posterior.fit(loader(2), checkpoint=vi.Checkpoint(directory, every=4), **ADAM)
    return str(caught.value), caught.value.__notes__


@pytest.mark.slow
@pytest.mark.parametrize(("who", "step"), [(1, 8), (0, 8)])
def test_a_killed_rank_ends_the_fit_and_it_can_be_resumed(tmp_path, who, step):
    # two groups of two draws, and two batches or one in turn: 8, 4, 8, 4, .. calls a step, 57 to 60 in step 9
    results = launch(with_a_death, 2, tmp_path, who, 58)
    assert results[who] is None
    said, notes = results[1 - who]
    assert f"rank {1 - who} of 2 has lost another rank" in said
    assert f"fit-{step:010d}" in notes[-1]  # the last regular checkpoint
    whole, resumed = make(), make()
    expected = whole.fit(loader(), **ADAM)
    result = resumed.fit(loader(), checkpoint=vi.Checkpoint(tmp_path, resume=True), **ADAM)
    assert f"resumed at step {step} from fit-{step:010d}.safetensors" in result.notes
    assert result.steps == expected.steps
    close(learned(resumed), learned(whole), 1e-6)


@pytest.mark.slow
def test_the_documented_script_runs_under_torchrun(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
    (tmp_path / "train.py").write_text(page.split("```python\n")[1].split("```")[0])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    # 64 observations, 8 to a rank: 4 steps to an epoch
    assert "after 12 steps (3 epochs)" in done.stdout
    assert "2 ranks, each with its part of every batch" in done.stdout
    assert done.stdout.count("ELBO") == 1  # of rank 0
    assert (tmp_path / "posterior.safetensors").exists()


# --------------------------------------------------------------------------------------------------- in one process


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_parts_of_every_batch_make_it_up(size, drop_last):
    whole = Batches(loader(drop_last=drop_last), seed=5)
    parts = [Batches(loader(size, drop_last=drop_last), seed=5, part=(r, size)) for r in range(size)]
    assert {part.length for part in parts} == {whole.length}
    for skip in (0, 1):
        expected = list(whole.epoch(3, skip))
        split = [list(part.epoch(3, skip)) for part in parts]
        for index, (x, _) in enumerate(expected):
            assert torch.equal(torch.cat([part[index][0] for part in split]), x)
            counted = [part.rows_of(index + skip) for part in parts]
            assert counted == [(len(part[index][0]), len(x)) for part in split]
    rows = torch.cat([x for r in range(size) for x, _ in whole.everything(part=(r, size))])
    assert torch.equal(rows.sort(0).values, data().tensors[0].sort(0).values)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="parallel must be one of"):
        make().fit(loader(), epochs=1, compute=vi.Compute(parallel="model"))
    with pytest.raises(ValueError, match="4 ranks share 3 observations"):
        Batches(loader(n=3), part=(0, 4))
