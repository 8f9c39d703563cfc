"""What λ is worth around trained networks: held-out log density and ELBO along a path, one panel for each set.

    python -m benchmarks.networks_paths --data DIR [--sets digits,breastmnist,nuclei] [--nets folder] --out paths.png

The networks are those of `benchmarks.networks`; `--nets` is the folder nets/ of a run of it, whose networks are taken
again. The prior is that of a path: four widths, up to 0.24 of each tensor's root mean square.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import structvi as vi

from .networks_methods import Workshop
from .networks_nets import TASKS


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="as in benchmarks.networks")
    parser.add_argument("--sets", default="digits,breastmnist,nuclei")
    parser.add_argument("--nets", type=Path, help="a folder with trained networks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="the picture")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    plt.switch_backend("Agg")
    names = options.sets.split(",")
    figure, axes = plt.subplots(1, len(names), figsize=(4.2 * len(names), 3.4), layout="constrained", squeeze=False)
    for ax, name in zip(axes[0], names, strict=True):
        task = TASKS[name]
        shop = Workshop(task, task.data(options.data), options.seed, torch.device("cpu"), 0, options.nets)
        bayes = vi.variationalize(shop.net(), vi.likelihoods.Categorical(), linearise=True)
        result = bayes.fit(
            shop.loader(shop.data.train), validation=shop.loader(shop.data.validation), temperature="validated"
        )
        print(f"{name}: network {result.network:.4f}, kept {result.kept}")
        for point in result.path:
            print(f"  λ = {point.temperature:g}: held out {point.held_out:.4f}, ELBO {point.elbo}")
        vi.plots.temperature_path(result, ax).set_title(name)
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
