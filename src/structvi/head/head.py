"""`fit_head`: a normal over a network's last layer, around the maximum of its posterior."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from glob import escape
from math import ceil, exp, inf, log, sqrt
from typing import TYPE_CHECKING, Any

import torch

from ..families.matrix_normal import MatrixNormal, matrix_normal
from ..families.normal import Diagonal, NormalForm
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
from ..laplace.selection import SCORED_ROWS, WIDTHS, Selection, score
from ..models.bayesian_model import rows
from ..models.likelihoods import Gaussian
from ..models.priors import NormalPrior
from ..networks.last_layer import Pass
from ..objective import Estimate
from ..predict.one_pass import layer_of, out_of_distribution, predictive, remember
from ..predict.predictive import Predictive
from ..result import Result, Status
from ..train.checks import remember_choice
from ..train.data import Batches, Reread, held_out_batches, warn_of_seen
from ..util.checks import check_integer, check_seed
from .layer_data import LayerData
from .rows import check_head, log_noise_of, passes, rows_of

if TYPE_CHECKING:
    from ..posterior import Posterior

#: the least width of a prior that is learned
LEAST = 1e-3
#: a change of the ELBO by less has converged, in nats for each observation
TOLERANCE = 1e-4
#: the step in which the axes of labels turn to the curvature's
TURN = 4
#: sets of draws for the ELBO of labels
ELBO_SETS = 4


@dataclass(repr=False, kw_only=True)
class HeadResult(Result):
    """A fitted last layer, and what the validation set selected.

    Without a validation set `selected` is empty, there are no candidates, and `gain` is None.

    Attributes:
        steps: of mean, precision, and of a prior's width and a noise that are learned.
        selected: the candidate that the validation set selected.
        candidates: the held-out log density of every candidate in nats, each with its own temperature.
        gain: how much higher that of the selected one is than the network's, and its paired standard error over rows.
    """

    steps: int
    selected: str = ""
    candidates: dict[str, float] = field(default_factory=dict[str, float])
    gain: tuple[float, float] | None = None


def fit_head(
    posterior: "Posterior",
    loader: Iterable[Any],
    *,
    validation: Iterable[Any] | None = None,
    iterations: int = 200,
    progress: bool = True,
    seed: int = 0,
) -> HeadResult:
    """Fit a normal over the last layer, all else fixed, and return its ELBO.

    The network passes over the data once. The normal has Kronecker axes (`MatrixNormal`), and the highest ELBO along
    these axes. For `Gaussian` noise that is the posterior itself.

    If you left the prior open, each tensor's is N(0, (w·rms)²), with rms the root mean square of its trained values.
    The width w has the highest ELBO, and so has a noise of `Gaussian("point")`.

    With a validation set the candidates are a grid of prior widths and the network itself, each with its own
    temperature. The widest candidate that is as good as the best is selected. If you left the prior
    of labels open, then the mean stays at the trained weights. `predict(x).ood_score` is known too.

    Args:
        posterior: over one linear layer or convolution, as `variationalize_head` makes it.
        loader: a `DataLoader`, or any re-iterable of batches: every observation is read once.
        validation: data that took no part in the training.
        iterations: the most steps.
        progress: print each step's ELBO to the standard error.
        seed: of the draws by which the ELBO of labels is estimated.

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
        family = matrix_normal(posterior.family)
        if family is None:
            raise ValueError(f"fit_head makes a MatrixNormal, the family is {type(posterior.family).__name__}")
        batches, theta = Batches(loader, seed, posterior.device), trained_values(posterior)
        fit = _Fit(posterior, family, batches.everything())
        if validation is None or fit.data.is_number or not fit.learns_prior:
            fit.climb(iterations, progress, seed)
        else:
            fit.width = DEFAULT_WIDTH
        held_out = None if validation is None else held_out_batches(validation, seed, posterior.device)
        selection = None if held_out is None else fit.select(held_out)
        fit.commit()
        remember(posterior, fit.layer)
        remember_choice(posterior, validation, seed)
        posterior.last_fit = result = fit.result(selection, seed)
        posterior.calibration = None if selection is None else selection.calibration
        if held_out is not None and posterior.model.user_forward is None:
            posterior.ood = out_of_distribution(posterior, theta, batches.everything(), held_out)
    return result


class _Fit:
    """A normal over a layer on its way.

    Args:
        posterior: over the layer.
        family: its family.
        batches: the training data.
    """

    def __init__(self, posterior: "Posterior", family: MatrixNormal, batches: Iterable[Any]):
        model, self.posterior, self.family, self.layer = posterior.model, posterior, family, layer_of(posterior)
        self.learns_prior = "prior" in posterior.left_open
        self.learns_noise = learned_noise(model.likelihood) is not None
        theta = trained_values(posterior)
        prior = width_prior(posterior, theta, 1.0)
        if not isinstance(prior, NormalPrior) or prior.learn:
            raise ValueError(f"fit_head needs a NormalPrior of known scales, or prior= left out, got {prior!r}")
        self.scales = prior.scales(model.net_space)
        read = list(rows_of(posterior, self.layer, batches))
        N = sum(B for _, B in read)
        if model.known_num_data is None or model.num_data_of_loader:
            model.num_data, model.num_data_of_loader = N, True
        self.T = family.forward().matrix(theta).detach()
        each = torch.tensor(list(self.scales.values()), dtype=torch.float64)
        unit = each.repeat_interleave(torch.tensor(family.widths)).to(self.T)
        self.data = LayerData([own for own, _ in read], model.likelihood, unit, model.num_data / N)
        self.width, self.steps, self.converged, self.is_network = 1.0, 0, True, False
        self.axes = self.data.axes(self.T)

    def climb(self, iterations: int, progress: bool, seed: int) -> None:
        """Move to the normal with the highest ELBO, of a width and noise with the highest evidence."""
        data, elbo, self.converged = self.data, -inf, False
        self.T = data.maximum(self.T, self.axes, self.width)
        while self.steps < iterations and not self.converged:
            self.steps, before = self.steps + 1, elbo
            self._learn()
            if not data.is_number:
                data.draw(self.axes, self.width, seed)
                if self.steps == TURN:
                    self.axes = data.axes(self.T)
                wanted = data.curvature(self.T, *self.axes[:2])  # the mean of both, or it goes up and down
                self.axes = self.axes._replace(curvature=(self.axes.curvature + wanted) / 2)
            self.T = data.maximum(self.T, self.axes, self.width)
            elbo = self._elbo()
            is_turned = data.is_number or self.steps > TURN
            self.converged = is_turned and abs(elbo - before) < TOLERANCE * self.posterior.model.num_data
            if progress:
                print(f"fit_head: step {self.steps}, ELBO {elbo:.5g} nats", file=sys.stderr)

    def _learn(self) -> None:
        """Update the prior's width and the noise of numbers by MacKay's rule, if they are learned."""
        data, log_noise = self.data, self.data.log_noise
        determined = float((1 - self.axes.scale(self.width).square()).sum())
        if self.learns_prior:
            self.width = max(sqrt(float((self.T / data.unit).square().sum()) / max(determined, 1e-12)), LEAST)
        if self.learns_noise:
            residual, count = data.residual(self.T)
            data.log_noise = 0.5 * log(residual / max(count - determined, 1e-3 * count))
            more = exp(2 * (log_noise - data.log_noise))
            self.axes = self.axes._replace(curvature=more * self.axes.curvature)

    def select(self, held_out: Reread) -> Selection:
        """Select the prior's width, or the network itself, on held-out data."""
        layer, likelihood, first = self.layer, self.posterior.model.likelihood, next(iter(held_out), None)
        if first is None:
            raise ValueError("validation= gives no batch: is its data set empty, or was it read to its end before?")
        seen = list(passes(self.posterior, layer, Reread(held_out.batches, ceil(SCORED_ROWS / rows(first)))))
        widths = list(WIDTHS) if self.learns_prior else [self.width]
        means = [self.data.maximum(self.T, self.axes, w) if self.data.is_number else self.T for w in widths]
        likelihood = Gaussian(exp(self.data.log_noise)) if self.data.is_number else likelihood

        def predict(_: int, here: Pass) -> tuple[list[Predictive], Any]:
            features = here.features.to(self.T)
            found = [Predictive(here.output.unsqueeze(0), here.output.new_ones(1), likelihood)]
            for T, width in zip(means, widths, strict=True):
                mean = layer.as_output(features @ T.mT, here.output)
                found.append(predictive(likelihood, layer, mean, self.data.outputs(features, self.axes, width)))
            return found, here.target

        names = [NETWORK, *(Candidate(width if self.learns_prior else None) for width in widths)]
        selection = Selection(dict(zip(names, score(1, seen, predict), strict=True)))
        self.is_network = selection.selected == NETWORK
        if not self.is_network:
            place = names.index(selection.selected) - 1
            self.width, self.T = widths[place], means[place]
        return selection

    @torch.no_grad()
    def commit(self) -> None:
        """Set the posterior's family, prior and noise."""
        posterior, model, family = self.posterior, self.posterior.model, self.family
        theta = family.forward().vector(self.T)
        if self.is_network:
            scale = NARROW * posterior.space.scale.to(theta)
            family.set_normal(NormalForm(trained_values(posterior), Diagonal(scale)))
        else:
            family.mean.copy_(theta)
            family.set_axes(self.axes.left, self.axes.right, self.width * self.data.unit, self.axes.scale(self.width))
        if self.learns_prior:
            model.prior = NormalPrior({escape(name): self.width * value for name, value in self.scales.items()})
        set_noise(model.likelihood, self.data.log_noise)

    def result(self, selection: Selection | None, seed: int) -> HeadResult:
        model = self.posterior.model
        notes = [f"of the network only {self.layer.name or 'its one layer'!r} is random: all else is fixed"]
        if self.learns_prior and isinstance(model.prior, NormalPrior):
            found = ", ".join(f"{name} {s:.3g}" for name, s in model.prior.scales(model.net_space).items())
            notes.append(f"the prior's scales were chosen: {found}")
        if self.learns_noise and isinstance(model.likelihood, Gaussian):
            notes.append(f"the noise was chosen: {exp(log_noise_of(model.likelihood)):.4g}")
        status = Status.CONVERGED if self.converged else Status.IMPROVING
        verdict = f"{status} after {self.steps} steps"
        result = HeadResult(status=status, verdict=verdict, elbo=self._estimate(seed), notes=notes, steps=self.steps)
        if selection is not None:
            result.selected, result.gain = selection.selected.name, selection.held_out.gain_over(selection.network)
            result.candidates = {one.name: selection.density(one) for one in selection.tried}
            result.verdict = f"the validation set selected {result.selected}"
        return result

    @torch.no_grad()
    def _elbo(self) -> float:
        """Return the ELBO: in closed form for numbers, else on the present draws of the outputs."""
        s2 = self.axes.scale(self.width).double().square()
        square = (self.T.double() / (self.width * self.data.unit)).square().sum()
        kl = 0.5 * float(s2.sum() + square - s2.numel() - s2.log().sum())
        spread = float((self.width**2 * self.axes.curvature.double() * s2).sum()) if self.data.is_number else 0.0
        return self.data.log_likelihood(self.T)[0] - 0.5 * spread - kl

    def _estimate(self, seed: int) -> Estimate:
        """Return the ELBO with its standard error; of labels on draws that the fit has not seen."""
        values = []
        for k in range(1 if self.data.is_number else ELBO_SETS):
            self.data.draw(self.axes, self.width, seed + 1 + k)
            values.append(self._elbo())
        found = torch.tensor(values, dtype=torch.float64)
        return Estimate(values[0], 0.0, found) if self.data.is_number else Estimate.of(found)
