"""The posterior over a network's weights: `variationalize` makes it, its methods fit it, predict and save."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from .couplings import Coupling, paired
from .diagnostics.arviz import to_arviz
from .diagnostics.diagnosis import diagnose
from .distributed.sharding import Sharded
from .families.family import Family
from .families.low_rank import LowRankNormal
from .families.matrix_normal import MatrixNormal
from .files import posterior_file
from .head.head import fit_head
from .head.update import update
from .laplace.laplace import laplace
from .models.bayesian_model import BayesianModel, Keys
from .models.calibration import Calibration
from .models.likelihoods import Bernoulli, Categorical
from .models.priors import NormalPrior, Prior
from .networks.call import BATCH_NORM, BATCH_NORMS, DROPOUT, BatchNorm, Dropout, in_modes, is_in_training
from .networks.last_layer import head_tensors
from .networks.learned_variance import LearnedVariance
from .networks.out_of_distribution import OutOfDistribution
from .networks.vmap_or_loop import Mode
from .objective import Estimate, Estimator, Terms, elbo_terms
from .parameters import Parameters, Select
from .predict.acquire import acquire
from .predict.calibration import calibrate
from .predict.linearised import output_moments
from .predict.metrics import evaluate
from .predict.predict import predict, predictor
from .predict.sample import mean_network, sample, sample_network
from .result import Result, Status
from .train.compare import elbo_over
from .train.data import Batches
from .train.fit import fit
from .train.grow import grow
from .train.step import stepper
from .util.checks import check_one_of
from .util.random_streams import borrowed_stream


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
        self, model: BayesianModel, family: Family, *, dropout: Dropout = "off", batch_norm: BatchNorm = "frozen"
    ):
        super().__init__()
        check_one_of("dropout", dropout, DROPOUT)
        check_one_of("batch_norm", batch_norm, BATCH_NORM)
        self.model = model
        self.family = family
        self.dropout: Dropout = dropout
        self.batch_norm: BatchNorm = batch_norm
        #: the arguments that the user left out, of "family", "prior", "linearise" and a head's "layer": `laplace` and
        #: `fit_head` may choose them
        self.left_open: frozenset[str] = frozenset()
        #: the result of `calibrate`: `predict` uses it; a fit drops it
        self.calibration: Calibration | None = None
        #: variances of the outputs at the price of a forward pass, from `laplace`; a fit drops them
        self.learned_variance: LearnedVariance | None = None
        #: what tells inputs that are unlike the data, from held-out data; a fit drops it
        self.ood: OutOfDistribution | None = None
        #: the fingerprint of the held-out data on which a fit has chosen, see `predict/calibration.py`
        self.chosen_on: str | None = None
        self._last_fit: Result | None = None
        #: how the last fit ended, also in another process: a file has it; None before any fit
        self.fit_status: Status | None = None
        #: whether `predict` says that there was no fit; a loop of your own asks for `terms`, and is one
        self.warns_unfitted = True

    def extra_repr(self) -> str:
        weights = sum(parameter.numel() for parameter in self.net.parameters())
        known = self.model.known_num_data
        N = "N not known yet" if known is None else f"N = {known}"
        return f"{self.model.net_space.size} of the network's {weights} weights are random, {N}"

    @property
    def last_fit(self) -> Result | None:
        """The result of the last fit."""
        return self._last_fit

    @last_fit.setter
    def last_fit(self, result: Result | None) -> None:
        # these belong to the fit before
        self._last_fit, self.calibration, self.learned_variance, self.ood = result, None, None, None
        self.fit_status = None if result is None else result.status

    @property
    def space(self) -> Parameters:
        return self.model.space

    @property
    def posteriors(self) -> list["Posterior"]:
        """This posterior alone; an ensemble has one for each network."""
        return [self]

    @property
    def net(self) -> nn.Module:
        return self.model.net

    @property
    def device(self) -> torch.device:
        """The device of the variational parameters."""
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
        """Return the parameters of likelihood and prior that a fit learns, by name."""
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
        if isinstance(self.family, Sharded):
            raise ValueError(
                "this rank has only its rows of the posterior: call gather(posterior) on all ranks, and use what it "
                "returns"
            )

    @contextmanager
    def network_mode(self, generator: torch.Generator | None = None) -> Iterator[nn.Module]:
        """Hold the network for this thread, in eval mode but for what `dropout` and `batch_norm` ask.

        Args:
            generator: with dropout="on" the random numbers of the network come from it, not from the global stream.
        """
        stream = nullcontext() if generator is None or self.dropout == "off" else borrowed_stream(generator)
        with stream, in_modes(self.net, lambda module: is_in_training(module, self.dropout, self.batch_norm)) as net:
            yield net

    @property
    def mixes_rows(self) -> bool:
        """True if batch norm takes its statistics from the batch: a row's output then depends on the other rows."""
        layers = [module for module in self.net.modules() if isinstance(module, BATCH_NORMS)]
        return any(self.batch_norm == "reestimated" or module.running_mean is None for module in layers)

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
        self.warns_unfitted = False
        with self.network_mode():
            return elbo_terms(self.family, self.model, batch, estimator, generator)

    # functions of a posterior as its methods: with their own signatures and documentation
    fit = fit
    laplace = laplace
    stepper = stepper
    fit_head = fit_head
    update = update
    grow = grow
    predict = forward = predict
    predictor = predictor
    evaluate = evaluate
    calibrate = calibrate
    acquire = acquire
    output_moments = output_moments
    sample = sample
    sample_network = sample_network
    mean_network = mean_network
    diagnose = diagnose
    to_arviz = to_arviz

    def elbo(
        self,
        loader: Iterable[Any],
        *,
        groups: int = 64,
        coupling: Coupling = paired,
        generator: torch.Generator | None = None,
    ) -> Estimate:
        """The ELBO over all data, in nats, with its standard error: every batch sees the same draws."""
        everything = Batches(loader, device=self.device).everything()
        return elbo_over(self, everything, groups=groups, coupling=coupling, generator=generator)

    def save(self, path: str | os.PathLike[str], network: Literal["store", "hash"] = "store") -> None:
        """Write the posterior to one safetensors file, atomically; `structvi.load(path, net)` reads it.

        The file holds the variational parameters, the parameters of likelihood and prior, and their description. It has
        no code and no pickle: `load` asks by name for functions and classes that you wrote yourself.

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
    keys: Keys | None = None,
    evaluation: Mode = "auto",
    chunk: int | None = None,
    checkpoint_activations: bool = False,
    linearise: bool | None = None,
    dropout: Dropout = "off",
    batch_norm: BatchNorm = "frozen",
    generator: torch.Generator | None = None,
) -> Posterior:
    """Turn a network into a variational posterior over its weights.

    Args:
        net: any module; it is never changed.
        likelihood: such as `likelihoods.Categorical()` or `likelihoods.Gaussian("point")`.
        family: a recipe. If it is None, `laplace` chooses, and `fit` takes `LowRankNormal(rank=8)`.
        prior: if it is None, `laplace` chooses, and `fit` takes `NormalPrior(1.0)`.
        num_data: N; if it is None, `fit` takes it from the loader's data set.
        select, exclude: the random tensors, as in `Parameters.of`; the others are fixed.
        forward: for other batches than (input, target) and dicts: (net, batch) → (output, target).
        keys: of dict batches with more in them the entries that count, ("image", "label"): as MONAI's. With
            `Categorical` labels [B, 1, ..] of floats then count as [B, ..] of integers.
        evaluation, chunk: how S weights are evaluated, see `BayesianModel` and `Evaluation`.
        checkpoint_activations: keep no activations of the network, for less memory and more time.
        linearise: y = f(x; θ₀) + J(x)(θ − θ₀) in place of the network, θ₀ its present values: a generalised linear
            model around a trained network. Its posterior may be wider than drawn weights of a network allow. If
            it is None, `laplace` chooses, and `fit` does not linearise.
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
    parameters = Parameters.of(net, select, exclude)
    _warn_of_probabilities(net, likelihood)
    if batch_norm == "deterministic":
        layers = [name for name, module in net.named_modules() if isinstance(module, BATCH_NORMS)]
        parameters = parameters.without(name for name in parameters.names if name.rpartition(".")[0] in layers)
    model = BayesianModel(
        net, likelihood, NormalPrior(1.0) if prior is None else prior, num_data, parameters=parameters,
        forward=forward, keys=keys, evaluation=evaluation, chunk=chunk, checkpoint_activations=checkpoint_activations,
        linearise=bool(linearise),
    )  # fmt: skip
    recipe = LowRankNormal(rank=min(8, model.space.size)) if family is None else family
    if not isinstance(recipe, Family):
        raise TypeError(f"family must be a recipe such as LowRankNormal(rank=8), got {recipe!r}")
    bound = recipe if recipe.space is not None else recipe.bind(model.space, generator)
    posterior = Posterior(model, bound, dropout=dropout, batch_norm=batch_norm)
    given = {"family": family, "prior": prior, "linearise": linearise}
    posterior.left_open = frozenset(name for name, value in given.items() if value is None)
    return posterior


def variationalize_head(
    net: nn.Module,
    likelihood: Callable[[Any, Any], Tensor],
    prior: Prior | None = None,
    *,
    layer: str | None = None,
    **options: Any,
) -> Posterior:
    """A posterior over the last layer of a trained network, of any size; the rest of the network is held.

    Fit it with `fit_head(loader, validation=held_out)`. It predicts from one pass of the network, without draws of
    weights. Its covariance has a Kronecker product of axes, `MatrixNormal`: exact for Gaussian noise.

    Args:
        net: a network whose output is that of a linear layer or convolution, up to its shape.
        likelihood: `likelihoods.Gaussian(noise)`, `Gaussian("point")`, `Bernoulli()` or `Categorical()`.
        prior: of independent normals; where none is given `fit_head` chooses its width, by the ELBO.
        layer: its name in `net.named_modules()`; the last linear layer or convolution by default.
        **options: such as `num_data`, `forward` and `keys`, as in `variationalize`.

    Example:
        >>> from structvi import likelihoods
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> variationalize_head(net, likelihoods.Categorical()).space.names
        ('2.weight', '2.bias')
    """
    names = head_tensors(net, layer)
    posterior = variationalize(net, likelihood, MatrixNormal(), prior, select=lambda name, _: name in names, **options)
    given = {"prior": prior, "layer": layer, "family": None}
    posterior.left_open = frozenset(name for name, value in given.items() if value is None)
    return posterior


def _warn_of_probabilities(net: nn.Module, likelihood: Any) -> None:
    """Warn if the last layer makes probabilities: the likelihood expects logits."""
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
