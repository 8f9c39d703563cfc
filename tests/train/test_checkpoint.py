"""A checkpoint knows what it is a fit of: others are refused with what differs, the same goes on bit for bit."""

import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import structvi as vi

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


def problem(data=None, batch_size=10, likelihood=None, prior=None, net=None, family=None, shuffle=True, **modes):
    x, t = rows() if data is None else data
    loader = DataLoader(TensorDataset(x, t), batch_size=batch_size, shuffle=shuffle)
    bayes = vi.variationalize(
        network() if net is None else net, vi.likelihoods.Gaussian(0.3) if likelihood is None else likelihood,
        vi.MeanField() if family is None else family, vi.priors.NormalPrior(1.0) if prior is None else prior, **modes,
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


X, T = rows()
OTHERS = {
    "other rows": (lambda: problem(data=rows(seed=1)), "the data"),
    "other targets": (lambda: problem(data=(X, T + 1)), "the data"),
    "another order": (lambda: problem(data=(X.flip(0), T.flip(0))), "the data"),
    "fewer rows": (lambda: problem(data=rows(n=30)), r"N \(40 then, 30 now\)"),
    "batch size": (lambda: problem(batch_size=8), "the batches"),
    "not shuffled": (lambda: problem(shuffle=False), "the batches"),
    "noise": (lambda: problem(likelihood=vi.likelihoods.Gaussian(0.2)), "the likelihood"),
    "a likelihood of one's own": (lambda: problem(likelihood=lambda y, t: -(y - t).square()), "the likelihood"),
    "prior's scale": (lambda: problem(prior=vi.priors.NormalPrior(2.0)), "the prior"),
    "prior's kind": (lambda: problem(prior=vi.priors.LaplacePrior(1.0)), "the prior"),
    "a prior of one's own": (lambda: problem(prior=own_prior), "the prior"),
    "ReLU": (lambda: problem(net=network(nn.ReLU)), "the network"),
    "other statistics": (lambda: problem(net=held_changed()), "the network's held tensors"),
    "batch norm": (lambda: problem(batch_norm="reestimated"), "dropout and batch_norm"),
    "family's start": (lambda: problem(family=vi.MeanField(initial_scale=0.2)), "the family"),
    "rank 0": (lambda: problem(family=vi.LowRankNormal(0)), "another posterior"),
    "selected": (lambda: problem(select="0.*"), "another posterior"),
    "a forward": (lambda: problem(forward=lambda net, batch: (net(batch[0]), batch[1])), "forward="),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_problem_is_refused(name, interrupted):
    make, words = OTHERS[name]
    bayes, loader = make()
    before = {key: tensor.clone() for key, tensor in bayes.learned().items()}
    with pytest.raises(ValueError, match=words):
        bayes.fit(loader, **OPTIONS, checkpoint=vi.Checkpoint(interrupted, resume=True))
    assert all(torch.equal(tensor, bayes.learned()[key]) for key, tensor in before.items())


class Augmented(Dataset):
    """Other noise at every reading."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        return X[index] + 0.01 * torch.randn(3), T[index]


def test_data_that_are_made_anew_at_each_reading_are_resumed(tmp_path):
    def fit(**options):
        return problem()[0].fit(DataLoader(Augmented(), batch_size=10, shuffle=True), **OPTIONS, **options)

    fit(checkpoint=vi.Checkpoint(tmp_path, every=4), callback=stop_at(6))
    assert fit(checkpoint=vi.Checkpoint(tmp_path, resume=True)).steps == 12


def test_a_folder_belongs_to_one_fit(tmp_path):
    bayes, loader = problem()
    bayes.fit(loader, **{**OPTIONS, "steps": 30}, checkpoint=vi.Checkpoint(tmp_path))
    names = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match="holds checkpoints of another fit, up to fit-0000000030"):
        problem()[0].fit(loader, **OPTIONS, checkpoint=vi.Checkpoint(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == names


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
    with pytest.raises(ValueError, match=r"step 6, .*steps \(12 then, 40 now\).* call fit again"):
        bayes.fit(loader, **{**OPTIONS, "steps": 40}, checkpoint=vi.Checkpoint(interrupted, resume=True))


FAMILIES = [vi.MeanField(), vi.LowRankNormal(2), vi.LowRankPrecision(1), vi.Mixture(vi.MeanField(), 2), vi.MAP()]


@settings(max_examples=8, deadline=None)
@given(
    family=st.sampled_from(range(len(FAMILIES))),
    steps=st.integers(4, 24),
    stop=st.integers(1, 23),
    every=st.sampled_from([None, 1, 5]),
    accumulate=st.integers(1, 3),
    batch_size=st.sampled_from([7, 10, 40]),
    staged=st.booleans(),
)
def test_resume_is_exact(family, steps, stop, every, accumulate, batch_size, staged):
    options = {"steps": steps, "progress": False, "accumulate": accumulate, "schedule": vi.Schedule(staged=staged)}
    whole, cut, again = (problem(family=FAMILIES[family], batch_size=batch_size) for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        cut[0].fit(cut[1], **options, checkpoint=vi.Checkpoint(folder, every=every), callback=stop_at(min(stop, steps)))
        again[0].fit(again[1], **options, checkpoint=vi.Checkpoint(folder, resume=True))
    whole[0].fit(whole[1], **options)
    assert all(torch.equal(tensor, again[0].learned()[key]) for key, tensor in whole[0].learned().items())
