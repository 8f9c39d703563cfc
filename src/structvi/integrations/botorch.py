"""A posterior as a BoTorch model: acquisition functions see its joint predictions, with gradients in the inputs."""

from contextlib import suppress
from math import exp
from typing import Any, Self

import torch
from torch import Tensor

from ..families.gaussian import Gaussian as Normal
from ..head.rows import log_noise_of
from ..models.likelihoods import Gaussian
from ..networks.last_layer import LastLayer
from ..posterior import Posterior
from ..predict.one_pass import known_layer, layer_of
from ..predict.predict import WeightDraws

try:
    from botorch.models.model import FantasizeMixin, Model
    from botorch.posteriors import GPyTorchPosterior
    from botorch.posteriors.ensemble import EnsemblePosterior
    from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
    from linear_operator import to_linear_operator
except ImportError:
    raise ImportError('structvi.integrations.botorch needs botorch: pip install "structvi[botorch]"') from None

__all__ = ["PosteriorModel"]

#: relative to the largest variance, added to the diagonal of a covariance between inputs
JITTER = 1e-6


class PosteriorModel(Model, FantasizeMixin):
    """A fitted posterior over a network from [B, d] to [B, m], in BoTorch's terms.

    Over the last layer, as `fit_head` makes it, the outputs at several inputs are jointly normal, and the model can be
    conditioned on observations, also on batches of fantasies. Any other posterior is an ensemble of drawn networks.
    Standardise inputs and targets yourself. To keep observations for good, call `bayes.update((X, Y))`.

    Args:
        bayes: fitted; its likelihood has numbers for targets.
        draws: of the weights, for a posterior that is not over the last layer alone.
        num_outputs: m, for such a posterior.

    Example:
        >>> from structvi import likelihoods, variationalize_head
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> bayes = variationalize_head(net, likelihoods.Gaussian("point"))
        >>> result = bayes.fit_head([(torch.rand(20, 2), torch.rand(20, 1))], progress=False)
        >>> PosteriorModel(bayes).posterior(torch.rand(5, 3, 2)).mean.shape
        torch.Size([5, 3, 1])
    """

    def __init__(self, bayes: Posterior, draws: int = 64, num_outputs: int = 1):
        super().__init__()
        if not isinstance(bayes.model.likelihood, Gaussian) or bayes.model.likelihood.noise in ("head", "random"):
            raise ValueError(
                f"PosteriorModel is for likelihoods.Gaussian with one noise, got {bayes.model.likelihood!r}: BoTorch "
                "optimises numbers"
            )
        self.bayes, self.draws, self._num_outputs = bayes, draws, num_outputs
        with suppress(ValueError):  # it is over more than one layer
            self._num_outputs = layer_of(bayes).outputs
        #: what the model is conditioned on, [.., n, d] and [.., n, m]
        self.observed: tuple[Tensor, Tensor] | None = None

    @property
    def num_outputs(self) -> int:
        return self._num_outputs

    @property
    def likelihood(self) -> Gaussian:
        """The likelihood, which `fantasize` looks for."""
        likelihood = self.bayes.model.likelihood
        assert isinstance(likelihood, Gaussian)
        return likelihood

    @property
    def batch_shape(self) -> torch.Size:
        return torch.Size() if self.observed is None else self.observed[1].shape[:-2]

    def posterior(
        self,
        X: Tensor,
        output_indices: None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Any:
        """Return the joint distribution of the outputs at X [.., q, d]."""
        X = self.transform_inputs(X)
        rows = X.reshape(-1, X.shape[-1])
        layer = known_layer(self.bayes, rows.detach().to(self.bayes.space.dtype))
        found = self._ensemble(X) if layer is None else self._normal(layer, X, observation_noise)
        return found if posterior_transform is None else posterior_transform(found)

    def condition_on_observations(self, X: Tensor, Y: Tensor, **kwargs: Any) -> Self:
        """Return the model after observations Y [.., n, m] at X [.., n, d], their noise that of the likelihood."""
        rows = X.detach().reshape(-1, X.shape[-1]).to(self.bayes.space.dtype)
        if known_layer(self.bayes, rows) is None:
            raise NotImplementedError(
                "only a posterior over the last layer can be conditioned in closed form: variationalize_head(net, "
                "likelihood).fit_head(loader). Fit any other one to all data again"
            )
        X = self.transform_inputs(X)
        shape = torch.broadcast_shapes(X.shape[:-2], Y.shape[:-2], self.batch_shape)
        parts = [(X, Y)] if self.observed is None else [self.observed, (X, Y)]
        model = type(self)(self.bayes, self.draws, self._num_outputs)
        model.observed = (
            torch.cat([x.expand(*shape, -1, -1) for x, _ in parts], -2),
            torch.cat([y.expand(*shape, -1, -1) for _, y in parts], -2),
        )
        return model

    def _normal(self, layer: LastLayer, X: Tensor, noise: bool | Tensor) -> Any:
        q, m, variance = X.shape[-2], layer.outputs, X.new_tensor(exp(2 * log_noise_of(self.likelihood)))
        if self.observed is None:
            mean, covariance = self._joint(layer, X)
        else:
            seen, Y = self.observed
            shape = torch.broadcast_shapes(X.shape[:-2], seen.shape[:-2])
            both = torch.cat([X.expand(*shape, -1, -1), seen.expand(*shape, -1, -1)], -2)
            mean, covariance = self._joint(layer, both)
            here, there = slice(0, q * m), slice(q * m, None)
            inner = covariance[..., there, there] + variance * torch.eye(seen.shape[-2] * m).to(X)
            root = torch.linalg.cholesky(inner)
            cross = torch.linalg.solve_triangular(root, covariance[..., there, here], upper=False)
            residual = (Y.expand(*shape, -1, -1).flatten(-2) - mean[..., there]).unsqueeze(-1)
            whitened = torch.linalg.solve_triangular(root, residual, upper=False)
            mean = mean[..., here] + (cross.mT @ whitened).squeeze(-1)
            covariance = covariance[..., here, here] - cross.mT @ cross
        identity = torch.eye(q * m).to(X)
        covariance = covariance + JITTER * covariance.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None] * identity
        if noise is not False:
            given = variance if noise is True else torch.as_tensor(noise).to(X)
            covariance = covariance + torch.diag_embed(given.expand(*mean.shape[:-1], q, m).flatten(-2))
        operator = to_linear_operator(covariance)
        if m == 1:
            return GPyTorchPosterior(MultivariateNormal(mean, operator))
        return GPyTorchPosterior(MultitaskMultivariateNormal(mean.unflatten(-1, (q, m)), operator))

    def _joint(self, layer: LastLayer, X: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean [.., q·m] and covariance [.., q·m, q·m] at X [.., q, d], an input's outputs side by side."""
        bayes, model = self.bayes, self.bayes.model
        density = bayes.family()
        assert isinstance(density, Normal)
        theta, m = density.mean.detach(), layer.outputs
        rows = X.reshape(-1, X.shape[-1]).to(theta)
        with bayes.network_mode(), model.linearised_around(None):
            here = layer.run(lambda: (model.outputs(theta.unsqueeze(0), rows)[0], None))
        J = here.features.new_zeros(len(rows), m, m * layer.width)
        each = torch.arange(m * layer.width, device=J.device).view(m, -1)
        for c in range(m):
            J[:, c, layer.order[each[c]]] = here.features
        J = J.reshape(*X.shape[:-2], X.shape[-2] * m, -1)
        covariance = density.between(J, J)
        return here.own.reshape(*X.shape[:-2], -1).to(X), (0.5 * (covariance + covariance.mT)).to(X)

    def _ensemble(self, X: Tensor) -> Any:
        bayes, model = self.bayes, self.bayes.model
        drawn = WeightDraws(bayes, self.draws).every()
        rows = X.reshape(-1, X.shape[-1]).to(drawn.theta)
        with bayes.network_mode():
            y = model.outputs(drawn.theta.detach(), rows, drawn.fixed)
        values = y.reshape(len(y), *X.shape[:-1], -1).movedim(0, -3).to(X)
        return EnsemblePosterior(values, drawn.weight.detach().to(X))
