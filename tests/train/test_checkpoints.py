"""A checkpoint of another kind of device: its stream cannot be gone on with."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.files import fit_checkpoint


def fit(bayes, **options):
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(24, 3, generator=g), torch.randn(24, 1, generator=g))
    return bayes.fit(DataLoader(data, batch_size=8), progress=False, schedule=vi.Schedule(stop=False), **options)


def make():
    torch.manual_seed(0)
    return vi.variationalize(nn.Linear(3, 1), vi.likelihoods.Gaussian(noise=1.0), vi.MeanField())


def test_a_fit_goes_on_with_a_stream_of_its_own(tmp_path, monkeypatch):
    """The 16 bytes of a GPU's stream in place of the CPU's: twice the same draws, and not the first ones again."""

    def stop(history):
        if len(history) == 6:
            raise KeyboardInterrupt

    fit(make(), steps=9, checkpoint=vi.Checkpoint(tmp_path), callback=stop)
    found = fit_checkpoint.latest(tmp_path)
    (name,) = [name for name in found.tensors if "stream" in name]
    other = found._replace(tensors={**found.tensors, name: torch.arange(16, dtype=torch.uint8)})
    monkeypatch.setattr(fit_checkpoint, "latest", lambda folder: other)
    twice = [make(), make()]
    for n, bayes in enumerate(twice):
        result = fit(bayes, steps=9, checkpoint=vi.Checkpoint(tmp_path / str(n), resume=True))
        assert any("another kind of device" in note for note in result.notes)
        assert torch.isfinite(result.history["elbo"]).all()
    assert all(torch.equal(a, b) for a, b in zip(*(one.parameters() for one in twice), strict=True))
    monkeypatch.undo()
    same = make()
    assert not any(
        "another kind of device" in note
        for note in fit(same, steps=9, checkpoint=vi.Checkpoint(tmp_path, resume=True)).notes
    )
    assert not all(torch.equal(a, b) for a, b in zip(same.parameters(), bayes.parameters(), strict=True))
