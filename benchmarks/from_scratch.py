"""Posteriors over a deep network from its first step, at the pace of its training: CIFAR-10, ResNet-20, group norm.

    python -m benchmarks.from_scratch --data DIR --device cuda --out folder --runs "method=map;lr=.01,lam=.1"
    python -m benchmarks.from_scratch --data DIR --device cuda --out folder --plan table --part 0/8
    python -m benchmarks.from_scratch --out folder --table        # the tables of a folder, nothing is run
    python -m benchmarks.from_scratch --quick                     # scikit-learn's digits, small: shows that it runs

13,000 images to train, 2,000 for validation, 5,000 to test; 25 epochs of batches of 100, images mirrored and shifted,
one draw a step. Methods: `sgd` (SGD with momentum as in `benchmarks.networks`), `map` (the preconditioned training
without noise), `mean_field`, `rotated` (mean field in Kronecker coordinates), `low_rank` (precision form, rank 4),
`ivon` (written after its paper); optimizers `soap` (`vi.optim.Soap`), `adam` and `newton`
(`vi.optim.NaturalGradient`); with `soap` scales by Adam.
Each run is one line of JSON, and a file of `--out`. Every choice (λ, temperature of the networks) is made on the
validation images: tables say which.

ELBO: at λ = 1 on the training images as they are, in nats; gain: how far above the best constant predictor's.
moved: the mean of |log s − log s₀| over the weights, s₀ the scales at the start.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import structvi as vi
from structvi.families import Diagonal, NormalForm

from . import from_scratch_tables, networks_data
from .ivon import fit_ivon
from .networks_data import Data
from .networks_measures import Meter, Predictor, assess, cases, log_probabilities, remembered
from .networks_methods import of_network, of_posterior
from .networks_nets import TASKS, Task, train

#: groups of antithetic draws for the ELBO
GROUPS = 8


@dataclass(frozen=True)
class Setting:
    """One run; defaults are those that were chosen on validation images."""

    method: str = "mean_field"
    optimizer: str = "soap"
    lam: float = 1.0
    prior: float = 1.0  # scale of NormalPrior.fan_in
    learn: bool = False  # its scale, for each tensor
    lr: float = 0.003
    scale_lr: float = 0.02
    refresh: int = 10
    turn: int = 10  # refreshes between two turns of a rotated family; 0 for none
    beta1: float = 0.95
    beta2: float = 0.95
    gram: float = 0.95
    radius: float = 1.0  # of newton
    initial_scale: float = 0.1
    warmup: float = 0.05
    hold: float = 0.0  # part of the steps after which rates fall
    rise: float = 0.25  # part of the steps in which λ rises
    average: bool = True
    watch: bool = False  # the last step or the average by validation images; else by the ELBO
    rank: int = 4
    epochs: int = 25
    batch: int = 100
    power: float = 1.0  # of the cosine along which rates fall: above one they are small for longer
    limit: float = 0.0  # seconds of a fit: its rates fall to zero by then, and it ends; 0 for none
    seed: int = 0
    draws: int = 32  # to predict
    ess: float = 1.0  # of IVON, in N
    h0: float = 0.1
    decay: float = 5e-4

    @classmethod
    def read(cls, text: str) -> "Setting":
        """From "method=map,lr=.003"."""
        kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(cls)}
        values: dict[str, Any] = {}
        for pair in filter(None, text.strip().split(",")):
            name, value = pair.split("=")
            if name not in kinds:
                raise ValueError(f"no setting {name!r}: there are {', '.join(kinds)}")
            values[name] = bool(int(value)) if kinds[name] is bool else kinds[name](value)
        return cls(**values)

    @property
    def name(self) -> str:
        """Of its file: what is not as by default."""
        own, plain = asdict(self), asdict(Setting())
        return "-".join(f"{key}={own[key]}" for key in own if own[key] != plain[key] or key in ("method", "seed"))


class Augmented:
    """Batches in a new order each epoch, on the device, from torch's global stream."""

    def __init__(self, x: Tensor, t: Tensor, batch: int, augment: Any):
        self.x, self.t, self.batch, self.augment = x, t, batch, augment

    def __len__(self) -> int:
        return math.ceil(len(self.x) / self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(len(self.x)).to(self.x.device).split(self.batch):
            x = self.x[rows]
            yield (x if self.augment is None else self.augment(x)), self.t[rows]


class Shop:
    """The data on the device, and what all runs share."""

    def __init__(self, task: Task, data: Data, device: torch.device):
        self.task, self.data, self.device, self.meter = task, data, device, Meter(device)
        self.x, self.t = (tensor.to(device) for tensor in data.train.tensors)

    def loader(self, batch: int) -> Augmented:
        return Augmented(self.x, self.t, batch, self.task.augment)

    def net(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self.task.net().to(self.device).eval()

    def plain(self) -> list[tuple[Tensor, Tensor]]:
        """The training images as they are."""
        return list(zip(self.x.split(500), self.t.split(500), strict=True))

    def held_out(self) -> list[tuple[Tensor, Tensor]]:
        parts = (tensor.to(self.device).split(500) for tensor in self.data.validation.tensors)
        return list(zip(*parts, strict=True))

    def constant(self) -> float:
        """Log likelihood of the best constant predictor."""
        share = torch.bincount(self.t).double() / len(self.t)
        return float((share * share.clamp_min(1e-300).log()).sum() * len(self.t))


def family(setting: Setting) -> vi.Family:
    start: dict[str, Any] = {"initial_scale": setting.initial_scale}
    return {
        "map": lambda: vi.MAP(),
        "mean_field": lambda: vi.MeanField(**start),
        "rotated": lambda: vi.Rotated(vi.MeanField(**start)),
        "low_rank": lambda: vi.LowRankPrecision(setting.rank, **start),
        "rotated_low_rank": lambda: vi.Rotated(vi.LowRankPrecision(setting.rank, **start)),
    }[setting.method]()


def log_scales(bayes: vi.Posterior) -> Tensor:
    named = bayes.family.named_parameters()
    return torch.cat([p.detach().flatten() for name, p in named if name.endswith("log_scale")])


def posterior(net: nn.Module, setting: Setting, shop: Shop, own: vi.Family) -> vi.Posterior:
    prior = vi.priors.NormalPrior.fan_in(setting.prior)
    if setting.learn:
        prior = vi.priors.NormalPrior.fan_in({name: setting.prior for name, _ in net.named_parameters()}, learn=True)
    return vi.variationalize(
        net, vi.likelihoods.Categorical(), own, prior, num_data=len(shop.x),
        generator=torch.Generator().manual_seed(setting.seed),
    ).to(shop.device)  # fmt: skip


def bound(bayes: vi.Posterior, shop: Shop) -> dict[str, float]:
    generator = torch.Generator(shop.device).manual_seed(0)
    with torch.no_grad():
        found = bayes.elbo(shop.plain(), groups=GROUPS, generator=generator)
    return {"elbo": found.value, "elbo_error": found.standard_error, "gain": found.value - shop.constant()}


class Clock:
    """Rates that fall to zero at the last step or when the time is over, whichever is first; and the curve so far.

    Args:
        setting: of the run.
        total: steps of a fit that has all of its time.
        path: where the mean ELBO of every epoch is written now and then, or None.
    """

    def __init__(self, setting: Setting, total: int, path: Path | None):
        self.setting, self.total, self.path = setting, total, path
        self.begun: float | None = None
        self.written = 0.0

    def passed(self, step: int) -> float:
        """The part of the fit that is over."""
        limit = self.setting.limit or math.inf
        return max(step / self.total, 0.0 if self.begun is None else (now() - self.begun) / limit)

    def factor(self, step: int) -> float:
        start, rise = self.passed(step), self.setting.warmup
        if step < rise * self.total and start < rise:
            return (step + 1) / (rise * self.total)
        return (0.5 * (1 + math.cos(math.pi * min(1.0, (start - rise) / (1 - rise))))) ** self.setting.power

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)

    def __call__(self, history: Any) -> None:
        if self.begun is None:
            self.begun = self.written = now()
        if self.path is not None and now() - self.written > 25:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.with_suffix(".curve").write_text(json.dumps(curve(history)))
            self.written = now()
        if self.passed(len(history)) >= 1 and len(history) < self.total:
            raise KeyboardInterrupt


def now() -> float:
    return time.perf_counter()


def curve(history: Any) -> list[float]:
    """The mean ELBO of every epoch, of the steps' own draws and batches."""
    elbo, epoch = history["elbo"].nan_to_num(), history["epoch"].long()
    count = torch.bincount(epoch).clamp_min(1)
    return (torch.bincount(epoch, elbo) / count).round(decimals=1).tolist()


def fit(setting: Setting, shop: Shop, path: Path | None = None) -> tuple[Predictor, dict[str, Any]]:
    """One run of ours, and what it says of itself."""
    bayes = posterior(shop.net(setting.seed), setting, shop, family(setting))
    begun = None if setting.method == "map" else log_scales(bayes)
    optimizer, lr = None, setting.lr
    if setting.optimizer in ("soap", "newton"):
        more = {"refresh": setting.refresh, "turn": setting.turn or None, "gram_beta": setting.gram}
        lr = None
        if setting.optimizer == "newton":
            own = {"beta": setting.beta1, "radius": setting.radius, **more}
            optimizer = vi.optim.NaturalGradient(bayes, setting.lr / setting.lam, setting.scale_lr / setting.lam, **own)
        else:
            own = {"betas": (setting.beta1, setting.beta2), **more}
            optimizer = vi.optim.Soap(bayes, setting.lr, setting.scale_lr, **own)
    loader = shop.loader(setting.batch)
    clock = Clock(setting, setting.epochs * len(loader), path) if setting.limit or setting.power != 1 else None
    schedule = vi.Schedule(setting.warmup, setting.hold, setting.rise, stop=False)
    result = bayes.fit(
        loader, epochs=setting.epochs, optimizer=optimizer, lr=lr, kl_weight=setting.lam,
        estimator=vi.Estimator(coupling=vi.couplings.naive),
        schedule=schedule if clock is None else clock.scheduler, callback=clock, progress=False, seed=setting.seed,
        validation=shop.held_out() if setting.watch else None,
    )  # fmt: skip
    seconds, lam = result.history["seconds"], result.history["kl_weight"]
    details: dict[str, Any] = {
        "kept": result.kept,
        "risen": float((lam < lam[-1]).double().mean()),  # after which part of the steps λ has its value
        "ms": 1000 * float(torch.as_tensor(seconds).double().nanmedian()),
        "notes": [note for note in result.notes if "captured" in note or "undone" in note],
        "made": len(lam),
        "curve": curve(result.history),
    }
    if begun is not None:
        log_s = log_scales(bayes)
        details |= bound(bayes, shop) | {
            "moved": float((log_s - begun).abs().mean()),
            "scale": float(log_s.exp().mean()),
        }
    draws = 1 if setting.method == "map" else setting.draws
    return of_posterior(bayes, draws, setting.seed), details


def fit_sgd(setting: Setting, shop: Shop) -> tuple[Predictor, dict[str, Any]]:
    task = replace(shop.task, epochs=setting.epochs, weight_decay=setting.decay)
    start = time.perf_counter()
    net = train(task, shop.data.train, setting.seed, shop.device)
    steps = setting.epochs * len(shop.loader(setting.batch))
    return of_network(net), {"ms": 1000 * (time.perf_counter() - start) / steps}


def ivon(setting: Setting, shop: Shop) -> tuple[Predictor, dict[str, Any]]:
    """As a posterior of ours with its mean and scales, so that it is measured alike."""
    net = shop.net(setting.seed)
    mean, scale, details = fit_ivon(
        net, shop.loader(setting.batch), setting.epochs, lr=setting.lr, ess=setting.ess * len(shop.x), h0=setting.h0,
        decay=setting.decay, beta1=setting.beta1, beta2=setting.beta2, warmup=setting.warmup, seed=setting.seed,
    )  # fmt: skip
    # its prior: N(0, 1/(N decay))
    model = replace(setting, prior=1.0)
    bayes = posterior(net, model, shop, vi.MeanField())
    bayes.model.prior = vi.priors.NormalPrior((setting.ess * len(shop.x) * setting.decay) ** -0.5)
    space = bayes.space
    bayes.family.set_normal(NormalForm(space.ravel(mean), Diagonal(space.ravel(scale))))
    details |= bound(bayes, shop) | {"scale": float(scale.mean())}
    return of_posterior(bayes, setting.draws, setting.seed), details


def run(setting: Setting, shop: Shop, path: Path | None = None) -> dict[str, Any]:
    """Fitted and measured, with a temperature on top too, chosen on validation images."""
    start = time.perf_counter()
    make = {"sgd": fit_sgd, "ivon": ivon}.get(setting.method, partial(fit, path=path))
    predictor, details = make(setting, shop)
    others: dict[str, Predictor] = details.pop("others", {})
    fitted = time.perf_counter() - start
    row = asdict(setting) | details | {"fit_seconds": fitted} | measured(predictor, shop)
    row |= {"ways": {name: measured(one, shop) for name, one in others.items()}} if others else {}
    return row | {"seconds": time.perf_counter() - start}


def measured(predictor: Predictor, shop: Shop) -> dict[str, Any]:
    """As it is, and with a temperature."""
    predictor = remembered(predictor)
    plain, T = assess(predictor, shop.data, 500, shop.meter), temperature(predictor, shop)
    tempered = assess(lambda x: (predictor(x) / T).log_softmax(1), shop.data, 500, shop.meter)
    return plain | {"T": T, "tempered": tempered}


def temperature(predictor: Predictor, shop: Shop) -> float:
    x, labels = shop.data.validation.tensors
    log_p = log_probabilities(predictor, x, 500, shop.device)
    grid = torch.logspace(-1, 1, 401, dtype=torch.float64).tolist()
    return min(grid, key=lambda T: float(cases((log_p / T).log_softmax(1), labels).mean()))


def read_runs(options: argparse.Namespace) -> list[Setting]:
    settings = [Setting.read(text) for text in filter(None, options.runs.split(";"))]
    if options.plan:
        settings += from_scratch_tables.plan(options.plan, Setting)
    index, count = (int(part) for part in options.part.split("/"))
    return settings[index::count]


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with cifar10/; without it scikit-learn's digits")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="a folder: a file for each run; what is there is not run again")
    parser.add_argument("--runs", default="", help='settings such as "method=map,lr=.003", semicolons between them')
    parser.add_argument("--plan", default="", help=f"a list of runs: {', '.join(from_scratch_tables.PLANS)}")
    parser.add_argument("--part", default="0/1", help="i/n: the i-th of n parts of the runs")
    parser.add_argument("--table", action="store_true", help="print the tables of --out, run nothing")
    parser.add_argument("--quick", action="store_true", help="two epochs of the digits")
    options = parser.parse_args(arguments)
    if options.table:
        if options.out is None:
            parser.error("--table prints what --out keeps: give both")
        print(from_scratch_tables.report(from_scratch_tables.read(options.out), asdict(Setting())))
        return []
    if options.device == "cpu":
        torch.set_num_threads(1)
    task = TASKS["cifar10-gn" if options.data is not None else "digits"]
    data = task.data(options.data) if options.data is not None else networks_data.digits(None)
    shop = Shop(task, data, torch.device(options.device))
    rows = []
    for setting in read_runs(options):
        if options.quick:
            setting = replace(setting, epochs=2, draws=4)
        path = None if options.out is None else options.out / f"{setting.name}.json"
        if path is not None and path.exists():
            continue
        row = run(setting, shop, path)
        rows.append(row)
        print(json.dumps(from_scratch_tables.short(row, asdict(Setting()))), flush=True)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(row))
    return rows


if __name__ == "__main__":
    main()
