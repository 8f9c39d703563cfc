"""Breast ultrasound, benign or malignant: which images to hand to a human. One minute on a CPU; ten seeds six.

python examples/classification.py [--out referral.png]             # simulated images, nothing to download
python examples/classification.py --data DIR --seeds 10            # DIR/breastmnist.npz of MedMNIST v2
python examples/classification.py --data DIR --tune                # settings, on the validation split

Four posteriors over one small convolutional network on one budget (see methods.py). The example prints the negative
log-likelihood and the risk–coverage area. The referral curve shows the accuracy on the rest if a person takes the most
uncertain images. All settings were selected on the validation split with two seeds; the test split is used once.
"""

import argparse
import json
import time
from dataclasses import asdict
from itertools import product
from pathlib import Path

import numpy as np
import torch
from methods import METHODS, Problem, Scores, Settings, compare, fit
from torch import Tensor, nn
from torch.utils.data import TensorDataset

DRAWS = 64
BUDGET = 120
#: the best of `--tune`
SETTINGS = {
    "MC dropout": Settings(prior_scale=4.0, drop=0.3),
    "mean field": Settings(prior_scale=8.0, trained=0.5),
    "structured": Settings(prior_scale=8.0, trained=0.5),
    "ensemble": Settings(prior_scale=16.0),
}


def network(drop: float) -> nn.Module:
    """22 thousand weights."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Dropout(drop), nn.Linear(512, 32), nn.ReLU(), nn.Dropout(drop), nn.Linear(32, 2),
    )  # fmt: skip


def simulated(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Dark lesions in speckle: the rounder the more often benign (1), the more ragged the more often malignant (0)."""
    angle = torch.atan2(*torch.meshgrid(torch.linspace(-1, 1, 28), torch.linspace(-1, 1, 28), indexing="ij"))
    radius = torch.linspace(-1, 1, 28).square().unsqueeze(0).add(torch.linspace(-1, 1, 28).square().unsqueeze(1)).sqrt()
    ragged = 0.4 * torch.rand(count, 1, 1, generator=generator)
    turn = 6.3 * torch.rand(count, 1, 1, generator=generator)
    size = 0.35 + 0.25 * torch.rand(count, 1, 1, generator=generator)
    edge = size * (1 + ragged * torch.sin(5 * angle + turn))
    images = torch.sigmoid(12 * (radius - edge)) * (0.5 + 0.5 * torch.rand(count, 28, 28, generator=generator))
    benign = torch.rand(count, generator=generator) < torch.sigmoid(25 * (0.25 - ragged.flatten()))
    return images.unsqueeze(1), benign.long()


def load(folder: Path | None) -> dict[str, TensorDataset]:
    """Training, validation and test images [n, 1, 28, 28], standardised by the training images."""
    if folder is None:
        generator = torch.Generator().manual_seed(0)
        splits = {name: simulated(n, generator) for name, n in (("train", 400), ("val", 100), ("test", 200))}
    else:
        with np.load(folder / "breastmnist.npz") as file:
            splits = {
                name: (
                    torch.from_numpy(file[f"{name}_images"]).float().unsqueeze(1),
                    torch.from_numpy(file[f"{name}_labels"]).long().flatten(),
                )
                for name in ("train", "val", "test")
            }
    images = splits["train"][0]
    return {name: TensorDataset((x - images.mean()) / images.std(), t) for name, (x, t) in splits.items()}


def score(method: str, problem: Problem, settings: Settings, seed: int, data: TensorDataset) -> Scores:
    x, t = data.tensors
    bayes = fit(method, problem, settings, seed)
    return Scores.of(bayes.predict(x, draws=DRAWS, generator=torch.Generator().manual_seed(seed)).mean, t)


def tune(methods: list[str], problem: Problem, validation: TensorDataset, seeds: int) -> None:
    """Validation NLL at four settings for every method."""
    everything = np.ones((1, len(validation)))
    trained = {"trained": (0.5, 0.8)}
    own = {"MC dropout": {"drop": (0.1, 0.3)}, "mean field": trained, "structured": trained}
    for method in methods:
        grid = own.get(method, {}) | {"prior_scale": (4.0, 8.0) if method in own else (2.0, 4.0, 8.0, 16.0)}
        for values in product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            scores = [score(method, problem, Settings(**chosen), seed, validation) for seed in range(seeds)]
            nll = np.mean([one.nll(everything)[0] for one in scores])
            print(f"{method:12} {json.dumps(chosen)}: nll {nll:.4f}", flush=True)


def table(scores: dict[str, list[Scores]]) -> str:
    """Means over seeds on the test split, and what the structured posterior changes against each of the others."""
    lines = ["| method | accuracy | NLL | risk–coverage area | structured − it: NLL | area |", "| --- |" + " --- |" * 5]
    for method, own in scores.items():
        everything = np.ones((1, len(own[0].loss)))
        accuracy = 1 - np.mean([one.wrong.sum() / one.count.sum() for one in own])
        nll, area = ([getattr(one, name)(everything)[0] for one in own] for name in ("nll", "aurc"))
        cells = [f"{accuracy:.3f}", *(f"{np.mean(v):.3f} ± {np.std(v):.3f}" for v in (nll, area))]
        for difference, low, high in compare(scores["structured"], own).values():
            cells.append("–" if method == "structured" else f"{difference:+.3f} ({low:+.3f} … {high:+.3f})")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def picture(scores: dict[str, list[Scores]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    grid = np.linspace(0, 0.8, 81)
    for method, own in scores.items():
        curves = [np.interp(grid, share[::-1], accuracy[::-1]) for share, accuracy in (one.referral() for one in own)]
        bold = method == "structured"
        axes.plot(grid, np.mean(curves, axis=0), label=method, lw=2.4 if bold else 1.2, zorder=3 if bold else 2)
    axes.set(xlabel="share referred to a human, most uncertain first", ylabel="accuracy on images kept", xlim=(0, 0.8))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with breastmnist.npz; without it simulated images")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--budget", type=int, default=BUDGET, help="passes over the training images for every method")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--out", default="referral.png")
    parser.add_argument("--tune", action="store_true", help="choose settings on the validation split, instead")
    parser.add_argument("--smoke", action="store_true", help="100 images, a budget of 20: shows that it runs, no more")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    splits = load(options.data)
    if options.smoke:
        splits = {name: TensorDataset(*(tensor[:100] for tensor in data.tensors)) for name, data in splits.items()}
    problem = Problem(network, splits["train"], 20 if options.smoke else options.budget, batch=100)
    if options.tune:
        tune(options.methods, problem, splits["val"], options.seeds)
    else:
        scores: dict[str, list[Scores]] = {}
        for method in options.methods:
            scores[method] = [
                score(method, problem, SETTINGS[method], seed, splits["test"]) for seed in range(options.seeds)
            ]
            print(f"{method}: {json.dumps(asdict(SETTINGS[method]))}, {time.perf_counter() - start:.0f} s", flush=True)
        print(table(scores))
        picture(scores, options.out)
        print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
