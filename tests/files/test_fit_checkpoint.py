"""Fits that die and go on: the resumed run ends in the bits of the run that was never killed."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.files import file as checkpoint

STEPS, EVERY = 40, 3


class Fault(Exception):
    """The machine went down."""


def posterior():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 1))
    likelihood, family = vi.likelihoods.Gaussian("point"), vi.LowRankNormal(2)
    return vi.variationalize(net, likelihood, family, vi.priors.NormalPrior(1.0, learn=True), dropout="on")


class Noisy(TensorDataset):
    """Data with random augmentation: its random numbers have to come back too."""

    def __getitem__(self, index):
        x, t = super().__getitem__(index)
        return x + 0.1 * torch.randn(x.shape), t


def loader(dataset=Noisy, **options):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(50, 3, generator=g)
    t = x.sum(-1, keepdim=True) + 0.3 * torch.randn(50, 1, generator=g)
    return DataLoader(dataset(x, t), batch_size=8, shuffle=True, **options)


def kept(directory, every):
    return None if directory is None else vi.Checkpoint(directory, every, resume=True)


def fit(directory=None, callback=None, **options):
    """The run of all these tests: staged, with accumulation, dropout, averaging and a learned noise and prior."""
    bayes = posterior()
    result = bayes.fit(
        loader(), steps=STEPS, accumulate=2, checkpoint=kept(directory, EVERY), progress=False,
        callback=callback, **options,
    )  # fmt: skip
    return bayes, result


def state(bayes):
    return {name: tensor.detach().clone() for name, tensor in bayes.named_parameters()} | {
        f"buffer.{name}": tensor.clone() for name, tensor in bayes.family.named_buffers()
    }


def assert_same(a, b):
    assert a.keys() == b.keys()
    differ = [name for name in a if not torch.equal(a[name], b[name])]
    assert not differ


def without_time(history):
    return history.to_tensor()[:, :-1].nan_to_num(-1.0)


@pytest.fixture(scope="module")
def unbroken():
    bayes, result = fit()
    return state(bayes), result


POINTS = [(where, when) for where in ("write", "fsync", "rename", "step") for when in ("before", "after")]


def break_at(monkeypatch, where, when, count):
    """Let the count-th call of one of the four fail, before or after it has done its work."""
    owner, name = {
        "write": (checkpoint, "write"),
        "fsync": (os, "fsync"),
        "rename": (os, "replace"),
        "step": (torch.optim.Adam, "step"),
    }[where]
    real, calls = getattr(owner, name), []

    def faulty(*arguments, **keywords):
        calls.append(None)
        if len(calls) == count and when == "before":
            raise Fault
        value = real(*arguments, **keywords)
        if len(calls) == count:
            raise Fault
        return value

    monkeypatch.setattr(owner, name, faulty)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(15))
def test_fifteen_injected_faults(number, unbroken, tmp_path, monkeypatch):
    where, when = POINTS[number % len(POINTS)]
    count = random.Random(number).randint(1, STEPS if where == "step" else STEPS // EVERY)
    with monkeypatch.context() as patch:
        break_at(patch, where, when, count)
        with pytest.raises(Fault):
            fit(tmp_path)
    bayes, result = fit(tmp_path)
    assert_same(state(bayes), unbroken[0])
    assert torch.equal(without_time(result.history), without_time(unbroken[1].history))
    values = [{name: one.value for name, one in which.candidates.items()} for which in (result, unbroken[1])]
    assert values[0] == values[1]
    assert len(values[0]) == 2  # the last step and the average
    assert result.kept == unbroken[1].kept


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def killed_run(directory, where, count):
    """In a process of its own: run until the count-th time that something happens, and be killed there."""
    torch.set_num_threads(1)
    calls = []

    def killing(real):
        def wrapped(*arguments, **keywords):
            calls.append(None)
            if len(calls) == count:
                die()
            return real(*arguments, **keywords)

        return wrapped

    if where == "write":  # before the tensors are written
        checkpoint.save_file = killing(checkpoint.save_file)
    if where == "rename":
        os.replace = killing(os.replace)
    if where == "optimizer":
        torch.optim.Adam.step = killing(torch.optim.Adam.step)
    fit(directory, callback=lambda history: die() if where == "callback" and len(history) == count else None)


KILLS = [("callback", 2), ("callback", 22), ("write", 7), ("rename", 7), ("optimizer", 31)]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Five processes at once, each killed somewhere else; one that has imported everything forks them."""
    directories = [tmp_path_factory.mktemp("killed") for _ in KILLS]
    command = [sys.executable, __file__, *map(str, directories)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(-signal.SIGKILL)] * len(KILLS), done.stderr
    return directories


def killed_runs(directories):
    """Fork a process for each of the kills, and print how they ended."""
    posterior().fit(loader(), steps=2, progress=False)  # what torch loads at a first fit is loaded once
    pids = []
    for directory, (where, count) in zip(directories, KILLS, strict=True):
        if not (pid := os.fork()):
            try:
                killed_run(Path(directory), where, count)
            finally:  # what is not killed never goes on as the parent
                os._exit(0)
        pids.append(pid)
    print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(KILLS)))
def test_five_real_kills(number, unbroken, killed):
    files = list(killed[number].glob("fit-*.safetensors"))
    assert bool(files) == (KILLS[number] != ("callback", 2))
    bayes, _ = fit(killed[number])
    assert_same(state(bayes), unbroken[0])
    assert len(list(killed[number].iterdir())) == 2  # half-written files are gone


def test_ctrl_c_and_on_again(unbroken, tmp_path):
    def stop(history):
        if len(history) == 20:
            raise KeyboardInterrupt

    bayes, result = fit(tmp_path, callback=stop)
    assert result.verdict == "stopped by you"
    # the same object, no longer fresh, goes on as well as a new one
    result = bayes.fit(
        loader(),
        steps=STEPS,
        accumulate=2,
        checkpoint=vi.Checkpoint(tmp_path, every=EVERY, resume=True),
        progress=False,
    )
    assert_same(state(bayes), unbroken[0])
    assert any(note == "resumed at step 20 from fit-0000000020.safetensors" for note in result.notes)


def test_undone_steps_and_own_optimizer_come_back(tmp_path):
    """Right after a checkpoint a batch is not finite: the step before it, which the old process made, is undone."""

    def run(directory, until=None):
        def stop(history):
            if len(history) == until:
                raise Fault

        x, t = loader(TensorDataset).dataset.tensors
        t = t.clone()
        t[32:40] = float("nan")  # batch 4
        torch.manual_seed(0)
        net = nn.Linear(3, 1)
        bayes = vi.variationalize(net, vi.likelihoods.Gaussian(noise=0.3), vi.MeanField())
        result = bayes.fit(
            DataLoader(TensorDataset(x, t), batch_size=8),
            steps=14,
            optimizer=lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
            checkpoint=kept(directory, 4),
            progress=False,
            callback=stop,
        )
        return bayes, result

    expected, uninterrupted = run(None)
    with pytest.raises(Fault):
        run(tmp_path, until=4)
    bayes, result = run(tmp_path)
    assert [one.index for one in result.skipped] == [4, 4]
    assert_same(state(bayes), state(expected))
    assert torch.equal(without_time(result.history), without_time(uninterrupted.history))


def test_damaged_checkpoints(unbroken, tmp_path):
    def stop(history):
        if len(history) == 20:
            raise Fault

    with pytest.raises(Fault):
        fit(tmp_path, callback=stop)
    newest, older = sorted(tmp_path.iterdir(), reverse=True)
    newest.write_bytes(newest.read_bytes()[:-100])
    bayes, result = fit(tmp_path)
    assert any(note.startswith(f"{newest.name} was left aside") for note in result.notes)
    assert any(note.startswith("resumed at step 15") for note in result.notes)
    assert_same(state(bayes), unbroken[0])
    for path in tmp_path.iterdir():
        path.write_bytes(b"nothing")
    with pytest.raises(checkpoint.CheckpointError, match=r"no checkpoint in .* is whole"):
        fit(tmp_path)
    assert older.name == "fit-0000000015.safetensors"


if __name__ == "__main__":
    killed_runs(sys.argv[1:])
