"""The rules that `benchmarks.networks_widths` compares: which of its candidates each keeps, and what comes of that."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structvi.predicting.grid_fit import label_losses, least
from structvi.training.candidates import Candidate
from structvi.training.held_out import HeldOut
from structvi.training.measuring import DOUBT
from structvi.training.rule import HARM, MIXED
from structvi.training.rule import Rule as Library
from structvi.training.validation import MARGIN

from .never_worse import HELD_OUT

NETWORK = "network"
Record = dict[str, Any]
#: an equal mixture of these
Group = tuple[str, ...]
#: log T on which labels of a tempered network are looked at
TEMPERATURES = torch.linspace(-1.5, 1.5, 121, dtype=torch.float64)
#: the widest prior of all tensors alike; of a last layer that is wider than the rest, widths of the rest and of its own
WIDEST, LAST = 1.5, ((0.01, (1.0, 1.5, 2.5, 4.0)), (0.1, (1.0, 1.5, 2.5, 4.0)))
#: with 95, 90 and 80 %
MOST, MORE, SOME = 1.6449, 1.2816, 0.8416


def widths(names: Sequence[str], most: float = WIDEST) -> list[float]:
    return sorted(float(name.split()[1]) for name in names if name.startswith("all ") if float(name.split()[1]) <= most)


def alike(names: Sequence[str]) -> list[Group]:
    """One width for all tensors."""
    return [(f"all {width:g}",) for width in widths(names)]


def wider_last(names: Sequence[str], all_of_them: bool = False) -> list[Group]:
    """And those whose last layer has a width of its own, in the order of the product of both widths."""
    some = {f"rest {width:g}, last layer {last:g}" for width, wider in LAST for last in wider}
    last = [(name,) for name in names if name in some or (all_of_them and name.startswith("rest"))]
    return sorted([*alike(names), *last], key=lambda group: _product(group[0]))


def up_to(names: Sequence[str]) -> list[Group]:
    """All widths up to c, equally likely."""
    found = widths(names)
    return [tuple(f"all {one:g}" for one in found[:k]) for k in range(2, len(found) + 1)]


def shares(*parts: float, with_network: bool = False) -> Callable[[Sequence[str]], list[Group]]:
    """c/part for each part, the nearest that there is, equally likely."""

    def groups(names: Sequence[str]) -> list[Group]:
        found, more = widths(names), (NETWORK,) * with_network

        def near(width: float) -> float:
            return min(found, key=lambda one: abs(log(one / width)))

        return [(*(f"all {near(c / part):g}" for part in parts), *more) for c in found if c >= 0.1]

    return groups


def rates(names: Sequence[str]) -> list[Group]:
    return [(name,) for name in names if name.startswith("dropout")]


class Kept(NamedTuple):
    group: Group
    temperature: float = 1.0


@dataclass(frozen=True)
class Rule:
    """The widest candidate that is as good as the best.

    Args:
        groups: the candidates, from narrow to wide.
        deviations: of the bound on harm; None: no bound.
        of_labels: the bound is on the gain under the labels of the network at a temperature, whose 95 % interval the
            held-out rows give: what is unknown is one number.
        keep_best: the maximum, as `keep="best"`, the network among them or not.
        by_gain: as good is also what gains more over the network, by one standard error at least, than it loses
            against the best.
        errors: as good is within so many standard errors, beside the margin.
        doubt: the network is not sure enough where labels say so by so many standard errors.
    """

    title: str
    groups: Callable[[Sequence[str]], list[Group]] = alike
    deviations: float | None = MOST
    of_labels: bool = False
    keep_best: bool = False
    with_network: bool = True
    by_gain: bool = False
    errors: float = 0.5
    doubt: float = 0.0

    def __call__(self, record: Record, rows: int) -> Kept:
        labels, log_p = _candidates(record, rows, self.groups)
        held_out = {group: _held_out(own, labels) for group, own in log_p.items()}
        network, names = held_out[NETWORK,], [group for group in log_p if group != (NETWORK,)]
        best = max(held_out, key=lambda group: held_out[group].mean)
        if self.keep_best:
            return Kept(best if self.with_network else max(names, key=lambda group: held_out[group].mean))
        safe = [group for group in names if self._is_safe(log_p, labels, group, held_out)]
        gains = {group: held_out[group].gain_over(network) for group in safe}
        if _too_sure(log_p[NETWORK,], labels) > -self.doubt:
            good = [group for group in safe if self._is_good(held_out[group], held_out[best], *gains[group])]
        else:
            good = [group for group in safe if gains[group][0] > 2 * gains[group][1]]
        return Kept(good[-1] if good else (NETWORK,))

    def _is_good(self, one: HeldOut, best: HeldOut, gain: float, error: float) -> bool:
        loss, its_error = best.gain_over(one)
        if loss <= min(MARGIN, self.errors * its_error):
            return True
        return self.by_gain and gain > error and loss <= min(MARGIN, gain)

    def _is_safe(
        self, log_p: dict[Group, Tensor], labels: Tensor, group: Group, held_out: dict[Group, HeldOut]
    ) -> bool:
        if self.deviations is None:
            return True
        if not self.of_labels:
            return held_out[group].least_gain_over(held_out[NETWORK,], self.deviations) >= -HARM
        p = tempered(log_p[NETWORK,], labels)
        return float((p * (log_p[group] - log_p[NETWORK,])).sum(1).mean()) >= -HARM


@dataclass(frozen=True)
class OfLibrary:
    """What `fit(validation=)` keeps of linearised candidates, by its own code."""

    title: str
    groups: Callable[[Sequence[str]], list[Group]]
    several: bool = False

    def __call__(self, record: Record, rows: int) -> Kept:
        labels, log_p = _candidates(record, rows, self.groups)
        held_out = {group: _held_out(own, labels) for group, own in log_p.items()}
        network = held_out[NETWORK,]
        alone = Candidate(NETWORK, None, True, 1.0, 1.0, network, network.mean, is_network=True)
        found = {group: Candidate("", rank, True, 1.0, is_exact=True) for rank, group in enumerate(log_p)}
        for group, one in found.items():
            one.measured(held_out[group], network)
        del found[NETWORK,]
        rule = Library(alone, _too_sure(log_p[NETWORK,], labels) < -DOUBT, HARM, MIXED, self.several)
        own = list(found.values())
        kept = rule.tempered(own, "widest") or rule.widest(own)
        groups = {one.width: group for group, one in found.items()} | {None: (NETWORK,)}
        return Kept(groups[kept.width], 1.0 if kept.adjustment is None else kept.adjustment.value)


@dataclass(frozen=True)
class Temperature:
    """The network's own, of the highest held-out density."""

    title: str

    def groups(self, names: Sequence[str]) -> list[Group]:
        return [(NETWORK,)]

    def __call__(self, record: Record, rows: int) -> Kept:
        log_p, labels = record["log_p"]["held out"][NETWORK][:rows], record["labels"]["held out"][:rows]
        losses = torch.stack(list(label_losses(log_p.double(), labels, is_binary=False)), 1)
        return Kept((NETWORK,), exp(least(losses)))


def _candidates(record: Record, rows: int, groups: Callable[[Sequence[str]], list[Group]]):
    """Held-out labels, and log p of every candidate there, from narrow to wide, and of the network."""
    labels, every = record["labels"]["held out"][:rows], record["log_p"]["held out"]
    log_p = {group: _mixed([every[name][:rows] for name in group]) for group in groups(list(every))}
    return labels, log_p | {(NETWORK,): every[NETWORK][:rows].double()}


def _product(name: str) -> float:
    """Of both widths: "rest 0.1, last layer 4" → 0.4, "all 0.1" → 0.01."""
    numbers = [float(part.split()[-1]) for part in name.split(",")]
    return numbers[0] * numbers[-1]


def _mixed(log_p: Sequence[Tensor]) -> Tensor:
    return torch.stack([one.double() for one in log_p]).logsumexp(0) - log(len(log_p))


def tempered(log_p: Tensor, labels: Tensor) -> Tensor:
    """Class probabilities of the network at the 5 % quantile of its temperature, given labels."""
    each = (log_p / TEMPERATURES.exp().view(-1, 1, 1)).log_softmax(2)  # [T, B, C]
    density = each.gather(2, labels.view(1, -1, 1).expand(len(each), -1, 1)).squeeze(2).sum(1)
    below = density.softmax(0).cumsum(0)
    return each[int((below < 0.05).sum())].exp()


def _held_out(log_p: Tensor, labels: Tensor) -> HeldOut:
    total = log_p.gather(1, labels.unsqueeze(1)).squeeze(1)
    losses = torch.stack(list(label_losses(log_p, labels, is_binary=False)), 1)
    return HeldOut(total, torch.ones_like(total), losses)


def _too_sure(log_p: Tensor, labels: Tensor) -> float:
    """By how many standard errors."""
    entropy = -(log_p.exp() * log_p).sum(1)
    excess = -log_p.gather(1, labels.unsqueeze(1)).squeeze(1) - entropy
    return float(excess.mean() / excess.std()) * len(excess) ** 0.5


ALIKE = Rule("all tensors alike (at first)")
LAST_LAYER = Rule("and the last layer wider (before)", wider_last)
UP_TO = Rule("a width that is not known, up to c: the mixture of all", up_to)
FOUR = Rule("… four widths: c, c/2.5, c/6.25, c/15.6", shares(1, 2.5, 6.25, 15.625))
EIGHTY = replace(FOUR, title="… bound with 80 %", deviations=SOME)
GAINED = replace(EIGHTY, title="… or more gained than lost (before)", by_gain=True)
DOUBTED = replace(GAINED, title="… not sure enough by one standard error", doubt=1.0)
NOW = OfLibrary("… with a temperature where it gains two (now)", FOUR.groups)
TEMPERATURE = Temperature("temperature scaling of the network")
RULES = (
    ALIKE,
    replace(ALIKE, title="… no bound", deviations=None),
    replace(ALIKE, title="… bound with 90 %", deviations=MORE),
    replace(ALIKE, title="… bound with 80 %", deviations=SOME),
    replace(ALIKE, title="… bound under tempered labels", of_labels=True),
    replace(ALIKE, title="… the maximum", keep_best=True),
    LAST_LAYER,
    replace(LAST_LAYER, title="… bound with 90 %", deviations=MORE),
    replace(LAST_LAYER, title="… bound with 80 %", deviations=SOME),
    replace(LAST_LAYER, title="… no bound", deviations=None),
    replace(LAST_LAYER, title="… 22 of them", groups=lambda names: wider_last(names, all_of_them=True)),
    UP_TO,
    replace(UP_TO, title="… bound with 90 %", deviations=MORE),
    replace(UP_TO, title="… bound with 80 %", deviations=SOME),
    Rule("… two widths, c and c/4, bound with 80 %", shares(1, 4), SOME),
    Rule("… three, c, c/3 and c/10, bound with 80 %", shares(1, 3, 10), SOME),
    Rule("… three and the network, bound with 80 %", shares(1, 3, 10, with_network=True), SOME),
    FOUR,
    replace(FOUR, title="… bound with 90 %", deviations=MORE),
    EIGHTY,
    GAINED,
    DOUBTED,
    replace(DOUBTED, title="… as good is within one standard error", errors=1.0),
    NOW,
    replace(NOW, title="… as around several networks", several=True),
    TEMPERATURE,
    Rule("MC dropout, the best rate or the network", rates, keep_best=True),
    Rule("MC dropout, the best rate", rates, keep_best=True, with_network=False),
)


def table(found: list[Record]) -> str:
    """A table for each set, of "tables" one for each number of held-out rows."""
    sets = sorted({record["name"].split()[0] for record in found})
    pieces = []
    for name in sets:
        own = [record for record in found if record["name"].split()[0] == name]
        for rows in HELD_OUT if name == "tables" else (len(own[0]["labels"]["held out"]),):
            pieces.append(f"### {name}, {len(own)} networks, {rows} held-out rows\n\n{compared(own, rows, RULES)}")
    return "\n\n".join(pieces)


def compared(found: list[Record], rows: int, rules: Sequence[Rule | OfLibrary | Temperature]) -> str:
    lines = ["| rule | gain on test rows | worst | more than .01 worse | gain under shift | network kept |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    for rule in rules:
        if not all(rule.groups(list(record["log_p"]["held out"])) for record in found):
            continue  # networks without dropout have no candidates of it
        kept = [rule(record, rows) for record in found]
        test = [gain(record, one, "test") for record, one in zip(found, kept, strict=True)]
        shift = [gain(record, one, "shift") for record, one in zip(found, kept, strict=True)]
        worse = 100 * mean(value < -0.01 for value in test)
        network = 100 * mean(one.group == (NETWORK,) for one in kept)
        cells = f"{mean(test):+.4f} | {min(test):+.4f} | {worse:.0f} % | {mean(shift):+.3f} | {network:.0f} %"
        lines.append(f"| {rule.title} | {cells} |")
    return "\n".join(lines)


def gain(record: Record, kept: Kept, part: str) -> float:
    """In log density over the network, the mean over the parts whose name starts so."""
    found = []
    for key, own in record["log_p"].items():
        if key.startswith(part):
            labels = record["labels"][key].unsqueeze(1)
            log_p = (_mixed([own[name] for name in kept.group]) / kept.temperature).log_softmax(1)
            found.append(float((log_p.gather(1, labels) - own[NETWORK].double().gather(1, labels)).mean()))
    return mean(found)
