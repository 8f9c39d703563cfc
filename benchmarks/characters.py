"""A character GPT of ten million weights with a posterior from the first step, beside AdamW with dropout and IVON.

    python -m benchmarks.characters --data DIR --device cuda --out folder --runs "method=adamw,dropout=.2;lam=.01"
    python -m benchmarks.characters --data DIR --out folder --table
    python -m benchmarks.characters --data DIR --quick             # a tiny network on a CPU: shows that it runs

DIR/shakespeare/input.txt.gz: the first 90 % of the text to train, the next 5 % for every choice (dropout, early
stopping, λ), the last 5 % to test. Batches of 64 times 256 characters, equal steps for all methods, one draw a step,
networks in bfloat16. Methods: `adamw` (dropout, early stopping: the best of ten looks at the validation text), `ours`
(mean field; `vi.Soap` or Adam), `ivon` (written after its paper). Loss: nats a character, of the average over draws.
With `widen=1` of `ours` also draws m + c(θ − m), with the c of the least loss of the validation text: "widened".
OOD: how well the entropy, averaged over 64 characters, tells English prose of another kind (DIR/mnist/README.md) from
the test text, as an AUROC.
"""

import argparse
import copy
import gzip
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import mean as average
from statistics import stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import structvi as vi
from structvi.studies.is_it_bayesian.at_scale.ivon import fit_ivon, schedule

from .characters_net import GPT, START
from .networks_measures import auroc, calibration_error

#: characters over which entropies are averaged, to tell texts apart
WINDOW = 64
#: factors of the posterior's spread
WIDTHS = (1.0, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8)
#: looks at the validation text of early stopping
LOOKS = 10


@dataclass(frozen=True)
class Setting:
    method: str = "ours"
    family: str = "mean_field"  # or "rotated": in the coordinates of Soap
    optimizer: str = "soap"
    lam: float = 0.01
    prior: float = 1.0
    lr: float = 0.002
    scale_lr: float = 0.02
    refresh: int = 20
    initial_scale: float = 0.1  # of START
    rise: float = 0.25
    paced: bool = False
    warmup: float = 0.05
    dropout: float = 0.2
    decay: float = 0.1
    ess: float = 1.0  # of IVON, in characters of the training text
    h0: float = 0.01
    radius: float = math.inf  # of its steps
    beta1: float = 0.9
    beta2: float = 0.99995
    steps: int = 2000
    batch: int = 64
    seed: int = 0
    draws: int = 16
    widen: bool = False
    width: int = 384
    heads: int = 6
    layers: int = 6
    length: int = 256

    @classmethod
    def read(cls, text: str) -> "Setting":
        kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(cls)}
        pairs = [pair.split("=") for pair in filter(None, text.strip().split(","))]
        values: dict[str, Any] = {
            name: bool(int(value)) if kinds[name] is bool else kinds[name](value) for name, value in pairs
        }
        return cls(**values)

    @property
    def name(self) -> str:
        own, plain = asdict(self), asdict(Setting())
        return "-".join(f"{key}={own[key]}" for key in own if own[key] != plain[key] or key in ("method", "seed"))


class Text:
    """The text as numbers on the device, in three parts; random stretches to train, all stretches to measure."""

    def __init__(self, folder: Path, device: torch.device, most: int | None = None):
        with gzip.open(folder / "shakespeare/input.txt.gz", "rt") as file:
            text = file.read()
        self.alphabet = {letter: i for i, letter in enumerate(sorted(set(text)))}
        other = (folder / "mnist/README.md").read_text()
        whole = self.numbers(text).to(device)
        first, second = int(0.9 * len(whole)), int(0.95 * len(whole))
        self.train, self.validation, self.test = whole[:first], whole[first:second][:most], whole[second:][:most]
        self.other = self.numbers(other).to(device)

    def numbers(self, text: str) -> Tensor:
        return torch.tensor([self.alphabet[letter] for letter in text if letter in self.alphabet])


class Stretches:
    """Random stretches of the training text, from torch's global stream; an epoch is so many steps."""

    def __init__(self, text: Tensor, setting: Setting, steps: int):
        self.text, self.setting, self.steps = text, setting, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        T, offsets = self.setting.length, torch.arange(self.setting.length + 1, device=self.text.device)
        for _ in range(self.steps):
            starts = torch.randint(len(self.text) - T, (self.setting.batch, 1)).to(self.text.device)
            rows = self.text[starts + offsets]
            yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def whole(text: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """All of a text in stretches: [n, T] and the next characters."""
    n = (len(text) - 1) // length
    return text[: n * length].view(n, length), text[1 : n * length + 1].view(n, length)


#: inputs [B, T] → log p of the next characters [B, V, T], one for each draw
Draw = Callable[[Tensor], Tensor]


def autocast(device: torch.device):
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@torch.no_grad()
def log_probabilities(draws: Sequence[Draw], x: Tensor, batch: int) -> Tensor:
    """log of the mean over draws: [n, V, T]."""
    found = []
    for part in x.split(batch):
        total: Tensor | None = None
        for draw in draws:
            with autocast(x.device):
                own = draw(part).float().log_softmax(1)
            total = own if total is None else torch.logaddexp(total, own)
        assert total is not None
        found.append(total - math.log(len(draws)))
    return torch.cat(found)


def nll(log_p: Tensor, targets: Tensor) -> float:
    return float(-log_p.gather(1, targets.unsqueeze(1)).double().mean())


def windows(log_p: Tensor) -> Tensor:
    """Entropies, averaged over stretches of WINDOW characters."""
    entropy = -(log_p.exp() * log_p).sum(1)  # [n, T]
    return entropy.unfold(1, min(WINDOW, entropy.shape[1]), WINDOW).mean(-1).flatten().double().cpu()


def assess(draws: Sequence[Draw], text: Text, setting: Setting) -> dict[str, float]:
    batch, T = setting.batch, setting.length
    values: dict[str, float] = {}
    x, t = whole(text.validation, T)
    values["validation"] = nll(log_probabilities(draws, x, batch), t)
    x, t = whole(text.test, T)
    inside = log_probabilities(draws, x, batch)
    values["loss"] = nll(inside, t)
    top, label = inside.max(1)
    confidence, right = top.exp().double().cpu().flatten(), (label == t).double().cpu().flatten()
    confidence = confidence.nan_to_num(0.0)  # of a fit that has diverged
    values |= {"ece": calibration_error(confidence, right), "accuracy": float(right.mean())}
    x, t = whole(text.other, T)
    outside = log_probabilities(draws, x, batch)
    return values | {"other_loss": nll(outside, t), "auroc": auroc(windows(inside), windows(outside))}


def network(text: Text, setting: Setting, dropout: float) -> GPT:
    return GPT(len(text.alphabet), setting.width, setting.heads, setting.layers, setting.length, dropout)


def train_adamw(text: Text, setting: Setting, device: torch.device) -> tuple[list[Draw], dict[str, Any]]:
    """The network of the best look at the validation text."""
    torch.manual_seed(setting.seed)
    net = network(text, setting, setting.dropout).to(device)
    matrices = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": setting.decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=setting.lr, betas=(0.9, 0.99), fused=device.type == "cuda")
    x, t = whole(text.validation, setting.length)
    best, kept, looks = math.inf, net.state_dict(), []
    every, start, spent = max(1, setting.steps // LOOKS), time.perf_counter(), 0.0
    for step, (inputs, targets) in enumerate(Stretches(text.train, setting, setting.steps)):
        for group in optimizer.param_groups:
            group["lr"] = setting.lr * schedule(step, setting.steps, setting.warmup)
        with autocast(device):
            loss = cross_entropy(net(inputs).float(), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % every == 0:
            before = time.perf_counter()
            looks.append(nll(log_probabilities([net.eval()], x, setting.batch), t))
            net.train()
            if looks[-1] < best:
                best, kept = looks[-1], copy.deepcopy(net.state_dict())
            spent += time.perf_counter() - before
    ms = 1000 * (time.perf_counter() - start - spent) / setting.steps
    net.load_state_dict(kept)
    return [net.eval()], {"ms": ms, "looks": looks}


def drawn(net: nn.Module, names: Sequence[str], thetas: Tensor) -> list[Draw]:
    """The network at each of the rows [S, P]."""
    shapes = [dict(net.named_parameters())[name].shape for name in names]

    def at(theta: Tensor) -> Draw:
        parts = theta.split([math.prod(shape) for shape in shapes])
        weights = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return lambda x: torch.func.functional_call(net, weights, (x,))

    return [at(theta) for theta in thetas]


def fit_ours(text: Text, setting: Setting, device: torch.device) -> tuple[list[Draw], dict[str, Any]]:
    torch.manual_seed(setting.seed)
    net = network(text, setting, 0.0).to(device).eval()
    family = vi.Rotated(vi.MeanField()) if setting.family == "rotated" else vi.MeanField()
    bayes = vi.variationalize(
        net, vi.likelihoods.Categorical(), family,
        vi.NormalPrior.fan_in(setting.prior), num_data=len(text.train) // setting.length,
    )  # fmt: skip
    named = bayes.family.named_parameters()
    log_scale = next(parameter for name, parameter in named if name.endswith("log_scale"))
    with torch.no_grad():  # embeddings start as narrow as matrices
        log_scale.fill_(math.log(setting.initial_scale * START))
    begun = log_scale.detach().clone()
    optimizer, lr = None, setting.lr
    if setting.optimizer == "soap":
        optimizer, lr = vi.Soap(setting.lr, setting.scale_lr, setting.refresh), None
    result = bayes.fit(
        Stretches(text.train, setting, setting.steps), steps=setting.steps, optimizer=optimizer, lr=lr,
        temperature=setting.lam, coupling=vi.naive, kl_warmup="paced" if setting.paced else setting.rise,
        warmup=setting.warmup, stop=False, restarts=0, clip=float(setting.length), compare=0.1, progress=False,
        seed=setting.seed, precision=torch.bfloat16 if device.type == "cuda" else None,
    )  # fmt: skip
    log_s = log_scale.detach()
    thetas = bayes.family().draw(setting.draws, vi.naive, torch.Generator(device).manual_seed(0)).theta.detach()
    details = {
        "ms": 1000 * float(torch.as_tensor(result.history["seconds"]).double().nanmedian()),
        "elbo": result.elbo.value,
        "kept": result.kept,
        "moved": float((log_s - begun).abs().mean()),
        "scale": float(log_s.exp().mean()),
        "notes": [note for note in result.notes if "captured" in note or "undone" in note],
    }
    draws = drawn(net, bayes.space.names, thetas)
    if setting.widen:
        centre, names = bayes.family().mean.detach(), bayes.space.names
        details |= widest(
            lambda width: drawn(net, names, centre + width * (thetas - centre)),
            *whole(text.validation, setting.length), setting.batch,
        )  # fmt: skip
    return draws, details


def widest(at: Callable[[float], list[Draw]], x: Tensor, t: Tensor, batch: int) -> dict[str, Any]:
    """The width of the least loss of the validation text, and the draws of it, as another way to predict."""
    width = min(WIDTHS, key=lambda width: nll(log_probabilities(at(width), x, batch), t))
    return {"widening": width, "others": {"widened": at(width)}}


def ivon(text: Text, setting: Setting, device: torch.device) -> tuple[list[Draw], dict[str, Any]]:
    torch.manual_seed(setting.seed)
    net = network(text, setting, 0.0).to(device).eval()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs.float(), targets)

    with autocast(device):
        mean, scale, details = fit_ivon(
            net, Stretches(text.train, setting, setting.steps), 1, lr=setting.lr, ess=setting.ess * len(text.train),
            h0=setting.h0, decay=setting.decay, beta1=setting.beta1, beta2=setting.beta2, warmup=setting.warmup,
            seed=setting.seed, radius=setting.radius, loss=loss,
        )  # fmt: skip
    noise = torch.Generator(device).manual_seed(0)
    thetas = mean + scale * torch.randn(setting.draws, len(mean), generator=noise, device=device)
    names = [name for name, _ in net.named_parameters()]
    return drawn(net, names, thetas), details | {"scale": float(scale.mean())}


METHODS = {"adamw": train_adamw, "ours": fit_ours, "ivon": ivon}


def run(text: Text, setting: Setting, device: torch.device) -> dict[str, Any]:
    start = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    draws, details = METHODS[setting.method](text, setting, device)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    fitted = time.perf_counter() - start
    others: dict[str, list[Draw]] = details.pop("others", {})
    row = asdict(setting) | details | {"gib": memory, "fit_seconds": fitted} | assess(draws, text, setting)
    row |= {"ways": {name: assess(own, text, setting) for name, own in others.items()}} if others else {}
    return row | {"seconds": time.perf_counter() - start}


def short(row: dict[str, Any]) -> dict[str, Any]:
    plain = asdict(Setting())
    values = {key: x for key, x in row.items() if key not in plain or x != plain[key] or key in ("method", "seed")}
    return {key: round(x, 5) if isinstance(x, float) else x for key, x in values.items()}


def table(rows: list[dict[str, Any]]) -> str:
    """All settings, mean ± deviation over seeds; bold: of each method that of the lowest validation loss at seed 0."""
    columns = ("loss", "ece", "accuracy", "auroc", "other_loss", "validation", "ms", "gib")
    rows = [way for row in rows for way in (row, *(row | own | {"method": f"{row['method']}, {name}"}
                                                   for name, own in row.get("ways", {}).items()))]  # fmt: skip
    lines = ["| method | setting | seeds | " + " | ".join(columns) + " |", "| --- " * (len(columns) + 3) + "|"]
    for method in dict.fromkeys((row["method"], row["optimizer"]) for row in rows):
        own: dict[str, list[dict[str, Any]]] = {}
        for row in sorted(rows, key=lambda row: row["seed"]):
            if (row["method"], row["optimizer"]) == method:
                setting = Setting(**{field.name: row.get(field.name, field.default) for field in fields(Setting)})
                own.setdefault(replace(setting, seed=0).name, []).append(row)
        best = min(own, key=lambda name: own[name][0]["validation"])
        for name, some in own.items():
            cells = [cell([row[key] for row in some]) for key in columns]
            chosen = f"**{name}**" if name == best else name
            lines.append(f"| {' '.join(method)} | {chosen} | {len(some)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(values: list[float]) -> str:
    return f"{average(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder with shakespeare/ and mnist/")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="a folder: a file for each run; what is there is not run again")
    parser.add_argument("--runs", default="method=adamw;method=ours;method=ivon,lr=.1")
    parser.add_argument("--table", action="store_true", help="print the table of --out, run nothing")
    parser.add_argument("--quick", action="store_true", help="a tiny network, ten steps")
    options = parser.parse_args(arguments)
    if options.table:
        print(table([json.loads(path.read_text()) for path in sorted(options.out.rglob("*.json"))]))
        return []
    device = torch.device(options.device)
    if options.device == "cpu":
        torch.set_num_threads(1)
    text = Text(options.data, device, 2000 if options.quick else None)
    rows = []
    for part in filter(None, options.runs.split(";")):
        setting = Setting.read(part)
        if options.quick:
            setting = replace(setting, steps=10, width=16, heads=2, layers=1, length=32, batch=4, draws=2)
        path = None if options.out is None else options.out / f"{setting.name}.json"
        if path is not None and path.exists():
            continue
        rows.append(run(text, setting, device))
        print(json.dumps(short(rows[-1])), flush=True)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(rows[-1]))
    return rows


if __name__ == "__main__":
    main()
