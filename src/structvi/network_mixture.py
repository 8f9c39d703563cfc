"""A mixture whose parts are posteriors around networks of their own: a deep ensemble, a posterior at each member."""

import copy
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .families.family import Family
from .files.file import CheckpointError, opened, write
from .files.posterior_description import refusing
from .files.posterior_file import check_calibration
from .models.calibration import Calibration
from .models.priors.base import Prior
from .objective import Estimate, NonFiniteError
from .posterior import EnsembleBase, load, variationalize
from .predict.calibration import calibrate
from .predict.metrics import evaluate
from .predict.predict import predict
from .result import Result, Status
from .train.around import Together, calibration_of
from .train.at_once import fit_each
from .train.batches import Batches
from .train.fit_many import options_of
from .train.held_out import member_log_probs
from .train.laplace import Placing, laplace
from .train.result import FitResult
from .train.seen import warn_of_seen
from .train.together import fit_together
from .util.checks import check_one_of

KIND = "mixture of networks"
#: of members that ended in different ways a mixture has the first of these
WORST_FIRST = (
    Status.DIVERGED, Status.STOPPED, Status.TOO_SHORT, Status.IMPROVING, Status.UNCLEAR, Status.NO_OPTIMUM,
    Status.OVER_FITTED, Status.MISSED_MODES, Status.CONVERGED, Status.PLACED,
)  # fmt: skip
#: iterations of the search for weights, each of which gains
ITERATIONS = 500
#: of stacking: observations that all members share equally
EQUAL_ROWS = 3.0


@dataclass(repr=False, kw_only=True)
class MixtureResult(Result):
    """What the fit of every member came to, and the mixture of them.

    Attributes:
        elbo: Σ_c w_c ELBO_c − KL[w‖1/C], of part and weights together.
        members: the result of each.
        weights: of the members.
        held_out: log density of the held-out data, the average over all draws, in nats for each number; None without.
        against_networks: around trained networks how much higher that is than that of the average over the networks
            themselves, and its standard error over rows; None with stacked weights.
        calibration: a temperature on top, where held-out data asked for one.
        mixture: what was fitted: it predicts, evaluates and saves.
    """

    members: list[FitResult]
    weights: list[float]
    held_out: float | None = None
    against_networks: tuple[float, float] | None = None
    calibration: Calibration | None = None
    mixture: "Ensemble"

    def headlines(self) -> list[str]:
        lines = [f"{len(self.members)} networks, weights {', '.join(f'{w:.3f}' for w in self.weights)}"]
        lines.append(f"ELBO of part and weights: {self.elbo}")
        if self.held_out is not None:
            return [*lines, self._held_out()]
        ended = Counter(one.status for one in self.members)
        return [*lines, "they ended: " + ", ".join(f"{count} {status.value}" for status, count in ended.items())]

    def _held_out(self) -> str:
        line = f"held-out log density: {self.held_out:.4f} nats"
        if self.against_networks is not None:
            gain, error = self.against_networks
            line += f", {gain:+.4f} ± {error:.4f} over the average of the networks"
        if self.calibration is not None and self.calibration.adjustment is not None:
            line += f"; with a temperature of {self.calibration.adjustment.value:.3g} on top"
        return line

    @property
    def details(self) -> str:
        lines = self.headlines()
        lines += [f"network {c}: {one.verdict}, ELBO {one.elbo}" for c, one in enumerate(self.members)]
        return "\n".join([*lines, *self.notes])

    @property
    def next_step(self) -> str:
        if any(one.status in (Status.IMPROVING, Status.TOO_SHORT) for one in self.members):
            return "fit longer: print(result.details) has each network's verdict; result.mixture predicts and evaluates"
        return "result.mixture.predict(x), .evaluate(test_loader), .calibrate(other_loader)"


class Ensemble(EnsembleBase):
    """Posteriors around networks of their own, fitted one by one and mixed: predictions average over all their draws.

    Which network it is, c, is a latent variable of the model with the prior 1/C: network c has its own buffers (batch
    norm), held tensors and point of linearisation. With `MAP()` members it is the deep ensemble, to the last digit.

    Args:
        posteriors: what `variationalize` returns, one for each network.

    Example:
        >>> from structvi import MAP, likelihoods
        >>> nets = [nn.Linear(3, 2), nn.Linear(3, 2)]
        >>> mixture = Ensemble.of(nets, likelihoods.Categorical(), MAP(), num_data=9)
        >>> mixture.predict(torch.zeros(5, 3)).mean.shape
        torch.Size([5, 2])
    """

    predict = predict
    """The average over all members' draws, see `structvi.predict.predict.predict`."""

    forward = predict

    calibrate = calibrate
    """A temperature or scale, and conformal sets, from held-out data; of the mixture, and kept by `save`."""

    evaluate = evaluate
    """Likelihood, error, calibration and coverage on a loader, see `structvi.predict.metrics.evaluate`."""

    @classmethod
    def of(
        cls,
        networks: Sequence[nn.Module],
        likelihood: Callable[[Any, Any], Tensor],
        family: Family | None = None,
        prior: Prior | None = None,
        **options: Any,
    ) -> "Ensemble":
        """One posterior around each network; arguments as of `variationalize`, the likelihood copied for each."""
        if isinstance(networks, nn.Module) or not networks:
            raise TypeError("expected a list of networks, one for each part")
        return cls(
            [variationalize(net, copy_of(likelihood), copy_of(family), copy_of(prior), **options) for net in networks]
        )

    def fit(
        self,
        loader: Iterable[Any],
        *,
        validation: Iterable[Any] | None = None,
        weights: Literal["equal", "stacked"] = "equal",
        **options: Any,
    ) -> MixtureResult:
        """Fit every member, then weigh them; small networks of one form all at once, see `fit_many`.

        Args:
            loader: as `Posterior.fit` takes it.
            validation: held-out data, on which each member's choices are made.
            weights: "equal", or "stacked": those with the highest held-out log density of the mixture (a concave
                problem), drawn to equal ones as by three more observations. By their ELBOs they would be zero but for
                one.
            **options: of `Posterior.fit`, the same for all; the seed of member c is seed + c. `kl_weight` may be a
                list, one for each member.

        Example:
            >>> from structvi import MeanField, likelihoods
            >>> data = [(torch.zeros(8, 3), torch.zeros(8, dtype=torch.long))]
            >>> nets = [nn.Linear(3, 2), nn.Linear(3, 2)]
            >>> mixture = Ensemble.of(nets, likelihoods.Categorical(), MeanField(), num_data=8)
            >>> mixture.fit(data, steps=2, progress=False).weights
            [0.5, 0.5]
        """
        if options.get("epochs") is None and options.get("steps") is None:
            raise ValueError(
                "fit needs a length: give epochs= or steps=. Around networks that are trained already: "
                "mixture.laplace(loader, validation=held_out)"
            )
        weighs = self._kl_weights(options)
        seed = options.pop("seed", 0)
        own = [
            options_of(**options, validation=validation, seed=seed + c, kl_weight=one) for c, one in enumerate(weighs)
        ]
        self._begin(weights, validation)
        if validation is not None:
            warn_of_seen(loader, validation)
        results = fit_each(self.posteriors, [loader] * len(own), own, label=f"{len(own)} members")
        return self._finish(None, results, validation, weights, seed)

    def _begin(self, weights: str, validation: Iterable[Any] | None) -> None:
        check_one_of("weights", weights, ("equal", "stacked"))
        if weights == "stacked" and validation is None:
            raise ValueError('weights="stacked" are chosen on held-out data: give validation=')
        self.calibration = None  # it was that of another mixture
        self.weights.fill_(1 / len(self.members))  # those of a fit before are not asked for

    def _finish(
        self, together: Together | None, results: list[FitResult], validation: Iterable[Any] | None, weights: str,
        seed: int,
    ) -> MixtureResult:  # fmt: skip
        held_out = None
        self.chosen_on = self.posteriors[0].chosen_on
        if validation is not None:
            batches = list(Batches(validation, seed, self.device).everything())
            log_probs, count = member_log_probs(self.posteriors, batches, seed)  # [C, elements]
            if weights == "stacked":
                self.weights.copy_(stacking(log_probs))
            held_out = float((self.weights.log().unsqueeze(-1) + log_probs).logsumexp(0).sum() / count)
            if together is not None and weights == "equal":  # as it was measured, without draws where it predicts so
                held_out = together.kept.density
        notes = [] if together is None else [_compared(together)]
        if weights == "stacked":
            notes.append("the weights were chosen on the held-out data: its log density above is optimistic")
        if together is None:
            _check_members(results)
        status = min((one.status for one in results), key=WORST_FIRST.index)
        return MixtureResult(
            status=status, verdict=f"{len(results)} networks, each: {status}", elbo=self._elbo(results), notes=notes,
            members=results, weights=self.weights.tolist(), held_out=held_out, mixture=self,
            against_networks=None if together is None or weights == "stacked" else _gained(together),
            calibration=self.calibration,
        )  # fmt: skip

    def laplace(
        self,
        loader: Iterable[Any],
        *,
        validation: Iterable[Any] | None = None,
        weights: Literal["equal", "stacked"] = "equal",
        keep: Literal["widest", "best"] = "widest",
        seed: int = 0,
        progress: bool = True,
    ) -> MixtureResult:
        """Place a posterior around each trained network, of one width for all, selected on the validation set."""
        self._begin(weights, validation)
        if validation is not None:
            warn_of_seen(loader, validation)
        options = Placing(validation, keep, seed, progress)
        together = fit_together(self.posteriors, loader, options, may_temper=weights == "equal")
        if together is None:
            results = [
                laplace(one, loader, validation=validation, keep=keep, seed=seed + c, progress=progress)
                for c, one in enumerate(self.posteriors)
            ]
        else:
            results, self.calibration = together.members, calibration_of(together.kept)
        return self._finish(together, results, validation, weights, seed)

    def _kl_weights(self, options: dict[str, Any]) -> list[Any]:
        """λ of each member."""
        given = options.pop("kl_weight", 1.0)
        if not isinstance(given, list | tuple):
            return [given] * len(self.members)
        if len(given) != len(self.members):
            raise ValueError(f"kl_weight must have one entry for each of {len(self.members)} members, got {len(given)}")
        return list(given)

    def _elbo(self, results: Sequence[FitResult]) -> Estimate:
        w = self.weights.cpu()
        divergence = float(torch.xlogy(w, w * len(w)).sum())
        per_group = sum(float(share) * one.elbo.per_group for share, one in zip(w, results, strict=True)) - divergence
        return Estimate.of(torch.as_tensor(per_group), all(one.bound for one in results))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write every member to a file of its own in a folder, the weights and the calibration.

        `load_mixture(folder, networks)` reads them.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for c, member in enumerate(self.posteriors):
            member.save(folder / f"network-{c}.safetensors")
        tensors, found = {"weights": self.weights}, self.calibration
        if found is not None and found.conformal is not None:
            tensors["scores"] = found.conformal.values
        description = {"kind": KIND, "networks": len(self.members)}
        write(folder / "mixture.safetensors", tensors, description | _described(found))


def _check_members(results: Sequence[FitResult]) -> None:
    """NonFiniteError where a member has diverged, as a fit by itself raises it."""
    lost = [c for c, one in enumerate(results) if one.status is Status.DIVERGED]
    if lost:
        raise NonFiniteError(
            f"of {len(results)} members these diverged: {', '.join(map(str, lost))} (counted from 0); "
            f"{' '.join(results[lost[0]].notes) or results[lost[0]].verdict}. The others are fitted: make a mixture of "
            "them alone, or fit again with a smaller lr="
        )


def load_mixture(folder: str | os.PathLike[str], networks: Sequence[nn.Module], **given: Any) -> Ensemble:
    """The mixture of a folder that `Ensemble.save` wrote, around networks of the same form.

    Args:
        folder: where it is.
        networks: as many as were saved, in any order: what is not random is copied into them.
        **given: what you wrote yourself, as in `load`.
    """
    path = Path(folder) / "mixture.safetensors"
    with opened(path) as stored:
        count, described = stored.description.get("networks"), stored.description.get("calibration")
        if stored.description.get("kind") != KIND or not {"weights"} <= set(stored.table) <= {"weights", "scores"}:
            raise CheckpointError(f"{path} does not describe a mixture of networks")
        tensors = stored.tensors()
    weights = tensors["weights"]
    if weights.shape != (count,) or not bool((weights >= 0).all()) or abs(float(weights.sum()) - 1) > 1e-6:
        raise CheckpointError(f"{path}: the weights must be {count} numbers ≥ 0 that sum to one")
    if len(networks) != count:
        raise ValueError(f"{path} is of {count} networks, got {len(networks)}")
    members = [load(Path(folder) / f"network-{c}.safetensors", net, **given) for c, net in enumerate(networks)]
    mixture = Ensemble(members)
    mixture.weights.copy_(weights)
    mixture.chosen_on = mixture.posteriors[0].chosen_on
    with refusing(path):
        mixture.calibration = _calibration(described, tensors.get("scores"), mixture.model.likelihood)
    return mixture


def _calibration(described: Any, scores: Tensor | None, likelihood: Any) -> Calibration | None:
    """From a file; ValueError where it says what cannot be."""
    found = None if described is None else Calibration.of(described, scores)
    has_scores = described is not None and described["conformal"] is not None
    if has_scores != (scores is not None):
        raise ValueError("conformal scores and their description go together")
    if found is not None:
        check_calibration(found, likelihood)
    return found


def _described(calibration: Calibration | None) -> dict[str, Any]:
    return {} if calibration is None else {"calibration": calibration.described()}


def _gained(together: Together) -> tuple[float, float]:
    """Over the average over the networks themselves, and its standard error."""
    assert together.ensemble.held_out is not None
    return together.kept.gain_over(together.ensemble.held_out)


def _compared(together: Together) -> str:
    """What was chosen for equal weights, beside the average over the networks themselves."""
    (gain, error), kept = _gained(together), together.kept
    name = "the networks themselves" if kept.is_network else kept.untempered.name
    text = (
        f"placed for the mixture: {name}; held-out log density of the average over the networks "
        f"{together.ensemble.density:.4f} nats, gained {gain:+.4f} ± {error:.4f}"
    )
    if kept.adjustment is not None:
        text += (
            f", with a temperature of {kept.adjustment.value:.3g} on top: a recalibration by the same held-out data, "
            "and no part of the posterior; predict(x, calibrated=False) is without it"
        )
    return text


def stacking(log_probs: Tensor, rows: float = EQUAL_ROWS) -> Tensor:
    """The weights with the highest Σ_n log Σ_c w_c p_c(t_n) + rows/C Σ_c log w_c: [C, n] → [C], by expectation
    maximisation.

    The second part holds them together where there are few data: as if so many more had been shared by all members.

    Args:
        log_probs: of each member and each observation.
        rows: how many; 0 for the first part alone.

    Example:
        >>> stacking(torch.tensor([[-1.0], [-3.0]]).double().expand(2, 97)).round(decimals=3).tolist()
        [0.983, 0.017]
        >>> stacking(torch.tensor([[-1.0], [-3.0]]).double(), rows=0).round(decimals=3).tolist()
        [1.0, 0.0]
    """
    C, n = log_probs.shape
    log_weights = log_probs.new_full((C,), -log(C))
    for _ in range(ITERATIONS):
        share = (log_weights.unsqueeze(-1) + log_probs).softmax(0)  # [C, n]
        log_weights = ((share.sum(-1) + rows / C) / (n + rows)).clamp(min=1e-300).log()
    return log_weights.exp() / log_weights.exp().sum()


def copy_of(part: Any) -> Any:
    """Of a module: each member learns its own noise and scales."""
    return copy.deepcopy(part) if isinstance(part, nn.Module) else part
