"""Dropout as a model: masks z have a prior, and their posterior is fitted along with the weights'."""

from math import log, log1p
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from ..couplings import Coupling, Noise, naive
from ..parameters import Parameters, Select
from .density import Density, Draws, check_draw
from .family import Family
from .gaussian import Gaussian, kl
from .mc_dropout import BernoulliMasked, Layout, Masked, Per, check_per
from .mean_field import DiagonalNormal, MeanField
from .numerics.algebra import sum_weights
from .point import MAP, PointMass

#: All masks are enumerated where that takes at most this many evaluations of the model.
MAX_ENUMERATED = 1024


class FittedBernoulli(BernoulliMasked):
    """θ∘z with z_m ~ B(sigmoid(logits_m)) in a model where z_m ~ B(prior_keep)."""

    def __init__(self, weights: Density, layout: Layout, logits: Tensor, prior_keep: float):
        super().__init__(weights, layout, logsigmoid(logits), logsigmoid(-logits))
        self.prior_keep = prior_keep
        self.enumerates = isinstance(weights, PointMass) and _few(1, layout.M)

    def latent_kl(self) -> Tensor:
        """Σ_m p_m log(p_m/p) + (1 − p_m) log((1 − p_m)/(1 − p))."""
        kept = self.log_keep.exp() * (self.log_keep - log(self.prior_keep))
        dropped = self.log_drop.exp() * (self.log_drop - log1p(-self.prior_keep))
        return sum_weights(kept + dropped).to(kept.dtype)

    def draw(self, groups: int = 1, coupling: Coupling = naive, generator: torch.Generator | None = None) -> Draws:
        """Draws of θ, each with all 2^M masks weighted by q(z) where that makes at most 1024, else with drawn masks.

        Drawn masks are independent of each other, whatever the coupling of the θ's, and a group has at least two.
        """
        check_draw(groups, coupling, generator, self.log_keep.device)
        draws = _plain(self.weights.draw(1 if self.enumerates else groups, coupling, generator))
        latent, weight = draws.theta, draws.weight
        S, M = latent.shape[0], self.layout.M
        if _few(S, M):
            z = self.states()
            latent = latent.repeat_interleave(2**M, dim=0)
            weight = torch.outer(weight, self.log_mask(z).exp()).flatten()
            masks = self.layout.spread(z).repeat(S, 1)
        else:
            if S == groups:
                latent, weight = latent.repeat_interleave(2, dim=0), weight.repeat_interleave(2) / 2
            z = self.masks(latent.shape[0], naive, generator)
            weight = leave_one_out(weight, self.log_mask(z))
            masks = self.layout.spread(z)
        return Draws(latent * masks, weight, latent=latent if self.has_density else None)


class FittedLogisticNormal(Masked):
    """θ∘z with z = sigmoid(g), g under a Gaussian, in a model where g_m ~ N(logit prior_keep, 1)."""

    def __init__(self, weights: Density, layout: Layout, gates: Gaussian, prior_keep: float):
        super().__init__(weights, layout)
        self.gates, self.prior_keep = gates, prior_keep

    @property
    def keep(self) -> Tensor:
        return self._moment(1)

    @property
    def mask_variance(self) -> Tensor:
        return self._moment(2) - self._moment(1).square()

    def _moment(self, power: int) -> Tensor:
        """E sigmoid(g)^power by the trapezoidal rule, whose error falls exponentially for analytic integrands: [M]."""
        nodes = torch.linspace(-9, 9, 145, dtype=torch.float64)
        weights = (-0.5 * nodes.square()).softmax(0)
        mean, scale = self.gates.mean, self.gates.variance.sqrt()
        moment = torch.zeros_like(mean)
        for node, weight in zip(nodes.tolist(), weights.tolist(), strict=True):
            moment = moment + weight * torch.sigmoid(mean + node * scale) ** power
        return moment

    def latent_kl(self) -> Tensor:
        mean = torch.full_like(self.gates.mean, _logit(self.prior_keep))
        return kl(self.gates, DiagonalNormal(mean, torch.zeros_like(mean)))

    def log_mass(self, theta: Tensor) -> Tensor:
        raise NotImplementedError(
            "relaxed masks spread a point estimate over a continuum, where every point has probability zero; "
            'for probabilities of points take q="bernoulli"'
        )

    def covariance_block(self, rows: slice, columns: slice) -> Tensor:
        raise NotImplementedError(
            "products of logistic normals have no closed-form mean: estimate this covariance from draws"
        )

    def draw(self, groups: int = 1, coupling: Coupling = naive, generator: torch.Generator | None = None) -> Draws:
        """Reparametrised in θ and in the gates, whose noise is one vector to the coupling where θ is Gaussian."""
        check_draw(groups, coupling, generator, self.gates.mean.device)
        weights, gates = self.weights, self.gates
        if isinstance(weights, PointMass):
            g, weight = gates.draw(groups, coupling, generator)[:2]
            latent = weights.point.expand(g.shape[0], -1)
        elif isinstance(weights, Gaussian):
            P, K = weights.P, weights.rank
            diagonal, low_rank = coupling(
                groups, P + gates.P, K + gates.rank, generator, gates.mean.dtype, gates.mean.device
            )
            latent, weight = weights.draw(groups, lambda *_: Noise(diagonal[:, :P], low_rank[:, :K]), generator)[:2]
            g = gates.draw(groups, lambda *_: Noise(diagonal[:, P:], low_rank[:, K:]), generator).theta
        else:
            latent, weight = _plain(weights.draw(groups, coupling, generator))[:2]
            g = gates.draw(latent.shape[0], naive, generator).theta
        theta = latent * self.layout.spread(torch.sigmoid(g))
        return Draws(theta, weight, latent=latent if self.has_density else None)


class FittedDropout(Family):
    """Masks as part of the model, z_m ~ B(prior_keep), fitted: q(θ, z) = q(θ) ∏ B(z_m; p_m), learned logit p_m.

    The objective is E_q[log lik(θ∘z) + log prior] + H(θ) − KL[q(z)‖p(z)], the KL in closed form. With θ under MAP the
    prior is taken at θ̂∘z and H is left out, so that MC dropout is the case q(z) = p(z); with θ under a density the
    prior is that of θ, and the target must be a `BayesianModel`, whose likelihood and prior are apart.

    The expectation over masks is exact, all 2^M of them weighted by q(z), where that takes at most 1024 evaluations.
    Otherwise S masks are drawn, and the gradient in p is the leave-one-out score-function estimator

        (1/S) Σ_s ∇ log q(z_s) (f_s − mean_{r≠s} f_r),

    carried by the draws' weights. It is unbiased because z_s is independent of every f_r, r ≠ s: masks are drawn
    independently whatever the coupling, which governs θ alone. A group has at least two draws: where q(θ) gives one
    (MAP, or `naive`), it goes with two masks. Its variance grows with M.

    With q="logistic_normal" the masks are relaxed to numbers in (0, 1), z = sigmoid(g), in a model with gates
    g_m ~ N(logit prior_keep, 1); g is under a Gaussian family, draws are reparametrised and coupled with θ's.

    Args:
        prior_keep: p, the prior probability to keep, in (0, 1); q(z) starts there.
        q: "bernoulli" or "logistic_normal".
        weights: the family of θ; None for `MAP()`.
        gates: the family of g, a Gaussian one, for q="logistic_normal" only; None for `MeanField()`.
        per: a mask to every "weight", or shared by the weights of an "input" unit (second axis of a tensor) or of
            an "output" unit (first axis).
        exempt: tensors that are never masked, by glob pattern or predicate; None for those of fewer than two axes in
            a network (biases, norms), and for none of a log density's.

    Example:
        >>> from structvi import Parameters
        >>> q = FittedDropout(prior_keep=0.8).bind(Parameters({"z": torch.ones(2)}))
        >>> draws = q().draw()
        >>> draws.theta.shape, round(draws.weight.sum().item(), 5)
        (torch.Size([4, 2]), 1.0)
    """

    logits: Tensor
    layout: Layout
    per: Per
    weights: Family
    gates: Family | None

    def __init__(
        self,
        prior_keep: float = 0.9,
        q: Literal["bernoulli", "logistic_normal"] = "bernoulli",
        weights: Family | None = None,
        gates: Family | None = None,
        per: Per = "weight",
        exempt: Select | None = None,
    ):
        super().__init__()
        if not isinstance(prior_keep, int | float) or not 0 < prior_keep < 1:
            raise ValueError(f"prior_keep must be a probability to keep, inside (0, 1), got {prior_keep!r}")
        if q not in ("bernoulli", "logistic_normal"):
            raise ValueError(f'q must be "bernoulli" or "logistic_normal", got {q!r}')
        for name, part in (("weights", weights), ("gates", gates)):
            if part is not None and not isinstance(part, Family):
                raise TypeError(f"{name} must be a family such as MeanField(), got {part!r}")
        if isinstance(weights, FittedDropout):
            raise TypeError("weights must be a family of their own, not masked again: got FittedDropout")
        if gates is not None and q == "bernoulli":
            raise ValueError('gates are for q="logistic_normal"; q="bernoulli" learns one logit per mask')
        check_per(per)
        self.prior_keep, self.q, self.per, self.exempt = prior_keep, q, per, exempt
        self.weights = MAP() if weights is None else weights
        self.gates = MeanField() if gates is None and q == "logistic_normal" else gates

    def initialise(self, parameters: Parameters, generator: torch.Generator | None) -> None:
        self.layout = Layout(parameters, self.per, self.exempt)
        self.weights = self.weights.bind(parameters, generator)
        start = parameters.initial.new_full((self.layout.M,), _logit(self.prior_keep))
        if self.gates is None:
            self.logits = nn.Parameter(start)
            return
        self.gates = self.gates.bind(Parameters({"gates": start}), generator)
        if not isinstance(self.gates(), Gaussian):
            raise TypeError(f"gates must be a Gaussian family, such as MeanField(), got {type(self.gates).__name__}")

    def normal(self) -> None:
        """None: a law of masked weights."""

    def forward(self) -> FittedBernoulli | FittedLogisticNormal:
        if self.gates is None:
            return FittedBernoulli(self.weights(), self.layout, self.logits, self.prior_keep)
        gates = self.gates()
        assert isinstance(gates, Gaussian)
        return FittedLogisticNormal(self.weights(), self.layout, gates, self.prior_keep)


def leave_one_out(weight: Tensor, log_q: Tensor) -> Tensor:
    """The weights w_s [S], with the score-function gradient Σ_s w_s ∇log q_s (f_s − mean_{r≠s} f_r) of Σ_s w_s f_s.

    Their values are unchanged, and they sum to one identically: so does their gradient, to zero.
    """
    S = weight.shape[0]
    push = weight.detach() * (log_q - log_q.detach())  # zero, with a gradient
    return weight + (push - push.mean()) * (S / (S - 1))


def _few(draws: int, M: int) -> bool:
    """Whether `draws` times all 2^M masks are at most MAX_ENUMERATED."""
    return M < MAX_ENUMERATED.bit_length() and draws * 2**M <= MAX_ENUMERATED


def _plain(draws: Draws) -> Draws:
    if draws.fixed or draws.latent is not None:
        raise ValueError(
            "FittedDropout masks all of its weights, and those of this family are partly fixed or masked already; "
            "give all of them one family with a density, or MAP(), and name with exempt= the tensors not to be masked"
        )
    return draws


def _logit(p: float) -> float:
    return log(p) - log1p(-p)
