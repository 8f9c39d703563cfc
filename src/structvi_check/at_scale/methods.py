"""What is asked: ours at λ = 1, and what IVON, SWAG, Laplace, ensembles and MC dropout call their posterior."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from structvi.couplings import naive
from structvi.families import MAP, Density, Family, LowRankPrecision, MeanField, Rotated
from structvi.families.mean_field import DiagonalNormal
from structvi.optim import Soap
from structvi.posterior import variationalize
from structvi.train.options import Schedule

from ..adapters import Adapter
from ..peers import SWAG, DeepEnsemble, DropoutNetwork
from ..problems import Data, Problem
from .ivon import fit_ivon

#: epochs of ours and of IVON, and rows of a batch
EPOCHS, BATCH = 100, 50
#: columns of Laplace's precision
RANK = 16


def loader(data: Data) -> DataLoader[Any]:
    return DataLoader(TensorDataset(data.x, data.t), batch_size=BATCH, shuffle=True)


class Batches:
    """Rows in a new order each epoch, from torch's global stream."""

    def __init__(self, data: Data):
        self.data = data

    def __len__(self) -> int:
        return -(-len(self.data.x) // BATCH)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(len(self.data.x)).split(BATCH):
            yield self.data.x[rows], self.data.t[rows]


class WithDensity:
    """A fitted density: draws and log q."""

    name: str
    density: Density
    #: mean |log s − log s₀| over the weights, s₀ where scales started; None where they have no start
    moved: float | None = None

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        return self.density.draw(n, naive, generator).theta.detach()

    def log_prob(self, theta: Tensor) -> Tensor:
        return self.density.log_prob(theta).detach()


class FromScratch(WithDensity):
    """Ours: E log lik − λ KL from the first step, the mean preconditioned.

    Args:
        name: in the table.
        recipe: the family.
        temperature: λ.
    """

    def __init__(self, name: str, recipe: Callable[[], Family], temperature: float = 1.0):
        self.name, self.recipe, self.temperature = name, recipe, temperature

    def fit(self, problem: Problem, seed: int) -> None:
        data = problem.data
        assert data is not None
        bayes = variationalize(
            data.build(), data.likelihood, self.recipe(), data.prior, generator=torch.Generator().manual_seed(seed)
        )
        start = _log_scales(bayes)
        bayes.fit(
            loader(data), epochs=EPOCHS, optimizer=Soap(bayes, 0.01, 0.05), kl_weight=self.temperature,
            schedule=Schedule(stop=False), progress=False, seed=seed,
        )  # fmt: skip
        self.moved = float((_log_scales(bayes) - start).abs().mean())
        self.density = bayes.family.requires_grad_(False)()


def _log_scales(bayes: Any) -> Tensor:
    own = [p.detach().flatten() for name, p in bayes.named_parameters() if name.endswith("log_scale")]
    return torch.cat(own).clone()


class IVON(WithDensity):
    """Shen et al. 2024, after its paper: ess = N, weight decay of the prior.

    Args:
        name: in the table.
        beta2: of its average of curvatures; 0.99995 as its authors take it.
    """

    def __init__(self, name: str = "IVON", beta2: float = 0.99995):
        self.name, self.beta2 = name, beta2

    def fit(self, problem: Problem, seed: int) -> None:
        data = problem.data
        assert data is not None
        net, N = data.build(), len(data.x)
        mean, scale, details = fit_ivon(
            net, Batches(data), EPOCHS, lr=0.1, ess=N, h0=0.1, decay=1 / (N * data.scale**2), beta1=0.9,
            beta2=self.beta2, warmup=0.05, seed=seed, loss=binary_cross_entropy_with_logits,
        )  # fmt: skip
        self.moved = details["moved"]
        self.density = DiagonalNormal(mean, scale.log())


class Laplace(WithDensity):
    """Around the optimum: the generalised Gauss-Newton matrix as a diagonal and 16 directions, and the prior."""

    name = "Laplace"

    def fit(self, problem: Problem, seed: int) -> None:
        data = problem.data
        assert data is not None
        net = optimum(data, seed)
        bayes = variationalize(net, data.likelihood, LowRankPrecision(RANK), data.prior, linearise=False)
        bayes.laplace(loader(data), progress=False, seed=seed)
        self.density = bayes.family.requires_grad_(False)()


def optimum(data: Data, seed: int) -> nn.Module:
    """The mode of the posterior, by the same steps as ours."""
    bayes = variationalize(data.build(), data.likelihood, MAP(), data.prior)
    bayes.fit(
        loader(data),
        epochs=EPOCHS,
        optimizer=Soap(bayes, 0.01),
        schedule=Schedule(stop=False),
        progress=False,
        seed=seed,
    )
    return bayes.mean_network()


def methods() -> dict[str, Adapter]:
    """By their names; none has been fitted."""
    every: list[Any] = [
        FromScratch("ours, mean field", MeanField),
        FromScratch("ours, rotated mean field", lambda: Rotated(MeanField())),
        FromScratch("ours, precision of rank 8", lambda: LowRankPrecision(8)),
        FromScratch("ours, mean field, λ = 0.1", MeanField, 0.1),
        IVON(),
        IVON("IVON, β₂ = 0.999", 0.999),
        Laplace(),
        SWAG(),
        DeepEnsemble(),
        DropoutNetwork(),
    ]
    return {one.name: one for one in every}
