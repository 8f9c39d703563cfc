"""`run`: methods on problems, a row for each pair."""

import traceback
from collections.abc import Iterable, Sequence
from math import isnan
from time import perf_counter

import torch
from torch import Tensor
from tqdm import tqdm

from structvi.util.checks import check_seed
from structvi.util.live import is_live
from structvi_paper.jobs import Job
from structvi_paper.jobs import run as run_jobs
from structvi_paper.settings import Settings

from .adapters import Adapter, NotApplicable, ours
from .isolation import Failed, at_work
from .measures import measure
from .methods import as_adapter
from .peers import PEERS
from .problems import PROBLEMS, Problem, fresh
from .report import Report
from .rows import Row
from .verdicts import findings, verdict

#: draws of the method that are measured
DRAWS = 8192
#: seconds that a method may take for one problem: its fit, its draws and their density
TIMEOUT = 600.0
#: the problems of `--quick`: the small ones, of each kind one
QUICK = ("correlated", "bimodal", "gaussian-10-100", "linear-regression", "rbf-regression", "logistic-regression")


def run(
    method: object,
    problems: Sequence[str | Problem] | str | Problem | None = None,
    *,
    seed: int = 0,
    timeout: float | None = TIMEOUT,
    progress: bool = True,
) -> Report:
    """Put one method, or several, to the question: is it Bayesian?

    Each method meets each problem in a process of its own, which has not the reference that its draws are compared
    with afterwards. Where it raises, takes too long or dies, its row says so, and the others go on.

    Args:
        method: an adapter of yours with `name`, `fit(problem, seed)` and `draw(n, generator) -> [n, P]`, and
            `log_prob(theta) -> [S]` where there is a density; a family such as `LowRankNormal(4)`; a name such as
            "mean-field" or "laplace-torch"; or a list of these.
        problems: names of `PROBLEMS`, or `Problem`s of your own; all by default.
        seed: of fits and draws.
        timeout: seconds that a method may take for one problem, then its process is killed; None for no limit.
        progress: a bar, in a terminal.

    Returns:
        A `Report`: `print(report)` shows the table, `report.save(folder)` writes table, JSON and a page with pictures.

    Example:
        >>> from structvi import FullNormal
        >>> report = run(FullNormal(), problems=["gaussian-10-100"], progress=False)
        >>> report.rows[0].bayesian, report.rows[0].verdict[:13]
        (True, 'Bayesian here')
    """
    check_seed(seed)

    check_timeout(timeout)
    methods = method if isinstance(method, list | tuple) else [method]
    adapters = [as_adapter(one) for one in methods]
    chosen = [one if isinstance(one, Problem) else fresh(one) for one in _names(problems)]
    if not adapters or not chosen:
        raise ValueError("nothing to do: give at least one method and one problem")
    names = [adapter.name for adapter in adapters]
    if len(set(names)) < len(names):
        raise ValueError(f"two methods have the same name, {names}; name one: structvi_check.Ours(family, name)")
    # a name stays one: where a process is spawned, what it stands for need not be sent
    given = [one if isinstance(one, str) else adapter for one, adapter in zip(methods, adapters, strict=True)]
    pairs = [(one, name, on) for on in chosen for one, name in zip(given, names, strict=True)]
    rows = []
    with tqdm(total=len(pairs), disable=not (progress and is_live())) as bar:
        for one, name, on in pairs:
            bar.set_postfix_str(f"{name}: {on.name}")
            rows.append(examine(one, on, seed, timeout))
            bar.update()
    return Report(tuple(rows), {one.name: one for one in chosen}, seed)


def check_timeout(timeout: float | None) -> None:
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float)):
        raise TypeError(f"timeout must be a number of seconds or None, got {timeout!r}")
    if timeout is not None and (isnan(timeout) or timeout <= 0):
        raise ValueError(f"timeout must be seconds above zero, or None for no limit, got {timeout!r}")


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


def run_named(
    methods: Sequence[str], problems: Sequence[str], seed: int, workers: int, timeout: float | None = TIMEOUT
) -> Report:
    """`run` for names, several at a time; the result is the same."""
    check_timeout(timeout)
    jobs = [
        Job(f"{name}: {method}", _examine_named, (method, name, seed, timeout), WEIGHTS.get(name, 1.0))
        for name in sorted(problems, key=lambda name: -WEIGHTS.get(name, 1.0))  # the long ones first
        for method in methods
    ]
    found = {job.arguments[:2]: row for job, row in zip(jobs, run_jobs(jobs, workers), strict=True)}
    rows = tuple(found[method, name] for name in problems for method in methods)
    return Report(rows, {name: fresh(name) for name in problems}, seed)


#: how long fits take beside those of a small problem
WEIGHTS = {"network": 15.0, "gaussian-50-10000": 3.0, "gaussian-50-100": 2.0, "gaussian-50-1": 2.0}


def _examine_named(method: str, name: str, seed: int, timeout: float | None) -> Row:
    return examine(method, fresh(name), seed, timeout)


def _names(problems: Sequence[str | Problem] | str | Problem | None) -> Iterable[str | Problem]:
    if problems is None:
        return list(PROBLEMS)
    return [problems] if isinstance(problems, str | Problem) else problems


def examine(method: Adapter | str, on: Problem, seed: int, timeout: float | None = TIMEOUT) -> Row:
    """Fit and draw, in a process that does not have the reference; measure and judge, in this one."""
    name, began = as_adapter(method).name, perf_counter()
    generator = Settings(seed).generator("check draws", on.name)
    try:
        with at_work(method, on, seed, DRAWS, generator, timeout) as work:
            theta, seconds, dense = work.draws()
            with torch.no_grad():
                measures = measure(on, theta, work.log_prob if dense else None)
    except NotApplicable as reason:
        return Row(name, on.name, f"not applicable: {reason}", None, perf_counter() - began)
    except Failed as failure:
        return _failed(name, on, str(failure), perf_counter() - began, failure.details)
    except Exception as error:  # of a problem of the user's own, say: the other rows are not lost
        words = f"its draws could not be measured: {type(error).__name__}: {error}"
        return _failed(name, on, words, perf_counter() - began, traceback.format_exc())
    found = tuple(findings(on, measures))
    words = verdict(on, measures)
    return Row(name, on.name, words, not found, seconds, measures, found, sketch=sketch(on, theta))


def _failed(name: str, on: Problem, words: str, seconds: float, details: str) -> Row:
    return Row(name, on.name, f"no result: {words}", None, seconds, failed=True, details=details)


def sketch(on: Problem, theta: Tensor) -> Tensor | None:
    """What the pictures show of draws [S, P]."""
    if on.data is not None and on.data.curve:
        levels = torch.tensor([0.05, 0.5, 0.95], dtype=theta.dtype)
        return torch.quantile(on.outputs(theta[:2000]), levels, dim=0)
    return theta[:400] if on.P == 2 else None
