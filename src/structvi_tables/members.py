"""One network for each fold of the rows, all trained in one program: member k sees every fold but its own.

All stop at one step: where the folds, each under the member that has not seen it, are most probable. What the folds say
of the networks is therefore a little optimistic; were each member to stop by its own fold, it would be much more so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import cos, inf, log, pi

import torch
from torch import Tensor, nn

from structvi.models.likelihoods import Gaussian, Likelihood, StudentT

#: learning rate, steps until it is reached, weight decay of AdamW, and the norm that gradients are clipped at
LR, WARMUP, DECAY, CLIP = 5e-3, 50, 0.3, 10.0
#: the weights that are kept are a running mean of those of the last 1/(1 − KEEP) steps
KEEP = 0.98
#: steps between two looks at the folds; of all steps, the share without a gain after which training ends
LOOK, PATIENCE = 25, 0.35
#: rows a step and steps: at least, and by the number of rows
BATCH, STEPS, EPOCHS, MOST_STEPS = 128, 1500, 40, 6000
#: factors of a noise that all rows share, tried on the folds; nats a row that count as a gain
FACTORS, LEAST_GAIN = (1.0, 1.2, 1.45, 1.75, 2.1, 2.5, 3.5, 5.0, 8.0), 1e-4


@dataclass
class Fold:
    """Rows to train on, and rows to look at: indices into one table each."""

    train: Tensor
    held: Tensor


@dataclass
class Trained:
    """Networks, the likelihood that they share, and the mean log density of the folds, each under its member."""

    nets: list[nn.Sequential]
    likelihood: Likelihood
    density: float


def folds_of(order: Tensor, count: int) -> list[Fold]:
    """`count` folds of rows in a random order, each held out by one member.

    Example:
        >>> [fold.held.tolist() for fold in folds_of(torch.arange(5), 2)]
        [[0, 2, 4], [1, 3]]
    """
    held = [order[k::count] for k in range(count)]
    return [Fold(torch.cat([h for j, h in enumerate(held) if j != k]), held[k]) for k in range(count)]


def network(sizes: Sequence[int], generator: torch.Generator | None = None) -> nn.Sequential:
    """A multilayer perceptron of rectified units: linear layers of these sizes, [input, hidden.., output].

    Example:
        >>> network([3, 8, 1])
        Sequential(
          (0): Linear(in_features=3, out_features=8, bias=True)
          (1): ReLU()
          (2): Linear(in_features=8, out_features=1, bias=True)
        )
    """
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layer = nn.Linear(a, b, device="meta").to_empty(device="cpu")
        for tensor in (layer.weight, layer.bias):  # torch's own start of a linear layer
            with torch.no_grad():
                tensor.copy_((2 * torch.rand(tensor.shape, generator=generator) - 1) / a**0.5)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class _Stack(nn.Module):
    """K networks of one form as one: [K, B, F] → [K, B, outputs]."""

    def __init__(self, nets: Sequence[nn.Sequential]):
        super().__init__()
        linear = [[layer for layer in net if isinstance(layer, nn.Linear)] for net in nets]
        each = list(zip(*linear, strict=True))
        self.weight = nn.ParameterList(torch.stack([layer.weight.detach().mT for layer in same]) for same in each)
        self.bias = nn.ParameterList(torch.stack([layer.bias.detach()[None] for layer in same]) for same in each)

    def forward(self, x: Tensor) -> Tensor:
        for i, (W, b) in enumerate(zip(self.weight, self.bias, strict=True)):
            x = torch.baddbmm(b, x.relu() if i else x, W)
        return x

    def into(self, nets: Sequence[nn.Sequential]) -> None:
        for k, net in enumerate(nets):
            linear = [layer for layer in net if isinstance(layer, nn.Linear)]
            for layer, W, b in zip(linear, self.weight, self.bias, strict=True):
                with torch.no_grad():
                    layer.weight.copy_(W[k].mT)
                    layer.bias.copy_(b[k, 0])


def train(
    x: Tensor,
    t: Tensor,
    folds: Sequence[Fold],
    sizes: Sequence[int],
    likelihood: Likelihood,
    seed: int,
    decay: float = DECAY,
) -> Trained:
    """Networks by AdamW on −log p(t | y), kept where the folds are most probable.

    Args:
        x: all rows, [N, F]; t: [N, 1] numbers or [N] labels.
        folds: one for each member.
        sizes: of the layers, with those of input and output.
        likelihood: what it learns itself is shared by the members while they train.
        seed: of starts and minibatches.
        decay: of the weights.
    """
    generator = torch.Generator().manual_seed(seed)
    nets = [network(sizes, generator) for _ in folds]
    run = _Run(_Stack(nets), likelihood, x, t, folds, generator)
    run.loop(decay)
    run.stack.into(nets)
    return Trained(nets, likelihood, run.best)


class _Run:
    def __init__(
        self,
        stack: _Stack,
        likelihood: Likelihood,
        x: Tensor,
        t: Tensor,
        folds: Sequence[Fold],
        generator: torch.Generator,
    ):
        self.stack, self.likelihood, self.x, self.t, self.generator = stack, likelihood, x, t, generator
        rows = min(len(fold.train) for fold in folds)
        self.batch = min(rows, BATCH * max(1, min(8, rows // 4000)))
        self.steps = min(MOST_STEPS, max(STEPS, EPOCHS * rows // self.batch))
        self.train = torch.stack([fold.train[:rows] for fold in folds])
        held = min(len(fold.held) for fold in folds)
        self.held = torch.stack([fold.held[:held] for fold in folds])
        self.values = [*stack.parameters(), *likelihood.parameters()]
        self.mean = [value.detach().clone() for value in self.values]
        self.kept = [value.detach().clone() for value in self.values]
        self.best = -inf

    def loop(self, decay: float) -> None:
        learned = list(self.likelihood.parameters())
        weights = self.values[: len(self.values) - len(learned)]
        groups = [{"params": weights}, {"params": learned, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups if learned else weights, lr=LR, weight_decay=decay)
        gained = 0
        for i in range(self.steps):
            for group in optimizer.param_groups:
                group["lr"] = LR * min(1, (i + 1) / WARMUP) * 0.5 * (1 + cos(pi * i / self.steps))
            at = torch.randint(self.train.shape[1], (len(self.train), self.batch), generator=self.generator)
            rows = self.train.gather(1, at)
            optimizer.zero_grad(set_to_none=True)
            loss = -self._log_prob(rows).sum(0).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(self.values, CLIP * len(self.train) ** 0.5)
            optimizer.step()
            with torch.no_grad():
                for mean, value in zip(self.mean, self.values, strict=True):
                    mean.lerp_(value, 1 - min(KEEP, i / (i + 1)))
            if i % LOOK == LOOK - 1:
                gained = i if self._look() else gained
                if i - gained > PATIENCE * self.steps:
                    break
        self._restore()

    def _log_prob(self, rows: Tensor) -> Tensor:
        """log p of [K, B] rows, each seen by its member: [K, B]."""
        y, t = self.stack(self.x[rows]), self.t[rows]
        return self.likelihood(y.flatten(0, 1), t.flatten(0, 1)).reshape(rows.shape)

    @torch.no_grad()
    def _look(self) -> bool:
        """Whether the running means are better on their folds than ever; they are then kept."""
        now = [value.detach().clone() for value in self.values]
        _set(self.values, self.mean)
        density, factor = with_noise(self.likelihood, lambda: float(self._log_prob(self.held).mean()))
        better = density > self.best + LEAST_GAIN
        if better:
            scale_noise(self.likelihood, factor)
            self.best = density
            _set(self.kept, self.values)
        _set(self.values, now)
        return better

    def _restore(self) -> None:
        with torch.no_grad():
            _set(self.values, self.kept)


def scale_noise(likelihood: Likelihood, factor: float) -> None:
    """Multiply the noise that a likelihood learns for all rows; nothing where it learns none."""
    if isinstance(likelihood, Gaussian | StudentT) and likelihood.noise == "point":
        with torch.no_grad():
            likelihood.log_noise += log(factor)


def with_noise(likelihood: Likelihood, density: Callable[[], float]) -> tuple[float, float]:
    """The highest density over factors of the noise, and the factor: residuals of fitted rows are too small."""
    found = []
    factors = FACTORS if isinstance(likelihood, Gaussian | StudentT) and likelihood.noise == "point" else (1.0,)
    for factor in factors:
        scale_noise(likelihood, factor)
        found.append((density(), factor))
        scale_noise(likelihood, 1 / factor)
    return max(found)


def _set(values: Sequence[Tensor], to: Sequence[Tensor]) -> None:
    for value, new in zip(values, to, strict=True):
        value.copy_(new)
