"""`diagnose`: a report on a fitted posterior, with a verdict in plain words."""

import textwrap
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..density.importance import K_LIMIT, Importance, Moments, Unavailable
from ..families.family import Family
from ..models.target import Target
from ..objective import Kind, NonFiniteError
from ..result import Result, Status
from ..util.checks import check_seed
from ..util.progress import progress_bar
from .gradients import gradient_noise
from .importance_weights import Problem, importance
from .learned import Learned, learned, spectrum

if TYPE_CHECKING:
    from ..posterior import Posterior

#: draws for importance weights: of a network, each a pass over the data; of a log density, five evaluations each
NETWORK_DRAWS, DRAWS = 100, 2000
#: groups of two draws for the ELBO, of a network and of a log density
NETWORK_GROUPS, GROUPS = 16, 64
#: q's moments are right if the corrected ones differ by less: in standard deviations, and as a share of one
SHIFT_LIMIT, WIDTH_LIMIT = 0.1, 0.1
#: share of effective draws from which the tail of their weights matters little below k̂ = 1
MOST_EFFECTIVE = 0.8
#: and from which weights that end at a bound, well below k̂ = 0 with tails, outweigh q's own k̂
NEARLY_ALL, BOUNDED = 0.9, -0.5
#: k̂ of one set of draws has a standard error of 0.1: between these values it is the mean over five sets
NEAR_LIMITS, SETS = (0.5, 1.3), 5
#: with fewer effective draws the corrected mean itself is uncertain by more than `SHIFT_LIMIT`
FEWEST_EFFECTIVE = 100

Level = Literal["good", "note", "bad", "not available"]
_MARKS: dict[Level, str] = {"good": "✓", "note": "·", "bad": "✗", "not available": "–"}


@dataclass(frozen=True)
class Finding:
    """One measurement: its value and its meaning."""

    name: str
    value: str
    level: Level
    meaning: str = ""


@dataclass(frozen=True)
class Report:
    """All findings. `print(report)` is a table, `report["k̂"]` one finding.

    Attributes:
        findings: in the order in which they were looked at.
        sound: False if something is bad; None if a measurement that decides was not available.
        verdict: the whole in a sentence.
        parts: name → the object a finding comes from: `Estimate`, `Importance`, `Moments`, `GradientNoise`, ..
    """

    findings: list[Finding]
    sound: bool | None
    verdict: str
    parts: dict[str, Any] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> Finding:
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(f"{name!r} was not looked at; there are {[finding.name for finding in self.findings]}")

    def __str__(self) -> str:
        names = max(_width(finding.name) for finding in self.findings)
        values = min(36, max(_width(finding.value) for finding in self.findings))
        indent = " " * (names + values + 6)
        lines = []
        for finding in self.findings:
            cells = [x + " " * (w - _width(x)) for x, w in ((finding.name, names), (finding.value, values))]
            head = f"{_MARKS[finding.level]} {cells[0]}  {cells[1]}  "
            meaning = textwrap.fill(finding.meaning, 120 - len(indent)).replace("\n", "\n" + indent)
            too_long = _width(finding.value) > values and meaning
            lines.append((f"{head.rstrip()}\n{indent}{meaning}" if too_long else head + meaning).rstrip())
        return "\n".join([*lines, "", self.verdict])

    __repr__ = __str__  # a notebook shows what print does


def diagnose(
    q: "Posterior | Family",
    data: Target | Iterable[Any],
    *,
    result: Result | None = None,
    draws: int | None = None,
    gradients: bool = True,
    progress: bool = True,
    seed: int = 0,
) -> Report:
    """Look at a fitted posterior from all sides: `print(bayes.diagnose(loader))`, or `diagnose(family, target)`.

    For a log density the report is a judgement of q itself. `sound` is False where k̂ ≥ 0.7, of q's draws or of those
    with tails (unless nothing is found beside q and k̂ < 1 and 80 % of q's draws are effective, or 90 % are and k̂ with
    tails is below −0.5), where importance-corrected moments differ from q's by more than 0.1 standard deviations or
    10 % in any coordinate, where fewer than 100 draws are effective, where the ELBO is not finite, or where the fit
    says that it missed modes. It takes about 16,000 evaluations, and 24,000 where k̂ is near a limit.

    No Gaussian matches a network's posterior: there the report explains k̂, and `sound` is False if the fit is stuck or
    the ELBO is not finite. It takes about 150 passes over the loader, of one draw each: `draws` of
    them for k̂, 32 for the ELBO.

    Args:
        q: a posterior, or a bound family.
        data: the posterior's loader, or the family's target, such as `LogDensity`.
        result: of `posterior.fit` or `vi.fit_density`; of the posterior's last fit if not given.
        draws: for the importance weights; 100 for a network, each a pass over the data, and 2000 for a log density.
        gradients: measure the gradient's noise, which takes some hundred evaluations of a minibatch.
        progress: show a bar, in a terminal.
        seed: of all draws.

    Example:
        >>> import torch
        >>> from structvi import LogDensity, MeanField, Parameters
        >>> space = Parameters({"z": torch.zeros(2)})
        >>> target = LogDensity(lambda p: -0.5 * p["z"].square().sum(), space)
        >>> diagnose(MeanField(initial_scale=1 / 3).bind(space), target).sound  # scales of one: q is the target
        True
        >>> diagnose(MeanField(initial_scale=0.2).bind(space), target).sound
        False
    """
    check_seed(seed)
    problem = Problem.of(q, data)
    posterior = problem.posterior
    network = posterior is not None
    if result is None and posterior is not None:
        result = posterior.last_fit
    findings: list[Finding] = []
    parts: dict[str, Any] = {}
    with progress_bar(total=4, label="diagnose", unit="part", show=progress) as bar:
        findings.append(_elbo(problem, seed, parts))
        bar.update()
        count = (NETWORK_DRAWS if network else DRAWS) if draws is None else draws
        findings += _weights(q, data, problem, count, seed, parts)
        bar.update()
        if result is not None:
            findings += _fit(result)
        if posterior is not None and problem.batches is not None:
            parts["learned"] = learned(posterior, problem.batches.loader, seed=seed + 3)
            findings.append(_learned(parts["learned"]))
        form = problem.family.normal()
        if form is not None and form.rank:
            own = parts["spectrum"] = spectrum(problem.family)
            value = ", ".join(f"{x:.3g}" for x in own.eigenvalues[:3].tolist()) or "none"
            findings.append(Finding("low-rank part", value, "good" if own.matter else "note", own.verdict))
        bar.update()
        if gradients and any(parameter.requires_grad for parameter in problem.family.parameters()):
            findings.append(_gradients(q, data, problem, seed, parts))
    sound, verdict = _verdict(findings, result, network)
    return Report(findings, sound, verdict, parts)


def _elbo(problem: Problem, seed: int, parts: dict[str, Any]) -> Finding:
    try:
        estimate = parts["elbo"] = problem.elbo(NETWORK_GROUPS if problem.posterior is not None else GROUPS, seed)
    except NonFiniteError as reason:
        return Finding("ELBO", "not finite", "bad", str(reason))
    if estimate.bound:
        text = "a lower bound of the log evidence, where prior and likelihood are normalised"
        return Finding("ELBO", str(estimate), "good", text)
    text = "E log joint: part of q is a point mass, so this is no bound and ranks no families"
    return Finding("ELBO", str(estimate), "note", text)


def _weights(q: Any, data: Any, problem: Problem, draws: int, seed: int, parts: dict[str, Any]) -> list[Finding]:
    """Return k̂ and, if it allows them, the corrected moments."""
    network = problem.posterior is not None
    try:
        weighted = importance(q, data, draws, seed=seed + 1)
    except (Unavailable, ImportError) as reason:
        return [Finding("k̂", "not available", "not available", str(reason))]
    except NonFiniteError as reason:
        return [Finding("k̂", "not finite", "bad", str(reason))]
    parts["importance"], k = weighted, weighted.k
    if not network and NEAR_LIMITS[0] <= k < NEAR_LIMITS[1]:
        sets = range(1, SETS)
        more = [importance(q, data, draws, tails=False, seed=seed + 1 + 1000 * index).k for index in sets]
        k = sum([k, *more]) / SETS
    found = [_k(weighted, k, problem.space.size, network)]
    if not network or weighted.k < K_LIMIT:
        parts["moments"] = weighted.moments()
        found += _moments(weighted, parts["moments"])
    return found


def _k(weighted: Importance, own: float, P: int, network: bool) -> Finding:
    k, S = max(own, weighted.k_weights if weighted.tails else own), len(weighted.log_weights)
    value = f"{k:.2f} of {S} draws"
    if k < K_LIMIT:
        text = "importance weights can be trusted: q covers the posterior, as far as its draws can see"
        return Finding("k̂", value, "good", text)
    bounded = bool(weighted.tails) and weighted.k_weights < BOUNDED and weighted.efficiency > NEARLY_ALL
    if not weighted.beside and (bounded or (k < 1.0 and weighted.efficiency > MOST_EFFECTIVE)):
        text = f"{100 * weighted.efficiency:.0f} % of the draws are effective: the tail of the weights matters little"
        return Finding("k̂", value, "good", text)
    if not network:
        corrected = "but corrected ones can" if weighted.k_weights < K_LIMIT else "nor can corrected ones"
        return Finding("k̂", value, "bad", f"q misses part of the posterior: its moments cannot be trusted, {corrected}")
    text = (
        f"q is not the posterior itself, as is to be expected of {P} weights: no importance weighting can correct it, "
        "and there are no corrected moments. It does not say that predictions are bad, nor that another family would "
        "predict better: judge predictions by held-out likelihood and coverage (evaluate), families by their ELBO"
    )
    return Finding("k̂", value, "note", text)


def _moments(weighted: Importance, moments: Moments) -> list[Finding]:
    effective, space = weighted.effective, weighted.space
    few = effective < FEWEST_EFFECTIVE
    worst_shift, shift_at = moments.shift.abs().max(0)
    worst_width, width_at = (moments.width - 1).abs().max(0)
    ratio = moments.width[width_at].item()
    error = (moments.standard_error / moments.sd)[shift_at].item()
    off = not worst_shift.item() <= SHIFT_LIMIT  # nan, where one draw has all weight, is off too
    wide = not worst_width.item() <= WIDTH_LIMIT
    return [
        Finding(
            "effective draws",
            f"{effective:.0f} of {len(weighted.weights)}",
            "bad" if few else "good",
            "too few for corrected moments: take more draws, or a family nearer to the posterior" if few else "",
        ),
        Finding(
            "mean",
            f"{worst_shift.item():.2f} ± {error:.2f} sd off at {space.label(int(shift_at))}",
            "bad" if off else "good",
            "q's mean is not the posterior's: use corrected moments, importance(..).moments()" if off else "",
        ),
        Finding(
            "standard deviation",
            f"{ratio:.2f} of corrected at {space.label(int(width_at))}",
            "bad" if wide else "good",
            f"q is too {'narrow' if ratio < 1 else 'wide'}: use corrected moments, or a richer family" if wide else "",
        ),
    ]


def _fit(result: Result) -> list[Finding]:
    level = "good" if result.converged else "bad" if result.status is Status.MISSED_MODES else "note"
    findings = [Finding("fit", result.verdict, level, "; ".join(result.notes))]
    if result.reached:
        counts = ", ".join(str(count) for count in result.reached)
        lonely = min(result.reached) == 1
        text = "one was reached by a single search: there may be more" if lonely else ""
        value = f"{len(result.reached)} seen; searches that ended at each: {counts}"
        findings.append(Finding("modes", value, "note" if lonely else "good", text))
    return findings


def _learned(own: Learned) -> Finding:
    said = [] if own.explained is None else [f"{100 * own.explained:.0f} % of variance explained"]
    said += [] if own.noise is None else [f"noise {own.noise:.2f} sd"]
    text = ""
    if own.stuck:
        text = f"stuck, or there is nothing to learn: {own.stuck}; start again, from another seed or a trained network"
    return Finding("stuck", ", ".join(said) or "not known", "bad" if own.stuck else "good", text)


def _gradients(q: Any, data: Any, problem: Problem, seed: int, parts: dict[str, Any]) -> Finding:
    density = problem.family()
    estimator: Kind = "path" if density.offers("log_prob") or not density.has_density else "entropy"
    noise = parts["gradients"] = gradient_noise(q, data, repeats=16, estimator=estimator, seed=seed + 2)
    value = ", ".join(f"{group} {ratio.snr:.2g}" for group, ratio in noise.groups["paired"].items())
    level: Level = "note" if noise.noisy or noise.better else "good"
    return Finding("gradient signal/noise", value, level, "; ".join(noise.advice))


def _verdict(findings: list[Finding], result: Result | None, network: bool) -> tuple[bool | None, str]:
    bad = [finding for finding in findings if finding.level == "bad"]
    if bad:
        return False, f"unsound: {'; '.join(f'{f.name} {f.value}' for f in bad)}"
    missing = next((f for f in findings if f.name == "k̂" and f.level == "not available"), None)
    if missing is not None and not network:
        return None, f"no verdict: k̂ is not available, for {missing.meaning}"
    if network and result is not None and not result.converged:
        return None, f"no verdict: the fit had not converged ({result.verdict}); call fit again, then diagnose"
    if network:
        return True, "nothing wrong was found with the fit; whether it predicts well, evaluate on held-out data"
    return True, "sound: q's means are within 0.1 sd and its standard deviations within 10 % of the corrected ones"


def _width(text: str) -> int:
    """Return the columns on a screen: the hat of k̂ takes none."""
    return sum(not unicodedata.combining(character) for character in text)
