"""The rules that `benchmarks.networks_widths` compares: which of its candidates each keeps, and what comes of that."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from structvi.training.candidates import HARM, LAST, WIDTHS
from structvi.training.held_out import HeldOut
from structvi.training.validation import MARGIN

from .never_worse import HELD_OUT

NETWORK = "network"
Record = dict[str, Any]
#: log T on which labels of a tempered network are looked at
TEMPERATURES = torch.linspace(-1.5, 1.5, 121, dtype=torch.float64)


@dataclass(frozen=True)
class Rule:
    """The widest candidate that is as good as the best.

    Args:
        starts: how the names of the candidates start.
        by_entropy: the widest is the one with the highest entropy off the data, not the last.
        last: with these widths of the last layer; the widest is then that with the largest product of both.
        quantile: standard deviations of the bound on harm; None: no bound.
        of_labels: the bound is on the gain under the labels of the network at a temperature, whose 95 % interval the
            held-out rows give: what is unknown is one number.
        keep_best: the maximum, as `keep="best"`, the network among them or not.
    """

    title: str
    starts: tuple[str, ...] = ("all",)
    by_entropy: bool = False
    quantile: float | None = 1.6449
    of_labels: bool = False
    keep_best: bool = False
    with_network: bool = True
    widest: float = WIDTHS[-1]
    last: tuple[tuple[float, tuple[float, ...]], ...] = ()

    def candidates(self, record: Record) -> list[str]:
        names = [name for name in record["held out"] if name.startswith(self.starts)]
        names = [n for n in names if not n.startswith(("all", "up to")) or float(n.split()[-1]) <= self.widest]
        names += [f"rest {width:g}, last layer {last:g}" for width, wider in self.last for last in wider]
        if self.by_entropy:
            return sorted(names, key=lambda name: record["off"][name])
        return sorted(names, key=_product) if self.last else names

    def __call__(self, record: Record, rows: int) -> str:
        labels = record["labels"][:rows]
        log_p = {name: own[:rows].double() for name, own in record["held out"].items()}
        names = self.candidates(record)
        held_out = {name: _held_out(log_p[name], labels) for name in [NETWORK, *names]}
        network = held_out[NETWORK]
        best = max(held_out, key=lambda name: held_out[name].mean)
        if self.keep_best:
            return best if self.with_network else max(names, key=lambda name: held_out[name].mean, default=NETWORK)
        safe = self._safe(log_p, labels, names, held_out)
        if _is_too_sure(log_p[NETWORK], labels):
            good = [name for name in safe if _as_good(held_out[name], held_out[best])]
        else:
            gains = {name: held_out[name].gain_over(network) for name in safe}
            good = [name for name in safe if gains[name][0] > 2 * gains[name][1]]
        return good[-1] if good else NETWORK

    def _safe(
        self, log_p: dict[str, Tensor], labels: Tensor, names: list[str], held_out: dict[str, HeldOut]
    ) -> list[str]:
        if self.quantile is None:
            return names
        if not self.of_labels:
            network = held_out[NETWORK]
            return [name for name in names if least_gain(held_out[name], network, self.quantile) >= -HARM]
        p = tempered(log_p[NETWORK], labels)
        return [name for name in names if float((p * (log_p[name] - log_p[NETWORK])).sum(1).mean()) >= -HARM]


def _product(name: str) -> float:
    """Of both widths: "rest 0.1, last layer 4" → 0.4, "all 0.1" → 0.01."""
    numbers = [float(part.split()[-1]) for part in name.split(",")]
    return numbers[0] * numbers[-1]


def least_gain(one: HeldOut, network: HeldOut, quantile: float) -> float:
    """`HeldOut.least_gain_over` at another quantile."""
    residual = one.total - network.total
    gain = float(residual.mean())
    residual, n = residual - gain, len(residual)
    error = float((residual.square().sum() / (n * (n + 1))).sqrt())
    if not error > 0:
        return gain
    skewness = 2 * float(residual.pow(3).sum()) / (n * (n + 1) * (n + 2)) / error**3
    return gain + error * (-quantile + (quantile**2 - 1) / 6 * skewness)


def tempered(log_p: Tensor, labels: Tensor) -> Tensor:
    """Class probabilities of the network at the 5 % quantile of its temperature, given labels."""
    each = (log_p / TEMPERATURES.exp().view(-1, 1, 1)).log_softmax(2)  # [T, B, C]
    density = each.gather(2, labels.view(1, -1, 1).expand(len(each), -1, 1)).squeeze(2).sum(1)
    below = density.softmax(0).cumsum(0)
    return each[int((below < 0.05).sum())].exp()


def _held_out(log_p: Tensor, labels: Tensor) -> HeldOut:
    total = log_p.gather(1, labels.unsqueeze(1)).squeeze(1)
    return HeldOut(total, torch.ones_like(total))


def _is_too_sure(log_p: Tensor, labels: Tensor) -> bool:
    entropy = -(log_p.exp() * log_p).sum(1)
    return float((-log_p.gather(1, labels.unsqueeze(1)).squeeze(1) - entropy).mean()) > 0


def _as_good(one: HeldOut, best: HeldOut) -> bool:
    gain, error = best.gain_over(one)
    return gain <= min(MARGIN, 0.5 * error)


ALIKE = Rule("all tensors alike (before)")
NOW = Rule("and the last layer wider (now)", last=LAST)
HEAD = ("all", "rest")
RULES = (
    ALIKE,
    replace(ALIKE, title="… no bound", quantile=None),
    replace(ALIKE, title="… bound with 90 %", quantile=1.2816),
    replace(ALIKE, title="… bound with 80 %", quantile=0.8416),
    replace(ALIKE, title="… bound under tempered labels", of_labels=True),
    replace(ALIKE, title="… the maximum", keep_best=True),
    replace(ALIKE, title="… wider ones too, up to 4", widest=inf),
    Rule("units of 1/√fan-in", ("fan-in",)),
    NOW,
    replace(NOW, title="… bound with 90 %", quantile=1.2816),
    replace(NOW, title="… no bound", quantile=None),
    Rule("… 22 of them, by entropy off the data", HEAD, by_entropy=True),
    Rule("… 22, bound under tempered labels", HEAD, by_entropy=True, of_labels=True),
    Rule("a width that is not known, up to c: the mixture of all", ("up to",)),
    Rule("… bound with 90 %", ("up to",), quantile=1.2816),
    Rule("… bound with 80 %", ("up to",), quantile=0.8416),
    Rule("… two widths, c and c/4", ("two",)),
    Rule("… three, c, c/3 and c/10", ("three",)),
    Rule("… one normal of unknown scale", ("scaled",)),
    Rule("5 % of the widest mixed in", ("rarely",)),
    Rule("MC dropout, the best rate or the network", ("dropout",), keep_best=True),
    Rule("MC dropout, the best rate", ("dropout",), keep_best=True, with_network=False),
)


def table(found: list[Record]) -> str:
    """A table for each set, of "tables" one for each number of held-out rows."""
    sets = sorted({record["name"].split()[0] for record in found})
    pieces = []
    for name in sets:
        own = [record for record in found if record["name"].split()[0] == name]
        for rows in HELD_OUT if name == "tables" else (len(own[0]["labels"]),):
            pieces.append(f"### {name}, {len(own)} networks, {rows} held-out rows\n\n{compared(own, rows, RULES)}")
    return "\n\n".join(pieces)


def compared(found: list[Record], rows: int, rules: Sequence[Rule]) -> str:
    lines = ["| rule | gain on test rows | worst | more than .01 worse | gain under shift | network kept |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    for rule in rules:
        if not all(rule.candidates(record) for record in found):
            continue  # networks without dropout have no candidates of it
        kept = [rule(record, rows) for record in found]
        test = [gain(record, name, "test") for record, name in zip(found, kept, strict=True)]
        shift = [gain(record, name, "shift") for record, name in zip(found, kept, strict=True)]
        worse = 100 * mean(value < -0.01 for value in test)
        network = 100 * mean(name == NETWORK for name in kept)
        cells = f"{mean(test):+.4f} | {min(test):+.4f} | {worse:.0f} % | {mean(shift):+.3f} | {network:.0f} %"
        lines.append(f"| {rule.title} | {cells} |")
    return "\n".join(lines)


def gain(record: Record, name: str, part: str) -> float:
    """In log density over the network, the mean over the parts whose name starts so."""
    own = [one for key, one in record["densities"].items() if key.startswith(part)]
    return mean(one[name] - one[NETWORK] for one in own)
