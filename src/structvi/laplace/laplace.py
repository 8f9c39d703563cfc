"""`bayes.laplace(loader, validation=held_out)`: a posterior around a trained network, in closed form."""

import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import exp
from typing import TYPE_CHECKING, Any

import torch

from ..models.likelihoods import Likelihood
from ..objective import Estimate, NonFiniteError, not_finite
from ..predict.one_pass import out_of_distribution
from ..result import Result, Status
from ..train.checks import notes_on_data, remember_choice
from ..train.compare import Watched, elbo_over, notes_on_bound
from ..train.data import Batches, Reread, held_out_batches, warn_of_seen
from ..util.checks import check_seed
from .place import NETWORK, TrainedNetwork, restored_on_error
from .selection import Selection, learned_variance, of_posteriors, select

if TYPE_CHECKING:
    from ..posterior import Posterior

#: batches on which the ELBO is estimated, and groups of draws
ELBO_BATCHES, ELBO_GROUPS = 4, 2


@dataclass(repr=False, kw_only=True)
class LaplaceResult(Result):
    """A posterior placed around a trained network, and what the validation set says of it.

    Log densities are in nats for each observed number of the validation set. The density of a
    candidate with a temperature or a noise is cross-fitted: each row takes the value that other folds ask for.

    Attributes:
        selected: the candidate that was selected; without a validation set the default.
        candidates: the held-out log density of every candidate that was tried, by name.
        network: that of the network as it is; None without a validation set, and so below.
        network_tempered: that of the network with its own temperature, or noise.
        held_out: that of the selected candidate.
        gain: how much higher that is than `network_tempered`, and its paired standard error over rows.
        lost: by how much predictions with learned variances are worse than with those of draws, on some of the rows,
            and its paired standard error; None if nothing was learned.
        seconds: what it took.
        epochs: the same over the seconds of one epoch of training, as the gradients here tell them.
    """

    selected: str
    candidates: dict[str, float] = field(default_factory=dict[str, float])
    network: float | None = None
    network_tempered: float | None = None
    held_out: float | None = None
    gain: tuple[float, float] | None = None
    lost: tuple[float, float] | None = None
    seconds: float = 0.0
    epochs: float = 0.0

    @property
    def bound(self) -> bool:
        """Whether the ELBO is a lower bound on the evidence: False with point masses."""
        return self.elbo.bound

    def headlines(self) -> list[str]:
        lines = [self.verdict]
        if self.held_out is not None and self.gain is not None:
            gain, error = self.gain
            lines.append(
                f"held-out log density: {self.held_out:.4f} nats; network {self.network:.4f}, with its own temperature "
                f"or noise {self.network_tempered:.4f} (difference {gain:+.4f} ± {error:.4f})"
            )
        return [*lines, f"took {self.seconds:.1f} s, as {self.epochs:.2g} epochs of training"]

    @property
    def details(self) -> str:
        tried = [f"{name}: {density:.4f} nats" for name, density in self.candidates.items()]
        return "\n".join([*self.headlines(), f"ELBO: {self.elbo}, not maximised", *tried, *self.notes])

    @property
    def next_step(self) -> str:
        if self.held_out is None:
            return "give validation=held_out_loader, which selects the prior's width; or bayes.fit(loader, epochs=..)"
        return "bayes.predict(x), bayes.evaluate(test_loader); bayes.save(file)"


def laplace(
    posterior: "Posterior",
    loader: Iterable[Any],
    *,
    validation: Iterable[Any] | None = None,
    seed: int = 0,
    progress: bool = True,
) -> LaplaceResult:
    """Place the posterior around the trained network, and return what the validation set selected.

    The mean is at the trained weights, and the precision is the data's curvature there plus the prior's. It chooses
    what you left open in `variationalize`: the prior's width, whether the network is linearised, and the family.

    With a validation set the candidates are priors of several widths and the network itself, each with its own
    temperature, or noise. The widest candidate is selected that is not worse than the best, nor than the network with
    its temperature, as far as the set can tell. The temperature is on top of predictions: `predict(x,
    calibrated=False)` is without it.

    If an input has more than three outputs, their variances are learned: a prediction then costs one forward pass.
    `predict(x, variance="exact")` has the exact ones.

    Without a validation set the prior is yours, or of a default width, and the network is linearised if it can be.
    It is the warm start of a fit, too: `bayes.laplace(loader)`, then `bayes.fit(loader, epochs=20)`.

    Args:
        posterior: of a trained network.
        loader: its training data.
        validation: data that took no part in the training.
        seed: of all randomness.
        progress: print what is being done to the standard error.

    Example:
        >>> from structvi import likelihoods, variationalize
        >>> data = [(torch.zeros(8, 3), torch.zeros(8, dtype=torch.long))]
        >>> bayes = variationalize(torch.nn.Linear(3, 2), likelihoods.Categorical(), num_data=8)
        >>> bayes.laplace(data, progress=False).selected
        'linearised, prior width 0.24'
    """
    results, selection = place_together([posterior], loader, validation=validation, seed=seed, progress=progress)
    if selection is not None:
        posterior.calibration = selection.calibration
    return results[0]


def place_together(
    posteriors: "Sequence[Posterior]",
    loader: Iterable[Any],
    *,
    validation: Iterable[Any] | None = None,
    seed: int = 0,
    progress: bool = True,
) -> tuple[list[LaplaceResult], Selection | None]:
    """Place a posterior around each network, all of one width: the one that suits their equal mixture.

    The best width of each network alone is too wide for the mixture, whose members differ already. The mixture has
    one temperature: the caller puts `selection.calibration` on top.
    """
    check_seed(seed)
    if not torch.is_grad_enabled():
        raise ValueError("laplace needs gradients: call it outside torch.no_grad() and torch.inference_mode()")
    start = time.perf_counter()

    def say(what: str) -> None:
        if progress:
            print(f"laplace: {what}", file=sys.stderr)

    if validation is not None:
        warn_of_seen(loader, validation)
    held_out = None if validation is None else held_out_batches(validation, seed, posteriors[0].device)
    with ExitStack() as stack:
        networks, data, results = [], [], []
        for c, posterior in enumerate(posteriors):
            _check(posterior)
            stack.enter_context(restored_on_error(posterior))
            batches = Batches(loader, seed + c, posterior.device)
            data.append((batches, notes_on_data(posterior, batches, validation)))
            say("the curvature at the trained weights")
            networks.append(TrainedNetwork.of(posterior, batches, held_out, seed + c))
        selection = None if held_out is None else select(networks, held_out, seed, say)
        for c, (network, (batches, notes)) in enumerate(zip(networks, data, strict=True)):
            posterior, result = network.posterior, _result(network, selection, notes, _doubt(network, batches))
            if selection is None:
                learned = learned_variance(network, Reread(batches), seed)
                network.commit(network.default, 0.0)
            else:
                learned = selection.learned[c] if selection.learned else None
                network.commit(selection.selected, selection.log_noise)
            remember_choice(posterior, validation, seed)
            result.elbo, result.seconds = _elbo(posterior, batches, seed), time.perf_counter() - start
            result.epochs = result.seconds / max(network.curvature.seconds * posterior.model.num_data, 1e-9)
            posterior.last_fit, posterior.learned_variance = result, learned
            if held_out is not None and network.is_function_of_inputs:
                posterior.ood = out_of_distribution(posterior, network.theta, batches.everything(), held_out)
            results.append(result)
    return results, selection


def _check(posterior: "Posterior") -> None:
    posterior.check_whole()
    if not isinstance(posterior.model.likelihood, Likelihood):
        raise TypeError("the curvature needs drawn labels, and a plain function draws none: write a Likelihood")
    if posterior.fit_status not in (None, Status.PLACED):
        raise ValueError(
            "this posterior was fitted before, and laplace would place it anew around the network's own weights: call "
            "fit(loader, epochs=) to go on, or variationalize the network again"
        )

    if posterior.space.dtype in (torch.float16, torch.bfloat16):
        raise ValueError("a posterior around a network needs more digits than half precision: give net.float()")


def _doubt(network: TrainedNetwork, batches: Batches) -> str:
    """Return what to say of a network that is worse on its own data than an output that ignores the input."""
    read = Watched(batches.everything(ELBO_BATCHES), network.posterior.model)
    found, constant = of_posteriors([network], NETWORK, read, 0, is_exact=False), read.log_likelihood
    if constant is None or float(found.plain.mean()) * network.posterior.model.num_data >= constant:
        return ""
    return (
        "the network is worse on its own training data than an output that ignores the input: is it trained? A "
        "posterior around untrained weights predicts no better; bayes.fit(loader, epochs=..) trains"
    )


def _elbo(posterior: "Posterior", batches: Batches, seed: int) -> Estimate:
    generator = torch.Generator(posterior.device).manual_seed(seed + 1)
    try:
        return elbo_over(posterior, batches.everything(ELBO_BATCHES), groups=ELBO_GROUPS, generator=generator)
    except NonFiniteError:
        return not_finite(ELBO_GROUPS)


def _result(network: TrainedNetwork, selection: Selection | None, notes: list[str], doubt: str) -> LaplaceResult:
    notes, name, measured = [*notes, *notes_on_bound(network.posterior.model)], network.default.name, {}
    verdict = f"placed around the network without a validation set: {name}"
    notes.append("a Laplace approximation: the mean is at the trained weights, and the ELBO was not maximised")
    if network.obstacle:
        notes.append(f"weights are drawn, as with linearise=False: {network.obstacle}")
    if selection is not None:
        factor = "noise relative to the residuals" if selection.of_noise else "temperature"
        names = {
            one: one.name + (f", {factor} {exp(found.value):.3g}" if found.value else "")
            for one, found in selection.tried.items()
        }
        alone, name = selection.network, names[selection.selected]
        verdict = f"placed around the network, as the validation set selected: {name}"
        worst = max(one.gain_over(alone)[1] for one in selection.tried.values())
        notes.append(f"{len(alone.count)} validation rows show differences between candidates of {2 * worst:.2g} nats")
        if selection.lost is not None:
            kept = "" if selection.learned else ": too much, and predictions have exact variances"
            notes.append("learned variances lose {:.4f} ± {:.4f} nats to those of draws".format(*selection.lost) + kept)
        if selection.selected == NETWORK:
            notes.append("no posterior around it is as good: its normal is so narrow that the ELBO says nothing")
        measured: dict[str, Any] = {
            "candidates": {names[one]: selection.density(one) for one in selection.tried},
            "network": alone.untempered.mean, "network_tempered": alone.mean,
            "held_out": selection.density(selection.selected), "gain": selection.held_out.gain_over(alone),
            "lost": selection.lost,
        }  # fmt: skip
    verdict = f"{doubt}\n{verdict}" if doubt else verdict
    elbo = not_finite(ELBO_GROUPS)  # not known yet
    return LaplaceResult(status=Status.PLACED, verdict=verdict, elbo=elbo, notes=notes, selected=name, **measured)
