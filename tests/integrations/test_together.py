"""What others have for predictions, draws and logs works on ours as it is: torchmetrics, ArviZ."""

import re
from pathlib import Path

import arviz_stats
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassCalibrationError

import structvi as vi


def fitted():
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    t = (x.sum(1) > 0).long()
    bayes = vi.variationalize(nn.Linear(3, 2), vi.likelihoods.Categorical(), vi.MeanField())
    loader = DataLoader(TensorDataset(x, t), batch_size=20)
    return bayes, loader, bayes.fit(loader, epochs=10, progress=False)


def test_torchmetrics():
    bayes, loader, _ = fitted()
    collection = MetricCollection(
        [MulticlassAccuracy(2, average="micro"), MulticlassAUROC(2), MulticlassCalibrationError(2)]
    )
    for x, t in loader:
        collection.update(bayes.predict(x, generator=torch.Generator().manual_seed(0)).mean, t)
    values = collection.compute()
    expected = bayes.evaluate(loader, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(values["MulticlassAccuracy"].item(), expected.accuracy)
    torch.testing.assert_close(values["MulticlassCalibrationError"].item(), expected.ece, rtol=0, atol=1e-5)
    assert 0.5 < values["MulticlassAUROC"] <= 1


def test_arviz():
    """4000 draws: within 5 standard errors of the posterior's mean."""
    bayes, loader, _ = fitted()
    data = bayes.to_arviz(loader, draws=4000)
    summary = arviz_stats.summary(data, var_names=["bias"], kind="stats", round_to="none")
    q = bayes.family()
    at = bayes.space.slice("bias")
    error = 5 * q.variance[at].sqrt().detach().numpy() / np.sqrt(4000)
    assert (np.abs(summary["mean"].to_numpy() - q.mean[at].detach().numpy()) < error).all()
    assert data.log_likelihood["t"].shape == (1, 4000, 60)
    assert np.isfinite(float(arviz_stats.loo(data).elpd))


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_the_page_runs_as_written(tmp_path, monkeypatch):
    import matplotlib

    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    namespace: dict = {}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, "integrations.md", "exec"), namespace)
    assert {path.name for path in tmp_path.iterdir()} >= {"posterior.safetensors", "predictive.pt2", "logs"}
