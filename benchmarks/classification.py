"""Seven posteriors over one small classifier on one budget: accuracy, likelihood, calibration, unfamiliar inputs.

    python -m benchmarks.classification [--seeds 3] [--out results.json]      # scikit-learn's digits, no files needed
    python -m benchmarks.classification --data DIR [--train 10000]            # DIR/mnist, DIR/notmnist: idx files, .gz
    python -m benchmarks.classification --tune                                # settings, on the validation split

The network is a perceptron with one hidden layer of 100 rectified units. The budget is the same for every method: the
number of gradient evaluations of the network over the data, draws a step × epochs (× members of the ensemble), with
antithetic pairs and one group a step. So MAP, with one draw, makes twice the steps of mean field, and each of three
members of the ensemble a third of MAP's. The prior is one for all methods, so that all approximate the same posterior:
its scale has the lowest negative log-likelihood on the digits' validation split, averaged over methods (`--tune`). The
learning rate is `fit`'s own, 0.02, but for families whose ELBO is higher with 0.05 at that scale; for point masses both
predict alike. The test split was used for none of this, and MNIST not at all. Networks are trained on the training
split alone. One thread is used, and the times of fits are processor seconds: other work on the machine does not count.

digits: 1000 training images, 297 for validation, 500 for testing, of one fixed shuffle. Unfamiliar inputs are the test
images with the pixels of each permuted at random (no image is a digit, all grey levels are as before), and turned by
90° (some, such as 0 and 8, look like a digit still). MNIST: the first 10000 training images,
the last 5000 for validation, all 10000 for testing, and notMNIST's 10000 letters.
"""

import argparse
import gzip
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

HIDDEN = 100
BATCH = 100
MEMBERS = 3
DRAWS = 64
#: the prior of every weight is N(0, scale²/fan_in), of a bias N(0, scale²)
PRIOR_SCALE = 8.0
#: what `--tune` tries: prior scales in units of 1/√fan_in, and learning rates
PRIOR_SCALES = (4.0, 8.0, 16.0)
LEARNING_RATES = (0.02, 0.05)


@dataclass
class Data:
    name: str
    train: TensorDataset
    validation: TensorDataset
    test: TensorDataset
    outside: dict[str, Tensor]  # unfamiliar inputs
    budget: int  # draws a step × epochs


@dataclass
class Method:
    name: str
    recipe: Callable[[], vi.Family]
    lr: float
    members: int = 1
    draws: int = DRAWS  # to predict


def dropout() -> vi.Family:
    """A mask to each hidden unit: on the inputs of the second layer, as `nn.Dropout(0.2)` before it."""
    return vi.MCDropout({"2.weight": 0.8}, per="input", initial_mean="rescaled")


METHODS = [
    Method("MAP", vi.MAP, lr=0.02, draws=1),
    Method("MC dropout", dropout, lr=0.02),
    Method("mean field", vi.MeanField, lr=0.05),
    Method("structured, rank 8", lambda: vi.StructuredNormal(8), lr=0.02),
    Method("precision, rank 8", lambda: vi.StructuredPrecision(8), lr=0.05),
    Method("mixture of 2, precision", lambda: vi.Mixture(vi.StructuredPrecision(8), 2), lr=0.05),
    Method("deep ensemble of 3", vi.MAP, lr=0.02, members=MEMBERS, draws=MEMBERS),
]


def digits() -> Data:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ImportError('the digits come with scikit-learn: pip install "structvi[bench]"') from None
    images, labels = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(images), generator=generator)
    x, t = torch.from_numpy(images).float()[order], torch.from_numpy(labels).long()[order]
    x = (x - x[:1000].mean()) / x[:1000].std()
    train, validation, test = (
        TensorDataset(x[part], t[part]) for part in (slice(1000), slice(1000, 1297), slice(1297, None))
    )
    familiar = test.tensors[0]
    permuted = torch.stack([row[torch.randperm(len(row), generator=generator)] for row in familiar])
    turned = familiar.unflatten(1, (8, 8)).rot90(1, (1, 2)).flatten(1)
    return Data("digits", train, validation, test, {"permuted": permuted, "turned": turned}, budget=240)


def mnist(folder: Path, size: int) -> Data:
    x, t = read_idx(folder / "mnist/train-images-idx3-ubyte.gz"), read_idx(folder / "mnist/train-labels-idx1-ubyte.gz")
    if not 1 <= size <= 55_000:
        raise ValueError(f"--train takes 1 to 55000 images, the last 5000 are for validation; got {size}")
    test = read_idx(folder / "mnist/t10k-images-idx3-ubyte.gz"), read_idx(folder / "mnist/t10k-labels-idx1-ubyte.gz")
    letters = read_idx(folder / "notmnist/t10k-images-idx3-ubyte.gz")
    centre, width = x[:size].float().mean(), x[:size].float().std()

    def prepared(images: Tensor) -> Tensor:
        return ((images.float() - centre) / width).flatten(1)

    return Data(
        "MNIST",
        TensorDataset(prepared(x[:size]), t[:size].long()),
        TensorDataset(prepared(x[-5000:]), t[-5000:].long()),
        TensorDataset(prepared(test[0]), test[1].long()),
        {"notMNIST": prepared(letters)},
        budget=60,
    )


def read_idx(path: Path) -> Tensor:
    """An idx file of bytes: two zeros, 8, the number of axes, their lengths as big-endian int32, the bytes."""
    with gzip.open(path) as file:
        content = file.read()
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is no idx file of bytes: it starts with {content[:4]!r}")
    axes = content[3]
    shape = np.frombuffer(content, ">i4", axes, offset=4).tolist()
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * axes)
    if values.size != math.prod(shape):
        raise ValueError(f"{path} says {shape} and holds {values.size} bytes: it is damaged")
    return torch.from_numpy(values.reshape(shape).copy())


def network(inputs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


def fit(
    method: Method, data: Data, seed: int, budget: int, prior_scale: float = PRIOR_SCALE
) -> tuple[vi.Posterior, dict[str, Any]]:
    """The fitted posterior and what the fit says of itself. An ensemble is fitted member by member."""
    loader = DataLoader(data.train, batch_size=BATCH, shuffle=True)
    inputs = data.train.tensors[0].shape[1]
    prior = vi.NormalPrior.fan_in(prior_scale)
    members, evaluations = [], 0.0
    start = time.process_time()
    for member in range(method.members):
        own = 1000 * member + seed
        posterior = vi.variationalize(
            network(inputs, own), vi.likelihoods.Categorical(), method.recipe(), prior,
            generator=torch.Generator().manual_seed(own),
        )  # fmt: skip
        draws = len(posterior.family().draw(1, vi.paired).theta)
        epochs = budget // (draws * method.members)
        # stop=False: the budget is spent in full
        result = posterior.fit(loader, epochs=epochs, lr=method.lr, stop=False, progress=False, seed=own)
        evaluations += draws * result.epochs
        members.append(posterior)
    details: dict[str, Any] = {"evaluations": evaluations, "verdict": result.verdict, "kept": result.kept}
    details["elbo"] = result.elbo.value if result.bound else None
    if method.members > 1:
        networks = [member.mean_network() for member in members]
        # equal weights: learned ones would go to the member with the highest joint density
        family = vi.Mixture.from_networks(networks, vi.MAP())
        posterior = vi.variationalize(networks[0], vi.likelihoods.Categorical(), family, prior)
    elif isinstance(posterior.family, vi.Mixture):
        details["proportions"] = posterior.family.proportions.tolist()
    return posterior, {**details, "fit_seconds": time.process_time() - start}


def measure(posterior: vi.Posterior, method: Method, familiar: TensorDataset, outside: dict[str, Tensor]) -> dict:
    """Every loader sees the same draws."""
    loader = DataLoader(familiar, batch_size=1000)
    start = time.process_time()
    metrics = posterior.evaluate(loader, draws=method.draws, generator=torch.Generator().manual_seed(0))
    values = {"accuracy": metrics.accuracy, "nll": metrics.nlpd, "ece": metrics.ece}
    for name, inputs in outside.items():
        values[f"auroc {name}"] = vi.metrics.ood_auroc(
            posterior, loader, inputs.split(1000), draws=method.draws, generator=torch.Generator().manual_seed(0)
        )
    return {**values, "predict_seconds": time.process_time() - start}


def run(data: Data, seeds: int, budget: int) -> list[dict]:
    """All methods, all seeds, on the test split."""
    runs = []
    for method in METHODS:
        for seed in range(seeds):
            posterior, details = fit(method, data, seed, budget)
            runs.append(
                {"method": method.name, "seed": seed} | details | measure(posterior, method, data.test, data.outside)
            )
            print(
                "{method:24} seed {seed}: accuracy {accuracy:.4f}, nll {nll:.4f}, {verdict}".format(**runs[-1]),
                flush=True,
            )
    return runs


def summary(runs: list[dict], data: Data) -> list[dict]:
    """Mean and standard deviation over seeds, for each method."""
    columns = ["accuracy", "nll", "ece", *(f"auroc {name}" for name in data.outside), "evaluations", "fit_seconds"]
    rows = []
    for method in METHODS:
        own = [one for one in runs if one["method"] == method.name]
        row: dict[str, Any] = {"method": method.name, "lr": method.lr}
        for column in [*columns, "elbo"]:
            values = [one[column] for one in own]
            if None not in values:
                row[column] = {"mean": mean(values), "sd": stdev(values) if len(values) > 1 else None}
        rows.append(row)
    return rows


def table(rows: list[dict], data: Data) -> str:
    columns = (
        {"accuracy": 4, "nll": 3, "ece": 3}
        | {f"auroc {name}": 3 for name in data.outside}
        | {"elbo": 0, "fit_seconds": 1}
    )

    def cell(value: dict | None, digits: int) -> str:
        if value is None:
            return "–"
        return f"{value['mean']:.{digits}f}" + (f" ± {value['sd']:.{digits}f}" if value["sd"] is not None else "")

    lines = ["| method | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    for row in rows:
        cells = [cell(row.get(column), digits) for column, digits in columns.items()]
        lines.append(f"| {row['method']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tune(data: Data, budget: int) -> list[dict]:
    """Validation negative log-likelihood at every prior scale and learning rate, seed 0: what METHODS are set by."""
    rows = []
    for method, scale, lr in product(METHODS, PRIOR_SCALES, LEARNING_RATES):
        tried = replace(method, lr=lr)
        posterior, details = fit(tried, data, 0, budget, scale)
        row = {"method": method.name, "prior_scale": scale, "lr": lr}
        rows.append(row | details | measure(posterior, tried, data.validation, {}))
        print("{method:24} prior {prior_scale:4g}, lr {lr}: nll {nll:.4f}, elbo {elbo}".format(**rows[-1]), flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, help="a folder with mnist/ and notmnist/; without it scikit-learn's digits"
    )
    parser.add_argument("--train", type=int, default=10_000, help="training images of MNIST")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budget", type=int, help="draws a step × epochs; 240 for the digits, 60 for MNIST")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    parser.add_argument("--quick", action="store_true", help="one seed and a budget of 12: shows that it runs, no more")
    parser.add_argument(
        "--tune", action="store_true", help="prior scales and learning rates on the validation split, instead"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    data = digits() if options.data is None else mnist(options.data, options.train)
    seeds, budget = (1, 12) if options.quick else (options.seeds, options.budget or data.budget)
    if budget % 12:  # one, two and four draws a step, three members
        raise ValueError(f"--budget must be a multiple of 12 to be the same for all methods, got {budget}")
    versions = {"structvi": vi.__version__, "torch": torch.__version__, "python": platform.python_version()}
    machine = f"{platform.system()} {platform.machine()}, one thread"
    sizes = {split: len(getattr(data, split)) for split in ("train", "validation", "test")}
    print(f"{data.name} {sizes}, {seeds} seeds, draws × epochs = {budget}, batch {BATCH}; {versions}, {machine}")
    start = time.perf_counter()
    results: dict[str, Any] = {"data": data.name, "sizes": sizes, "hidden": HIDDEN, "batch": BATCH, "budget": budget}
    results["prior_scale"] = PRIOR_SCALE
    results |= {"seeds": seeds, "versions": versions, "machine": machine}
    if options.tune:
        results["tune"] = tune(data, budget)
    else:
        results["runs"] = run(data, seeds, budget)
        results["rows"] = summary(results["runs"], data)
        print(table(results["rows"], data))
    results["seconds"] = time.perf_counter() - start
    print(f"{results['seconds']:.0f} s")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))
    return results


if __name__ == "__main__":
    main()
