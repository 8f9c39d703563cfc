"""`fit_head`: the best normal over a network's last layer, in closed form or by its fixed point, without a step size.

One pass of the network gives the features that come to the layer (`head_rows.py`). Of Gaussian noise sums over them are
kept, and the posterior is exact; of class labels the features themselves, and the normal that maximises the ELBO is
found by steps of the natural gradient (`head_bound.py`). Scales of the prior and the noise, where they are learned,
are those that maximise the bound: MacKay's update s² = |μ|²/γ, γ = n − tr Σ/s², and where that does not raise it
s² = (|μ|² + tr Σ)/n, which always does.
"""

from collections.abc import Iterable
from glob import escape
from math import exp, log, pi
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..models.bayesian_model import BayesianModel
from ..models.likelihoods import Bernoulli, Categorical, Gaussian
from ..models.priors.base import PriorModule, learns
from ..models.priors.scale import NormalPrior
from ..objective import Estimate
from ..result import Status
from ..util.checks import check_integer, check_positive, check_seed
from .batches import Batches
from .constant_predictor import Watched
from .head_bound import (
    BernoulliBound,
    CategoricalBound,
    GaussianBound,
    HeadBound,
    Prior,
    scored,
    start,
    step,
)
from .head_rows import Head
from .progress import Progress
from .result import FitResult, History
from .warm_start import trained_values

if TYPE_CHECKING:
    from ..posterior import Posterior

#: a scale that is learned is at least this fraction of the layer's initialisation scale
LEAST = 1e-3
#: sets of draws for the ELBO that is reported
FRESH = 8
#: the longest step of a logarithm of a scale
LONGEST = 2.0


def fit_head(
    posterior: "Posterior",
    loader: Iterable[Any],
    *,
    temperature: float = 1.0,
    iterations: int = 200,
    tolerance: float = 1e-2,
    draws: int | None = None,
    progress: bool = True,
    seed: int = 0,
) -> FitResult:
    """The best full normal over the last layer, all else held: `variationalize_head(net, likelihood).fit_head(loader)`.

    The network passes over the data once. For `Gaussian` noise N(μ, Σ) is the posterior itself; for `Bernoulli` and
    `Categorical` it is the normal of the highest ELBO, of which there is one. Where the prior was left open, each
    tensor's is N(0, s²) with the s that maximises the bound; so is that of `NormalPrior(learn=True)`, one for each of
    its patterns, and the noise of `Gaussian("point")`. No logits are drawn to predict: `posterior.output_moments(x)`.

    Args:
        posterior: over the weight and bias of one linear layer or convolution, as `variationalize_head` makes it.
        loader: a `DataLoader`, or any re-iterable of batches: every observation is read once.
        temperature: λ of E log lik − λ KL. Other than one, what is found is not the posterior.
        iterations: at most so many steps, each a pass over the features.
        tolerance: in nats: where a step gains less the fit has converged.
        draws: quasi-random draws of the C logits, for `Categorical`; by default 256, and 8C where that is more.
        progress: show a bar, or lines where there is no terminal.
        seed: of these draws.

    Raises:
        ValueError: the output is not linear in the layer, the prior is not normal, or the likelihood has none of the
            forms above.

    Example:
        >>> from structvi import likelihoods, variationalize_head
        >>> data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=8)
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        >>> bayes = variationalize_head(net, likelihoods.Gaussian(noise=1.0))
        >>> bayes.fit_head(loader, progress=False).converged
        True
    """
    check_seed(seed)
    check_positive(temperature, "temperature")
    check_integer("iterations", iterations)
    check_positive(tolerance, "tolerance", "in nats")
    check_integer("draws", draws, 2, optional=True)
    _check(posterior)
    head, model = Head(posterior), posterior.model
    batches = Batches(loader, seed, posterior.device)
    bound = _bound(head, draws, seed)
    read, seen = Watched(batches.everything(), model), 0
    for rows, B in head.rows(read):
        bound.add(rows)
        seen += B
    if model.known_num_data is None or model.num_data_of_loader:
        model.num_data, model.num_data_of_loader = seen, True
    run = _Run(head, bound, model.num_data / seen, temperature, Progress(iterations, show=progress))
    try:
        converged = run.loop(iterations, tolerance)
    finally:
        run.bar.close()
    run.put()
    posterior.last_fit = run.result(converged, tolerance, read.log_likelihood, batches)
    return posterior.last_fit


def _check(posterior: "Posterior") -> None:
    likelihood = posterior.model.likelihood
    if not isinstance(likelihood, Gaussian | Bernoulli | Categorical) or (
        isinstance(likelihood, Gaussian) and likelihood.noise in ("random", "head")
    ):
        raise ValueError(
            'fit_head is for likelihoods.Gaussian with a known noise or noise="point", Bernoulli and Categorical, got '
            f"{likelihood!r}: use fit"
        )
    if posterior.family.coordinates != "full":
        raise ValueError(
            f"fit_head makes a normal with all covariances, and the family is {type(posterior.family).__name__}: use "
            "variationalize_head(net, likelihood), or the family FullNormal()"
        )
    if posterior.dropout == "on" or posterior.batch_norm == "reestimated":
        raise ValueError(
            'fit_head keeps the features of one pass: with dropout="on" or batch_norm="reestimated" they are others in '
            "every pass. Leave these out, or use fit"
        )


def _bound(head: Head, draws: int | None, seed: int) -> HeadBound:
    likelihood = head.model.likelihood
    if isinstance(likelihood, Gaussian):
        noise = likelihood.noise if isinstance(likelihood.noise, float) else None
        log_noise = float(likelihood.log_noise.detach()) if noise is None else log(noise)
        return GaussianBound(head.outputs, head.width, log_noise, head.posterior.device)
    if isinstance(likelihood, Bernoulli):
        return BernoulliBound(head.outputs, head.width)
    if draws is None:
        draws = max(256, 8 * head.outputs)
    return CategoricalBound(head.outputs, head.width, draws, seed)


class _Scales(NamedTuple):
    """What of the prior is learned: its precision is base·exp(−2 shift[owner])."""

    base: Prior  # [G, M]
    owner: Tensor  # [G, M], long
    least: Tensor  # [K]: of `shift`
    constant: float  # of the log prior, beside that of a normal

    def prior(self, shift: Tensor) -> Prior:
        if not len(shift):
            return self.base
        return Prior(self.base.centre, self.base.precision * (-2 * shift)[self.owner].exp())


class _Run:
    """A normal on its way to the maximum of the bound."""

    def __init__(self, head: Head, bound: HeadBound, scale: float, temperature: float, bar: Progress):
        self.head, self.bound, self.bar = head, bound, bar
        self.all_data, self.temperature = scale, temperature
        self.scale = scale / temperature
        self.order = head.order.to(head.posterior.device)
        self.scales = self._read_prior()
        self.shift = self.scales.least.new_zeros(len(self.scales.least))
        noise = head.model.likelihood.noise if isinstance(head.model.likelihood, Gaussian) else None
        self.learns_noise = noise == "point"
        self.history = History()
        mean = self._inside(trained_values(head.posterior))
        self.q = start(bound, self.scales.prior(self.shift), self.scale, mean)

    def _inside(self, theta: Tensor) -> Tensor:
        """[G, M] of numbers as they lie in θ [P]."""
        inside = theta[self.order].reshape(self.bound.groups, self.bound.size)
        return inside.double() if inside.dtype.is_floating_point else inside

    def loop(self, iterations: int, tolerance: float) -> bool:
        """Whether it has converged after so many steps at most."""
        self._record()
        for _ in range(iterations):
            before = self.q.objective
            if not len(self.shift) and not self.learns_noise:
                self.q = step(self.bound, self.prior, self.scale, self.q)
            else:
                self._learn()
            self._record()
            if self.q.objective - before < tolerance:
                return True
        return False

    @property
    def prior(self) -> Prior:
        return self.scales.prior(self.shift)

    def _record(self) -> None:
        elbo = self.elbo
        self.history.append(step=len(self.history), epoch=0, elbo=elbo, kl_weight=self.temperature)
        if len(self.history) > 1:
            self.bar.update(elbo, 0.0)

    @property
    def elbo(self) -> float:
        """At λ = 1, in nats for the whole data set."""
        return self.all_data * self.q.expected.value - self.q.kl + self.scales.constant

    def _learn(self) -> None:
        """What is learned of prior and noise at this q, and then q: where MacKay's update lowers the bound, the other.

        That one maximises the bound at this q, so nothing is lost by it.
        """
        q, shift, noise = self.q, self.shift, self._noise()
        for faster in (True, False):
            self.shift = (shift + self._change_of_scales(faster)).maximum(self.scales.least)
            there = q
            if self.learns_noise:
                self._set_noise(max(noise + self._change_of_noise(faster), self._least_noise()))
                there = q._replace(expected=self.bound.expect(q.mean, q.covariance))
            there = scored(there, self.prior, self.scale)
            there = step(self.bound, self.prior, self.scale, there)
            if there.objective > q.objective:
                self.q = there
                return
            self.shift = shift
            self._set_noise(noise)

    def _change_of_scales(self, faster: bool) -> Tensor:
        """Of log s: ½ log |μ|²/(s² γ) with γ = n − tr Σ/s², or ½ log (|μ|² + tr Σ)/(n s²)."""
        K, owner = len(self.shift), self.scales.owner.reshape(-1)
        if not K:
            return self.shift

        def sums(values: Tensor) -> Tensor:
            return values.new_zeros(K).index_add(0, owner, values.reshape(-1))

        precision = self.prior.precision
        count, square, spread = (
            sums(torch.ones_like(precision)),
            sums(precision * self.q.mean.square()),
            sums(precision * self.q.variance),
        )
        ratio = (square + spread) / count
        if faster:
            determined = count - spread
            ratio = torch.where(determined > 1e-3 * count, square / determined.clamp(min=1e-12), ratio)
        return (0.5 * ratio.clamp(min=1e-12).log()).clamp(-LONGEST, LONGEST)

    def _change_of_noise(self, faster: bool) -> float:
        """Of log σ: likewise, with γ = tr(ΦᵀΦ Σ)/σ²."""
        bound = self.bound
        assert isinstance(bound, GaussianBound)
        variance, count = exp(2 * bound.log_noise), float(bound.count.sum())
        residual, spread = float(bound.residual(self.q.mean)), float(bound.spread(self.q.covariance))
        ratio = (residual + spread) / (count * variance)
        if faster and (rest := count - spread / variance) > 1e-3 * count:
            ratio = residual / (rest * variance)
        return min(max(0.5 * log(max(ratio, 1e-12)), -LONGEST), LONGEST)

    def _noise(self) -> float:
        return self.bound.log_noise if isinstance(self.bound, GaussianBound) else 0.0

    def _least_noise(self) -> float:
        assert isinstance(self.bound, GaussianBound)
        return self.bound.least_noise(self.head.model.space.dtype)

    def _set_noise(self, log_noise: float) -> None:
        if isinstance(self.bound, GaussianBound):
            self.bound.log_noise = log_noise

    def _read_prior(self) -> "_Scales":
        posterior, model = self.head.posterior, self.head.model
        space, prior = model.net_space, model.prior
        theta = trained_values(posterior).double()
        if "prior" in posterior.left_open:  # one scale a tensor
            own = space.scales.double().to(theta.device)
            owner = torch.arange(len(space)).repeat_interleave(torch.tensor(space.numels)).to(theta.device)
            base = Prior(self._inside(torch.zeros_like(theta)), self._inside(torch.ones_like(theta)))
            return _Scales(base, self._inside(owner), (LEAST * own).log(), 0.0)
        centre, precision, constant = normal_prior(model, theta)
        base = Prior(self._inside(centre), self._inside(precision))
        owner, least = torch.zeros_like(theta, dtype=torch.long), theta.new_zeros(0)
        if isinstance(prior, NormalPrior) and prior.learn:
            owners = torch.tensor(prior.owners(space))
            owner = owners.repeat_interleave(torch.tensor(space.numels)).to(theta.device)
            least = theta.new_full((len(prior.log_scale),), log(LEAST))
        elif learns(prior):
            raise ValueError(
                f"fit_head learns the scale of a NormalPrior alone, not what {type(prior).__name__} learns: give a "
                "NormalPrior, leave prior= out, or use fit"
            )
        return _Scales(base, self._inside(owner), least, constant)

    @torch.no_grad()
    def put(self) -> None:
        """What was found, into the posterior."""
        posterior, model, q = self.head.posterior, self.head.model, self.q
        family = posterior.family
        back = torch.argsort(self.order)
        mean = q.mean.reshape(-1)[back]
        covariance = torch.block_diag(*q.covariance)[back][:, back]
        like = trained_values(posterior)
        family.standardise(None)
        family.change_coordinates(mean.to(like), torch.linalg.cholesky(covariance).to(like))
        if isinstance(model.likelihood, Gaussian) and self.learns_noise:
            model.likelihood.log_noise.fill_(self._noise())
        if "prior" in posterior.left_open:
            scales = zip(model.net_space.names, self.shift.exp().tolist(), strict=True)
            model.prior = NormalPrior({escape(name): value for name, value in scales})
        elif isinstance(model.prior, NormalPrior) and model.prior.learn:
            model.prior.log_scale.add_(self.shift.to(model.prior.log_scale))

    def result(self, converged: bool, tolerance: float, constant: float | None, batches: Batches) -> FitResult:
        name = "the head's normal"
        elbo = self._fresh()
        steps = len(self.history) - 1
        status = Status.CONVERGED if converged else Status.IMPROVING
        verdict = f"the last step gained less than {tolerance:g} nats"
        if not converged:
            verdict = f"after {steps} steps the ELBO still rises by more than {tolerance:g} nats: give more iterations="
        how = "in closed form"
        if isinstance(self.bound, CategoricalBound):
            how = f"on {FRESH} × {self.bound.draws} fresh quasi-random draws of each row's logits"
        elif isinstance(self.bound, BernoulliBound):
            how = "by quadrature over the logits"
        return FitResult(
            status=status, verdict=verdict, elbo=elbo, kept=name, candidates={name: elbo}, comparison=how,
            history=self.history, steps=steps, epochs=1.0, kl_weight=self.temperature, bound=True,
            exact=batches.exact and self.head.posterior.device.type == "cpu", notes=self._notes(),
            evaluation="none: the features of one pass", constant=constant,
        )  # fmt: skip

    def _fresh(self) -> Estimate:
        """The ELBO; where it takes draws, on others than those that the fit has seen."""
        if not isinstance(self.bound, CategoricalBound):
            return Estimate(self.elbo, 0.0, torch.tensor([self.elbo], dtype=torch.float64))
        values = self.bound.values(self.q.mean, self.q.covariance, FRESH)
        return Estimate.of(self.all_data * values - self.q.kl + self.scales.constant)

    def _notes(self) -> list[str]:
        model = self.head.model
        notes = [f"of the network only {self.head.name or 'its one layer'!r} is random: all else is held as it is"]
        if len(self.shift):
            assert isinstance(model.prior, NormalPrior)
            found = ", ".join(f"{name} {s:.3g}" for name, s in model.prior.scales(model.net_space).items())
            notes.append(f"the prior's scales were chosen by the ELBO: {found}")
        if bool((self.shift <= self.scales.least).any()):
            notes.append("a scale of the prior ended at its lower limit: the data say nothing of that tensor")
        if self.learns_noise:
            notes.append(f"the noise was chosen by the ELBO: {exp(self._noise()):.4g}")
        if self.temperature != 1:
            notes.append(f"λ = {self.temperature:g}: a tempered posterior is not the posterior; the ELBO is at λ = 1")
        if not isinstance(model.likelihood, Gaussian) and not model.likelihood.exact:  # pyright: ignore
            notes.append("the likelihood is weighted: its ELBO is no bound on the evidence")
        if isinstance(model.prior, PriorModule) and not model.prior.normalised:
            notes.append("the prior is not normalised: the ELBO is known up to a constant")
        return notes


def normal_prior(model: BayesianModel, theta: Tensor) -> tuple[Tensor, Tensor, float]:
    """Centre and precision [P] of a prior of independent normals, and its constant beside theirs.

    Any prior whose log density is a quadratic function of each number by itself is one; what it is, three gradients
    tell.
    """

    def gradient(at: Tensor) -> Tensor:
        row = at.detach().requires_grad_()
        with torch.enable_grad():
            value = model.log_prior(row.unsqueeze(0)).sum()
            return torch.autograd.grad(value, row)[0] if value.requires_grad else torch.zeros_like(row)

    zero, one = torch.zeros_like(theta), torch.ones_like(theta)
    slope = gradient(zero)
    precision = slope - gradient(one)
    probe = torch.randn(theta.shape, generator=torch.Generator().manual_seed(0), dtype=theta.dtype).to(theta.device)
    near = 1e-6 * (slope.abs() + precision.abs() * (1 + probe.abs()))
    if not bool((precision > 0).all()) or bool(((slope - precision * probe - gradient(probe)).abs() > near).any()):
        raise ValueError(
            f"fit_head needs a prior of independent normals, and {model.prior!r} is another: give a NormalPrior, leave "
            "prior= out, or use fit"
        )
    centre = slope / precision
    with torch.no_grad():
        value = float(model.log_prior(zero.unsqueeze(0)))
    own = -0.5 * (precision * centre.square()).sum() + 0.5 * (precision / (2 * pi)).log().sum()
    return centre, precision, value - float(own)
