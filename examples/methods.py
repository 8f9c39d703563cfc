"""Parts of segmentation.py and classification.py, nothing to run: four posteriors on one budget, and comparisons.

The budget is counted in passes: gradients of the network for every training image once, with one draw of the weights.
MC dropout takes `budget` epochs with one mask a step, each of M members of an ensemble budget/M epochs of ordinary
training. The variational methods first train for a share of the budget. One pass gives the diagonal Fisher information,
from which their scales start. The rest goes to the posterior, at two draws for every group.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi


@dataclass(frozen=True)
class Settings:
    """Settings that the validation split selects, from grids of the same size for every method."""

    prior_scale: float = 4.0  # of N(0, scale²/fan_in) over a weight, N(0, scale²) over a bias
    lr: float = 0.003
    drop: float = 0.1  # of MC dropout
    trained: float = 0.5  # of the variational methods: the share of the budget for ordinary training
    #: elements of the target (pixels) that count as one observation: more than one where neighbours say the same
    together: int = 1


@dataclass(frozen=True)
class Problem:
    """A network, its data and its random weights."""

    network: Callable[[float], nn.Module]  # a new one with this probability to drop
    train: TensorDataset
    budget: int
    batch: int
    classes: int = 2
    select: str = "*"  # which weights are random, of the variational methods
    groups: int = 1
    members: int = 5  # of the ensemble


METHODS: dict[str, Callable[[], vi.Family] | None] = {  # None: no posterior, one or several point estimates
    "MC dropout": None,
    "mean field": vi.MeanField,
    "structured": lambda: vi.LowRankPrecision(rank=8),
    "ensemble": None,
}


def fit(method: str, problem: Problem, settings: Settings, seed: int) -> vi.Posterior:
    """The method's posterior, after all of the budget."""
    family, budget = METHODS[method], problem.budget
    if method == "ensemble":
        seeds = range(seed, seed + 1000 * problem.members, 1000)
        members = [trained(problem, settings, budget // problem.members, own).mean_network() for own in seeds]
        return posterior(
            problem, members[0], settings, vi.Mixture([vi.MAP().bind(vi.Parameters.of(net)) for net in members])
        )
    if family is None:
        return trained(problem, settings, budget, seed, "on" if method == "MC dropout" else "off")
    first = round(settings.trained * budget)
    net = trained(problem, settings, first - 1, seed).mean_network()
    bayes = posterior(problem, net, settings, family(), problem.select)
    epochs = (budget - first) // (2 * problem.groups)
    bayes.fit(
        loader(problem), epochs=epochs, lr=settings.lr, estimator=vi.Estimator(groups=problem.groups), schedule=vi.Schedule(stop=False),
        progress=False, seed=seed,
    )  # fmt: skip
    return bayes


def trained(problem: Problem, settings: Settings, epochs: int, seed: int, dropout: str = "off") -> vi.Posterior:
    """Ordinary training: a point estimate; with the network's own dropout layers on, in training and in predictions."""
    torch.manual_seed(seed)
    net = problem.network(settings.drop)
    point = posterior(problem, net, settings, vi.MAP(), dropout=dropout)
    point.fit(
        loader(problem), epochs=epochs, lr=settings.lr, schedule=vi.Schedule(stop=False), progress=False, seed=seed
    )
    return point


def posterior(problem: Problem, net: nn.Module, settings: Settings, family: vi.Family, select="*", **options):
    weights = None if settings.together == 1 else (1 / settings.together,) * problem.classes
    likelihood = vi.likelihoods.Categorical(class_weights=weights)
    prior = vi.priors.NormalPrior(settings.prior_scale, by_fan_in=True)
    return vi.variationalize(net, likelihood, family, prior, select=select, **options)


def loader(problem: Problem) -> DataLoader:
    return DataLoader(problem.train, batch_size=problem.batch, shuffle=True)


@dataclass
class Scores:
    """Losses of n cases (images) in nats, and wrong and all elements in bins of rising uncertainty, [n, bins].

    An element is a label of an image: one, or one per pixel. Elements of a case are not independent, so a bootstrap
    resamples cases.
    """

    loss: np.ndarray  # [n], mean over the elements
    count: np.ndarray
    wrong: np.ndarray

    @classmethod
    def of(cls, p: Tensor, t: Tensor, bins: int = 1000) -> "Scores":
        """Class probabilities [n, C, ..] and labels [n, ..]. The uncertainty is 1 − the highest probability."""
        n = len(t)
        top, label = p.max(1)
        loss = -p.gather(1, t.unsqueeze(1)).squeeze(1).clamp(min=1e-30).log()
        _, rank = (1 - top.double()).flatten().unique(return_inverse=True)
        below = torch.bincount(rank).cumsum(0)  # elements at most as uncertain
        which = ((below[rank] - 1) * min(bins, t.numel()) // t.numel()).reshape(n, -1)
        count = torch.zeros(n, min(bins, t.numel()), dtype=torch.float64)
        wrong = count.clone().scatter_add_(1, which, (label != t).reshape(n, -1).double())
        count.scatter_add_(1, which, torch.ones_like(which, dtype=torch.float64))
        return cls(loss.reshape(n, -1).mean(1).double().numpy(), count.numpy(), wrong.numpy())

    def nll(self, weight: np.ndarray) -> np.ndarray:
        """Mean loss where case i counts weight[r, i] times: [R, n] → [R]."""
        return weight @ self.loss / weight.sum(1)

    def aurc(self, weight: np.ndarray) -> np.ndarray:
        """Area under the risk–coverage curve: the mean over coverages of the error rate among the most certain."""
        count, wrong = weight @ self.count, weight @ self.wrong  # [R, bins]
        risk = wrong.cumsum(1) / count.cumsum(1).clip(min=1)
        return (risk * count).sum(1) / count.sum(1)

    def error_auroc(self) -> float:
        """P(a wrong element is more uncertain than a right one), ½ where they tie."""
        wrong, right = self.wrong.sum(0), (self.count - self.wrong).sum(0)
        below = right.cumsum() - right / 2
        return float((wrong * below).sum() / (wrong.sum() * right.sum()))

    def referral(self) -> tuple[np.ndarray, np.ndarray]:
        """The share of elements referred, most uncertain first, and the accuracy on those that are kept."""
        count, wrong = self.count.sum(0), self.wrong.sum(0)
        kept = count.cumsum()
        some = kept > 0
        return 1 - kept[some] / kept[-1], 1 - wrong.cumsum()[some] / kept[some]


def compare(ours: list[Scores], others: list[Scores], resamples: int = 2000) -> dict[str, tuple[float, float, float]]:
    """Ours − others: the mean over seeds of NLL and area, and 95 % intervals of a paired bootstrap over cases.

    Every resample draws cases once, for all seeds and both methods. Negative is better for us.
    """
    n = len(ours[0].loss)
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), resamples).astype(float)
    result = {}
    for name in ("nll", "aurc"):

        def difference(weight: np.ndarray, name: str = name) -> np.ndarray:
            pairs = zip(ours, others, strict=True)
            return np.mean([getattr(a, name)(weight) - getattr(b, name)(weight) for a, b in pairs], axis=0)

        low, high = np.quantile(difference(drawn), [0.025, 0.975])
        result[name] = (float(difference(np.ones((1, n)))[0]), float(low), float(high))
    return result
