"""A posterior as plain data: a model, a family, and the modes the network is called in; operations are above it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from .families.family import Family
from .models.bayesian_model import BayesianModel
from .models.calibration import Calibration
from .objective import Estimator, Terms, elbo_terms
from .parameters import Parameters
from .result import Result, Status
from .util.checks import check_one_of

Dropout = Literal["off", "on"]
BatchNorm = Literal["frozen", "deterministic", "reestimated"]
DROPOUT: tuple[Dropout, ...] = ("off", "on")
BATCH_NORM: tuple[BatchNorm, ...] = ("frozen", "deterministic", "reestimated")

BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
# the last three drop inside themselves, or skip their own dropout layers on a fast path that only training closes
_DROPOUTS = (nn.modules.dropout._DropoutNd, nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer)


class Posterior(nn.Module):
    """A network with likelihood, prior and variational family, without the operations: `structvi.Posterior` adds them.

    - `.train()` and `.eval()` change nothing about the posterior: it stays a distribution, and the network's own
      mode is set for the time of a call by `dropout` and `batch_norm` alone.
    - `.to(device)` moves everything: variational parameters, network, likelihood, prior.
    - `.parameters()` are what a fit learns: the variational parameters, and those of likelihood and prior. The
      network's own tensors are read, never changed.

    Args:
        model: the network with likelihood and prior.
        family: bound to `model.space`.
        dropout: "off", or "on": the network's own dropout layers stay active in `fit` and `predict`.
        batch_norm: "frozen", "deterministic" or "reestimated", see `variationalize`.
    """

    #: what posteriors of several networks are mixed by: set by `network_mixture`, whose room is above those that fit
    mixed_by: ClassVar[Callable[..., Any]]

    def __init__(
        self, model: BayesianModel, family: Family, *, dropout: Dropout = "off", batch_norm: BatchNorm = "frozen"
    ):
        super().__init__()
        check_one_of("dropout", dropout, DROPOUT)
        check_one_of("batch_norm", batch_norm, BATCH_NORM)
        self.model = model
        self.family = family
        self.dropout: Dropout = dropout
        self.batch_norm: BatchNorm = batch_norm
        #: what the user has not asked for, of "family", "prior", "linearise" and a head's "layer": a fit may choose it,
        #: and looks whether the layer is the last one
        self.left_open: frozenset[str] = frozenset()
        #: what `calibrate` found: `predict` uses it; a fit drops it
        self.calibration: Calibration | None = None
        #: the fingerprint of the held-out data on which a fit has chosen, see `predict/cases.py`
        self.chosen_on: str | None = None
        self._last_fit: Result | None = None
        #: how the last fit ended, also in another process: a file has it; None before any fit
        self.fit_status: Status | None = None

    def extra_repr(self) -> str:
        weights = sum(parameter.numel() for parameter in self.net.parameters())
        known = self.model.known_num_data
        N = "N not known yet" if known is None else f"N = {known}"
        return f"{self.model.net_space.size} of the network's {weights} weights are random, {N}"

    @property
    def last_fit(self) -> Result | None:
        """What the last fit returned."""
        return self._last_fit

    @last_fit.setter
    def last_fit(self, result: Result | None) -> None:
        self._last_fit, self.calibration = result, None  # a calibration belongs to the fit before
        self.fit_status = None if result is None else result.status

    @property
    def space(self) -> Parameters:
        return self.model.space

    @property
    def net(self) -> nn.Module:
        return self.model.net

    @property
    def device(self) -> torch.device:
        """Where the variational parameters are."""
        own = next(self.family.parameters(), None)  # past all of the network's it is a long walk
        return next(self.parameters()).device if own is None else own.device

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        own = f"{prefix}.model.net." if prefix else "model.net."
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if not name.startswith(own):
                yield name, parameter

    def learned(self) -> dict[str, Tensor]:
        """All that a fit changes, by name, not copied: the parameters, and the family's buffers."""
        buffers = {f"family.{name}": buffer for name, buffer in self.family.named_buffers()}
        return {**dict(self.named_parameters()), **buffers}

    def outside_family(self) -> dict[str, Tensor]:
        """What a fit learns beside the family, by name: of likelihood and prior."""
        family = {id(parameter) for parameter in self.family.parameters()}
        return {name: p for name, p in self.named_parameters() if id(p) not in family}

    def train(self, mode: bool = True) -> Self:
        self.training = mode
        return self

    def with_family(self, family: Family) -> Self:
        """A posterior of the same model and modes with another family."""
        other = type(self)(self.model, family, dropout=self.dropout, batch_norm=self.batch_norm)
        other.left_open = self.left_open
        return other

    def check_whole(self) -> None:
        """Refuse what this rank's rows alone cannot do."""
        if self.family.shard is not None:
            raise ValueError(
                "this rank has only its rows of the posterior: ask what gather(posterior), called on all ranks, "
                "returns; or write the rows with save_sharded(posterior, directory)"
            )

    @contextmanager
    def network_mode(self) -> Iterator[nn.Module]:
        """Inside, `model` calls the network in eval mode but for what `dropout` and `batch_norm` ask, in this thread.

        The network itself keeps its mode: what is called, and given here, is a twin that shares its tensors
        (`networks/twins.py`).
        """
        with self.model.twins.borrowed(self._is_active) as twin:
            yield twin.net

    @property
    def mixes_rows(self) -> bool:
        """Whether a row's output depends on the rest of its batch: batch norm that takes its statistics from it."""
        layers = [module for module in self.net.modules() if isinstance(module, BATCH_NORMS)]
        return any(self.batch_norm == "reestimated" or module.running_mean is None for module in layers)

    def _is_active(self, module: nn.Module) -> bool:
        if self.dropout == "on" and isinstance(module, _DROPOUTS):
            return True
        return self.batch_norm == "reestimated" and isinstance(module, BATCH_NORMS)

    def loss(
        self,
        batch: Any,
        *,
        estimator: Estimator = Estimator(),
        kl_weight: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return −(E log lik − λ KL[q‖prior])/N in nats per observation, for a loop of your own; λ is `kl_weight`."""
        terms = self.terms(batch, estimator=estimator, generator=generator)
        return -terms.objective(kl_weight).mean() / self.model.num_data

    def terms(
        self, batch: Any, *, estimator: Estimator = Estimator(), generator: torch.Generator | None = None
    ) -> Terms:
        """Return E log lik and KL[q‖prior] for each group of draws, in nats for the whole data set."""
        with self.network_mode():
            return elbo_terms(self.family, self.model, batch, estimator, generator)


class EnsembleBase(nn.Module):
    """Posteriors of several networks with their weights, without the operations: `structvi.Ensemble` adds them.

    The part c is a latent variable of the model, with the prior 1/C: p(t, c, θ) = 1/C p(θ) p(t | y_c(x; θ)), where
    network c has buffers, θ₀ and held tensors of its own.
    """

    weights: Tensor

    def __init__(self, posteriors: Sequence[Posterior]):
        super().__init__()
        if not posteriors or not all(isinstance(one, Posterior) for one in posteriors):
            raise TypeError("expected a list of posteriors, as variationalize returns them, one for each network")
        if len({id(one.net) for one in posteriors}) < len(posteriors):
            raise ValueError("two of the posteriors are of the same network: each part has a network of its own")
        first = posteriors[0]
        for one in posteriors[1:]:
            if type(one.model.likelihood) is not type(first.model.likelihood):
                raise ValueError("the posteriors of a mixture must share their likelihood")
        self.members = nn.ModuleList(posteriors)
        #: as of a posterior; those of the members take no part
        self.calibration: Calibration | None = None
        self.chosen_on: str | None = None
        self.register_buffer("weights", torch.full((len(posteriors),), 1 / len(posteriors), dtype=torch.float64))

    @property
    def posteriors(self) -> list[Posterior]:
        return list(self.members)  # pyright: ignore[reportReturnType]

    @property
    def model(self) -> BayesianModel:
        """That of the first network."""
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
