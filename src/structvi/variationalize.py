"""The front door: a network becomes a posterior that can be fitted, asked for predictions and kept."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from . import diagnostics, fitting, likelihoods, metrics, prediction, refining
from .batches import Batches
from .couplings import Coupling, paired
from .elbo import Estimator, Terms, elbo_terms
from .estimate import Estimate, full_elbo
from .evaluation import Mode
from .families.base import Family
from .families.structured import StructuredNormal
from .history import FitResult
from .parameters import Parameters, Select
from .priors import NormalPrior, Prior
from .targets import BayesianModel

DROPOUT = ("off", "on")
BATCH_NORM = ("frozen", "deterministic", "reestimated")

_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
# the last three drop inside themselves, or skip their own dropout layers on a fast path that only training closes
_DROPOUTS = (nn.modules.dropout._DropoutNd, nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer)


class Posterior(nn.Module):
    """A network with likelihood, prior and variational family: what `variationalize` returns.

    - `posterior(x)` is `posterior.predict(x)`: a `Predictive`.
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

    def __init__(
        self,
        model: BayesianModel,
        family: Family,
        *,
        dropout: Literal["off", "on"] = "off",
        batch_norm: Literal["frozen", "deterministic", "reestimated"] = "frozen",
    ):
        super().__init__()
        self.model = model
        self.family = family
        self.dropout = dropout
        self.batch_norm = batch_norm
        #: what the last fit returned
        self.last_fit: FitResult | None = None

    def extra_repr(self) -> str:
        weights = sum(parameter.numel() for parameter in self.net.parameters())
        N = "N not known yet" if self.model._num_data is None else f"N = {self.model.num_data}"
        return f"{self.model.net_space.size} of the network's {weights} weights are random, {N}"

    @property
    def space(self) -> Parameters:
        return self.model.space

    @property
    def net(self) -> nn.Module:
        return self.model.net

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator:
        own = f"{prefix}.model.net." if prefix else "model.net."
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if not name.startswith(own):
                yield name, parameter

    def train(self, mode: bool = True) -> "Posterior":
        self.training = mode
        return self

    @contextmanager
    def network_mode(self) -> Iterator[None]:
        """Inside, the network is in eval mode but for what `dropout` and `batch_norm` ask; afterwards as it was."""
        before = [(module, module.training) for module in self.net.modules()]
        try:
            for module, _ in before:
                active = isinstance(module, _DROPOUTS) and self.dropout == "on"
                active = active or (isinstance(module, _BATCH_NORMS) and self.batch_norm == "reestimated")
                module.__dict__["training"] = active  # past nn.Module's own, which takes longer than small networks
            yield
        finally:
            for module, training in before:
                module.__dict__["training"] = training

    def loss(
        self,
        batch: Any,
        *,
        groups: int = 1,
        coupling: Coupling = paired,
        estimator: Estimator = "path",
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """−(E log lik − λ KL[q‖prior]) / N in nats per observation, for a loop of your own."""
        terms = self.terms(batch, groups=groups, coupling=coupling, estimator=estimator, generator=generator)
        return -(terms.fit - temperature * terms.complexity).mean() / self.model.num_data

    def terms(
        self,
        batch: Any,
        *,
        groups: int = 1,
        coupling: Coupling = paired,
        estimator: Estimator = "path",
        generator: torch.Generator | None = None,
    ) -> Terms:
        """E log lik and KL[q‖prior] for each group of draws, in nats for the whole data set."""
        with self.network_mode():
            return elbo_terms(
                self.family,
                self.model,
                batch,
                groups=groups,
                coupling=coupling,
                estimator=estimator,
                generator=generator,
            )

    # functions of a posterior as its methods: with their own signatures and documentation

    fit = fitting.fit
    """Fit to the data, see `structvi.fitting.fit`: `posterior.fit(loader, epochs=20)`."""

    grow = refining.grow
    """Refine a fitted posterior, `rank=` or `components=`, see `structvi.refining.grow`; never makes it worse."""

    predict = prediction.predict
    """The mixture over draws of the weights, Σ_s w_s p(t | y_s(x)): see `structvi.prediction.predict`."""

    forward = prediction.predict

    evaluate = metrics.evaluate
    """Likelihood, error, calibration and coverage of predictions on a loader, streamed: see `metrics.evaluate`."""

    sample_network = prediction.sample_network
    """A copy of the network with drawn weights: an ordinary module with parameters of its own."""

    mean_network = prediction.mean_network
    """A copy of the network at the posterior mean of its weights."""

    diagnose = diagnostics.diagnose
    """How near it is to the posterior and how good its fit, in plain words: see `structvi.diagnostics.diagnose`."""

    to_arviz = diagnostics.to_arviz
    """Draws as arviz `InferenceData`, for its summaries and plots: see `structvi.diagnostics.to_arviz`."""

    def elbo(
        self,
        loader: Iterable[Any],
        *,
        groups: int = 64,
        coupling: Coupling = paired,
        generator: torch.Generator | None = None,
    ) -> Estimate:
        """The ELBO over all data, in nats, with its standard error: every batch sees the same draws."""
        batches = Batches(loader, device=next(self.parameters()).device)
        with self.network_mode():
            return full_elbo(
                self.family, self.model, batches.everything(), groups=groups, coupling=coupling, generator=generator
            )

    def save(self, path: str | os.PathLike, network: Literal["store", "hash"] = "store") -> None:
        """Write the posterior to one safetensors file, atomically; `structvi.load(path, net)` reads it.

        In it are the variational parameters, those of likelihood and prior, and a description of all of them; no code
        and no pickle. Functions and classes that you wrote yourself are not: `load` asks for them by name.

        Args:
            path: the file; one that is there is replaced.
            network: "store" the network's tensors that are not random too, held ones and buffers; or only their
                "hash": `load` then refuses a network where they are not the same.
        """
        from .keeping import save

        save(self, path, network)


def variationalize(
    net: nn.Module,
    likelihood: Callable[[Any, Any], Tensor],
    family: Family | None = None,
    prior: Prior | None = None,
    *,
    num_data: int | None = None,
    select: Select = "*",
    exclude: Select = (),
    forward: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None,
    evaluation: Mode = "auto",
    chunk: int | None = None,
    deterministic: bool | None = None,
    checkpoint_activations: bool = False,
    dropout: Literal["off", "on"] = "off",
    batch_norm: Literal["frozen", "deterministic", "reestimated"] = "frozen",
    generator: torch.Generator | None = None,
) -> Posterior:
    """Turn a network into a variational posterior over its weights.

    Args:
        net: any module; it is never changed.
        likelihood: such as `likelihoods.Categorical()` or `likelihoods.Gaussian("point")`.
        family: a recipe; `StructuredNormal(rank=8)` by default.
        prior: `NormalPrior(1.0)` by default.
        num_data: N; `fit` takes it from the loader's data set where it is not given.
        select, exclude: which tensors are random, as in `Parameters.of`; the others are held.
        forward: for other batches than (input, target) and dicts: (net, batch) → (output, target).
        evaluation, chunk, deterministic: how S weights are evaluated, see `BayesianModel` and `Evaluation`.
        checkpoint_activations: keep no activations of the network, for less memory and more time.
        dropout: the network's own dropout layers are "off" in `fit` and `predict`, or "on" in both, on top of the
            family.
        batch_norm: running statistics are "frozen" as the network has them, and the affine weights random as all
            others; or, "deterministic", the affine weights are held too; or, "reestimated", layers use the
            statistics of the batch for every draw, in `fit` the minibatch and in `predict` a reference batch.
        generator: of the family's start.

    Example:
        >>> from structvi import likelihoods
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> bayes = variationalize(net, likelihoods.Categorical(), num_data=100)
        >>> bayes.loss((torch.zeros(10, 3), torch.zeros(10, dtype=torch.long))).requires_grad
        True
    """
    for name, value, known in (
        ("dropout", dropout, DROPOUT),
        ("batch_norm", batch_norm, BATCH_NORM),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {known}, got {value!r}")
    parameters = Parameters.of(net, select, exclude)
    _warn_of_probabilities(net, likelihood)
    if batch_norm == "deterministic":
        affine = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in net.named_modules()
            if isinstance(module, _BATCH_NORMS)
            for name, _ in module.named_parameters(recurse=False)
        }
        parameters = parameters.without(affine & set(parameters.names))
    model = BayesianModel(
        net,
        likelihood,
        NormalPrior(1.0) if prior is None else prior,
        num_data,
        parameters=parameters,
        forward=forward,
        evaluation=evaluation,
        chunk=chunk,
        deterministic=deterministic,
        checkpoint_activations=checkpoint_activations,
    )
    recipe = StructuredNormal(rank=min(8, model.space.size)) if family is None else family
    if not isinstance(recipe, Family):
        raise TypeError(f"family must be a recipe such as StructuredNormal(rank=8), got {recipe!r}")
    bound = recipe if recipe.space is not None else recipe.bind(model.space, generator)
    return Posterior(model, bound, dropout=dropout, batch_norm=batch_norm)


def _warn_of_probabilities(net: nn.Module, likelihood: Any) -> None:
    """Where the last layer makes probabilities, of which the likelihood would make probabilities once more."""
    if not isinstance(likelihood, likelihoods.Categorical | likelihoods.Bernoulli):
        return
    *_, (name, last) = net.named_modules(remove_duplicate=False)  # a layer may stand in several places
    harmless = isinstance(last, nn.LogSoftmax) and isinstance(likelihood, likelihoods.Categorical)
    if isinstance(last, nn.Softmax | nn.LogSoftmax | nn.Sigmoid) and not harmless:
        warnings.warn(
            f"the network ends in {type(last).__name__} ({name!r}), but likelihoods.{type(likelihood).__name__} "
            "expects logits and makes probabilities of them itself: remove that layer, or put nn.Identity() in its "
            "place",
            stacklevel=3,
        )
