"""`fit_head`: the best normal over a network's last layer, in closed form, by Newton's method or by its fixed point.

A layer of few numbers gets all covariances, see `climb.py`. A larger one, or one with a validation set, gets a
Kronecker product of axes, see `kronecker.py`.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from glob import escape
from math import exp, log, sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..families.matrix_normal import MatrixNormal, matrix_normal
from ..families.normal import Diagonal, NormalForm, Triangle
from ..laplace.place import (
    DEFAULT_WIDTH,
    NARROW,
    NETWORK,
    Candidate,
    learned_noise,
    restored_on_error,
    set_noise,
    trained_values,
    width_prior,
)  # fmt: skip
from ..laplace.selection import WIDTHS, HeldOut, Selection, score, widest
from ..models.calibration import Calibration
from ..models.likelihoods import Bernoulli, Gaussian
from ..models.priors import NormalPrior
from ..networks.last_layer import LastLayer, Pass
from ..predict.last_layer import layer_of, predictive, remember
from ..predict.predictive import Predictive
from ..result import Result, Status
from ..train.checks import remember_choice
from ..train.data import Batches, Reread, held_out_batches, warn_of_seen
from ..util.checks import check_integer, check_seed
from .bound import GaussianBound, LabelBound
from .climb import TOLERANCE, Climb
from .kronecker import Kronecker
from .rows import Rows, check_head, log_noise_of, passes, rows_of

if TYPE_CHECKING:
    from ..posterior import Posterior

#: the validation set is read up to this many rows times outputs, and at least up to this many rows
HELD_OUT_NUMBERS, FEWEST_ROWS = 2**18, 1000
#: Newton's method, and the curvature where it ends, in turn
ROUNDS = 2
#: the least width of a prior that is learned, and the change of its logarithm below which it has converged
LEAST, SETTLED = 1e-3, 1e-3


@dataclass(repr=False, kw_only=True)
class HeadResult(Result):
    """A fitted last layer, and what the validation set selected.

    Without a validation set `selected` is empty, there are no candidates, and `gain` is None.

    Attributes:
        steps: of the natural gradient, or of the prior's width.
        path: the ELBO at the start and after every step; of a Kronecker product the final one alone.
        selected: the candidate that the validation set selected.
        candidates: the held-out log density of every candidate in nats, each with its own temperature.
        gain: how much higher that of the selected one is than the network's, and its paired standard error over rows.
    """

    steps: int
    path: list[float]
    selected: str = ""
    candidates: dict[str, float] = field(default_factory=dict[str, float])
    gain: tuple[float, float] | None = None

    @property
    def next_step(self) -> str:
        if not self.converged:
            return "call fit_head with more iterations="
        return "bayes.predict(x), bayes.evaluate(test_loader); bayes.save(file)"


def fit_head(
    posterior: "Posterior",
    loader: Iterable[Any],
    *,
    validation: Iterable[Any] | None = None,
    iterations: int = 200,
    progress: bool = True,
    seed: int = 0,
) -> HeadResult:
    """Fit the best normal over the last layer, all else fixed, and return its ELBO.

    The network passes over the data once. For `Gaussian` noise N(μ, Σ) is the posterior itself. For `Bernoulli` and
    `Categorical` it is the normal of the highest ELBO, if the layer has at most 2,048 numbers. A larger layer gets a
    `MatrixNormal` around the maximum of the posterior, with the curvature there along Kronecker axes.

    If you left the prior open, each tensor's is N(0, s²), and s maximises the bound; so does a noise of
    `Gaussian("point")`. A `MatrixNormal` of labels then stays at the trained weights, under a prior of a default width.
    One of numbers takes the width and the noise with the highest evidence.

    With a validation set the posterior is a `MatrixNormal`. The candidates are a grid of prior widths and the network
    itself, each with its own temperature. The widest candidate that is as good as the best is selected.

    Args:
        posterior: over one linear layer or convolution, as `variationalize_head` makes it.
        loader: a `DataLoader`, or any re-iterable of batches: every observation is read once.
        validation: data that took no part in the training.
        iterations: the most steps, each a pass over the features.
        progress: print each step's ELBO to the standard error.
        seed: of the quasi-random draws of class logits.

    Raises:
        ValueError: a nonlinearity comes after the layer, or prior or likelihood have no closed form.

    Example:
        >>> from structvi import likelihoods, variationalize_head
        >>> data = [(torch.randn(32, 3), torch.randn(32, 1))]
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        >>> bayes = variationalize_head(net, likelihoods.Gaussian(noise=1.0))
        >>> bayes.fit_head(data, progress=False).converged
        True
    """
    check_seed(seed)
    check_integer("iterations", iterations)
    check_head(posterior, "fit_head")
    if validation is not None:
        warn_of_seen(loader, validation)
    with restored_on_error(posterior):
        if validation is not None and "family" in posterior.left_open and matrix_normal(posterior.family) is None:
            posterior.family = MatrixNormal().bind(posterior.space).to(posterior.device)
        form, family = posterior.family.normal(), matrix_normal(posterior.family)
        is_dense = form is not None and isinstance(form.root, Triangle)
        if family is None and (validation is not None or not is_dense):
            raise ValueError(
                "fit_head makes a normal with all covariances, or with Kronecker axes as a validation set needs, and "
                f"the family is {type(posterior.family).__name__}: use variationalize_head(net, likelihood), or the "
                "family FullNormal() or MatrixNormal()"
            )
        layer, log_scale = layer_of(posterior), _prior_scales(posterior)
        rows = rows_of(posterior, layer, Batches(loader, seed, posterior.device).everything())
        calibration = None
        if family is None:
            result = _climb(posterior, layer, log_scale, rows, iterations, progress, seed)
        else:
            held_out = None if validation is None else held_out_batches(validation, seed, posterior.device)
            fit = _KroneckerFit(posterior, family, layer, log_scale, rows)
            fit.place(iterations, progress)
            if held_out is not None:
                calibration = fit.select(held_out)
            result = fit.commit(seed)
        remember(posterior, layer)
        remember_choice(posterior, validation, seed)
        posterior.last_fit = result
        posterior.calibration = calibration
    return result


def _count(posterior: "Posterior", N: int) -> float:
    """Set the number of observations, if no one has said it; return it over the N that were read."""
    model = posterior.model
    if model.known_num_data is None or model.num_data_of_loader:
        model.num_data, model.num_data_of_loader = N, True
    return model.num_data / N


def _prior_scales(posterior: "Posterior") -> Tensor | None:
    """Return the logarithm of each tensor's prior scale; None if the prior was left open."""
    model = posterior.model
    if "prior" in posterior.left_open:
        return None
    if not isinstance(model.prior, NormalPrior) or model.prior.learn:
        raise ValueError(
            f"fit_head needs a NormalPrior of known scales, or prior= left out, got {model.prior!r}: use fit"
        )
    found = list(model.prior.scales(model.net_space).values())
    return torch.tensor(found, dtype=torch.float64, device=posterior.device).log()


def _notes(posterior: "Posterior", layer: LastLayer, learns_prior: bool, learns_noise: bool) -> list[str]:
    model = posterior.model
    notes = [f"of the network only {layer.name or 'its one layer'!r} is random: all else is fixed"]
    if learns_prior and isinstance(model.prior, NormalPrior):
        found = ", ".join(f"{name} {s:.3g}" for name, s in model.prior.scales(model.net_space).items())
        notes.append(f"the prior's scales were chosen by the ELBO: {found}")
    if learns_noise and isinstance(model.likelihood, Gaussian):
        notes.append(f"the noise was chosen by the ELBO: {exp(log_noise_of(model.likelihood)):.4g}")
    return notes


# ------------------------------------------------------------------------------------------ all covariances


def _climb(
    posterior: "Posterior", layer: LastLayer, log_scale: Tensor | None, rows: Iterable[tuple[Rows, int]],
    iterations: int, progress: bool, seed: int,
) -> HeadResult:  # fmt: skip
    model, N = posterior.model, 0
    bound: GaussianBound | LabelBound = LabelBound(layer, isinstance(model.likelihood, Bernoulli), seed)
    if isinstance(model.likelihood, Gaussian):
        bound = GaussianBound(layer, model.likelihood)
    for own, B in rows:
        bound.add(own.double())
        N += B
    climb = Climb(posterior, layer, bound, _count(posterior, N), log_scale)
    converged = climb.run(iterations, progress)
    posterior.family.set_normal(climb.form())
    if climb.learns_noise:
        set_noise(model.likelihood, bound.log_noise)
    if climb.learns_prior:
        scales = zip(model.net_space.names, climb.log_scale.exp().tolist(), strict=True)
        model.prior = NormalPrior({escape(name): value for name, value in scales})
    steps = len(climb.path) - 1
    verdict = f"the last of {steps} steps gained less than {TOLERANCE:g} nats"
    if not converged:
        verdict = f"after {steps} steps the ELBO still rises by more than {TOLERANCE:g} nats"
    return HeadResult(
        status=Status.CONVERGED if converged else Status.IMPROVING, verdict=verdict, elbo=climb.elbo(),
        notes=_notes(posterior, layer, climb.learns_prior, climb.learns_noise), steps=steps, path=climb.path,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ Kronecker axes


class _KroneckerFit:
    """A posterior over a layer with Kronecker axes, on its way.

    Args:
        posterior: over the layer.
        family: its family.
        layer: the layer.
        log_scale: of each tensor's prior; None if it was left open.
        rows: of the training data.
    """

    def __init__(
        self, posterior: "Posterior", family: MatrixNormal, layer: LastLayer, log_scale: Tensor | None,
        rows: Iterable[tuple[Rows, int]],
    ):  # fmt: skip
        self.posterior, self.family, self.layer = posterior, family, layer
        model, read = posterior.model, list(rows)
        factor = _count(posterior, sum(B for _, B in read))
        self.learns_prior, self.learns_noise = log_scale is None, learned_noise(model.likelihood) is not None
        prior = width_prior(posterior, trained_values(posterior), 1.0)
        assert isinstance(prior, NormalPrior)
        self.scales = prior.scales(model.net_space)
        unit = torch.tensor(list(self.scales.values()), dtype=torch.float64).repeat_interleave(
            torch.tensor(family.widths)
        )
        theta = trained_values(posterior)
        self.T = family.forward().matrix(theta).detach()
        self.data = Kronecker([own for own, _ in read], model.likelihood, unit.to(theta), factor)
        self.width, self.steps, self.selection, self.converged = 1.0, 0, None, True
        self.axes = self.data.axes(self.T)

    def place(self, iterations: int, progress: bool) -> None:
        """Move to the maximum of the posterior, or stay at trained weights of labels whose prior was left open."""
        if self.learns_prior and not self.data.is_number:
            self.width = DEFAULT_WIDTH
            return
        for _ in range(1 if self.data.is_number else ROUNDS):
            self.T = self.data.maximum(self.T, self.axes, self.width)
            self.axes = self.axes if self.data.is_number else self.data.axes(self.T)
        if self.learns_prior or self.learns_noise:
            self._learn(iterations, progress)

    def _learn(self, iterations: int, progress: bool) -> None:
        """Maximise the evidence over the prior's width and the noise of numbers, by MacKay's updates."""
        data, self.converged = self.data, False
        while self.steps < iterations and not self.converged:
            self.steps += 1
            determined = float((1 - self.axes.scale(self.width).square()).sum())
            width, log_noise = self.width, data.log_noise
            if self.learns_prior:
                size = float((self.T / data.unit).square().sum()) / max(determined, 1e-12)
                self.width = max(sqrt(size), LEAST)
            if self.learns_noise:
                residual, count = data.residual(self.T)
                rest = max(count - determined, 1e-3 * count)
                data.log_noise = 0.5 * log(max(residual / rest, data.least_variance()))
            more = exp(2 * (log_noise - data.log_noise))
            self.axes = self.axes._replace(curvature=more * self.axes.curvature)
            self.T = data.maximum(self.T, self.axes, self.width)
            self.converged = max(abs(log(self.width / width)), abs(data.log_noise - log_noise)) < SETTLED
            if progress:
                print(f"fit_head: step {self.steps}, prior width {self.width:.3g}", file=sys.stderr)

    def select(self, held_out: Reread) -> Calibration | None:
        """Select the prior's width, or the network itself, on held-out data; return the temperature."""
        posterior, layer = self.posterior, self.layer
        likelihood, seen, rows = posterior.model.likelihood, [], 0
        for here in passes(posterior, layer, held_out):
            seen.append(here)
            rows += len(here.features)
            if rows >= max(FEWEST_ROWS, HELD_OUT_NUMBERS // layer.outputs):
                break
        if not seen:
            raise ValueError("validation= gives no batch: is its data set empty, or was it read to its end before?")
        widths = list(WIDTHS) if self.learns_prior else [self.width]
        means = [self.data.maximum(self.T, self.axes, w) if self.data.is_number else self.T for w in widths]
        set_noise(likelihood, self.data.log_noise)

        def network(_: Any, here: Pass) -> tuple[list[list[Predictive]], Any]:
            return [[Predictive(here.output.unsqueeze(0), here.output.new_ones(1), likelihood)]], here.target

        def around(_: Any, here: Pass) -> tuple[list[list[Predictive]], Any]:
            features = here.features.to(self.T)
            found = []
            for T, width in zip(means, widths, strict=True):
                mean = layer.as_output(features @ T.mT, here.output)
                found.append([predictive(likelihood, layer, mean, self.data.outputs(features, self.axes, width))])
            return found, here.target

        one: Any = [posterior]
        grid = torch.zeros(1, dtype=torch.float64)
        tried: dict[Candidate, HeldOut] = {NETWORK: score(one, seen, grid, network)[0]}
        found = score(one, seen, grid, around)
        names = [Candidate(width if self.learns_prior else None, linearised=True) for width in widths]
        tried |= dict(zip(names, found, strict=True))
        self.selection = Selection(selected := widest(tried), tried)
        if not selected.is_network:
            place = names.index(selected)
            self.width, self.T = widths[place], means[place]
        return self.selection.calibration

    def commit(self, seed: int) -> HeadResult:
        """Set the posterior's family, prior and noise; return the result."""
        posterior, model, data, selection = self.posterior, self.posterior.model, self.data, self.selection
        theta = self.family.forward().vector(self.T)
        if selection is not None and selection.selected.is_network:
            scale = NARROW * posterior.space.scale.to(theta)
            self.family.set_normal(NormalForm(trained_values(posterior), Diagonal(scale)))
        else:
            with torch.no_grad():
                self.family.mean.copy_(theta)
            self.family.set_axes(*self.axes[:2], self.width * data.unit, self.axes.scale(self.width))
        if self.learns_prior:
            model.prior = NormalPrior({escape(name): self.width * value for name, value in self.scales.items()})
        if self.learns_noise:
            set_noise(model.likelihood, data.log_noise)
        notes = _notes(posterior, self.layer, self.learns_prior, self.learns_noise)
        if not data.is_exact:
            notes.append("the precision is the curvature at the mean along Kronecker axes; the ELBO was not maximised")
        elbo = data.elbo(self.T, self.axes, self.width, seed)
        result = HeadResult(
            status=Status.CONVERGED if self.converged else Status.IMPROVING, elbo=elbo, notes=notes, steps=self.steps,
            verdict="placed along Kronecker axes" if self.converged else f"after {self.steps} steps the width moves",
            path=[elbo.value],
        )  # fmt: skip
        if selection is not None:
            network = selection.network
            result.selected, result.gain = selection.selected.name, selection.held_out.gain_over(network)
            result.candidates = {
                one.name: network.mean + held.gain_over(network)[0] for one, held in selection.tried.items()
            }
            result.verdict = f"the validation set selected {result.selected}"
        return result
