"""A step that does not fit into memory: what is said, and that nothing is lost."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.optim.adam import adam_groups
from structvi.train import step
from structvi.train.step import Step

N, D = 24, 3
CPU = torch.device("cpu")


def loader():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=g)
    return DataLoader(TensorDataset(x, x[:, :1].sin()), batch_size=8, shuffle=True)


def make(family=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(D, 16), nn.Tanh(), nn.Linear(16, 1))
    return vi.variationalize(net, vi.likelihoods.Gaussian(noise=0.3), family or vi.LowRankNormal(4), num_data=N)


def no_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")


def test_nothing_is_lost(tmp_path, monkeypatch):
    """The posterior is that of the last step, and a fit resumed from the checkpoint ends as one never stopped."""
    options = {"steps": 12, "progress": False, "schedule": vi.Schedule(stop=False)}
    whole = make()
    whole.fit(loader(), **options)
    bayes, seen = make(), {}

    def fail_later(history):
        if len(history) == 7:
            seen.update({name: p.detach().clone() for name, p in bayes.named_parameters()})
            monkeypatch.setattr(step.Step, "gradients", no_memory)

    words = r"does not fit into memory, with P = 81 weights, 486 variational parameters, 2 draws and batches of 8\..*said: CUDA"
    with pytest.raises(torch.OutOfMemoryError, match=words) as caught:
        bayes.fit(loader(), **options, checkpoint=vi.Checkpoint(tmp_path, every=5), callback=fail_later)
    assert any("after step 7" in note and str(tmp_path) in note for note in caught.value.__notes__)
    assert all(torch.equal(seen[name], p) for name, p in bayes.named_parameters())
    assert all(p.grad is None for p in bayes.parameters())
    monkeypatch.undo()
    again = make()
    result = again.fit(loader(), **options, checkpoint=vi.Checkpoint(tmp_path, resume=True))
    assert any("resumed at step 7" in note for note in result.notes)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def test_the_tensors_of_a_failed_step_are_free_when_the_error_is_told():
    """The frames of the error hold its draws, and so do the functions of cleared frames that close over them."""
    drawn = []

    class Layer(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            if type(self.weight) is torch.Tensor and self.weight.grad_fn is not None:  # a draw of the step
                drawn.append(weakref.ref(self.weight))
                no_memory()
            return out

    bayes = vi.variationalize(Layer(3, 1), vi.likelihoods.Gaussian(noise=1.0), vi.MeanField(), evaluation="loop")
    with pytest.raises(torch.OutOfMemoryError, match="a step does not fit"):
        bayes.fit(loader(), steps=2, progress=False)
    assert drawn
    assert not any(one() is not None for one in drawn)


def test_nothing_moves_where_there_is_no_memory_for_all_moments(monkeypatch):
    """Memory for the moments of mean and scale and none for the factor's second: the next step begins as the first."""
    bayes, other = make(), make()
    made, zeros_like = [], torch.zeros_like

    def last_fails(x, **options):
        if x.ndim == 2:
            made.append(x)
        return no_memory() if len(made) == 2 else zeros_like(x, **options)

    before = [p.detach().clone() for p in bayes.parameters()]
    other.load_state_dict(bayes.state_dict())
    batch = next(iter(loader()))
    for one in (bayes, other):
        adam, generator = torch.optim.Adam(adam_groups(one, 0.1), fused=True), torch.Generator().manual_seed(0)
        make_step = Step(one, adam, generator)
        told = make_step.gradients([batch], (1.0,), 1.0, generator)
        if one is bayes:
            monkeypatch.setattr(torch, "zeros_like", last_fails)
            with pytest.raises(torch.OutOfMemoryError):
                make_step.move(*told)
            monkeypatch.undo()
            assert all(torch.equal(a, b) for a, b in zip(before, bayes.parameters(), strict=True))
        make_step.move(*told)
    assert not any(torch.equal(a, b) for a, b in zip(before, bayes.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), bayes.parameters(), strict=True))
