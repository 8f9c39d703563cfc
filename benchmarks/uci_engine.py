"""J regressions with networks of one hidden layer as one program: every tensor has J jobs in front.

The mathematics is the library's (`families/structured.py`, `families/precision.py`, the path estimator of `elbo.py`)
with the gradients of mean, scale and factor in closed form; `tests/test_uci.py` compares the two. On a GPU a step is
captured once and replayed. Letters as in the library: S draws, P weights, K rank, N data; H hidden units, D inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import cos, log, pi
from typing import NamedTuple

import torch
from torch import Tensor

from .uci_data import Splits

State = dict[str, Tensor]
#: state and λ to gradients
Step = Callable[[State, Tensor], State]
#: of the learning rate of mean and scale: the factor's. Adam moves every entry of a factor by about the rate at each
#: step, signal or not: at the full rate the noise of 20 columns costs more than they bring
FACTOR_RATE = 0.1
WARMUP, LAST_PART, CLIP = 0.05, 0.25, 10.0


@dataclass
class Jobs:
    """y(x) = W₂ relu(W₁x + b₁) + b₂ for each job; θ = (W₁, b₁, W₂, b₂) flat.

    `batch` is how many data a step takes, None for all.
    """

    data: Splits
    hidden: int = 50
    batch: int | None = None
    sizes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.J, self.D, self.N = self.data.x.shape
        self.sizes = [self.hidden * self.D, self.hidden, self.hidden, 1]
        self.P = sum(self.sizes)
        self.device = self.data.x.device

    def per_weight(self, value: Tensor) -> Tensor:
        """[J, 4], one for each tensor, to [J, P]."""
        parts = [value[:, i : i + 1].expand(-1, n) for i, n in enumerate(self.sizes)]
        return torch.cat(parts, -1)

    def initial_scale(self) -> Tensor:
        """Root mean squares of `nn.Linear`'s initialisation: [J, P]."""
        fan_in = torch.tensor([self.D, self.D, self.hidden, self.hidden], device=self.device)
        return self.per_weight((3 * fan_in).rsqrt().expand(self.J, 4))

    def initial(self, seeds: list[int]) -> Tensor:
        """`nn.Linear`'s initialisation, uniform: [J, P]."""
        rows = [torch.rand(self.P, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return (2 * torch.stack(rows).to(self.device) - 1) * 3**0.5 * self.initial_scale()

    def prior(self, scale: float = 1.0) -> Tensor:
        """Log prior scales of the four tensors, scale/√fan_in for weights and scale for biases: [J, 4]."""
        divisor = torch.tensor([self.D, 1.0, self.hidden, 1.0], device=self.device)
        return (log(scale) - 0.5 * divisor.log()).expand(self.J, 4).clone()

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """[J, S, P], [J, D, B] → [J, S, B]."""
        J, S, _ = theta.shape
        W1, b1, W2, b2 = theta.split(self.sizes, -1)
        units = torch.baddbmm(b1.reshape(J, -1, 1), W1.reshape(J, -1, self.D), x).relu_()
        return torch.bmm(W2.reshape(J * S, 1, -1), units.view(J * S, self.hidden, -1)).view(J, S, -1) + b2

    def dropout_outputs(self, theta: Tensor, x: Tensor, inputs: Tensor, units: Tensor) -> Tensor:
        """The same with masks of 0 and 1 on inputs [J, S, D, B or 1] and hidden units [J, S, H, B or 1]; θ [J, P]."""
        W1, b1, W2, b2 = (part.unsqueeze(1) for part in theta.split(self.sizes, -1))
        W1 = W1.reshape(self.J, 1, self.hidden, self.D)
        active = (W1 @ (x.unsqueeze(1) * inputs) + b1.unsqueeze(-1)).relu() * units
        return (W2.unsqueeze(-2) @ active).squeeze(-2) + b2

    def step_data(self) -> tuple[Tensor, Tensor]:
        if self.batch is None or self.batch >= self.N:
            return self.data.x, self.data.t
        rows = torch.randint(self.N, (self.batch,), device=self.device)
        return self.data.x[:, :, rows], self.data.t[:, rows]

    def log_likelihood(self, y: Tensor, t: Tensor, log_noise: Tensor) -> Tensor:
        """Scaled to all N observations: [J, S, B] → [J, S]."""
        square = (y - t.unsqueeze(1)).square().mean(-1)
        noise = log_noise.unsqueeze(1)
        return -self.N * (0.5 * square * (-2 * noise).exp() + noise + 0.5 * log(2 * pi))

    def log_prior(self, theta: Tensor, log_prior: Tensor) -> Tensor:
        """[J, S, P] → [J, S]."""
        scale = self.per_weight(log_prior).unsqueeze(1)
        return -(0.5 * (theta * (-scale).exp()).square() + scale).sum(-1) - 0.5 * self.P * log(2 * pi)


def inverse(M: Tensor) -> Tensor:
    """Of positive definite matrices [J, K, K], by Gauss–Jordan without pivots: nothing that waits for the device."""
    M = M.clone()
    for k in range(M.shape[-1]):
        pivot = M[:, k, k].reciprocal().view(-1, 1, 1)
        row, column = M[:, k : k + 1] * pivot, M[:, :, k : k + 1].clone()
        M = M - column * row
        M[:, :, k : k + 1] = -column * pivot
        M[:, k : k + 1] = row
        M[:, k : k + 1, k : k + 1] = pivot
    return M


def _woodbury(q: State, form: str) -> tuple[Tensor, Tensor]:
    """G [J, P, K] and M⁻¹ for M = I + GᵀG: Λ = (I + GGᵀ)/s² in the precision form, Σ = s²(I + GGᵀ) in the other."""
    scale, unit = q["log_scale"].exp(), q["unit"]
    G = q["factor"] * (scale / unit if form == "precision" else unit / scale).unsqueeze(-1)
    M = G.double().mT @ G.double()
    return G, inverse(M + torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)).to(G.dtype)


class Drawn(NamedTuple):
    """Paired noise, and what it makes."""

    eps: Tensor  # [J, S, P]
    z: Tensor  # [J, S, K]
    d: Tensor  # [J, S, P]: θ − μ
    product: Tensor  # [J, S, P]: Λd
    G: Tensor | None = None
    inner: Tensor | None = None  # M⁻¹


def deviations(q: State, form: str, groups: int) -> Drawn:
    """2·groups draws, in antithetic pairs."""
    scale = q["log_scale"].exp().unsqueeze(1)
    J, P = q["mean"].shape
    half = torch.randn(J, groups, P, device=scale.device)
    eps = torch.cat([half, -half], 1)
    K = q["factor"].shape[-1] if "factor" in q else 0
    half = torch.randn(J, groups, K, device=scale.device)
    z = torch.cat([half, -half], 1)
    if not K:
        return Drawn(eps, z, scale * eps, eps / scale)
    G, inner = _woodbury(q, form)
    if form == "precision":
        x = eps + (z - eps @ G) @ inner @ G.mT
        return Drawn(eps, z, scale * x, (x + (x @ G) @ G.mT) / scale, G, inner)
    x = eps + z @ G.mT
    return Drawn(eps, z, scale * x, (x - (x @ G) @ inner @ G.mT) / scale, G, inner)


def gradients(q: State, form: str, v: Tensor, drawn: Drawn) -> State:
    """Of mean, log scale and factor, from v = ∇θ(log p − log q) at the draws [J, S, P]."""
    eps, z, d, _, G, inner = drawn
    S, scale = v.shape[1], q["log_scale"].exp().unsqueeze(1)
    out = {"mean": v.mean(1)}
    if G is None or inner is None:
        return out | {"log_scale": (v * eps * scale).mean(1)}
    if form == "covariance":
        u = q["unit"].unsqueeze(1)
        return out | {"log_scale": (v * eps * scale).mean(1), "factor": (v * u).mT @ z / S}
    # d = Λ⁻¹(ε/s + Wz): w·δd for w = Λ⁻¹v
    y = v * scale
    w = scale * (y - (y @ G) @ inner @ G.mT)
    W = q["factor"] / q["unit"].unsqueeze(-1)
    slope = (w.mT @ (z - d @ W) - d.mT @ (w @ W)) / S
    return out | {
        "log_scale": (w * (2 * d / scale.square() - eps / scale)).mean(1),
        "factor": slope / q["unit"].unsqueeze(-1),
    }


def normal_step(jobs: Jobs, form: str, groups: int) -> Step:
    """Gradients of E log lik − λ KL by the path estimator, for mean, scale, factor, noise and prior scales."""

    def step(q: State, temperature: Tensor) -> State:
        drawn = deviations(q, form, groups)
        theta = (q["mean"].unsqueeze(1) + drawn.d).requires_grad_()
        noise, prior = (q[name].detach().requires_grad_() for name in ("log_noise", "log_prior"))
        x, t = jobs.step_data()
        with torch.enable_grad():
            value = jobs.log_likelihood(jobs.outputs(theta, x), t, noise) + temperature * jobs.log_prior(theta, prior)
            slope, of_noise, of_prior = torch.autograd.grad(value.sum(), (theta, noise, prior))
        S = theta.shape[1]
        out = gradients(q, form, slope + temperature * drawn.product, drawn)
        return out | {"log_noise": of_noise / S, "log_prior": of_prior / S}

    return step


def point_step(jobs: Jobs, rates: Tensor | None = None, draws: int = 1) -> Step:
    """Gradients of log p(t, θ): MAP; with drop rates [J] MC dropout, a mask for each observation and draw."""
    keep = torch.ones(jobs.J, 4, device=jobs.device)
    if rates is not None:
        keep[:, 0] = keep[:, 2] = 1 - rates  # biases are never masked
    keep = jobs.per_weight(keep)

    def step(q: State, temperature: Tensor) -> State:
        theta, noise = (q[name].detach().requires_grad_() for name in ("mean", "log_noise"))
        x, t = jobs.step_data()
        with torch.enable_grad():
            if rates is None:
                y = jobs.outputs(theta.unsqueeze(1), x)
                value = jobs.log_prior(theta.unsqueeze(1), q["log_prior"]).sum()
            else:
                y = jobs.dropout_outputs(theta, x, *masks(jobs, rates, draws, t.shape[1]))
                value = -0.5 * (keep * (theta * (-jobs.per_weight(q["log_prior"])).exp()).square()).sum()
            value = value + jobs.log_likelihood(y, t, noise).mean(1).sum()
            of_mean, of_noise = torch.autograd.grad(value, (theta, noise))
        return {"mean": of_mean, "log_noise": of_noise}

    return step


def masks(jobs: Jobs, rates: Tensor, draws: int, B: int) -> tuple[Tensor, Tensor]:
    """1 with probability 1 − rate: [J, draws, D, B] and [J, draws, H, B]."""
    rate = rates.view(-1, 1, 1, 1)
    shapes = ((jobs.J, draws, n, B) for n in (jobs.D, jobs.hidden))
    inputs, units = ((torch.rand(shape, device=jobs.device) >= rate).float() for shape in shapes)
    return inputs, units


def maximise(
    jobs: Jobs, q: State, step: Step, steps: int, lr: float, seed: int, kl_warmup: float = 0.0, part: tuple = (0.0, 1.0)
) -> tuple[State, State]:
    """Adam with warm-up and cosine decay to zero, job by job: the last iterate and the mean over the last quarter.

    `part` is the part of the schedule to run: a fit in two stages runs one after the other.
    """
    torch.manual_seed(seed)
    q = {name: value.detach().clone() for name, value in q.items()}
    names = list(step(q, torch.ones((), device=jobs.device)))
    values = [q[name] for name in names]
    rates = [FACTOR_RATE if name == "factor" else 1.0 for name in names]
    first, second, mean = ([torch.zeros_like(v) for v in values] for _ in range(3))
    begin, end = (round(x * steps) for x in part)
    # made beforehand: a captured step reads its own row
    plan = torch.tensor([_plan(i, begin, steps, lr, kl_warmup) for i in range(begin, end)], device=jobs.device)
    at = torch.zeros((), dtype=torch.long, device=jobs.device)

    def advance() -> None:
        rate, correct1, correct2, share, temperature = plan.index_select(0, at.view(1))[0].unbind()
        found = step(q, temperature)
        slopes = [-found[name] / jobs.N for name in names]
        norm = torch.stack([s.reshape(jobs.J, -1).square().sum(1) for s in slopes]).sum(0).sqrt()
        limit = (CLIP / norm).clamp(max=1.0)
        for value, m, v, average, slope, relative in zip(values, first, second, mean, slopes, rates, strict=True):
            slope = slope * limit.view(-1, *[1] * (slope.ndim - 1))
            m.lerp_(slope, 0.1)
            v.lerp_(slope.square(), 0.001)
            value.sub_(rate * relative * (m / correct1) / ((v / correct2).sqrt() + 1e-8))
            average.lerp_(value, share)
        at.add_(1)

    with torch.no_grad():
        repeat(advance, end - begin, jobs.device)
    return q, q | dict(zip(names, mean, strict=True))


def _plan(i: int, begin: int, steps: int, lr: float, kl_warmup: float) -> tuple[float, float, float, float, float]:
    """Of step i: the learning rate, Adam's two corrections, the weight of this iterate in the running mean, and λ."""
    warm = WARMUP * steps
    rate = (i + 1) / warm if i < warm else 0.5 * (1 + cos(pi * (i - warm) / (steps - warm)))
    n = i + 1 - begin  # of Adam's own steps
    share = 1 / max(1, i + 1 - int((1 - LAST_PART) * steps))
    return lr * rate, 1 - 0.9**n, 1 - 0.999**n, share, min(1.0, (i + 1) / (kl_warmup * steps + 1))


def repeat(advance: Callable[[], None], steps: int, device: torch.device) -> None:
    """Call it `steps` times; on a GPU as a graph that is captured once."""
    if device.type != "cuda" or steps < 10:
        for _ in range(steps):
            advance()
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            advance()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        advance()
    for _ in range(steps - 3):
        graph.replay()
    torch.cuda.synchronize()


def half_log_det(q: State, form: str) -> Tensor:
    """½ log det Σ: [J]."""
    total = q["log_scale"].double().sum(-1)
    if "factor" not in q:
        return total
    G, _ = _woodbury(q, form)
    M = G.double().mT @ G.double() + torch.eye(G.shape[-1], dtype=torch.float64, device=G.device)
    half = 0.5 * torch.logdet(M)
    return total - half if form == "precision" else total + half


@torch.no_grad()
def elbo(jobs: Jobs, q: State, form: str, draws: int = 4096, seed: int = 1, chunk: int = 64) -> tuple[Tensor, Tensor]:
    """On all data and common draws: the ELBO and its standard error over pairs, [J] each."""
    torch.manual_seed(seed)
    constant = half_log_det(q, form) + 0.5 * jobs.P * log(2 * pi)
    pairs = []
    for _ in range(draws // chunk):
        _, _, d, product, *_ = deviations(q, form, chunk // 2)
        theta = q["mean"].unsqueeze(1) + d
        value = jobs.log_likelihood(jobs.outputs(theta, jobs.data.x), jobs.data.t, q["log_noise"])
        value = value + jobs.log_prior(theta, q["log_prior"]) + 0.5 * (d * product).sum(-1)
        pairs.append(value.double().view(jobs.J, 2, -1).mean(1))
    values = torch.cat(pairs, 1)
    return values.mean(1) + constant, values.std(1) / values.shape[1] ** 0.5


def choose(states: list[State], values: Tensor) -> State:
    """Job by job the state with the highest value [len(states), J]."""
    best = values.argmax(0)
    rows = torch.arange(len(best), device=best.device)
    return {name: torch.stack([state[name] for state in states])[best, rows] for name in states[0]}
