"""A deep ensemble with a posterior around each network."""

import copy
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..families.family import Family
from ..files import posterior_file
from ..files.describe import refusing
from ..files.file import CheckpointError, read, write
from ..files.posterior_file import SCORES, describe_calibration
from ..laplace.laplace import LaplaceResult, place_together
from ..models.bayesian_model import BayesianModel
from ..models.calibration import Calibration
from ..models.priors import Prior
from ..objective import Estimate, NonFiniteError
from ..parameters import Parameters
from ..posterior import Posterior, variationalize
from ..predict.calibration import calibrate
from ..predict.metrics import evaluate
from ..predict.predict import predict
from ..result import Result, Status
from ..train.result import FitResult
from ..util.folder_files import write_together
from .many import fit_many

KIND = "ensemble"
#: files of a folder
FILE, MEMBER = "ensemble.safetensors", "network-{}.safetensors"


@dataclass(repr=False, kw_only=True)
class EnsembleResult(Result):
    """The result of an ensemble's fit.

    Attributes:
        elbo: the mean over the members.
        members: the result of each.
        held_out: log density of the held-out data, the average over all members, in nats a number; None without them.
        gain: over the average of the trained networks with its own temperature, and its standard error over rows; None
            if the members were trained.
        ensemble: the fitted ensemble; its `calibration` may be a temperature.
    """

    members: Sequence[FitResult | LaplaceResult]
    held_out: float | None = None
    gain: tuple[float, float] | None = None
    ensemble: "Ensemble"

    def headlines(self) -> list[str]:
        lines = [self.verdict, f"mean ELBO of the members: {self.elbo}"]
        if self.held_out is not None:
            lines.append(f"held-out log density: {self.held_out:.4f} nats")
        if self.gain is not None:
            lines.append("gain over the average of the networks {:+.4f} ± {:.4f}".format(*self.gain))
        return lines

    @property
    def details(self) -> str:
        members = [f"network {c}: {one.verdict}, ELBO {one.elbo}" for c, one in enumerate(self.members)]
        return "\n".join([*self.headlines(), *members, *self.notes])

    @property
    def next_step(self) -> str:
        return "ensemble.predict(x), .evaluate(test_loader), .calibrate(other_loader)"


class Ensemble(nn.Module):
    """Posteriors around several networks: predictions average over the draws of all.

    The index c of the network is a latent variable with the prior 1/C: p(t, c, θ) = 1/C p(θ) p(t | y_c(x; θ)). Each
    network has its own buffers (batch norm), held tensors and point of linearisation. With `MAP()` members it is
    the deep ensemble, to the last digit.

    Args:
        posteriors: what `variationalize` returns, one for each network.

    Example:
        >>> from structvi import MAP, likelihoods
        >>> nets = [nn.Linear(3, 2), nn.Linear(3, 2)]
        >>> ensemble = Ensemble.of(nets, likelihoods.Categorical(), MAP(), num_data=9)
        >>> ensemble.predict(torch.zeros(5, 3)).mean.shape
        torch.Size([5, 2])
    """

    def __init__(self, posteriors: Sequence[Posterior]):
        super().__init__()
        if not posteriors or not all(isinstance(one, Posterior) for one in posteriors):
            raise TypeError("expected a list of posteriors, as variationalize returns them, one for each network")
        if len({id(one.net) for one in posteriors}) < len(posteriors):
            raise ValueError("two of the posteriors are of the same network: each member has a network of its own")
        if len({type(one.model.likelihood) for one in posteriors}) > 1:
            raise ValueError("the posteriors of an ensemble must share their likelihood")
        self.members = nn.ModuleList(posteriors)
        #: found by `calibrate`, as for a posterior; calibrations of the members take no part
        self.calibration: Calibration | None = None
        self.chosen_on: str | None = None

    @classmethod
    def of(
        cls,
        networks: Sequence[nn.Module],
        likelihood: Callable[[Any, Any], Tensor],
        family: Family | None = None,
        prior: Prior | None = None,
        **options: Any,
    ) -> "Ensemble":
        """Return a posterior around each network; arguments as of `variationalize`, the likelihood copied for each."""
        if isinstance(networks, nn.Module) or not networks:
            raise TypeError("expected a list of networks, one for each member")
        parts = likelihood, family, prior  # a copy for each member, which learns its own noise and scales
        return cls([variationalize(net, *copy.deepcopy(parts), **options) for net in networks])

    @property
    def posteriors(self) -> list[Posterior]:
        return list(self.members)  # pyright: ignore[reportReturnType]

    @property
    def model(self) -> BayesianModel:
        """The model of the first network."""
        return self.posteriors[0].model

    @property
    def space(self) -> Parameters:
        return self.model.space

    @property
    def device(self) -> torch.device:
        return self.posteriors[0].device

    def train(self, mode: bool = True) -> Self:
        self.training = mode
        return self

    predict = predict
    """The average over all members' draws, see `structvi.predict.predict.predict`."""

    forward = predict

    calibrate = calibrate
    """A temperature or scale, and conformal sets, from held-out data; of the ensemble, and kept by `save`."""

    evaluate = evaluate
    """Likelihood, error, calibration and coverage on a loader, see `structvi.predict.metrics.evaluate`."""

    def fit(
        self,
        loader: Iterable[Any],
        *,
        validation: Iterable[Any] | None = None,
        seed: int = 0,
        each: Mapping[str, Sequence[Any]] | None = None,
        **options: Any,
    ) -> EnsembleResult:
        """Train every member, all at once if `fit_many` can.

        Args:
            loader: as `Posterior.fit` takes it.
            validation: held-out data.
            seed: member c has seed + c.
            each: options that differ, one value for each member: `each={"kl_weight": [1.0, 0.3]}`.
            **options: of `Posterior.fit`, the same for all.

        Example:
            >>> from structvi import MeanField, likelihoods
            >>> data = [(torch.zeros(8, 3), torch.zeros(8, dtype=torch.long))]
            >>> nets = [nn.Linear(3, 2), nn.Linear(3, 2)]
            >>> ensemble = Ensemble.of(nets, likelihoods.Categorical(), MeanField(), num_data=8)
            >>> len(ensemble.fit(data, steps=2, progress=False).members)
            2
        """
        C = len(self.members)
        own = {"seed": [seed + c for c in range(C)], **(each or {})}
        results = fit_many(self.posteriors, [loader] * C, each=own, validation=validation, **options)
        lost = [c for c, one in enumerate(results) if one.status is Status.DIVERGED]
        if lost:
            raise NonFiniteError(
                f"of {C} members these diverged: {lost} (counted from 0). The others are fitted: make an ensemble of "
                "them alone, or fit again with a smaller lr="
            )
        self.calibration, self.chosen_on = None, self.posteriors[0].chosen_on
        held_out = None if validation is None else -self.evaluate(validation, progress=False).nlpd
        return self._result(results, held_out=held_out)

    def laplace(
        self, loader: Iterable[Any], *, validation: Iterable[Any] | None = None, seed: int = 0, progress: bool = True
    ) -> EnsembleResult:
        """Place a posterior around each trained network, of one prior width for all, selected on the validation data.

        The average over the networks themselves is one of the candidates.
        """
        results, found = place_together(self.posteriors, loader, validation=validation, seed=seed, progress=progress)
        self.chosen_on, self.calibration = self.posteriors[0].chosen_on, None
        if found is None:
            return self._result(results)
        self.calibration = found.calibration
        gain, notes = found.held_out.gain_over(found.network), [f"placed for the ensemble: {results[0].selected}"]
        if found.calibration is not None:
            notes.append(f"predictions are calibrated on the held-out data: {found.calibration}")
        return self._result(results, held_out=found.density(found.selected), gain=gain, notes=notes)

    def _result(self, results: Sequence[FitResult | LaplaceResult], **found: Any) -> EnsembleResult:
        ended = Counter(one.status for one in results)
        per_group = torch.stack([torch.as_tensor(one.elbo.per_group) for one in results]).mean(0)
        return EnsembleResult(
            status=max(ended, key=list(Status).index),  # the worst
            verdict=f"{len(results)} networks: " + ", ".join(f"{count} {status}" for status, count in ended.items()),
            elbo=Estimate.of(per_group, all(one.bound for one in results)),
            members=results, ensemble=self, **found,
        )  # fmt: skip

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a file for every member, and one for the calibration, in place of those in the folder.

        `vi.load(folder, networks)` reads them.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        described, tensors = describe_calibration(self.calibration)

        def make(hidden: Path) -> None:
            for c, member in enumerate(self.posteriors):
                member.save(hidden / MEMBER.format(c))
            write(hidden / FILE, tensors, {"kind": KIND, "networks": len(self.members), "calibration": described})

        made = write_together(folder, make)
        for old in {*folder.glob(MEMBER.format("*"))}.difference(made):
            old.unlink()


def load_ensemble(folder: str | os.PathLike[str], networks: Sequence[nn.Module], **given: Any) -> Ensemble:
    """Return the ensemble of a folder that `Ensemble.save` wrote, around networks of the same form.

    Args:
        folder: of the ensemble.
        networks: as many as were saved, in any order; held tensors and buffers are copied into them.
        **given: parts of your own, as in `load`.
    """
    path = Path(folder) / FILE
    tensors, saved = read(path)
    count, described = saved.get("networks"), saved.get("calibration")
    if saved.get("kind") != KIND or not set(tensors) <= {SCORES}:
        raise CheckpointError(f"{path} does not describe an ensemble")
    if len(networks) != count:
        raise ValueError(f"{path} is of {count} networks, got {len(networks)}")
    paths = [Path(folder) / MEMBER.format(c) for c in range(len(networks))]
    pairs = zip(paths, networks, strict=True)
    ensemble = Ensemble([posterior_file.load(Posterior, own, net, **given) for own, net in pairs])
    ensemble.chosen_on = ensemble.posteriors[0].chosen_on
    with refusing(path):
        ensemble.calibration = Calibration.of(described, tensors.get(SCORES))
    return ensemble
