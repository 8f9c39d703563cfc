"""`diagnose`: everything there is to know about a fitted posterior, with a verdict in plain words."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..families.family import Family
from ..models.target import Target
from ..objective import Kind, NonFiniteError
from ..parameters import Parameters
from ..result import Result, Status
from ..train.data import Reread
from ..util.checks import check_seed
from ..util.progress import progress_bar
from .allowance import FEWEST_DRAWS, FEWEST_REPEATS, Allowance
from .gradients import gradient_noise
from .importance_weights import K_LIMIT, Importance, Moments, importance
from .low_rank_spectrum import low_rank_state, spectrum
from .problem import Problem, Unavailable
from .report import Finding, Report
from .what_was_learned import Learned, learned

if TYPE_CHECKING:
    from ..posterior import Posterior

#: q's moments are right where the corrected ones differ by no more: in standard deviations, and in part of one.
SHIFT_LIMIT = 0.1
WIDTH_LIMIT = 0.1
#: Where so many of q's draws are effective, the tail of their weights matters little below k̂ = 1.
MOST_EFFECTIVE = 0.8
#: From this k̂ on weights have no mean: they grow as they do towards a mode that q has not.
NO_MEAN = 1.0
#: Unless nearly all draws are effective, and weights under draws with tails end at a bound, well below k̂ = 0.
NEARLY_ALL, BOUNDED = 0.9, -0.5
#: k̂ of one set of draws has a standard error of 0.1: from the first value to the second more sets are taken.
NEAR_LIMITS, SETS = (0.5, 1.3), 5
#: With fewer effective draws the corrected mean itself is uncertain by more than `SHIFT_LIMIT`.
FEWEST_EFFECTIVE = 100
#: More units that are off in one layer are told.
MANY_UNITS = 0.5


def diagnose(
    q: "Posterior | Family",
    data: Target | Iterable[Any],
    *,
    result: Result | None = None,
    draws: int | None = None,
    gradients: bool = True,
    passes: float | None = None,
    progress: bool = True,
    seed: int = 0,
) -> Report:
    """Look at a fitted posterior from all sides: `print(bayes.diagnose(loader))`, or `diagnose(family, target)`.

    For a log density the report is a judgement of q itself. `sound` is False where k̂ ≥ 0.7, of q's draws or of those
    with tails (unless nothing is found beside q and k̂ < 1 and 80 % of q's draws are effective, or 90 % are and k̂ with
    tails is below −0.5), where
    importance-corrected moments differ from q's by more than 0.1 standard deviations or 10 % in any coordinate, where
    fewer than 100 draws are effective, where the ELBO is not finite, or where the fit says that it missed modes. Near
    its limits k̂ is the mean over five sets of draws. For a network, whose posterior no Gaussian matches, k̂ is reported
    with what it means, and `sound` is False where the fit is stuck or the ELBO not finite.

    Args:
        q: a posterior, or a bound family.
        data: the posterior's loader, or the family's target, such as `LogDensity`.
        result: what `posterior.fit` or `vi.fit_density` returned; that of the posterior's last fit if not given.
        draws: for the importance weights; at most 1000 for a network, each a pass over the data, and 10000 for a log
            density.
        gradients: measure the gradient's noise, which takes some hundred evaluations of a minibatch.
        passes: of a network, how many passes over the data, of one draw each, all of it may take. By default a tenth
            of the passes of its last fit (a step counts three for each of its draws), or as many as 10⁷ products of
            weights and observations; without a fit as many as it likes. The report says what was left out.
        progress: show what is being looked at, in a terminal.
        seed: of all draws.

    Example:
        >>> import torch
        >>> from structvi import LogDensity, MeanField
        >>> space = Parameters({"z": torch.zeros(2)})
        >>> target = LogDensity(lambda p: -0.5 * p["z"].square().sum(), space)
        >>> diagnose(MeanField(initial_scale=1 / 3).bind(space), target).sound  # scales of one: q is the target
        True
        >>> diagnose(MeanField(initial_scale=0.2).bind(space), target).sound
        False
    """
    check_seed(seed)
    problem = Problem.of(q, data)
    network = problem.posterior is not None
    if result is None and problem.posterior is not None:
        result = problem.posterior.last_fit
    allowed = Allowance.of(problem, result, passes, draws)
    findings: list[Finding] = []
    parts: dict[str, Any] = {}
    with progress_bar(total=4, label="diagnose", unit="part", show=progress) as stages:
        stages.set_postfix_str("ELBO")
        _elbo(problem, allowed, seed, findings, parts)
        stages.update()
        stages.set_postfix_str(f"importance weights of {allowed.draws} draws")
        _weights(q, data, problem, allowed, seed, findings, parts)
        stages.update()
        stages.set_postfix_str("what was learned")
        if result is not None:
            findings += _fit(result)
        if problem.posterior is not None and problem.batches is not None:
            read, most = problem.batches, allowed.batches[1]
            loader = read.loader if most is None else Reread(read, most)
            findings += _learned(problem.posterior, loader, seed + 3, parts)
        state = low_rank_state(problem.family())
        if state is not None and state.factor.shape[1]:
            findings.append(_low_rank(problem.family, parts))
        stages.update()
        stages.set_postfix_str("gradients")
        if gradients and any(parameter.requires_grad for parameter in problem.family.parameters()):
            _gradients(q, data, allowed, seed, findings, parts)
    sound, verdict = _verdict(findings, result, network)
    return Report(findings, sound, verdict, parts)


def _low_rank(family: Family, parts: dict[str, Any]) -> Finding:
    parts["spectrum"] = spectrum(family)
    level = "note" if parts["spectrum"].matter == 0 else "good"
    largest = parts["spectrum"].eigenvalues[:3].tolist()
    value = ", ".join(f"{x:.3g}" for x in largest) or "none"
    return Finding("low-rank part", value, level, parts["spectrum"].verdict)


def _weights(
    q: Any, data: Any, problem: Problem, allowed: Allowance, seed: int, findings: list[Finding], parts: dict[str, Any]
) -> None:
    """k̂, and where it allows them the corrected moments."""
    network, draws = problem.posterior is not None, allowed.draws
    try:
        if draws < 1:
            raise Unavailable(allowed.too_few("draws", FEWEST_DRAWS))
        weighted = importance(q, data, draws, seed=seed + 1)
    except (Unavailable, ImportError) as reason:
        findings.append(Finding("k̂", "not available", "not available", str(reason)))
    except NonFiniteError as reason:
        findings.append(Finding("k̂", "not finite", "bad", str(reason)))
    else:
        parts["importance"] = weighted
        k = weighted.k if network else _stable_k(q, data, weighted.k, draws, seed + 1)
        findings.append(_k(weighted, k, problem.space.size, network))
        if not network or weighted.k < K_LIMIT:
            parts["moments"] = weighted.moments()
            findings += _moments(weighted, parts["moments"], problem.space)


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


def _elbo(problem: Problem, allowed: Allowance, seed: int, findings: list[Finding], parts: dict[str, Any]) -> None:
    try:
        estimate = parts["elbo"] = problem.elbo(allowed.groups, seed, allowed.batches[0])
    except NonFiniteError as reason:
        findings.append(Finding("ELBO", "not finite", "bad", str(reason)))
        return
    if estimate.bound:
        text = "a lower bound of the log evidence, where prior and likelihood are normalised"
        findings.append(Finding("ELBO", str(estimate), "good", text + allowed.note()))
    else:
        text = "E log joint: part of q is a point mass, so this is no bound and ranks no families"
        findings.append(Finding("ELBO", str(estimate), "note", text + allowed.note()))


def _stable_k(q: Any, data: Any, k: float, draws: int, seed: int) -> float:
    """k̂ as the mean over several sets of draws where one says too little."""
    if not NEAR_LIMITS[0] <= k < NEAR_LIMITS[1]:
        return k
    more = [importance(q, data, draws, tails=False, seed=seed + 1000 * index).k for index in range(1, SETS)]
    return sum([k, *more]) / SETS


def _k(weighted: Importance, own: float, P: int, network: bool) -> Finding:
    k, S = max(own, weighted.k_weights if weighted.tails else own), len(weighted.log_weights)
    value = f"{k:.2f} of {S} draws"
    if k < K_LIMIT:
        text = "importance weights can be trusted: q covers the posterior, as far as its draws can see"
        return Finding("k̂", value, "good", text)
    bounded = bool(weighted.tails) and weighted.k_weights < BOUNDED and weighted.efficiency > NEARLY_ALL
    if not weighted.beside and (bounded or (k < NO_MEAN and weighted.efficiency > MOST_EFFECTIVE)):
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


def _moments(weighted: Importance, moments: Moments, space: Parameters) -> list[Finding]:
    effective = weighted.effective
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
            f"{worst_shift.item():.2f} ± {error:.2f} sd off at {_name(space, int(shift_at))}",
            "bad" if off else "good",
            "q's mean is not the posterior's: use corrected moments, importance(..).moments()" if off else "",
        ),
        Finding(
            "standard deviation",
            f"{ratio:.2f} of corrected at {_name(space, int(width_at))}",
            "bad" if wide else "good",
            f"q is too {'narrow' if ratio < 1 else 'wide'}: use corrected moments, or a richer family" if wide else "",
        ),
    ]


def _name(space: Parameters, index: int) -> str:
    for name, size in zip(space.names, space.numels, strict=True):
        if index < size:
            return f"{name}[{index}]" if size > 1 else name
        index -= size
    raise IndexError(index)


def _learned(posterior: "Posterior", loader: Iterable[Any], seed: int, parts: dict[str, Any]) -> list[Finding]:
    own: Learned = learned(posterior, loader, seed=seed)
    parts["learned"] = own
    said = [] if own.explained is None else [f"{100 * own.explained:.0f} % of variance explained"]
    said += [] if own.noise is None else [f"noise {own.noise:.2f} sd"]
    text = ""
    if own.stuck:
        text = f"stuck, or there is nothing to learn: {own.stuck}; start again, from another seed or a trained network"
    findings = [Finding("stuck", ", ".join(said) or "not known", "bad" if own.stuck else "good", text)]
    if own.units_off:
        layer, off = max(own.units_off.items(), key=lambda pair: pair[1])
        many = off > MANY_UNITS
        text = "the data need fewer units than there are, or the family switches them off, as mean field does"
        value = f"{100 * off:.0f} % of {layer}"
        findings.append(Finding("units off", value, "note" if many else "good", text if many else ""))
    if own.tensors:
        few = ", ".join(own.at_prior[:4]) + (", .." if len(own.at_prior) > 4 else "")
        text = f"the data say nothing about {few}: their posterior is their prior" if own.at_prior else ""
        value = f"{len(own.at_prior)} of {len(own.tensors)} tensors"
        findings.append(Finding("at the prior", value, "note" if own.at_prior else "good", text))
    return findings


def _gradients(
    q: Any, data: Any, allowed: Allowance, seed: int, findings: list[Finding], parts: dict[str, Any]
) -> None:
    if allowed.repeats < FEWEST_REPEATS:
        text = allowed.too_few("gradients", FEWEST_REPEATS)
        findings.append(Finding("gradient signal/noise", "not measured", "not available", text))
        return
    density = Problem.of(q, data).family()
    estimator: Kind = "path" if density.offers("log_prob") or not density.has_density else "entropy"
    noise = parts["gradients"] = gradient_noise(q, data, repeats=allowed.repeats, estimator=estimator, seed=seed + 2)
    own = noise.groups["paired"]
    value = ", ".join(f"{group} {ratio.snr:.2g}" for group, ratio in own.items())
    level = "note" if noise.noisy or noise.better else "good"
    findings.append(Finding("gradient signal/noise", value, level, "; ".join(noise.advice)))


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
