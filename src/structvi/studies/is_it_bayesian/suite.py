"""`run`: methods on problems, a row for each pair."""

import sys
from collections.abc import Iterable, Sequence
from time import perf_counter

import torch
from torch import Tensor
from tqdm import tqdm

from ..paper.jobs import Job
from ..paper.jobs import run as run_jobs
from ..paper.settings import Settings
from .adapters import Adapter, NotApplicable, ours
from .measures import measure
from .methods import as_adapter
from .peers import PEERS
from .problems import PROBLEMS, Problem, problem
from .report import Report
from .rows import Row
from .verdicts import findings, verdict

#: draws of the method that are measured
DRAWS = 8192
#: the problems of `--quick`: the small ones, of each kind one
QUICK = ("correlated", "bimodal", "gaussian-10-100", "linear-regression", "rbf-regression", "logistic-regression")


def run(
    method: object,
    problems: Sequence[str | Problem] | str | Problem | None = None,
    *,
    seed: int = 0,
    progress: bool = True,
) -> Report:
    """Put one method, or several, to the question: is it Bayesian?

    Args:
        method: an adapter of yours with `name`, `fit(problem, seed)` and `draw(n, generator) -> [n, P]`, and
            `log_prob(theta) -> [S]` where there is a density; a family such as `StructuredNormal(4)`; a name such as
            "mean-field" or "laplace-torch"; or a list of these.
        problems: names of `PROBLEMS`, or `Problem`s of your own; all by default.
        seed: of fits and draws.
        progress: a bar, in a terminal.

    Returns:
        A `Report`: `print(report)` shows the table, `report.save(folder)` writes table, JSON and a page with pictures.

    Example:
        >>> from structvi import FullNormal
        >>> report = run(FullNormal(), problems=["gaussian-10-100"], progress=False)
        >>> report.rows[0].bayesian, report.rows[0].verdict[:13]
        (True, 'Bayesian here')
    """

    methods = method if isinstance(method, list | tuple) else [method]
    adapters = [as_adapter(one) for one in methods]
    chosen = [one if isinstance(one, Problem) else problem(one) for one in _names(problems)]
    if not adapters or not chosen:
        raise ValueError("nothing to do: give at least one method and one problem")
    names = [adapter.name for adapter in adapters]
    if len(set(names)) < len(names):
        raise ValueError(f"two methods have the same name, {names}; name one: structvi.check.Ours(family, name)")
    pairs = [(adapter, one) for one in chosen for adapter in adapters]
    rows = []
    with tqdm(total=len(pairs), disable=not (progress and sys.stderr.isatty())) as bar:
        for adapter, one in pairs:
            bar.set_postfix_str(f"{adapter.name}: {one.name}")
            rows.append(examine(adapter, one, seed))
            bar.update()
    return Report(tuple(rows), {one.name: one for one in chosen}, seed)


def method_names(text: str) -> list[str]:
    """From "mean-field,full", "ours", "peers" or "all"."""
    groups = {"ours": list(ours()), "peers": list(PEERS), "all": [*ours(), *PEERS]}
    return _known(text, groups, "method")


def problem_names(text: str, quick: bool) -> list[str]:
    """From "bimodal,network" or "all"; of all the quick ones where asked for."""
    return _known(text, {"all": list(QUICK if quick else PROBLEMS)}, "problem", list(PROBLEMS))


def _known(text: str, groups: dict[str, list[str]], what: str, names: Sequence[str] = ()) -> list[str]:
    known = names or groups["all"]
    chosen = [name for part in text.split(",") if part for name in groups.get(part.strip(), [part.strip()])]
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        wrong = ", ".join(map(repr, unknown or [text]))
        raise ValueError(f"there is no {what} {wrong}; there are {', '.join([*groups, *known])}")
    return list(dict.fromkeys(chosen))


def run_named(methods: Sequence[str], problems: Sequence[str], seed: int, workers: int) -> Report:
    """`run` for names, in several processes; the result is the same."""
    jobs = [
        Job(f"{name}: {method}", _examine_named, (method, name, seed), WEIGHTS.get(name, 1.0))
        for name in sorted(problems, key=lambda name: -WEIGHTS.get(name, 1.0))  # the long ones first
        for method in methods
    ]
    found = {job.arguments[:2]: row for job, row in zip(jobs, run_jobs(jobs, workers), strict=True)}
    rows = tuple(found[method, name] for name in problems for method in methods)
    return Report(rows, {name: problem(name) for name in problems}, seed)


#: how long fits take beside those of a small problem
WEIGHTS = {"network": 15.0, "gaussian-50-10000": 3.0, "gaussian-50-100": 2.0, "gaussian-50-1": 2.0}


def _examine_named(method: str, name: str, seed: int) -> Row:
    return examine(as_adapter(method), problem(name), seed)


def _names(problems: Sequence[str | Problem] | str | Problem | None) -> Iterable[str | Problem]:
    if problems is None:
        return list(PROBLEMS)
    return [problems] if isinstance(problems, str | Problem) else problems


def examine(adapter: Adapter, on: Problem, seed: int) -> Row:
    """Fit, draw, measure, judge."""
    began = perf_counter()
    try:
        adapter.fit(on, seed)
    except NotApplicable as reason:
        return Row(adapter.name, on.name, f"not applicable: {reason}", None, perf_counter() - began)
    seconds = perf_counter() - began
    theta = _draws(adapter, on, Settings(seed).generator("check draws", on.name))
    with torch.no_grad():
        measures = measure(on, theta, getattr(adapter, "log_prob", None))
    found = tuple(findings(on, measures))
    words = verdict(on, measures)
    return Row(adapter.name, on.name, words, not found, seconds, measures, found, sketch(on, theta))


def _draws(adapter: Adapter, on: Problem, generator: torch.Generator) -> Tensor:
    theta = adapter.draw(DRAWS, generator)
    if not isinstance(theta, Tensor) or theta.shape != (DRAWS, on.P):
        came = tuple(theta.shape) if isinstance(theta, Tensor) else type(theta).__name__
        raise ValueError(
            f"{adapter.name}: draw(n, generator) must give a tensor [n, P] = [{DRAWS}, {on.P}] of draws of θ in the "
            f"order of problem.space, got {came}"
        )
    if not torch.isfinite(theta).all():
        raise ValueError(f"{adapter.name}: draw gave numbers that are not finite on {on.name}")
    return theta.detach().double()


def sketch(on: Problem, theta: Tensor) -> Tensor | None:
    """What the pictures show of draws [S, P]."""
    if on.data is not None and on.data.curve:
        levels = torch.tensor([0.05, 0.5, 0.95], dtype=theta.dtype)
        return torch.quantile(on.outputs(theta[:2000]), levels, dim=0)
    return theta[:400] if on.P == 2 else None
