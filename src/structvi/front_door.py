"""The front door: a network becomes a posterior that can be fitted, asked for predictions and kept."""

import os
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from .basics.checks import check_one_of
from .couplings import Coupling, paired
from .families.family import Family
from .families.structured import StructuredNormal
from .models.bayesian_model import BayesianModel
from .models.likelihoods import Bernoulli, Categorical
from .models.priors.base import Prior
from .models.priors.scale import NormalPrior
from .networks.vmap_or_loop import Mode
from .objective import Estimate
from .parameters import Parameters, Select
from .posterior import BATCH_NORM, BATCH_NORMS, DROPOUT, BatchNorm, Dropout, PosteriorBase
from .predicting.metrics import evaluate
from .predicting.predict import mean_network, predict, sample, sample_network
from .result import Result
from .storing import posterior_file
from .training.batches import Batches
from .training.comparing import elbo_over
from .training.fit import fit
from .training.grow import grow

if TYPE_CHECKING:
    from arviz import InferenceData

    from .diagnostics import Report


class Posterior(PosteriorBase):
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

    # functions of a posterior as its methods: with their own signatures and documentation

    fit = fit
    """Fit to the data, see `structvi.training.fit.fit`: `posterior.fit(loader, epochs=20)`."""

    grow = grow
    """Refine a fitted posterior, `rank=` or `components=`, see `structvi.training.grow.grow`; never makes it worse."""

    predict = predict
    """The mixture over draws of the weights, Σ_s w_s p(t | y_s(x)): see `structvi.predicting.predict.predict`."""

    forward = predict

    evaluate = evaluate
    """Likelihood, error, calibration and coverage of predictions on a loader, streamed: see `metrics.evaluate`."""

    sample = sample
    """n independent draws of the weights, by tensor name: see `structvi.predicting.predict.sample`."""

    sample_network = sample_network
    """A copy of the network with drawn weights: an ordinary module with parameters of its own."""

    mean_network = mean_network
    """A copy of the network at the posterior mean of its weights."""

    def diagnose(
        self,
        loader: Iterable[Any],
        *,
        result: Result | None = None,
        draws: int | None = None,
        gradients: bool = True,
        seed: int = 0,
    ) -> "Report":
        """How near it is to the posterior and how good its fit, in plain words: see `structvi.diagnostics.diagnose`."""
        from .diagnostics import diagnose  # loaded when asked for, as are its plots

        return diagnose(self, loader, result=result, draws=draws, gradients=gradients, seed=seed)

    def to_arviz(
        self,
        loader: Iterable[Any] | None = None,
        draws: int = 1000,
        *,
        select: Select = "*",
        chunk: int = 16,
        seed: int = 0,
    ) -> "InferenceData":
        """Draws as arviz `InferenceData`, for its summaries and plots: see `structvi.diagnostics.to_arviz`."""
        from .diagnostics import to_arviz

        return to_arviz(self, loader, draws, select=select, chunk=chunk, seed=seed)

    def elbo(
        self,
        loader: Iterable[Any],
        *,
        groups: int = 64,
        coupling: Coupling = paired,
        generator: torch.Generator | None = None,
    ) -> Estimate:
        """The ELBO over all data, in nats, with its standard error: every batch sees the same draws."""
        batches = Batches(loader, device=self.device)
        return elbo_over(self, batches.everything(), groups=groups, coupling=coupling, generator=generator)

    def save(self, path: str | os.PathLike, network: Literal["store", "hash"] = "store") -> None:
        """Write the posterior to one safetensors file, atomically; `structvi.load(path, net)` reads it.

        In it are the variational parameters, those of likelihood and prior, and a description of all of them; no code
        and no pickle. Functions and classes that you wrote yourself are not: `load` asks for them by name.

        Args:
            path: the file; one that is there is replaced.
            network: "store" the network's tensors that are not random too, held ones and buffers; or only their
                "hash": `load` then refuses a network where they are not the same.
        """
        posterior_file.save(self, path, network)


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
    dropout: Dropout = "off",
    batch_norm: BatchNorm = "frozen",
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
    check_one_of("dropout", dropout, DROPOUT)
    check_one_of("batch_norm", batch_norm, BATCH_NORM)
    parameters = Parameters.of(net, select, exclude)
    _warn_of_probabilities(net, likelihood)
    if batch_norm == "deterministic":
        affine = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in net.named_modules()
            if isinstance(module, BATCH_NORMS)
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


def load(
    path: str | os.PathLike,
    net: nn.Module,
    *,
    family: Family | None = None,
    prior: Prior | None = None,
    likelihood: Callable[[Any, Any], Tensor] | None = None,
    forward: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None,
    device: torch.device | str | None = None,
) -> Posterior:
    """The posterior of a file that `Posterior.save` wrote, around a network of the same form.

    The network's tensors that are not random, held ones and buffers, are part of the posterior: they are copied from
    the file into `net`, as `load_state_dict` does; the random ones of `net` are left as they are. A file that was
    saved with network="hash" changes nothing in `net`, and is refused where those tensors are not the same.

    Args:
        path: the file.
        net: a network with the tensors of the one that was saved; where they differ, the error names them.
        family, prior, likelihood, forward: what you wrote yourself is not in the file: give it again, made with the
            same arguments. Its tensors, if it has any, are set from the file.
        device: where to move all of it, `net` included; None for where `net` is.

    Raises:
        CheckpointError: the file is missing, damaged, of another version or of another kind.
        ValueError: the network, or what you gave, is not what was saved.

    Example:
        >>> import tempfile
        >>> from structvi import MeanField, likelihoods
        >>> path = os.path.join(tempfile.mkdtemp(), "posterior.safetensors")
        >>> variationalize(nn.Linear(3, 2), likelihoods.Categorical(), MeanField(), num_data=100).save(path)
        >>> load(path, nn.Linear(3, 2)).family
        MeanField(initial_mean='current', initial_scale=0.1)
    """
    plain = posterior_file.load(
        path, net, family=family, prior=prior, likelihood=likelihood, forward=forward, device=device
    )
    return Posterior(plain.model, plain.family, dropout=plain.dropout, batch_norm=plain.batch_norm)


def _warn_of_probabilities(net: nn.Module, likelihood: Any) -> None:
    """Where the last layer makes probabilities, of which the likelihood would make probabilities once more."""
    if not isinstance(likelihood, Categorical | Bernoulli):
        return
    *_, (name, last) = net.named_modules(remove_duplicate=False)  # a layer may stand in several places
    harmless = isinstance(last, nn.LogSoftmax) and isinstance(likelihood, Categorical)
    if isinstance(last, nn.Softmax | nn.LogSoftmax | nn.Sigmoid) and not harmless:
        warnings.warn(
            f"the network ends in {type(last).__name__} ({name!r}), but likelihoods.{type(likelihood).__name__} "
            "expects logits and makes probabilities of them itself: remove that layer, or put nn.Identity() in its "
            "place",
            stacklevel=3,
        )
