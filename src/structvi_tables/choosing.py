"""The choice of models for a table: all are tried on folds of the rows, and the best are mixed."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from structvi.models.likelihoods import Categorical, Gaussian, Likelihood, StudentT
from structvi.posterior import Posterior, variationalize_head

from . import training
from .mixture import Mixture
from .training import BATCH, Fold, network, train

#: each noise by its name
NOISES: dict[str, Callable[[], Likelihood]] = {
    "Gaussian": lambda: Gaussian("point"),
    "heteroscedastic": lambda: Gaussian("head"),
    "Student-t": lambda: StudentT(),
    "heteroscedastic Student-t": lambda: StudentT("head"),
}
CLASSES = "classes"
#: units of each of a network's two hidden layers
WIDTH = 64
#: decay of the weights of a network, and of one that is to have small ones
DECAY, SHRINK = 0.3, 3.0
#: the most coefficients of a linear model in closed form
LARGEST = 700
#: networks that get a posterior
BEST = 2
#: models of the mixture are at most this many nats below the best
BEHIND = 0.3
#: rows that each part has for itself beforehand: few rows do not decide between models that are nearly the same
BEFOREHAND = 5.0
#: draws of a prediction, from each member
DRAWS = 16

Say = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """A model to try.

    Attributes:
        encoding: "plain", numbers as they are, or "bins", each also by a line bent at the edges of its bins.
        deep: a network with two hidden layers, instead of a model that is linear in its inputs.
        noise: of `NOISES`, or "classes".
        decay: of the weights while it is trained.
    """

    encoding: str
    deep: bool
    noise: str
    decay: float = DECAY

    def __str__(self) -> str:
        what = "additive model" if self.encoding == "bins" else "linear model"
        if self.deep:
            what = f"network of {WIDTH} and {WIDTH} units"
            what += ", inputs in bins" if self.encoding == "bins" else ""
            what += ", small weights" if self.decay == SHRINK else ""
        return what if self.noise == CLASSES else f"{what}, {self.noise} noise"

    def likelihood(self) -> Likelihood:
        return Categorical() if self.noise == CLASSES else NOISES[self.noise]()

    def sizes(self, inputs: int, classes: int) -> list[int]:
        outputs = classes if self.noise == CLASSES else 2 if self.noise.startswith("heteroscedastic") else 1
        return [inputs, *(WIDTH, WIDTH) * self.deep, outputs]


@dataclass
class Part:
    """A model that was tried: for each fold a network, and a posterior if it may be mixed.

    Attributes:
        held_out: log density of every row under the member that has not learned from it, [N], in the scaled unit.
        noise: the likelihood that the networks were trained with.
        weight: in the mixture.
    """

    recipe: Recipe
    held_out: Tensor
    posteriors: list[Posterior] = field(default_factory=list)
    nets: list[nn.Sequential] = field(default_factory=list)
    noise: Any = None
    weight: float = 0.0

    @property
    def density(self) -> float:
        mean = float(self.held_out.mean())
        return mean if mean == mean else -inf


@dataclass
class Problem:
    """Rows as tensors: x by encoding, [N, F] each; t [N, 1] or labels [N]; the folds; C, or 0 for amounts."""

    x: dict[str, Tensor]
    t: Tensor
    folds: Sequence[Fold]
    classes: int
    seed: int

    def tried(self, recipe: Recipe) -> Part:
        """Fit the recipe to all folds but one, in turn; a linear model has its posterior in closed form."""
        x = self.x[recipe.encoding]
        sizes = recipe.sizes(x.shape[1], self.classes)
        if not recipe.deep and (sizes[0] + 1) * sizes[1] <= LARGEST and recipe.noise in ("Gaussian", CLASSES):
            posteriors = [self._linear(recipe, sizes, k) for k in range(len(self.folds))]
            return self._judged(Part(recipe, torch.zeros(0), posteriors))
        noise, held_out = recipe.likelihood(), torch.full((len(self.t),), torch.nan)
        nets = train(x, self.t, self.folds, noise, sizes, recipe.decay, self.seed, training.STEPS)
        with torch.no_grad():
            for fold, net in zip(self.folds, nets, strict=True):
                held_out[fold.held] = noise(net(x[fold.held]), self.t[fold.held]).reshape(-1)
        return Part(recipe, held_out, nets=nets, noise=noise)

    def seconds(self, recipe: Recipe) -> float:
        """Return the time of all steps of a recipe, from a few of them."""
        x, noise, start = self.x[recipe.encoding], recipe.likelihood(), perf_counter()
        sizes = recipe.sizes(x.shape[1], self.classes)
        train(x, self.t, self.folds, noise, sizes, recipe.decay, self.seed, training.LOOK)
        return (perf_counter() - start) / training.LOOK * training.STEPS

    def _linear(self, recipe: Recipe, sizes: list[int], k: int) -> Posterior:
        rows, net = self.folds[k].train, network(sizes, stream(self.seed + k))
        posterior = variationalize_head(net, recipe.likelihood(), num_data=len(rows))
        posterior.fit_head(self._batches(recipe, rows), progress=False, seed=self.seed)
        return posterior

    def placed(self, part: Part) -> Part:
        """Place a posterior over the last layer of every network; its prior is selected on the fold."""
        if part.posteriors:
            return part
        for k, (net, fold) in enumerate(zip(part.nets, self.folds, strict=True)):
            posterior = variationalize_head(net, copy.deepcopy(part.noise), num_data=len(fold.train))
            batches, validation = (self._batches(part.recipe, rows) for rows in fold)
            posterior.laplace(batches, validation=validation, progress=False, seed=self.seed + k)
            part.posteriors.append(posterior)
        return self._judged(part)

    def _batches(self, recipe: Recipe, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(self.x[recipe.encoding][some], self.t[some]) for some in rows.split(BATCH)]

    def _judged(self, part: Part) -> Part:
        part.held_out = torch.full((len(self.t),), torch.nan)
        for posterior, fold in zip(part.posteriors, self.folds, strict=True):
            for rows in fold.held.split(BATCH):
                x = self.x[part.recipe.encoding][rows]
                predictive = posterior.predict(x, draws=2 * DRAWS, generator=stream(self.seed))
                part.held_out[rows] = predictive.log_prob(self.t[rows]).reshape(-1)
        return part


def stream(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mixed(parts: Sequence[Part], inputs: Mapping[str, Tensor], seed: int) -> Mixture:
    """Return the mixture for rows [B, F] by encoding, with draws of each member from the seed."""
    predictives, weights = [], []
    for part in parts:
        for posterior in part.posteriors:
            x = inputs[part.recipe.encoding]
            predictives.append(posterior.predict(x, draws=DRAWS, generator=stream(seed)))
            weights.append(part.weight / len(part.posteriors))
    return Mixture(predictives, weights)


def chosen(problem: Problem, say: Say, noise: str = "auto") -> tuple[list[Part], list[Part]]:
    """Return the parts of the mixture, the heaviest first, and all that was tried, the best first.

    Every recipe is judged by folds. The best get posteriors, and the weights of the mixture are those with the highest
    held-out density (`weights_of`).

    Args:
        problem: rows, folds and seed.
        say: called with sentences on the progress.
        noise: one of `NOISES`, or "auto".
    """
    noises = [CLASSES] if problem.classes else list(NOISES) if noise == "auto" else [noise]
    recipes = [Recipe(encoding, False, noises[0]) for encoding in ("plain", "bins")]
    recipes += [Recipe("plain", False, kind) for kind in noises[1:2]]
    recipes += [Recipe("bins", True, kind) for kind in noises]
    recipes += [Recipe("bins", True, CLASSES, SHRINK)] if problem.classes else []
    networks = [recipe for recipe in recipes if recipe.deep]
    most = (len(networks) + 1) * problem.seconds(networks[0])
    about = f"{most / 60:.0f} minutes" if most > 100 else f"{max(10, round(most, -1)):.0f} seconds"
    say(f"Training takes about {about} at most; it stops where the folds gain nothing more.")
    parts = [problem.tried(recipe) for recipe in recipes]
    best = max((part for part in parts if part.recipe.deep), key=lambda part: part.density)
    parts.append(problem.tried(Recipe("plain", True, best.recipe.noise)))
    parts.sort(key=lambda part: -part.density)
    for part in parts:
        say(f"tried: {part.recipe}, held-out log density {part.density:.3f} nats a row")
    trained = [part for part in parts if not part.posteriors][:BEST]
    near = [*trained, *(part for part in parts if part.posteriors)]
    top = max(part.density for part in near)
    near = [problem.placed(part) for part in near if part.density > top - BEHIND]
    near = [part for part in near if part.density > -inf]
    for part, weight in zip(near, weights_of(torch.stack([part.held_out for part in near]).double()), strict=True):
        part.weight = float(weight)
    mixture = sorted(near, key=lambda part: -part.weight)
    for part in mixture:
        say(f"in the mixture, weight {part.weight:.2f}: {part.recipe}")
    return mixture, sorted(parts, key=lambda part: -part.density)


def weights_of(log_probs: Tensor) -> Tensor:
    """Maximise Σ_n log Σ_c w_c p_c(t_n) + `BEFOREHAND` Σ_c log w_c: [C, n] → [C], by expectation maximisation.

    Example:
        >>> weights_of(torch.tensor([[-1.0, -1.0], [-1.0, -1.0]]).double()).tolist()
        [0.5, 0.5]
    """
    weights = log_probs.new_full((len(log_probs),), 1 / len(log_probs))
    for _ in range(300):
        share = (weights.log().unsqueeze(-1) + log_probs).softmax(0).sum(-1) + BEFOREHAND
        weights = share / share.sum()
    return weights
