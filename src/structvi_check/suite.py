"""`run`: methods on problems, a row for each pair."""

from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter

import torch

import structvi as vi
from structvi_paper.processes import processes
from structvi_paper.settings import Settings

from .isolation import Failed, fit_apart
from .measures import measure
from .methods import Adapter, NotApplicable, Ours, ours
from .peers import PEERS
from .problems import PROBLEMS, REFERENCE, Problem
from .problems import problem as named_problem
from .report import Report, Row
from .verdicts import findings, verdict

#: the problems of `--quick`: the small ones, of each kind one
QUICK = ("correlated", "bimodal", "gaussian-10-100", "linear-regression", "rbf-regression", "logistic-regression")


def run(
    method: object,
    problems: Sequence[str | Problem] | str | Problem | None = None,
    *,
    seed: int = 0,
    timeout: float | None = 600.0,
    workers: int = 1,
) -> Report:
    """Put one method, or several, to the question: is it Bayesian?

    Each method meets each problem in a process of its own, without the reference that its draws are compared with
    afterwards. If it raises, takes too long or dies, its row says so, and the others go on.

    Args:
        method: an adapter of yours with `name`, `fit(problem, seed)` and `draw(n, generator) -> [n, P]`, and
            `log_prob(theta) -> [S]` where there is a density; a family such as `LowRankNormal(4)`; a name such as
            "mean-field" or "swag"; or a list of these.
        problems: names of `PROBLEMS`, or `Problem`s of your own; all by default.
        seed: of fits and draws.
        timeout: seconds that a method may take for one problem, then its process is killed; None for no limit.
        workers: rows that are computed at a time; with more than one, methods and problems must be names.

    Returns:
        A `Report`: `print(report)` shows the table, `report.save(folder)` writes table, JSON and a page.

    Example:
        >>> from structvi import FullNormal
        >>> report = run(FullNormal(), problems=["gaussian-10-100"])
        >>> report.rows[0].bayesian, report.rows[0].verdict[:13]
        (True, 'Bayesian here')
    """
    if timeout is not None and not timeout > 0:  # NaN neither
        raise ValueError(f"timeout must be seconds above zero, or None for no limit, got {timeout!r}")
    methods = list(method) if isinstance(method, list | tuple) else [method]
    names = [as_method(one).name for one in methods]
    wanted = list(PROBLEMS) if problems is None else [problems] if isinstance(problems, str | Problem) else problems
    chosen = [one if isinstance(one, Problem) else named_problem(one) for one in wanted]
    if not methods or not chosen:
        raise ValueError("nothing to do: give at least one method and one problem")
    if len(set(names)) < len(names):
        raise ValueError(f"two methods have the same name, {names}; name one: structvi_check.Ours(family, name)")
    with processes(workers) as starmap:
        rows = starmap("check", examine, [(one, on, seed, timeout) for on in wanted for one in methods])
    return Report(tuple(rows), {one.name: one for one in chosen}, seed)


def as_method(method: object) -> Adapter:
    """Return a method in the form that is examined; it may be an adapter, a family, or a name."""
    if isinstance(method, str):
        known = ours()
        if method not in known and method not in PEERS:
            raise ValueError(f"there is no method {method!r}; there are {', '.join([*known, *PEERS])}")
        return known[method] if method in known else PEERS[method]()
    if isinstance(method, vi.Family):
        return Ours(method)
    if not isinstance(method, Adapter) or isinstance(method, type) or not isinstance(method.name, str):
        raise TypeError(
            "a method is an object with a text `name`, `fit(problem, seed)` and `draw(n, generator) -> [n, P]`; got "
            f"{method!r}"
        )
    return method


def names_in(text: str, groups: Mapping[str, Iterable[str]], what: str) -> list[str]:
    """Return the names in a text such as "mean-field,swag,all", where a group stands for its names."""
    chosen = [name for part in text.split(",") for name in groups.get(part.strip(), [part.strip()])]
    known = groups["all"]
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise ValueError(
            f"there is no {what} {', '.join(map(repr, unknown))}; there are {', '.join([*groups, *known])}"
        )
    return list(dict.fromkeys(chosen))


def method_names(text: str) -> list[str]:
    """Return the names in "mean-field,full", "ours", "peers" or "all"."""
    return names_in(text, {"ours": ours(), "peers": PEERS, "all": {**ours(), **PEERS}}, "method")


def problem_names(text: str, quick: bool) -> list[str]:
    """Return the names in "bimodal,network", "quick" or "all", which is "quick" if that was asked for."""
    return names_in("quick" if quick and text == "all" else text, {"quick": QUICK, "all": PROBLEMS}, "problem")


def examine(method: object, problem: str | Problem, seed: int, timeout: float | None) -> Row:
    """Fit and draw, in a process that does not have the reference; measure and judge, in this one."""
    on = problem if isinstance(problem, Problem) else named_problem(problem)
    adapter, began = as_method(method), perf_counter()
    generator = Settings(seed).generator("check draws", on.name)
    try:
        fitted = fit_apart(adapter, on, seed, REFERENCE, generator, timeout)
    except NotApplicable as reason:
        return Row(adapter.name, on.name, f"not applicable: {reason}", None, perf_counter() - began)
    except Failed as failure:
        words, seconds = f"no result: {failure.words}", perf_counter() - began
        return Row(adapter.name, on.name, words, None, seconds, failed=True, details=failure.details)
    with torch.no_grad():
        measures = measure(on, fitted.theta, fitted.log_q)
    found, words = tuple(findings(on, measures)), verdict(on, measures)
    return Row(adapter.name, on.name, words, not found, fitted.seconds, measures, found)
