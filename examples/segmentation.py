"""Nuclei in microscope images with a U-Net: what the network does not know, pixel by pixel. Two minutes on a CPU.

python examples/segmentation.py [--out segmentation.png]            # simulated blobs, nothing to download
python examples/segmentation.py --data DIR --seeds 3                # DIR/nuclei256.npz
python examples/segmentation.py --data DIR --select "model.2.*"     # random weights in the last decoder block only
python examples/segmentation.py --net package.module:function       # any network: function(drop) -> nn.Module

The network is MONAI's U-Net (`pip install "structvi[imaging]"`) with 12 thousand weights, or what --net makes: images
[B, 1, H, W] to logits [B, 2, H, W]. Four posteriors on one budget (see methods.py): Dice, negative log-likelihood,
calibration, and whether uncertainty finds the wrong pixels (AUROC, risk–coverage area); maps of both kinds of
uncertainty as a picture.

Pixels are not independent: neighbours share their nucleus, their light and the hand that drew the border. A likelihood
over pixels counts every one of them as an observation, and the posterior is then far too narrow: --together 16 counts
16 pixels as one, by log p(t | y)/16 for every pixel.
"""

import argparse
import importlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from methods import METHODS, Problem, Scores, Settings, compare, fit
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d
from torch.utils.data import TensorDataset

import structvi as vi

DRAWS = 16
LR, TRAINED = 0.01, 0.75
BUDGET = 36
TRAIN, VALIDATION, TEST = 80, 60, 94
#: chosen by `--tune` on the validation images
SETTINGS = {
    "MC dropout": Settings(lr=LR, drop=0.05),
    "mean field": Settings(lr=LR, trained=TRAINED),
    "structured": Settings(lr=LR, trained=TRAINED, together=4),
    "ensemble": Settings(lr=LR),
}


def monai_unet(drop: float) -> nn.Module:
    try:
        from monai.networks.nets import UNet
    except ImportError:
        raise ImportError('the U-Net is MONAI\'s: pip install "structvi[imaging]", or give another by --net') from None
    return UNet(2, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1, dropout=drop)


def blobs(count: int, side: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Bright blobs in noise, each with a border of its own softness, drawn by the annotator at one level or another."""
    rand = partial(torch.rand, generator=generator)
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    images, labels = torch.zeros(count, side, side), torch.zeros(count, side, side, dtype=torch.long)
    for image, label in zip(images, labels, strict=True):
        for row, column, size, blur, light, level in rand(8, 6):
            distance = ((y - side * row).square() + (x - side * column).square()).sqrt() - (2 + 5 * size)
            soft = torch.sigmoid(-distance / (0.3 + 2 * blur))
            image += (0.3 + 0.7 * light) * soft
            label[soft > 0.3 + 0.4 * level] = 1
    return (images + 0.15 * torch.randn(images.shape, generator=generator)).unsqueeze(1), labels


def load(folder: Path | None, side: int) -> dict[str, TensorDataset]:
    """Training, validation and test images [n, 1, side, side] and labels, standardised by the training images."""
    generator = torch.Generator().manual_seed(0)
    if folder is None:
        x, t = blobs(TRAIN + VALIDATION + TEST, side, generator)
    else:
        with np.load(folder / "nuclei256.npz") as file:
            x = torch.from_numpy(file["images"]).float().unsqueeze(1)
            t = torch.from_numpy(file["labels"] > 0).float().unsqueeze(1)
        order = torch.randperm(len(x), generator=generator)
        shrink = x.shape[-1] // side
        x, t = avg_pool2d(x, shrink)[order], (avg_pool2d(t, shrink)[order] > 0.5).squeeze(1).long()
    x = (x - x[:TRAIN].mean()) / x[:TRAIN].std()
    ends = {
        "train": slice(TRAIN),
        "val": slice(TRAIN, TRAIN + VALIDATION),
        "test": slice(-TEST, None),
    }
    return {name: TensorDataset(x[part], t[part]) for name, part in ends.items()}


def dice(p: Tensor, t: Tensor) -> float:
    """2 |A ∩ B| / (|A| + |B|) of the foreground, mean over the images that have some."""
    a, b = p.argmax(1).flatten(1).bool(), t.flatten(1).bool()
    some = (a | b).any(1)
    return (2 * (a & b).sum(1) / (a.sum(1) + b.sum(1)))[some].mean().item()


def calibration(p: Tensor, t: Tensor, bins: int = 15) -> float:
    """Expected calibration error of the most probable label over all pixels."""
    top, label = p.max(1)
    which = (top * bins).long().clamp(max=bins - 1).flatten()
    gap = torch.zeros(bins, dtype=torch.float64).index_add_(0, which, (top - (label == t).float()).double().flatten())
    return (gap.abs().sum() / t.numel()).item()


def probabilities(bayes: vi.Posterior, x: Tensor, seed: int) -> Tensor:
    """Batch after batch; every batch sees the same draws."""
    parts = [bayes.predict(part, DRAWS, generator=torch.Generator().manual_seed(seed)).mean for part in x.split(20)]
    return torch.cat(parts)


def tune(methods: list[str], problem: Problem, validation: TensorDataset, seeds: int) -> None:
    """Validation NLL at two settings for every method."""
    x, t = validation.tensors
    grids = {"MC dropout": {"drop": (0.05, 0.1)}, "ensemble": {"prior_scale": (4.0, 16.0)}}
    for method in methods:
        ((name, values),) = grids.get(method, {"together": (1, 4)}).items()
        for value in values:
            tried = replace(Settings(lr=LR, trained=TRAINED), **{name: value})
            predicted = [probabilities(fit(method, problem, tried, seed), x, seed) for seed in range(seeds)]
            nll = np.mean([Scores.of(p, t).loss.mean() for p in predicted])
            print(f"{method:12} {name} {value}: nll {nll:.4f}", flush=True)


def table(results: dict[str, list[dict]]) -> str:
    """Means over seeds on the test images, and what the structured posterior changes against each of the others."""
    columns = ["Dice", "NLL", "ECE", "AUROC of errors", "risk–coverage area ·10³"]
    lines = [
        "| method | " + " | ".join(columns) + " | structured − it: NLL | area ·10³ |",
        "| --- |" + " --- |" * (len(columns) + 2),
    ]
    for method, runs in results.items():
        everything = np.ones((1, len(runs[0]["scores"].loss)))
        values = np.array(
            [
                (r["dice"], r["scores"].nll(everything)[0], r["ece"], r["scores"].error_auroc(),
                 1e3 * r["scores"].aurc(everything)[0])
                for r in runs
            ]
        )  # fmt: skip
        cells = [f"{mean:.4f} ± {std:.4f}" for mean, std in zip(values.mean(0), values.std(0), strict=True)]
        if method != "structured" and "structured" in results:
            ours, theirs = ([run["scores"] for run in results[name]] for name in ("structured", method))
            for scale, (difference, low, high) in zip((1, 1e3), compare(ours, theirs).values(), strict=True):
                cells.append(f"{scale * difference:+.4f} ({scale * low:+.4f} … {scale * high:+.4f})")
        else:
            cells += ["–", "–"]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def picture(bayes: vi.Posterior, data: TensorDataset, path: str, indices: tuple[int, ...] = (0, 1, 2)) -> None:
    """Per image: the input, the entropy, its epistemic part, the wrong pixels."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    x, t = (tensor[list(indices)] for tensor in data.tensors)
    predictive = bayes.predict(x, 32, generator=torch.Generator().manual_seed(0))
    wrong = (predictive.mean.argmax(1) != t).numpy()
    figure, axes = plt.subplots(len(indices), 4, figsize=(11, 2.6 * len(indices)), layout="constrained", squeeze=False)
    for i, row in enumerate(axes):
        vi.plots.uncertainty_map(x, predictive, i, ax=list(row[:3]))
        row[0].contour(t[i].numpy(), levels=[0.5], colors="#e0563a", linewidths=0.8)
        row[0].set_title("input and annotation", fontsize=10)
        row[3].imshow(wrong[i], cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
        row[3].set(xticks=[], yticks=[])
        row[3].set_title("wrong pixels", fontsize=10)
    figure.savefig(path, dpi=80)


def settings(method: str, together: int | None) -> Settings:
    return SETTINGS[method] if together is None else replace(SETTINGS[method], together=together)


def chosen_network(name: str | None) -> Callable[[float], nn.Module]:
    if name is None:
        return monai_unet
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with nuclei256.npz; without it simulated blobs")
    parser.add_argument("--net", help="package.module:function(drop) that makes the network; MONAI's U-Net by default")
    parser.add_argument("--select", default="*", help="which weights are random, of the variational methods")
    parser.add_argument("--together", type=int, help="pixels that count as one observation, for all methods")
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--budget", type=int, default=BUDGET, help="passes over the training images for every method")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--out", default="segmentation.png", help="maps of the structured posterior")
    parser.add_argument("--tune", action="store_true", help="settings on the validation images, instead")
    parser.add_argument("--smoke", action="store_true", help="8 images, a budget of 10: shows that it runs, no more")
    options = parser.parse_args()
    torch.set_num_threads(1)
    side, budget = (32, 10) if options.smoke else (options.side, options.budget)
    splits = load(options.data, side)
    if options.smoke:
        splits = {name: TensorDataset(*(tensor[:8] for tensor in data.tensors)) for name, data in splits.items()}
    network = chosen_network(options.net)
    problem = Problem(network, splits["train"], budget, batch=8, select=options.select, members=4)
    if options.tune:
        tune(options.methods, problem, splits["val"], options.seeds)
        return
    start = time.perf_counter()
    x, t = splits["test"].tensors
    results: dict[str, list[dict]] = {}
    for method in options.methods:
        for seed in range(options.seeds):
            bayes = fit(method, problem, settings(method, options.together), seed)
            p = probabilities(bayes, x, seed)
            own = {"scores": Scores.of(p, t), "dice": dice(p, t), "ece": calibration(p, t)}
            results.setdefault(method, []).append(own)
            print(f"{method}, seed {seed}: Dice {own['dice']:.4f}, {time.perf_counter() - start:.0f} s", flush=True)
            if method == "structured" and seed == 0:
                picture(bayes, splits["test"], options.out)
                print(f"wrote {options.out}")
    print(table(results))


if __name__ == "__main__":
    main()
