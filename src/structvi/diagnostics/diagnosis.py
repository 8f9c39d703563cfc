"""`diagnose`: a report on a fitted posterior, with a verdict in plain words."""

import textwrap
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..density.importance import K_LIMIT, Importance, Unavailable
from ..families.family import Family
from ..models.target import Target
from ..objective import Estimate, Estimator, NonFiniteError, elbo_terms
from ..result import Result, Status
from ..util.checks import check_seed
from ..util.progress import progress_bar
from .importance_weights import check_pair, importance
from .learned import learned

if TYPE_CHECKING:
    from ..posterior import Posterior

#: draws for importance weights, and groups of two draws for the ELBO: of a network, and of a log density
DRAWS, GROUPS = (100, 2000), (16, 64)
#: q's moments are right if corrected ones differ by less, in standard deviations and as a share of one
LIMIT = 0.1
#: with fewer effective draws the corrected mean itself is uncertain by more than `LIMIT`
FEWEST_EFFECTIVE = 1 / LIMIT**2

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
        parts: name → the object a finding comes from: `Estimate`, `Importance`, `Moments`, `Learned`.
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
        lines = []
        for finding in self.findings:
            cells = [x + " " * (w - _width(x)) for x, w in ((finding.name, names), (finding.value, values))]
            head = f"{_MARKS[finding.level]} {cells[0]}  {cells[1]}  "
            indent = " " * (names + values + 6)
            if _width(finding.value) > values:
                lines.append(head.rstrip())
                if not finding.meaning:
                    continue
                head = indent
            lines.append(textwrap.fill(finding.meaning, 120, initial_indent=head, subsequent_indent=indent) or head)
        return "\n".join([*(line.rstrip() for line in lines), "", self.verdict])

    __repr__ = __str__  # a notebook shows what print does


def diagnose(
    q: "Posterior | Family",
    data: Target | Iterable[Any],
    *,
    result: Result | None = None,
    draws: int | None = None,
    progress: bool = True,
    seed: int = 0,
) -> Report:
    """Look at a fitted posterior from all sides: `print(bayes.diagnose(loader))`, or `diagnose(family, target)`.

    For a log density the report is a judgement of q itself, by corrected moments. `sound` is False where they differ
    from q's by more than 0.1 standard deviations or 10 % in any coordinate, where fewer than 100 draws are effective or
    k̂ of all draws is 0.7 or more, where the ELBO is not finite, or where the fit says that it missed modes. It takes
    about 14,000 evaluations.

    No Gaussian matches a network's posterior: there the report explains k̂, and `sound` is False if the fit is stuck or
    the ELBO is not finite. It takes about 150 passes over the loader, of one draw each: `draws` of
    them for k̂, 32 for the ELBO.

    Args:
        q: a posterior, or a bound family.
        data: the posterior's loader, or the family's target, such as `LogDensity`.
        result: of `posterior.fit` or `vi.fit_density`; of the posterior's last fit if not given.
        draws: for the importance weights; 100 for a network, each a pass over the data, and 2000 for a log density.
        progress: show a bar, in a terminal.
        seed: of all draws.

    Example:
        >>> from structvi import LogDensity, MeanField, Parameters
        >>> space = Parameters({"z": torch.zeros(2)})
        >>> target = LogDensity(lambda p: -0.5 * p["z"].square().sum(), space)
        >>> diagnose(MeanField(initial_scale=1 / 3).bind(space), target).sound  # scales of one: q is the target
        True
        >>> diagnose(MeanField(initial_scale=0.2).bind(space), target).sound
        False
    """
    check_seed(seed)
    check_pair(q, data)
    is_network = not isinstance(q, Family)
    result = q.last_fit if result is None and is_network else result
    findings: list[Finding] = []
    parts: dict[str, Any] = {}
    with progress_bar(total=3, label="diagnose", unit="part", show=progress) as bar:
        findings.append(_elbo(q, data, seed, parts))
        bar.update()
        findings += _weights(q, data, draws or DRAWS[0 if is_network else 1], seed + 1, parts)
        bar.update()
        if result is not None:
            level = "good" if result.converged else "bad" if result.status is Status.MISSED_MODES else "note"
            findings.append(Finding("fit", result.verdict, level, "; ".join(result.notes)))
        if is_network:
            assert not isinstance(data, Target)
            findings.append(_learned(q, data, seed + 3, parts))
        bar.update()
    sound, verdict = _verdict(findings, result, is_network)
    return Report(findings, sound, verdict, parts)


def _elbo(q: "Posterior | Family", data: Any, seed: int, parts: dict[str, Any]) -> Finding:
    try:
        if isinstance(q, Family):
            density = q()
            estimator = Estimator("log_q" if density.offers("log_prob") else "entropy", GROUPS[1])
            generator = torch.Generator(density.mean.device).manual_seed(seed)
            with torch.no_grad():
                terms = elbo_terms(q, data, None, estimator, generator)
            estimate = Estimate.of(terms.objective(), density.bound)
        else:
            estimate = q.elbo(data, groups=GROUPS[0], generator=torch.Generator(q.device).manual_seed(seed))
    except NonFiniteError as reason:
        return Finding("ELBO", "not finite", "bad", str(reason))
    parts["elbo"] = estimate
    if estimate.bound:
        text = "a lower bound of the log evidence, where prior and likelihood are normalised"
        return Finding("ELBO", str(estimate), "good", text)
    text = "E log joint: part of q is a point mass, so this is no bound and ranks no families"
    return Finding("ELBO", str(estimate), "note", text)


def _weights(q: "Posterior | Family", data: Any, draws: int, seed: int, parts: dict[str, Any]) -> list[Finding]:
    """Return k̂ and, if it allows them, the corrected moments."""
    try:
        weighted = parts["importance"] = importance(q, data, draws, seed=seed)
    except (Unavailable, ImportError) as reason:
        return [Finding("k̂", "not available", "not available", str(reason))]
    except NonFiniteError as reason:
        return [Finding("k̂", "not finite", "bad", str(reason))]
    value, level = f"{weighted.k:.2f} of {draws} draws", "good"
    text = "importance weights can be trusted: q covers the posterior, as far as its draws can see"
    if not isinstance(q, Family) and not weighted.trusted:
        text = (
            f"q is not the posterior itself, as is to be expected of {weighted.space.size} weights: no importance "
            "weighting can correct it, and there are no corrected moments. It does not say that predictions are bad, "
            "nor that another family would predict better: judge predictions by held-out likelihood and coverage "
            "(evaluate), families by their ELBO"
        )
        return [Finding("k̂", value, "note", text)]
    if not weighted.trusted:
        text = "q misses part of the posterior: neither its moments nor corrected ones can be trusted"
        level, text = "bad", f"{text}, k̂ with tails is {weighted.k_weights:.2f}"
    elif weighted.k >= K_LIMIT:
        level, text = "note", "draws of q miss part of the posterior; corrected moments can be trusted"
    return [Finding("k̂", value, level, text), *_moments(weighted, parts)]


def _moments(weighted: Importance, parts: dict[str, Any]) -> list[Finding]:
    moments = parts["moments"] = weighted.moments()
    effective, label = weighted.effective, weighted.space.label
    is_few = effective < FEWEST_EFFECTIVE
    shift, shift_at = moments.shift.abs().max(0)
    wide, width_at = (moments.width - 1).abs().max(0)
    ratio, error = moments.width[width_at].item(), (moments.standard_error / moments.sd)[shift_at].item()
    is_off, is_wide = not shift.item() <= LIMIT, not wide.item() <= LIMIT  # nan, where one draw has all weight, too
    few = "too few for corrected moments: take more draws, or a family nearer to the posterior"
    off = "q's mean is not the posterior's: use corrected moments, importance(..).moments()"
    width = f"q is too {'narrow' if ratio < 1 else 'wide'}: use corrected moments, or a richer family"
    return [
        _judged("effective draws", f"{effective:.0f} of {len(weighted.weights)}", is_few, few),
        _judged("mean", f"{shift.item():.2f} ± {error:.2f} sd off at {label(int(shift_at))}", is_off, off),
        _judged("standard deviation", f"{ratio:.2f} of corrected at {label(int(width_at))}", is_wide, width),
    ]


def _judged(name: str, value: str, is_bad: bool, meaning: str) -> Finding:
    return Finding(name, value, "bad", meaning) if is_bad else Finding(name, value, "good")


def _learned(q: "Posterior", loader: Iterable[Any], seed: int, parts: dict[str, Any]) -> Finding:
    own = parts["learned"] = learned(q, loader, seed=seed)
    said = [] if own.explained is None else [f"{100 * own.explained:.0f} % of variance explained"]
    said += [] if own.noise is None else [f"noise {own.noise:.2f} sd"]
    why = f"stuck, or there is nothing to learn: {own.stuck}; start again, from another seed or a trained network"
    return _judged("stuck", ", ".join(said) or "not known", own.stuck is not None, why)


def _verdict(findings: list[Finding], result: Result | None, is_network: bool) -> tuple[bool | None, str]:
    bad = [finding for finding in findings if finding.level == "bad"]
    if bad:
        return False, f"unsound: {'; '.join(f'{f.name} {f.value}' for f in bad)}"
    if is_network and result is not None and not result.converged:
        return None, f"no verdict: the fit had not converged ({result.verdict}); call fit again, then diagnose"
    if is_network:
        return True, "nothing wrong was found with the fit; whether it predicts well, evaluate on held-out data"
    for finding in findings:
        if finding.level == "not available":
            return None, f"no verdict: {finding.name} is not available, for {finding.meaning}"
    return True, "sound: q's means are within 0.1 sd and its standard deviations within 10 % of the corrected ones"


def _width(text: str) -> int:
    """Return the columns on a screen: the hat of k̂ takes none."""
    return sum(not unicodedata.combining(character) for character in text)
