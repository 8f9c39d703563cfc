"""Which rule should choose the width of a posterior around a network? What was tried, on networks of their own.

    python -m benchmarks.networks_widths --data DIR --sets breastmnist,digits,tables --first 100 --seeds 8 --out folder
    python -m benchmarks.networks_widths --out folder --table

For every network and every candidate log p of all classes is kept, of held-out rows, of others, and of those shifted.
The rules (`networks_rules.py`) are then compared on that: gain in log density over the network on the other rows and
under shift, the share of runs more than .01 nats worse than their network.
Of images the training and validation images of the benchmark are split anew for every network, into those it is trained
on, as many held-out ones as the benchmark has, and at least twice as many others: no test image is looked at. Rows of
"tables" are simulated (`never_worse.py`), and shifted by noise of one standard deviation; there each network has
held-out sets of 40, 100 and 250 rows.
"""

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.models.priors.scale import NormalPrior
from structvi.predicting.function_space import evenly_spread, jacobians, normal_outputs
from structvi.training import candidates
from structvi.training.batches import Batches
from structvi.training.before import set_num_data
from structvi.training.warm_start import Laplace, curvature_of, prior_precision, trained_values

from . import networks_rules, never_worse
from .networks_data import shifted
from .networks_methods import of_dropout
from .networks_nets import TASKS, dropout_layers, set_dropout, train

#: of all tensors; and of the last layer alone, the others at the width before the comma
GRID = (0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.45, 0.65, 1.0, 1.5, 2.5, 4.0)
HEADS = ((0.01, (0.3, 0.65, 1.0, 1.5, 2.5, 4.0)), (0.1, (0.3, 0.65, 1.0, 1.5, 2.5, 4.0)),
         (0.2, (0.45, 0.65, 1.0, 1.5, 2.5, 4.0)), (0.3, (0.65, 1.0, 1.5, 2.5)))  # fmt: skip
POINTS, RATES, MASKS = 512, (0.02, 0.05, 0.1, 0.2), 64
#: images beside training and held-out ones, at most
MOST = 1000


class Network(NamedTuple):
    name: str
    net: nn.Module
    train: TensorDataset
    #: inputs, and labels where there are some
    parts: dict[str, tuple[Tensor, ...]]


def networks(sets: Sequence[str], data: Path | None, seeds: Sequence[int], members: int) -> Iterator[list[Network]]:
    """One by one, or so many of the same images, whose equal mixture is meant."""
    for name in sets:
        for seed in seeds:
            if name == "tables":
                yield from ([one] for one in _tables(seed))
            else:
                yield [_images(name, data, seed, member) for member in range(members)]


def _images(name: str, folder: Path | None, seed: int, member: int) -> Network:
    task = TASKS[name]
    data = task.data(folder)
    order = torch.randperm(len(data.train) + len(data.validation), generator=torch.Generator().manual_seed(seed))
    x, t = (torch.cat(pair)[order] for pair in zip(data.train.tensors, data.validation.tensors, strict=True))
    held, others = len(data.validation), min(2 * len(data.validation), MOST)
    cuts = slice(held + others, None), slice(held), slice(held, held + others)
    (own, held_out, test) = ((x[cut], t[cut]) for cut in cuts)
    net = train(task, TensorDataset(*own), seed + 1000 * member, torch.device("cpu"), bf16=name.startswith("cifar"))
    shifts = {f"shift {kind}": one.tensors for kind, one in shifted(*test).items()}
    return Network(f"{name} {seed}", net, TensorDataset(*own), {"held out": held_out, "test": test, **shifts})


def _tables(seed: int) -> Iterator[Network]:
    rows, tests = max(never_worse.HELD_OUT), 1000
    for title, is_labels, x, t, n in never_worse.tables(seed):
        if not is_labels:
            continue
        for with_norm in (True, False):
            for stopped in (False, True):
                net = never_worse.trained(x[:n], t[:n], True, with_norm, stopped, seed)
                test = x[n + rows :][:tests], t[n + rows :][:tests]
                noise = torch.randn(test[0].shape, generator=torch.Generator().manual_seed(seed))
                parts = {"held out": (x[n : n + rows], t[n : n + rows]), "test": test}
                parts["shift noise"] = test[0] + noise, test[1]
                kind = f"{'norm' if with_norm else 'plain'}, {'stopped' if stopped else 'to the end'}"
                yield Network(f"tables {seed} {title}, {kind}", net, TensorDataset(x[:n], t[:n]), parts)


def mixed(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the equal mixture of networks: each candidate is placed around all of them."""
    first = records[0]
    if len(records) == 1:
        return first
    log_p = {
        part: {name: _mean(torch.stack([one["log_p"][part][name].double() for one in records])).float() for name in own}
        for part, own in first["log_p"].items()
    }
    name, seed = first["name"].split()
    return first | {"name": f"{name}-mixtures-of-{len(records)} {seed}", "log_p": log_p}


def measured(one: Network) -> dict[str, Any]:
    """Of every candidate log p [B, C] of every part, and the labels of these."""
    bayes = vi.variationalize(one.net, vi.likelihoods.Categorical())
    batches = Batches(DataLoader(one.train, 64), 0)
    set_num_data(bayes, batches)
    laplace = _curvature(bayes, batches)
    theta, normals, found = laplace.theta, dict(_normals(bayes, laplace)), {}
    for part, (x, *_) in one.parts.items():
        rows: dict[str, list[Tensor]] = {}
        with torch.no_grad():
            for y, J in jacobians(bayes, theta, x):
                noise = evenly_spread(POINTS, y.shape[1], 0)
                rows.setdefault("network", []).append(y.double().log_softmax(1))
                for name, density in normals.items():
                    rows.setdefault(name, []).append(_drawn(y, density.between(J, J), noise))
            found[part] = {name: torch.cat(own) for name, own in rows.items()}
            if dropout_layers(one.net):
                found[part] |= {f"dropout, rate {rate:g}": _masked(one.net, rate, x) for rate in RATES}
    log_p = {part: {name: log_p.float() for name, log_p in own.items()} for part, own in found.items()}
    return {"name": one.name, "labels": {part: own[1] for part, own in one.parts.items()}, "log_p": log_p}


def _curvature(bayes: Any, batches: Batches) -> Laplace:
    """That of the default call (`training/around.py`)."""
    model, theta = bayes.model, trained_values(bayes, present=True)
    with bayes.network_mode(), model.linearised_around(None):
        bayes.family = vi.StructuredPrecision(candidates.RANK).bind(bayes.space).to(bayes.device)
        model.prior = candidates.relative_prior(model, theta, candidates.WIDTH)
        for family in bayes.family.families():
            family.first_stage()
            family.learn_all()
        return curvature_of(bayes, theta, batches, 0, bayes.family.precision_columns)


def _normals(bayes: Any, laplace: Laplace) -> Iterator[tuple[str, Any]]:
    model, theta, family = bayes.model, laplace.theta, bayes.family
    named, names = model.space.unravel(theta), list(model.net_space.names)
    fans = dict(zip(names, model.net_space.scales.tolist(), strict=True))
    rms = {name: max(float(named[name].double().square().mean().sqrt()), 1e-3 * fans[name]) for name in names}
    last = names[-2:]  # weight and bias of the last layer

    def at(width: float, head: float, units: dict[str, float]) -> Any:
        model.prior = NormalPrior({escape(n): (head if n in last else width) * units[n] for n in names})
        laplace.place(family, 1.0, prior_precision(model, theta))
        return copy.deepcopy(family)()

    for width in GRID:
        yield f"all {width:g}", at(width, width, rms)
    for width, heads in HEADS:
        for head in heads:
            yield f"rest {width:g}, last layer {head:g}", at(width, head, rms)


def _drawn(mean: Tensor, covariance: Tensor, noise: Tensor) -> Tensor:
    return _mean(normal_outputs(mean, covariance, noise).double().log_softmax(-1))


def _mean(log_p: Tensor) -> Tensor:
    return log_p.logsumexp(0) - torch.tensor(float(len(log_p)), dtype=torch.float64).log()


def _masked(net: nn.Module, rate: float, x: Tensor) -> Tensor:
    own = copy.deepcopy(net)
    set_dropout(own, rate)
    return torch.cat([of_dropout(own, MASKS, 0)(part) for part in x.split(250)])


def main(arguments: Sequence[str] | None = None, show: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with breastmnist/, mnist/")
    parser.add_argument("--sets", default="breastmnist", help="with commas between them, of networks' sets and tables")
    parser.add_argument("--first", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--members", type=int, default=1, help="of images: the equal mixture of so many networks")
    parser.add_argument("--out", type=Path, required=True, help="a folder, with a file for each network")
    parser.add_argument("--table", action="store_true", help="compare the rules on what is there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if not options.table:
        options.out.mkdir(parents=True, exist_ok=True)
        seeds = range(options.first, options.first + options.seeds)
        for own in networks(options.sets.split(","), options.data, seeds, options.members):
            record = mixed([measured(one) for one in own])
            torch.save(record, options.out / f"{record['name'].replace(' ', '_').replace(',', '')}.pt")
            show(record["name"])
    show(networks_rules.table([torch.load(path) for path in sorted(options.out.glob("*.pt"))]))


if __name__ == "__main__":
    main()
