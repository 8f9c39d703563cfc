"""Which prior for a network that is fitted from the start: ELBO and held-out density of mean field, prior by prior.

    python -m benchmarks.priors [--seeds N] [--out file.json]

A perceptron of two hidden layers of 50 units on four sets that come with scikit-learn. Two thirds of the rows are
fitted, the others are the test set. The fit is `bayes.fit(loader, steps=2000, lr=0.01)`, batches of 64 rows. Seeds
change split, network and draws.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from sklearn import datasets
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

from .uci_tables import grid

BATCH, STEPS, HIDDEN, LR = 64, 2000, 50, 0.01
SETS = ("diabetes", "cancer", "wine", "digits")
PRIORS: dict[str, Callable[[nn.Module], Any]] = {
    "NormalPrior(1.0)": lambda net: vi.NormalPrior(1.0),
    "NormalPrior.fan_in()": lambda net: vi.NormalPrior.fan_in(),
    "NormalPrior, a learned scale for each tensor": lambda net: vi.NormalPrior(
        {name: 1.0 for name, _ in net.named_parameters()}, learn=True
    ),
    "HierarchicalNormalPrior()": lambda net: vi.HierarchicalNormalPrior(),
    "HierarchicalNormalPrior.fan_in()": lambda net: vi.HierarchicalNormalPrior.fan_in(),
    "StudentTPrior(2.0)": lambda net: vi.StudentTPrior(2.0),
}


def read(name: str, seed: int) -> tuple[TensorDataset, TensorDataset, int]:
    """Training and test rows, standardised by the former, and how many outputs there are; 1 is a regression."""
    load = {"cancer": "load_breast_cancer"}.get(name, f"load_{name}")
    x, t = getattr(datasets, load)(return_X_y=True)
    x, t = torch.from_numpy(x).float(), torch.from_numpy(t)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    cut = 2 * len(x) // 3
    first, rest = order[:cut], order[cut:]
    x = (x - x[first].mean(0)) / x[first].std(0).clamp(min=1e-6)
    if name == "diabetes":
        t = t.float().unsqueeze(1)
        t, outputs = (t - t[first].mean(0)) / t[first].std(0), 1
    else:
        t, outputs = t.long(), int(t.max()) + 1
    return TensorDataset(x[first], t[first]), TensorDataset(x[rest], t[rest]), outputs


def one(name: str, prior: str, seed: int) -> dict[str, float]:
    train, test, outputs = read(name, seed)
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(train.tensors[0].shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
        nn.Linear(HIDDEN, outputs),
    )  # fmt: skip
    likelihood = vi.likelihoods.Gaussian("point") if outputs == 1 else vi.likelihoods.Categorical()
    bayes = vi.variationalize(net, likelihood, vi.MeanField(), PRIORS[prior](net))
    loader = DataLoader(train, BATCH, shuffle=True)
    result = bayes.fit(loader, steps=STEPS, lr=LR, seed=seed, progress=False)
    predictive = bayes.predict(test.tensors[0], draws=256, generator=torch.Generator().manual_seed(seed))
    log_p: Tensor = predictive.log_prob(test.tensors[1])
    return {"elbo": result.elbo.value, "density": float(log_p.mean())}


def table(found: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    lines = []
    for prior in PRIORS:
        cells = []
        for name in SETS:
            rows = found.get(name, {}).get(prior, [])
            if rows:
                density = [row["density"] for row in rows]
                spread = f" ± {stdev(density):.3f}" if len(density) > 1 else ""
                cells.append(f"{mean(row['elbo'] for row in rows):.0f}, {mean(density):.3f}{spread}")
            else:
                cells.append("–")
        lines.append([prior, *cells])
    return grid("ELBO, test log density", list(SETS), lines)


def main(arguments: Sequence[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="keep the figures in a file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for seed in range(options.seeds):
        for name in SETS:
            for prior in PRIORS:
                found.setdefault(name, {}).setdefault(prior, []).append(one(name, prior, seed))
                print(seed, name, prior, found[name][prior][-1], flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(found))
    print(table(found))
    return table(found)


if __name__ == "__main__":
    main()
