"""`fit_head`: the best normal over a network's last layer, in closed form or by the fixed point of its ELBO.

The steps are those of the natural gradient: Λ ← (1−ρ) Λ + ρ Λ*, μ ← μ + ρ Λ⁻¹ ∇F, with ρ = 1 if that raises F, else
less. For Gaussian noise the first is exact. Scales of the prior and the noise, if they are learned, maximise the bound:
MacKay's update s² = |μ|²/γ, γ = n − tr Σ/s², and if that does not raise it s² = (|μ|² + tr Σ)/n, which always does.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from glob import escape
from math import exp, log, nan
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..families.normal import NormalForm, Triangle
from ..laplace.place import trained_values
from ..models.likelihoods import Bernoulli, Categorical, Gaussian
from ..models.priors import NormalPrior
from ..objective import Estimate
from ..result import Result, Status
from ..train.data import Batches
from ..util.checks import check_integer, check_seed
from .bound import Expected, GaussianBound, LabelBound
from .features import Head

if TYPE_CHECKING:
    from ..posterior import Posterior

#: a step that gains less has converged, in nats
TOLERANCE = 1e-2
#: the shortest step of the natural gradient, as a fraction of the whole one
SHORTEST = 2.0**-8
#: a scale that is learned is at least this fraction of the layer's initialisation scale
LEAST = 1e-3
#: the longest step of the logarithm of a scale
LONGEST = 2.0
#: sets of draws for the ELBO that is reported
SETS = 8


@dataclass(repr=False, kw_only=True)
class HeadResult(Result):
    """What `fit_head` came to.

    Attributes:
        steps: of the natural gradient.
        path: the ELBO at the start and after every step.
    """

    steps: int
    path: list[float]

    @property
    def next_step(self) -> str:
        if not self.converged:
            return "call fit_head with more iterations="
        return "bayes.predict(x), bayes.evaluate(test_loader); bayes.save(file)"


def fit_head(
    posterior: "Posterior", loader: Iterable[Any], *, iterations: int = 200, progress: bool = True, seed: int = 0
) -> HeadResult:
    """Fit the best full normal over the last layer, all else fixed, and return its ELBO.

    The network passes over the data once. For `Gaussian` noise N(μ, Σ) is the posterior itself; for `Bernoulli` and
    `Categorical` it is the normal of the highest ELBO, of which there is one. If you left the prior open, each
    tensor's is N(0, s²) with the s that maximises the bound; so does the noise of `Gaussian("point")`.

    Args:
        posterior: over one linear layer or convolution, as `variationalize_head` makes it.
        loader: a `DataLoader`, or any re-iterable of batches: every observation is read once.
        iterations: the most steps, each a pass over the features.
        progress: print each step's ELBO to the standard error.
        seed: of the quasi-random draws of class logits.

    Raises:
        ValueError: the output is not the layer's own, the prior is no `NormalPrior`, or the likelihood is another one.

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
    _check(posterior)
    head, model, N = Head(posterior), posterior.model, 0
    bound: GaussianBound | LabelBound = LabelBound(head, isinstance(model.likelihood, Bernoulli), seed)
    if isinstance(model.likelihood, Gaussian):
        bound = GaussianBound(head, model.likelihood)
    for rows, B in head.rows(Batches(loader, seed, posterior.device).everything()):
        bound.add(rows)
        N += B
    if model.known_num_data is None or model.num_data_of_loader:
        model.num_data, model.num_data_of_loader = N, True
    climb = _Climb(head, bound, model.num_data / N)
    converged = climb.run(iterations, progress)
    climb.commit()
    posterior.last_fit = climb.result(converged)
    return posterior.last_fit


def _check(posterior: "Posterior") -> None:
    likelihood = posterior.model.likelihood
    is_gaussian = isinstance(likelihood, Gaussian) and likelihood.noise not in ("random", "head")
    if not is_gaussian and not (isinstance(likelihood, Bernoulli | Categorical) and likelihood.exact):
        raise ValueError(
            'fit_head is for likelihoods.Gaussian with a known noise or noise="point", and for Bernoulli and '
            f"Categorical without class weights, got {likelihood!r}: use fit"
        )
    form = posterior.family.normal()
    if form is None or not isinstance(form.root, Triangle):
        raise ValueError(
            f"fit_head makes a normal with all covariances, and the family is {type(posterior.family).__name__}: use "
            "variationalize_head(net, likelihood), or the family FullNormal()"
        )
    if posterior.dropout == "on" or posterior.batch_norm == "reestimated":
        raise ValueError(
            'fit_head uses the features of one pass: with dropout="on" or batch_norm="reestimated" they are others in '
            "every pass. Leave these out, or use fit"
        )


class _Normal(NamedTuple):
    """q, and the bound there."""

    mean: Tensor  # [M]
    covariance: Tensor  # [M, M]
    precision: Tensor  # [M, M]
    log_det: float  # of the covariance
    expected: Expected
    kl: float = nan
    elbo: float = nan  # κ E log p(T | θ) − KL


class _Climb:
    """A normal on its way to the maximum of the bound.

    Args:
        head: the layer.
        bound: with all rows.
        scale: κ, N over the rows that were read.
    """

    def __init__(self, head: Head, bound: GaussianBound | LabelBound, scale: float):
        self.head, self.bound, self.scale, self.order = head, bound, scale, head.order
        space, likelihood = head.model.net_space, head.model.likelihood
        self.owner = torch.arange(len(space)).repeat_interleave(torch.tensor(space.numels)).to(self.order)[self.order]
        self.learns_prior = "prior" in head.posterior.left_open
        self.least = (LEAST * space.scales.double()).log().to(self.order.device)
        self.log_scale = self._prior_scales()
        self.learns_noise = isinstance(likelihood, Gaussian) and likelihood.noise == "point"
        mean = trained_values(head.posterior).double()[self.order]
        at_mean = bound.expect(mean, torch.zeros(len(mean), len(mean)).to(mean))
        precision = torch.diag(self._prior()) + scale * at_mean.precision
        self.q = self._at(mean, precision, torch.linalg.cholesky(precision))
        self.path = [self.q.elbo]

    def _prior(self) -> Tensor:
        """Return the prior's precision [M]."""
        return (-2 * self.log_scale)[self.owner].exp()

    def run(self, iterations: int, progress: bool) -> bool:
        """Take at most so many steps; return whether the last one has converged."""
        for k in range(iterations):
            elbo = self.q.elbo
            if self.learns_prior or self.learns_noise:
                self._learn()
            else:
                self.q = self._step(self.q)
            self.path.append(self.q.elbo)
            if progress:
                print(f"fit_head: step {k + 1}, ELBO {self.q.elbo:.5g} nats", file=sys.stderr)
            if self.q.elbo - elbo < TOLERANCE:
                return True
        return False

    def _at(self, mean: Tensor, precision: Tensor, root: Tensor) -> _Normal:
        """Return the bound at N(mean, precision⁻¹); root is the precision's, from Cholesky."""
        covariance = torch.cholesky_inverse(root)
        log_det, expected = -2 * float(root.diagonal().log().sum()), self.bound.expect(mean, covariance)
        return self._scored(_Normal(mean, covariance, precision, log_det, expected))

    def _scored(self, q: _Normal) -> _Normal:
        """Return the same normal under the present prior."""
        precision = self._prior()
        square = q.mean.square() + q.covariance.diagonal()
        cost = (precision * square).sum() - len(q.mean) - precision.log().sum()
        kl = 0.5 * (float(cost) - q.log_det)
        return q._replace(kl=kl, elbo=self.scale * q.expected.value - kl)

    def _step(self, q: _Normal) -> _Normal:
        """Take a step of the natural gradient as long as raises the bound; return `q` itself if none does."""
        prior = self._prior()
        wanted = torch.diag(prior) + self.scale * q.expected.precision
        gradient = self.scale * q.expected.gradient - prior * q.mean
        length = 1.0
        while length >= SHORTEST:
            precision = torch.lerp(q.precision, wanted, length)
            root = torch.linalg.cholesky(precision)
            move = torch.cholesky_solve(gradient.unsqueeze(-1), root).squeeze(-1)
            there = self._at(q.mean + length * move, precision, root)
            if there.elbo > q.elbo:
                return there
            length /= 4
        return q

    def _learn(self) -> None:
        """Update prior scales and noise at this q, and then q: by MacKay's update if that raises the bound."""
        q, log_scale, bound, log_noise = self.q, self.log_scale, self.bound, self.bound.log_noise
        for faster in (True, False):
            if self.learns_prior:
                self.log_scale = (log_scale + self._change_of_scales(faster)).maximum(self.least)
            there = q
            if isinstance(bound, GaussianBound) and self.learns_noise:
                least = bound.least_noise(self.head.model.space.dtype)
                bound.log_noise = max(log_noise + self._change_of_noise(bound, faster), least)
                there = q._replace(expected=bound.expect(q.mean, q.covariance))
            there = self._step(self._scored(there))
            if there.elbo > q.elbo:
                self.q = there
                return
            self.log_scale, bound.log_noise = log_scale, log_noise

    def _change_of_scales(self, faster: bool) -> Tensor:
        """Return ½ log |μ|²/(s² γ) with γ = n − tr Σ/s², or ½ log (|μ|² + tr Σ)/(n s²): [K]."""
        precision = self._prior()

        def sums(values: Tensor) -> Tensor:
            return values.new_zeros(len(self.log_scale)).index_add(0, self.owner, values)

        count, square = sums(torch.ones_like(precision)), sums(precision * self.q.mean.square())
        spread = sums(precision * self.q.covariance.diagonal())
        ratio = (square + spread) / count
        if faster:
            determined = count - spread
            ratio = torch.where(determined > 1e-3 * count, square / determined.clamp(min=1e-12), ratio)
        return (0.5 * ratio.clamp(min=1e-12).log()).clamp(-LONGEST, LONGEST)

    def _change_of_noise(self, bound: GaussianBound, faster: bool) -> float:
        """Return the change of log σ: likewise, with γ = tr(ΦᵀΦ Σ)/σ²."""
        variance, count = exp(2 * bound.log_noise), float(bound.count.sum())
        residual, spread = float(bound.residual(self.q.mean)), float(bound.spread(self.q.covariance))
        ratio = (residual + spread) / (count * variance)
        if faster and (rest := count - spread / variance) > 1e-3 * count:
            ratio = residual / (rest * variance)
        return min(max(0.5 * log(max(ratio, 1e-12)), -LONGEST), LONGEST)

    def _prior_scales(self) -> Tensor:
        """Return the logarithm of each tensor's prior scale, one to start with if the prior was left open."""
        prior, space = self.head.model.prior, self.head.model.net_space
        if self.learns_prior:
            return torch.zeros_like(self.least)
        if not isinstance(prior, NormalPrior) or prior.learn:
            raise ValueError(
                f"fit_head needs a NormalPrior of known scales, or prior= left out, got {prior!r}: use fit"
            )
        return torch.tensor(list(prior.scales(space).values()), dtype=torch.float64, device=self.least.device).log()

    @torch.no_grad()
    def commit(self) -> None:
        """Set the posterior's family, prior and noise."""
        posterior, model, q = self.head.posterior, self.head.model, self.q
        back, like = torch.argsort(self.order), trained_values(posterior)
        root = torch.linalg.cholesky(q.covariance[back][:, back])
        posterior.family.set_normal(NormalForm(q.mean[back].to(like), Triangle(root.to(like))))
        if isinstance(model.likelihood, Gaussian) and self.learns_noise:
            model.likelihood.log_noise.fill_(self.bound.log_noise)
        if self.learns_prior:
            scales = zip(model.net_space.names, self.log_scale.exp().tolist(), strict=True)
            model.prior = NormalPrior({escape(name): value for name, value in scales})

    def result(self, converged: bool) -> HeadResult:
        steps = len(self.path) - 1
        verdict = f"the last of {steps} steps gained less than {TOLERANCE:g} nats"
        if not converged:
            verdict = f"after {steps} steps the ELBO still rises by more than {TOLERANCE:g} nats"
        elbo = Estimate(self.q.elbo, 0.0, torch.tensor([self.q.elbo], dtype=torch.float64))
        if isinstance(self.bound, LabelBound):  # on draws that the fit has not seen
            found = [self.bound.expect(self.q.mean, self.q.covariance, 1 + k).value for k in range(SETS)]
            elbo = Estimate.of(self.scale * torch.tensor(found, dtype=torch.float64) - self.q.kl)
        return HeadResult(
            status=Status.CONVERGED if converged else Status.IMPROVING, verdict=verdict, elbo=elbo,
            notes=self._notes(), steps=steps, path=self.path,
        )  # fmt: skip

    def _notes(self) -> list[str]:
        model = self.head.model
        notes = [f"of the network only {self.head.name or 'its one layer'!r} is random: all else is fixed"]
        if self.learns_prior and isinstance(model.prior, NormalPrior):
            found = ", ".join(f"{name} {s:.3g}" for name, s in model.prior.scales(model.net_space).items())
            notes.append(f"the prior's scales were chosen by the ELBO: {found}")
        if self.learns_noise:
            notes.append(f"the noise was chosen by the ELBO: {exp(self.bound.log_noise):.4g}")
        return notes
