"""A checkpoint knows what it is a fit of: others are refused with what differs, the same goes on bit for bit."""

import os
import signal
import tempfile
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import structvi as vi
from tests.children import python

N = 40


def rows(seed=0, n=N):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator)
    return x, x.sum(1, keepdim=True) + 0.1 * torch.randn(n, 1, generator=generator)


def network(activation=nn.Tanh):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), activation(), nn.BatchNorm1d(4), nn.Linear(4, 1))


def own_prior(parameters, theta):
    return -0.5 * theta.square().sum(-1)


def other_prior(parameters, theta):
    return -0.5 * theta.square().sum(-1) - 1.0


class Held(nn.Module):
    """The same modules, another forward."""

    def __init__(self, twice=False):
        super().__init__()
        self.net = network()
        self.forward_of = twice

    def forward(self, x):
        return self.net(x)


class Otherwise(Held):
    def forward(self, x):
        return self.net(2 * x)


def problem(
    data=None, batch_size=10, likelihood=None, prior=None, net=None, family=None, dtype=torch.float32, select="*",
    shuffle=True, **modes,
):  # fmt: skip
    x, t = rows() if data is None else data
    net = (network() if net is None else net).to(dtype)
    loader = DataLoader(TensorDataset(x.to(dtype), t.to(dtype)), batch_size=batch_size, shuffle=shuffle)
    bayes = vi.variationalize(
        net, vi.likelihoods.Gaussian(0.3) if likelihood is None else likelihood,
        vi.MeanField() if family is None else family, vi.priors.NormalPrior(1.0) if prior is None else prior,
        select=select, **modes,
    )  # fmt: skip
    return bayes, loader


OPTIONS = {"steps": 12, "progress": False, "schedule": vi.Schedule(kl_warmup=0.0)}


def stop_at(count):
    def stop(history):
        if len(history) == count:
            raise KeyboardInterrupt

    return stop


@pytest.fixture
def interrupted(tmp_path):
    bayes, loader = problem()
    bayes.fit(loader, **OPTIONS, checkpoint=vi.Checkpoint(tmp_path, every=4), callback=stop_at(6))
    return tmp_path


def held_changed():
    net = network()
    net[2].running_mean += 1
    return net


def frozen(value):
    net = network()
    net[0].weight.requires_grad_(False).fill_(value)
    return net


X, T = rows()
OTHERS = {
    "other rows": (lambda: problem(data=rows(seed=1)), "the data"),
    "one row changed": (lambda: problem(data=(X.clone().index_fill(0, torch.tensor([0]), 9.0), T)), "the data"),
    "other targets": (lambda: problem(data=(X, T + 1)), "the data"),
    "another order": (lambda: problem(data=(X.flip(0), T.flip(0))), "the data"),
    "fewer rows": (lambda: problem(data=rows(n=30)), "the number of observations"),
    "batch size": (lambda: problem(batch_size=8), "batches"),
    "not shuffled": (lambda: problem(shuffle=False), "batches"),
    "noise": (lambda: problem(likelihood=vi.likelihoods.Gaussian(0.2)), "the likelihood"),
    "a likelihood of one's own": (lambda: problem(likelihood=lambda y, t: -(y - t).square()), "the likelihood"),
    "prior's scale": (lambda: problem(prior=vi.priors.NormalPrior(2.0)), "the prior"),
    "prior's kind": (lambda: problem(prior=vi.priors.LaplacePrior(1.0)), "the prior"),
    "a prior of one's own": (lambda: problem(prior=own_prior), "the prior"),
    "ReLU": (lambda: problem(net=network(nn.ReLU)), "the network's structure"),
    "other statistics": (lambda: problem(net=held_changed()), "the network's held tensors and buffers"),
    "batch norm": (lambda: problem(batch_norm="reestimated"), "dropout and batch_norm"),
    "family's start": (lambda: problem(family=vi.MeanField(initial_scale=0.2)), "the family"),
    "rank 0": (lambda: problem(family=vi.LowRankNormal(0)), "belongs to another posterior"),
    "float64": (lambda: problem(dtype=torch.float64), "the weights' dtype"),
    "selected": (lambda: problem(select="0.*"), "belongs to another posterior"),
    "a forward": (lambda: problem(forward=lambda net, batch: (net(batch[0]), batch[1])), "forward="),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_problem_is_refused(name, interrupted):
    make, words = OTHERS[name]
    bayes, loader = make()
    before = {key: tensor.clone() for key, tensor in bayes.learned().items()}
    with pytest.raises(ValueError, match=words.replace("(", "\\(")):
        bayes.fit(loader, **OPTIONS, checkpoint=vi.Checkpoint(interrupted, resume=True))
    assert all(torch.equal(tensor, bayes.learned()[key]) for key, tensor in before.items())


def test_the_recommended_pair_does_not_give_the_old_posterior(tmp_path):
    bayes, loader = problem()
    bayes.fit(loader, **OPTIONS, checkpoint=vi.Checkpoint(tmp_path, resume=True))
    bayes, loader = problem(data=rows(seed=3))
    with pytest.raises(ValueError, match=r"another problem; these differ: .*the data"):
        bayes.fit(loader, **OPTIONS, checkpoint=vi.Checkpoint(tmp_path, resume=True))


def test_the_same_goes_on_bit_for_bit(interrupted):
    whole, loader = problem()
    whole.fit(loader, **OPTIONS)
    again, loader = problem()
    again.fit(loader, **OPTIONS, checkpoint=vi.Checkpoint(interrupted, resume=True))
    assert all(torch.equal(tensor, again.learned()[key]) for key, tensor in whole.learned().items())


def test_code_of_a_network_and_functions_of_ones_own(tmp_path):
    bayes, loader = problem(net=Held(), prior=own_prior)
    bayes.fit(loader, **OPTIONS, checkpoint=vi.Checkpoint(tmp_path, every=4), callback=stop_at(6))
    other, loader = problem(net=Otherwise(), prior=own_prior)
    with pytest.raises(ValueError, match="the network's"):
        other.fit(loader, **OPTIONS, checkpoint=vi.Checkpoint(tmp_path, resume=True))
    other, loader = problem(net=Held(), prior=other_prior)
    with pytest.raises(ValueError, match="the prior"):
        other.fit(loader, **OPTIONS, checkpoint=vi.Checkpoint(tmp_path, resume=True))
    same, loader = problem(net=Held(), prior=own_prior)
    result = same.fit(loader, **OPTIONS, checkpoint=vi.Checkpoint(tmp_path, resume=True))
    assert any("without a look at what the prior calls or holds (own_prior)" in note for note in result.notes)


class Augmented(Dataset):
    """Other noise at every reading."""

    def __init__(self, labels):
        self.labels = labels

    def __len__(self):
        return N

    def __getitem__(self, index):
        return X[index] + 0.01 * torch.randn(3), self.labels[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, T, strict=True))


def test_augmented_data_count_by_length_and_labels(tmp_path):
    def fit(labels, **options):
        bayes, _ = problem()
        return bayes.fit(DataLoader(Augmented(labels), batch_size=10, shuffle=True), **OPTIONS, **options)

    fit(T, checkpoint=vi.Checkpoint(tmp_path, every=4), callback=stop_at(6))
    assert fit(T, checkpoint=vi.Checkpoint(tmp_path, resume=True)).steps == 12
    with pytest.raises(ValueError, match="the labels"):
        fit(T + 1, checkpoint=vi.Checkpoint(tmp_path, resume=True))


def test_a_stream_is_not_looked_at_and_the_notes_say_so(tmp_path):
    def fit(**options):
        bayes, _ = problem()
        bayes.model.num_data = N
        return bayes.fit(DataLoader(Stream(), batch_size=10), **OPTIONS, **options)

    fit(checkpoint=vi.Checkpoint(tmp_path, every=4), callback=stop_at(6))
    resumed = fit(checkpoint=vi.Checkpoint(tmp_path, resume=True))
    assert any("resumed without a look at the data, a stream" in note for note in resumed.notes)


# ---------------------------------------------------------------------------------------------- folders and lengths


def test_a_folder_belongs_to_one_fit(tmp_path):
    bayes, loader = problem()
    bayes.fit(loader, **{**OPTIONS, "steps": 30}, checkpoint=vi.Checkpoint(tmp_path))
    names = sorted(path.name for path in tmp_path.iterdir())
    other, loader = problem(data=rows(seed=4))
    with pytest.raises(ValueError, match="holds checkpoints of another fit, up to fit-0000000030"):
        other.fit(loader, **OPTIONS, checkpoint=vi.Checkpoint(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_the_lock_dies_with_its_process(tmp_path):
    """A fit that is killed leaves a folder that can be resumed without a hand."""
    script = textwrap.dedent(f"""
        import os, signal, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import structvi as vi
        from test_fingerprint import OPTIONS, problem

        def kill(history):
            if len(history) == 6:
                os.kill(os.getpid(), signal.SIGKILL)

        bayes, loader = problem()
        bayes.fit(loader, **OPTIONS, checkpoint=vi.Checkpoint({str(tmp_path)!r}, every=4), callback=kill)
    """)
    ended = python(script)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    whole, loader = problem()
    whole.fit(loader, **OPTIONS)
    bayes, loader = problem()
    result = bayes.fit(loader, **OPTIONS, checkpoint=vi.Checkpoint(tmp_path, resume=True))
    assert any("resumed at step 4" in note for note in result.notes)
    assert all(torch.equal(tensor, bayes.learned()[key]) for key, tensor in whole.learned().items())


def test_a_finished_fit_is_restored_and_goes_on(tmp_path):
    bayes, loader = problem()
    bayes.fit(loader, **OPTIONS, checkpoint=vi.Checkpoint(tmp_path))
    bayes.fit(loader, steps=20, progress=False)
    again, loader = problem()
    assert again.fit(loader, **OPTIONS, checkpoint=vi.Checkpoint(tmp_path, resume=True)).steps == 12
    again.fit(loader, steps=20, progress=False)
    assert all(torch.equal(tensor, again.learned()[key]) for key, tensor in bayes.learned().items())


def test_another_length_is_refused_with_what_to_do(interrupted):
    bayes, loader = problem()
    words = r"steps: 12 then, 40 now\), which has made 6 steps: resume with the same.* call fit again"
    with pytest.raises(ValueError, match=words):
        bayes.fit(loader, **{**OPTIONS, "steps": 40}, checkpoint=vi.Checkpoint(interrupted, resume=True))


# ------------------------------------------------------------------------------------------ resume is refused or exact

FAMILIES = [vi.MeanField(), vi.LowRankNormal(2), vi.LowRankPrecision(1), vi.Mixture(vi.MeanField(), 2), vi.MAP()]


@settings(max_examples=15, deadline=None)
@given(
    family=st.sampled_from(range(len(FAMILIES))),
    steps=st.integers(4, 24),
    stop=st.integers(1, 23),
    every=st.integers(1, 6),
    accumulate=st.integers(1, 3),
    batch_size=st.sampled_from([7, 10, 40]),
    change=st.sampled_from([None, "data", "prior", "noise", "batch size"]),
)
def test_resume_is_refused_or_exact(family, steps, stop, every, accumulate, batch_size, change):
    options = {"steps": steps, "progress": False, "accumulate": accumulate}
    made = {"family": FAMILIES[family], "batch_size": batch_size}
    with tempfile.TemporaryDirectory() as folder:
        bayes, loader = problem(**made)
        bayes.fit(loader, **options, checkpoint=vi.Checkpoint(folder, every=every), callback=stop_at(min(stop, steps)))
        changes = {
            "data": {"data": rows(seed=9)},
            "prior": {"prior": vi.priors.NormalPrior(0.5)},
            "noise": {"likelihood": vi.likelihoods.Gaussian(0.4)},
            "batch size": {"batch_size": batch_size + 1},
        }
        again, loader = problem(**{**made, **changes.get(change, {})})
        if change is not None:
            with pytest.raises(ValueError, match=r"these differ|other settings|another length"):
                again.fit(loader, **options, checkpoint=vi.Checkpoint(folder, resume=True))
            return
        again.fit(loader, **options, checkpoint=vi.Checkpoint(folder, resume=True))
    whole, loader = problem(**made)
    whole.fit(loader, **options)
    assert all(torch.equal(tensor, again.learned()[key]) for key, tensor in whole.learned().items())
