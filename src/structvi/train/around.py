"""A posterior around a trained network without a step: `fit(loader, validation=held_out)`.

The mean is held at the trained weights θ₀, the precision is the curvature's (`warm_start.py`), and what the user left
open is chosen:

- the prior's width c: N(0, (c·rms)²), rms that of each tensor's trained values. Weights before a normalisation can be
  multiplied by any number without a change of the network, and with this unit without a change of its posterior. The
  width is not known but for its largest value: the posterior is the equal mixture of those of several widths up to c.
  It is heavy-tailed: that costs little on data like the training data, where they agree, and gains most on others;
- whether the network is linearised at θ₀, or called at drawn weights;
- the family, a scale mixture of the precision form: its leading directions are those in which the data say most.

With held-out data the choice is theirs: the *widest* posterior whose log density is within `MARGIN` nats of the best
candidate's, and within a paired standard error of it or not more below it than above the network, which is itself
among the candidates. The widest, since it costs nothing where data are like the training data, and is what gains where
they are not; and none that the data let be more than `HARM` nats worse than the network. `keep="best"` takes the
maximum. Where the network is not sure enough already, a posterior must gain to be taken (`candidates.py`). Without
held-out data c = `WIDTH`, linearised.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..couplings import naive, paired
from ..families.precision import LowRankPrecision
from ..families.scale_mixture import ScaleMixture
from ..models.calibration import Calibration
from ..models.likelihoods import Likelihood
from ..objective import Estimate, NonFiniteError, not_finite
from ..result import Status
from .batches import Batches, Reread, held_out_batches
from .candidates import PARTS, RANK, WIDTH, Around, Candidate, candidates_of, relative_prior
from .comparing import worth_on_seed
from .constant_predictor import Watched
from .held_out import DRAWS, OUTPUT_DRAWS, HeldOut, of_network
from .measuring import chosen
from .noise import Noise
from .notes import notes_on_bound
from .probing import linear_obstacle
from .result import FitResult, History
from .validation import PREFERRED
from .warm_start import curvature_of, trained_values, with_residual_noise

if TYPE_CHECKING:
    from ..posterior import Posterior
    from .laplace import Placing

UNCERTAIN = (
    "of every posterior the held-out data allow that it is worse than the network: what is kept is a narrow normal "
    "around it; more held-out rows would tell more"
)
#: groups of draws of the ELBO that is reported; batches, at most, and the share of the data that they are at most
GROUPS, BATCHES, SHARE = 2, 4, 0.1


def fit_around(posterior: "Posterior", batches: Batches, options: "Placing", notes: list[str]) -> FitResult:
    """Place the posterior, choose what is open, and say what came of it."""
    around = _prepared(posterior, batches, options)
    network = None
    if options.validation is None:
        candidates = candidates_of([around], options)
        kept = candidates[0]
    else:
        kept, alone, candidates = chosen([around], _held_out(options, posterior), options)
        network = alone.held_out
    return _placed(around, batches, options, notes, candidates, kept, network)


class Together(NamedTuple):
    """Posteriors around several networks, placed alike: what was chosen of the equal mixture of them."""

    members: list[FitResult]
    kept: Candidate
    #: the average over the networks themselves
    ensemble: Candidate
    candidates: list[Candidate]


def fit_around_together(
    members: "Sequence[tuple[Posterior, Batches, list[str]]]", options: "Placing", may_temper: bool = True
) -> Together:
    """Place a posterior around each network, of one width for all: that which suits their mixture.

    What suits each by itself is too wide for the mixture, whose members differ already. A temperature on top is the
    mixture's, and no member has it.
    """
    own = [replace(options, seed=options.seed + c) for c in range(len(members))]
    arounds = [_prepared(one, data, mine) for (one, data, _), mine in zip(members, own, strict=True)]
    kept, ensemble, candidates = chosen(arounds, _held_out(options, members[0][0]), options, may_temper)
    results = [
        _placed(around, data, mine, notes, [], kept.untempered, None)
        for around, (_, data, notes), mine in zip(arounds, members, own, strict=True)
    ]
    return Together(results, kept, ensemble, candidates)


def _held_out(options: "Placing", posterior: "Posterior") -> Reread:
    assert options.validation is not None
    return held_out_batches(options.validation, options.seed, posterior.device)


def _placed(
    around: Around,
    batches: Batches,
    options: "Placing",
    notes: list[str],
    candidates: list[Candidate],
    kept: Candidate,
    network: HeldOut | None,
) -> FitResult:
    around.place_kept(kept, batches.everything(1))
    posterior = around.posterior
    if kept.is_network:
        note = UNCERTAIN if "prior" in posterior.left_open else PREFERRED
        notes, candidates = [*notes, note], [*candidates, kept] if candidates else []
    if around.obstacle is not None:
        notes = [*notes, f"weights are drawn, as with linearise=False: {around.obstacle}"]
    on_data = of_network(*around.network, batches.everything(_few(batches)))
    trained = on_data.mean * float(on_data.count.sum()) / len(on_data.count) * posterior.model.num_data
    return _result(posterior, batches, options, notes, candidates, kept, network, trained)


def _prepared(posterior: "Posterior", batches: Batches, options: "Placing") -> Around:
    """The curvature at the trained weights, with the family and a first prior where they are open."""
    model = posterior.model
    theta = trained_values(posterior, present="linearise" in posterior.left_open)
    with posterior.network_mode(), model.linearised_around(None):
        theta = with_residual_noise(model, theta, batches.everything())
        if "family" in posterior.left_open:
            rank = min(RANK, theta.numel() // 2)
            recipe = ScaleMixture(rank, PARTS) if "prior" in posterior.left_open else LowRankPrecision(rank)
            posterior.family = recipe.bind(posterior.space).to(posterior.device)
        if "prior" in posterior.left_open:
            model.prior = relative_prior(model, theta, WIDTH)
        for family in posterior.family.families():
            family.first_stage()  # a factor that the curvature does not give is none
            family.learn_all()
        laplace = curvature_of(posterior, theta, batches, options.seed, posterior.family.precision_columns)
    obstacle = linear_obstacle(posterior, theta, batches) if "linearise" in posterior.left_open else None
    return Around(posterior, laplace, Noise.of(posterior), obstacle)


def _few(batches: Batches) -> int:
    """How many batches the ELBO is measured on: its price is a share of a pass."""
    return BATCHES if batches.length is None else max(1, min(BATCHES, int(SHARE * batches.length)))


def _elbo(posterior: "Posterior", batches: Iterable[Any], options: "Placing") -> Estimate:
    try:
        # of a mixture a group has a draw of each part
        coupling = paired if posterior.family.scale_count == 1 else naive
        return worth_on_seed(posterior, batches, GROUPS, options.seed, 1.0, coupling).elbo
    except NonFiniteError:
        return not_finite(GROUPS)


def _result(
    posterior: "Posterior",
    batches: Batches,
    options: "Placing",
    notes: list[str],
    candidates: list[Candidate],
    kept: Candidate,
    network: HeldOut | None,
    trained: float,
) -> FitResult:
    read = Watched(batches.everything(_few(batches)), posterior.model)
    elbo = _elbo(posterior, read, options)
    model = posterior.model
    notes = [*notes, _explain(kept, options, posterior.family.scale_count)]
    if not isinstance(model.likelihood, Likelihood):
        notes.append(
            "the likelihood is a plain function, of which no labels can be drawn: the curvature is that of the "
            "observed ones, too small on a network that fits its data, and the posterior too wide"
        )
    if read.log_likelihood is not None and trained < read.log_likelihood:
        notes.append(
            "the network is worse on its own data than an output that ignores the input: is it trained? give epochs= "
            "to fit it from where it is"
        )
    notes += notes_on_bound(model)
    if kept.temperature != 1:
        notes.append(f"λ = {kept.temperature:g}: a tempered posterior is not the posterior; the ELBO is at λ = 1")
    evaluation = model.evaluation
    return FitResult(
        status=Status.PLACED, verdict=_verdict(kept), elbo=elbo, kept=kept.name,
        candidates={kept.name: elbo}, comparison=f"{GROUPS} groups of draws", history=History(), steps=0, epochs=0.0,
        kl_weight=kept.temperature, bound=posterior.family().bound, exact=posterior.device.type == "cpu",
        notes=notes, evaluation=str(evaluation), constant=read.log_likelihood,
        held_out={one.name: one.density for one in candidates if one.held_out is not None},
        network=None if network is None else network.mean,
        against_network=None if network is None or kept.held_out is None else kept.gain_over(network),
        calibration=calibration_of(kept), is_of_mixture=network is None and options.validation is not None,
    )  # fmt: skip


def calibration_of(kept: Candidate) -> Calibration | None:
    """The temperature on top of what is kept."""
    draws = 1 if kept.is_network else OUTPUT_DRAWS if kept.is_exact else DRAWS
    notes = ("it was chosen with the posterior, on the validation data of its fit",)
    return None if kept.adjustment is None else Calibration(kept.adjustment, None, draws, notes)


def _verdict(kept: Candidate) -> str:
    if kept.is_network:
        with_it = "" if kept.adjustment is None else f", with a temperature of {kept.adjustment.value:.3g}"
        none = "the held-out data show no posterior around it that is as good for certain"
        return f"the network was kept{with_it}: {none}"
    return f"placed around the network: {kept.name}"


def _explain(kept: Candidate, options: "Placing", parts: int) -> str:
    text = (
        "the mean is held at the trained weights, which have seen the data, and the precision is the curvature there: "
        "a Laplace approximation. No ELBO was maximised"
    )
    if kept.is_network:
        text = (
            "the spread around the trained weights is so small that predictions are the network's own; its ELBO is "
            "that of a narrow normal, and says nothing of the network"
        )
    elif kept.linearised:
        text += "; it is that of the network linearised at these weights"
    if kept.width is not None:
        how = "by held-out density" if options.validation is not None else "without held-out data"
        up_to = f"one of {parts} widths up to " if parts > 1 else ""
        text += f". The prior's width, {up_to}{kept.width:.3g} of each tensor's root mean square, was chosen {how}"
    if kept.adjustment is not None:
        text += (
            f". On top is a temperature of {kept.adjustment.value:.3g}, a recalibration by the same held-out data, and "
            "no part of the posterior; predict(x, calibrated=False) is without it"
        )
    if kept.noise != 1.0:
        text += (
            f". The noise, {kept.noise:.3g} times the residuals on the training data, was chosen by held-out density"
        )
    return text
