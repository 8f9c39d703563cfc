"""Problems whose posterior is known: exactly, or by long runs of a sampler whose draws come with the package."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import log
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributions import Normal
from torch.func import functional_call, vmap

from structvi.families.full import FullNormalDensity
from structvi.models.likelihoods import Bernoulli, Gaussian, Likelihood
from structvi.parameters import Parameters
from structvi.util.configuration import configuration
from structvi_paper import figure2, regression
from structvi_paper.settings import Settings

#: draws of NUTS and HMC; tools/check_references.py makes them
REFERENCES = Path(__file__).parent / "references"
#: draws of a posterior that can be drawn from exactly
REFERENCE = 8192
#: dimensions and condition numbers of the Gaussians
GAUSSIANS = [(10, 100), (50, 10_000)]
F64: Any = {"dtype": torch.float64}


@dataclass(frozen=True)
class Data:
    """A network with data, the parts of a problem.

    Args:
        build: a new network, in float64, the same at every call.
        likelihood: its noise is known.
        scale: standard deviation of the normal prior of all weights.
        x, t: inputs and observations.
        grid: inputs at which predictions are compared.
    """

    build: Callable[[], nn.Module]
    likelihood: Likelihood
    scale: float
    x: Tensor
    t: Tensor
    grid: Tensor

    @property
    def noise(self) -> float | None:
        """The noise of a regression; None for two classes."""
        noise = configuration(self.likelihood).get("noise")
        return None if noise is None else float(noise)

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Return y at inputs [N, ..]: [S, P] → [S, N]."""
        net = self.build()
        space = Parameters.of(net)
        each = vmap(lambda row: functional_call(net, space.unravel(row), (x,)), chunk_size=1024)
        return each(theta).flatten(1)

    def log_joint(self, theta: Tensor) -> Tensor:
        """Return log p(t, θ) at all draws at once: [S, P] → [S]."""
        y = self.outputs(theta, self.x)
        prior = Normal(0.0, self.scale).log_prob(theta).sum(-1)
        return self.likelihood(y, self.t.flatten().expand_as(y)).sum(-1) + prior


@dataclass(eq=False)
class Problem:
    """A posterior p(θ | data) that is known. It is a target: `space` and `log_joint`, as `LogDensity` has them.

    Args:
        name, title: for the command line, and in words.
        space: the P weights, in float64.
        function: log p(data, θ), [S, P] → [S].
        reference: draws of the posterior, [R, P].
        truth: θ* [P], from which the data come; where there are none, a draw of the posterior.
        log_evidence: log p(data), which makes log p(θ | data) and KL known; None where it is not.
        modes: normals that cover the posterior's modes, one each; none where they are not counted.
        data: network and observations, where the problem has them.
        identified: whether the posterior of the weights is compared; False for that of predictions, of a network in
            which many weights are the same function.
    """

    name: str
    title: str
    space: Parameters
    function: Callable[[Tensor], Tensor]
    reference: Tensor
    truth: Tensor
    log_evidence: float | None = 0.0
    modes: Sequence[FullNormalDensity] = ()
    data: Data | None = None
    identified: bool = True

    def __post_init__(self) -> None:
        if self.reference.ndim != 2 or self.reference.shape[1] != self.P or self.truth.shape != (self.P,):
            raise ValueError(
                f"{self.name}: the space has P = {self.P} numbers; expected reference [R, P] and truth [P], got "
                f"{tuple(self.reference.shape)} and {tuple(self.truth.shape)}"
            )

    def question(self) -> "Problem":
        """The problem without the answer, which is what methods get: no reference draws [0, P], no modes, no evidence,
        and NaN for the truth."""
        unknown = torch.full_like(self.truth, torch.nan)
        return replace(self, reference=self.reference[:0].clone(), truth=unknown, log_evidence=None, modes=())

    def log_joint(self, theta: Tensor, batch: Any = None) -> Tensor:
        """log p(data, θ): [S, P] → [S]."""
        return self.function(theta)

    @property
    def P(self) -> int:
        return self.space.size

    def log_posterior(self, theta: Tensor) -> Tensor:
        """log p(θ | data), normalised: [S, P] → [S]."""
        assert self.log_evidence is not None, "log p(θ | data) is known where the evidence is"
        return self.log_joint(theta) - self.log_evidence

    def outputs(self, theta: Tensor) -> Tensor:
        """y at the grid's inputs: [S, P] → [S, G]."""
        assert self.data is not None, "only a problem with a network has predictions"
        with torch.no_grad():
            return self.data.outputs(theta, self.data.grid)

    def quantities(self, theta: Tensor) -> Tensor:
        """The numbers whose law is compared: every weight and every principal axis of the posterior, which see scales
        and correlations; for a network the outputs on the grid: [S, P] → [S, Q]."""
        if not self.identified:
            return self.outputs(theta)
        return torch.cat([theta, theta @ self.axes], dim=-1)

    @cached_property
    def axes(self) -> Tensor:
        """The posterior's principal axes [P, P]: of its one mode, where there is one. Those of the draws would be the
        axes of their largest and least variance by chance."""
        one = len(self.modes) == 1
        covariance = self.modes[0].covariance() if one else torch.cov(self.reference.mT)
        return torch.linalg.eigh(covariance).eigenvectors


def reference_draws(name: str) -> tuple[Tensor, float | None]:
    """Return the draws of a sampler [R, P] in float64, and log p(data) where it is known."""
    with safe_open(REFERENCES / f"{name}.safetensors", framework="pt") as file:
        metadata = file.metadata() or {}
        draws = file.get_tensor("draws").double()
    return draws, float(metadata["log_evidence"]) if "log_evidence" in metadata else None


def _generator(*labels: object) -> torch.Generator:
    return Settings().generator("check", *labels)


def _space(P: int) -> Parameters:
    return Parameters({"theta": torch.zeros(P, **F64)})


def two_dimensional(name: str, title: str, of: str) -> Problem:
    """A target of the paper's figure 2."""
    parts, log_masses = figure2.posteriors()[of]
    generator = _generator(name)
    count = torch.multinomial(log_masses.exp(), REFERENCE + 1, replacement=True, generator=generator)
    each = torch.stack([part.draw(REFERENCE + 1, generator=generator).theta for part in parts])  # [M, R + 1, 2]
    draws = each[count, torch.arange(REFERENCE + 1)]
    return Problem(name, title, _space(2), partial(figure2.log_density, of), draws[1:], draws[0], modes=parts)


def gaussian(d: int, condition: int) -> Problem:
    """N(μ, Σ) with μ ~ N(0, I), axes at random, variances in geometric progression around one."""
    name = f"gaussian-{d}-{condition}"
    generator = _generator(name)
    axes, _ = torch.linalg.qr(torch.randn(d, d, generator=generator, **F64))
    variances = (log(condition) * torch.linspace(-0.5, 0.5, d, **F64)).exp()
    mean = torch.randn(d, generator=generator, **F64)
    exact = FullNormalDensity(mean, torch.linalg.cholesky((axes * variances) @ axes.mT))
    draws = exact.draw(REFERENCE + 1, generator=generator).theta
    title = f"Gaussian in {d} dimensions, condition number {condition}"
    return Problem(name, title, _space(d), exact.log_prob, draws[1:], draws[0], modes=[exact])


def linear(inputs: int, bias: bool) -> nn.Module:
    """All weights zero."""
    net = nn.Linear(inputs, 1, bias=bias).double()
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    return net


def _conjugate(name: str, title: str, data: Data, exact: FullNormalDensity, truth: Tensor) -> Problem:
    """A linear regression with the posterior N(μ, Σ); log p(data) = log p(data, θ) − log p(θ | data) at any θ."""
    function, at = data.log_joint, truth.unsqueeze(0)
    log_evidence = (function(at) - exact.log_prob(at)).item()
    draws = exact.draw(REFERENCE, generator=_generator(name)).theta
    return Problem(name, title, Parameters.of(data.build()), function, draws, truth, log_evidence, [exact], data)


def rbf_regression() -> Problem:
    """The paper's: ten radial basis functions, noise known."""
    found = regression.data_set(Settings(), 0)
    grid = regression.features(torch.linspace(*regression.RANGE, 41, **F64))
    build = partial(linear, regression.CENTRES, False)
    data = Data(build, Gaussian(regression.NOISE), 1.0, found.design, found.t.unsqueeze(-1), grid)
    title = "RBF regression of the paper, 10 weights"
    return _conjugate("rbf-regression", title, data, found.posterior(), found.theta)


def linear_regression() -> Problem:
    """Five correlated inputs and a bias, 40 observations, θ ~ N(0, I), noise 0.5."""
    name, noise, N, inputs = "linear-regression", 0.5, 40, 5
    generator = _generator(name)
    x = _correlated(N, inputs, generator)
    design = torch.cat([x, torch.ones(N, 1, **F64)], dim=-1)
    truth = torch.randn(inputs + 1, generator=generator, **F64)
    t = design @ truth + noise * torch.randn(N, generator=generator, **F64)
    precision = design.mT @ design / noise**2 + torch.eye(inputs + 1, **F64)
    covariance = torch.linalg.inv(precision)
    exact = FullNormalDensity(covariance @ (design.mT @ t) / noise**2, torch.linalg.cholesky(covariance))
    data = Data(
        partial(linear, inputs, True), Gaussian(noise), 1.0, x, t.unsqueeze(-1), _correlated(41, inputs, generator)
    )
    return _conjugate(name, "conjugate linear regression, 6 weights", data, exact, truth)


def _correlated(N: int, inputs: int, generator: torch.Generator) -> Tensor:
    """Return standard normal inputs with correlation 0.8 between every two: [N, inputs]."""
    own, shared = (torch.randn(N, size, generator=generator, **F64) for size in (inputs, 1))
    return 0.2**0.5 * own + 0.8**0.5 * shared


def logistic_data() -> tuple[Data, Tensor]:
    """Five correlated inputs and a bias, 60 observations of two classes, θ ~ N(0, 2² I); data and θ*."""
    N, inputs, scale = 60, 5, 2.0
    generator = _generator("logistic-regression")
    x = _correlated(N, inputs, generator)
    truth = scale * torch.randn(inputs + 1, generator=generator, **F64)
    logits = x @ truth[:-1] + truth[-1]
    t = (torch.rand(N, generator=generator, **F64) < logits.sigmoid()).double()
    grid = _correlated(41, inputs, generator)
    return Data(partial(linear, inputs, True), Bernoulli(), scale, x, t.unsqueeze(-1), grid), truth


def logistic_regression() -> Problem:
    data, truth = logistic_data()
    draws, log_evidence = reference_draws("logistic-regression")
    normal = FullNormalDensity(draws.mean(0), torch.linalg.cholesky(torch.cov(draws.mT)))
    function, title = data.log_joint, "logistic regression, 6 weights"
    return Problem(
        "logistic-regression", title, Parameters.of(data.build()), function, draws, truth, log_evidence, [normal], data
    )


def small_network() -> nn.Module:
    """1-16-1 with tanh, at a draw of torch's initialisation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def network_data() -> tuple[Data, Tensor]:
    """A function drawn from the prior θ ~ N(0, I), seen at 40 inputs with a gap between them; data and θ*."""
    noise, N = 0.2, 40
    generator = _generator("network")
    side = torch.randint(2, (N, 1), generator=generator) * 2 - 1
    x = side * (0.5 + 1.5 * torch.rand(N, 1, generator=generator, **F64))
    net = small_network()
    space = Parameters.of(net)
    truth = torch.randn(space.size, generator=generator, **F64)
    y = functional_call(net, space.unravel(truth), (x,))
    t = y + noise * torch.randn(N, 1, generator=generator, **F64)
    grid = torch.linspace(-2.5, 2.5, 41, **F64).unsqueeze(-1)
    return Data(small_network, Gaussian(noise), 1.0, x, t, grid), truth


def network() -> Problem:
    data, truth = network_data()
    draws, _ = reference_draws("network")
    function, title = data.log_joint, "network 1-16-1 with tanh, predictions"
    return Problem("network", title, Parameters.of(data.build()), function, draws, truth, None, (), data, False)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "correlated": partial(two_dimensional, "correlated", "correlated Gaussian in two dimensions", "unimodal"),
    "bimodal": partial(two_dimensional, "bimodal", "two modes in two dimensions", "bimodal"),
    **{f"gaussian-{d}-{condition}": partial(gaussian, d, condition) for d, condition in GAUSSIANS},
    "linear-regression": linear_regression,
    "rbf-regression": rbf_regression,
    "logistic-regression": logistic_regression,
    "network": network,
}


def problem(name: str) -> Problem:
    """Return the problem of this name, made anew: nobody else has had it."""
    if name not in PROBLEMS:
        raise ValueError(f"there is no problem {name!r}; there are {', '.join(PROBLEMS)}")
    return PROBLEMS[name]()
