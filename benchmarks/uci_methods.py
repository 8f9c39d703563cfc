"""The methods of `benchmarks.uci`: how each is fitted, and what it predicts. All splits of a set at once."""

from dataclasses import dataclass
from math import log, pi

import torch
from torch import Tensor

from . import uci_engine as engine
from .uci_data import Splits
from .uci_engine import Jobs, State

#: draws a step, and to predict with
DRAWS, PREDICT = 8, 1000
MEMBERS = 5
#: MC dropout's drop rates, and prior scales in units of 1/√fan_in for all point estimates: chosen on validation data
RATES = (0.005, 0.01, 0.05, 0.1)
SCALES = (1.0, 4.0)


@dataclass
class Budget:
    """Of a point estimate: steps, learning rate, and data a step (None for all)."""

    steps: int
    lr: float
    batch: int | None = None


@dataclass
class Predicted:
    """Of a test set, in the data's own units: log-likelihood and root mean square error, [J] each."""

    log_likelihood: Tensor
    rmse: Tensor


def with_rank(q: State, rank: int, seed: int) -> State:
    """More columns, small ones; the first ones learn relative to the present scales."""
    unit = q.get("unit", q["log_scale"].exp())
    old = q.get("factor", unit.unsqueeze(-1)[..., :0])
    generator = torch.Generator().manual_seed(seed)
    new = 0.01 * torch.randn(*unit.shape, rank - old.shape[-1], generator=generator).to(unit)
    return q | {"unit": unit, "factor": torch.cat([old, new], -1)}


@torch.no_grad()
def draws(jobs: Jobs, q: State, form: str, seed: int = 7) -> Tensor:
    """Outputs on the test inputs at weights drawn from q: [J, S, B]."""
    torch.manual_seed(seed)
    parts = []
    for _ in range(PREDICT // 100):
        theta = q["mean"].unsqueeze(1) + engine.deviations(q, form, 50).d
        parts.append(jobs.outputs(theta, jobs.data.x_test))
    return torch.cat(parts, 1)


@torch.no_grad()
def dropout_draws(jobs: Jobs, q: State, rates: Tensor, seed: int = 7) -> Tensor:
    torch.manual_seed(seed)
    parts = []
    for _ in range(PREDICT // 100):
        inputs, units = engine.masks(jobs, rates, 100, 1)
        parts.append(jobs.dropout_outputs(q["mean"], jobs.data.x_test, inputs, units))
    return torch.cat(parts, 1)


def score(data: Splits, y: Tensor, variance: Tensor) -> Predicted:
    """An equal mixture of N(y_s, variance_s) against the test targets; y [J, S, B], variance broadcasts to it."""
    t = data.t_test.unsqueeze(1)
    log_prob = -0.5 * ((t - y).square() / variance + variance.log() + log(2 * pi))
    likelihood = (log_prob.logsumexp(1) - log(y.shape[1])).mean(-1) - data.unit.log()
    return Predicted(likelihood, (y.mean(1) - data.t_test).square().mean(-1).sqrt() * data.unit)


def noise(q: State) -> Tensor:
    return (2 * q["log_noise"]).exp().view(-1, 1, 1)


@dataclass
class Points:
    """Fitted networks, their drop rates and prior scales: [J] each."""

    jobs: Jobs
    q: State
    rates: Tensor
    scales: Tensor

    def score(self) -> Predicted:
        if bool((self.rates == 0).all()):
            y = self.jobs.outputs(self.q["mean"].unsqueeze(1), self.jobs.data.x_test)
        else:
            y = dropout_draws(self.jobs, self.q, self.rates)
        return score(self.jobs.data, y, noise(self.q))


def fit_points(data: Splits, seeds: list[int], rates: Tensor, scales: Tensor, budget: Budget, hidden: int) -> Points:
    """MAP where the rates are 0, MC dropout elsewhere: one fit for each row of the data."""
    jobs = Jobs(data, hidden, budget.batch)
    log_prior = jobs.prior() + scales.log().unsqueeze(-1)
    q = {"mean": jobs.initial(seeds), "log_noise": torch.zeros(jobs.J, device=jobs.device), "log_prior": log_prior}
    step = engine.point_step(jobs) if bool((rates == 0).all()) else engine.point_step(jobs, rates, DRAWS)
    return Points(jobs, engine.maximise(jobs, q, step, budget.steps, budget.lr, seeds[0])[0], rates, scales)


def tuned_points(
    data: Splits, seeds: list[int], rates: tuple[float, ...], trial: Budget, budget: Budget, hidden: int
) -> Points:
    """Drop rate and prior scale with the highest log-likelihood on a held-out fifth of the training set; then refit."""
    held, R = data.validation(), len(data.t)
    grid = torch.tensor([(rate, scale) for rate in rates for scale in SCALES], device=data.t.device)  # [C, 2]
    rows = torch.arange(R, device=data.t.device).repeat_interleave(len(grid))
    tried = grid.repeat(R, 1)
    own = [seed for seed in seeds for _ in range(len(grid))]
    value = fit_points(held.take(rows), own, tried[:, 0], tried[:, 1], trial, hidden).score().log_likelihood
    best = grid[value.view(R, -1).argmax(1)]
    return fit_points(data, seeds, best[:, 0], best[:, 1], budget, hidden)


def ensemble(fitted: Points, seeds: list[int], budget: Budget) -> Predicted:
    """Equal mixture of `MEMBERS` networks with the prior scales of `fitted`."""
    data = fitted.jobs.data
    rows = torch.arange(len(data.t), device=data.t.device).repeat_interleave(MEMBERS)
    own = [seed + 1000 * member for seed in seeds for member in range(MEMBERS)]
    many = fit_points(data.take(rows), own, fitted.rates[rows], fitted.scales[rows], budget, fitted.jobs.hidden)
    y = many.jobs.outputs(many.q["mean"].unsqueeze(1), many.jobs.data.x_test)  # [R·M, 1, B]
    return score(data, y.view(len(data.t), MEMBERS, -1), noise(many.q).view(-1, MEMBERS, 1))


@torch.no_grad()
def last_layer_laplace(fitted: Points) -> Predicted:
    """Laplace in W₂ and b₂ at the MAP, exact there: the prior scale has the highest marginal likelihood of a grid."""
    jobs, q = fitted.jobs, fitted.q
    W1, b1, W2, b2 = q["mean"].split(jobs.sizes, -1)

    def features(x: Tensor) -> Tensor:
        active = (W1.view(jobs.J, jobs.hidden, jobs.D) @ x + b1.unsqueeze(-1)).relu()
        return torch.cat([active, torch.ones_like(active[:, :1])], 1).double()  # [J, H + 1, n]

    phi, weights = features(jobs.data.x), torch.cat([W2, b2], -1).double()
    variance = noise(q).double()
    information = phi @ phi.mT / variance
    eye = torch.eye(jobs.hidden + 1, dtype=torch.float64, device=jobs.device)
    scales = torch.logspace(-2, 1.5, 36, dtype=torch.float64, device=jobs.device)
    evidence = torch.stack(
        [
            -0.5 * (weights / s).square().sum(-1) - len(eye) * s.log() - 0.5 * torch.logdet(information + eye / s**2)
            for s in scales
        ]
    )
    best = scales[evidence.argmax(0)].view(-1, 1, 1)
    new = features(jobs.data.x_test)
    spread = (new * torch.linalg.solve(information + eye / best**2, new)).sum(1, keepdim=True)  # [J, 1, B]
    y = jobs.outputs(q["mean"].unsqueeze(1), jobs.data.x_test)
    return score(jobs.data, y, variance.float() + spread.float())
