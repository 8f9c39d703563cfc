"""The models that are tried on a table: inputs, hidden layers and noise, and a posterior around each."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, nn

from structvi import families
from structvi.families.family import Family
from structvi.families.low_rank import LowRankPrecision
from structvi.models.likelihoods import Categorical, Gaussian, Likelihood, StudentT
from structvi.posterior import Posterior, variationalize, variationalize_head

from .members import DECAY, Fold, Trained, network, train
from .pooled import Pooled

#: what each noise is called, and how many numbers the network gives for it
NOISES = ("Gaussian", "heteroscedastic", "Student-t", "heteroscedastic Student-t")
CLASSES = "classes"
#: the families that a name stands for, and their rank; others are given as recipes
NAMED = {"LowRankPrecision": 8, "LowRankNormal": 8, "MeanField": 0, "FullNormal": 0}
HIDDEN = (64, 64)
#: decay of the weights of a network that is to have small ones
SHRINK = 3.0
#: at most so many numbers has a model that is fitted in closed form, of amounts and of classes
CLOSED, CLOSED_CLASSES = 1500, 700
#: a last layer of so many numbers has a full normal, and a larger one a low-rank one of this rank
FULL, RANK = 1000, 8
#: a posterior of classes by its fixed point: most iterations, and nats
ITERATIONS = 60
#: rows in a batch of the fits that take no gradient steps
ROWS = 1024
#: draws of a prediction, from each member
DRAWS = 16


def likelihood_of(noise: str) -> Likelihood:
    """The likelihood that a name stands for.

    Example:
        >>> likelihood_of("Student-t")
        StudentT(noise='point', df='point', initial=1.0, initial_df=4.0)
    """
    makers = {
        "Gaussian": lambda: Gaussian("point"),
        "heteroscedastic": lambda: Gaussian("head"),
        "Student-t": lambda: StudentT(),
        "heteroscedastic Student-t": lambda: StudentT("head"),
        CLASSES: lambda: Categorical(),
    }
    if noise not in makers:
        raise ValueError(f"the noise must be one of {tuple(makers)}, got {noise!r}")
    return makers[noise]()


def family_of(name: str | Family | None, rank: int | None = None) -> Family | None:
    """The recipe that a name stands for; a recipe is itself.

    Example:
        >>> family_of("LowRankNormal", 3).rank
        3
    """
    if name is None or isinstance(name, Family):
        return name
    if name not in NAMED:
        raise ValueError(f"family must be one of {tuple(NAMED)}, or a recipe such as MAP(), got {name!r}")
    kind = getattr(families, name)
    return kind(rank=NAMED[name] if rank is None else rank) if NAMED[name] else kind()


@dataclass(frozen=True)
class Recipe:
    """A model to try.

    Attributes:
        encoding: "plain", numbers as they are, or "bins", each also by a line bent at the edges of its bins.
        hidden: widths of the hidden layers; () for a model that is linear in its inputs.
        noise: of `NOISES`, or "classes".
        shrink: whether the weights are kept small while it is trained.
    """

    encoding: str
    hidden: tuple[int, ...]
    noise: str
    shrink: bool = False

    @property
    def name(self) -> str:
        if self.hidden:
            what = f"network of {' and '.join(map(str, self.hidden))} units" + (
                ", inputs in bins" if self.encoding == "bins" else ""
            )
            what += ", small weights" if self.shrink else ""
        else:
            what = "additive model" if self.encoding == "bins" else "linear model"
        return what if self.noise == CLASSES else f"{what}, {self.noise} noise"

    def sizes(self, inputs: int, classes: int) -> list[int]:
        outputs = classes if self.noise == CLASSES else 2 if self.noise.startswith("heteroscedastic") else 1
        return [inputs, *self.hidden, outputs]

    def is_closed(self, inputs: int, classes: int) -> bool:
        """Whether the posterior is found without gradient steps."""
        most = CLOSED_CLASSES if self.noise == CLASSES else CLOSED
        return not self.hidden and self.noise in ("Gaussian", CLASSES) and (inputs + 1) * max(1, classes) <= most


@dataclass
class Part:
    """A model with a posterior for each fold.

    Attributes:
        held_out: log density of every row under the member that has not seen it, [N], in the target's scaled unit.
        weight: in the mixture.
        trained: networks that have no posterior yet.
    """

    recipe: Recipe
    posteriors: list[Posterior]
    held_out: Tensor
    weight: float = 0.0
    trained: Trained | None = None

    @property
    def density(self) -> float:
        mean = float(self.held_out.mean())
        return mean if mean == mean else -inf


def pooled(parts: Sequence[Part], inputs: Mapping[str, Tensor], seed: int, draws: int = DRAWS) -> Pooled:
    """The mixture for rows [B, F] by encoding, with so many draws of each member: those of the seed."""
    predictives, weights = [], []
    for part in parts:
        for posterior in part.posteriors:
            predictives.append(posterior.predict(inputs[part.recipe.encoding], draws=draws, generator=stream(seed)))
            weights.append(part.weight / len(part.posteriors))
    return Pooled(predictives, weights)


def batches(x: Tensor, t: Tensor, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(x[part], t[part]) for part in rows.split(ROWS)]


def stream(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def around(net: nn.Sequential, likelihood: Likelihood, family: Family | None) -> Posterior:
    """Over all weights where a family is given, else over the last layer: a full normal, of a large layer low rank."""
    if family is not None:
        return variationalize(net, likelihood, family)
    last = f"{len(net) - 1}."
    if sum(value.numel() for name, value in net.named_parameters() if name.startswith(last)) <= FULL:
        return variationalize_head(net, likelihood)
    return variationalize(net, likelihood, LowRankPrecision(RANK), select=lambda name, _: name.startswith(last))


@dataclass
class Problem:
    """Rows as tensors: x by encoding, [N, F] each; t [N, 1] or labels [N]; the folds; C, or 0 for amounts."""

    x: dict[str, Tensor]
    t: Tensor
    folds: Sequence[Fold]
    classes: int
    seed: int
    family: Family | None = None

    def fitted(self, recipe: Recipe) -> Part:
        """Networks or linear models, one for each fold, without a posterior where one is trained by steps."""
        sizes = recipe.sizes(self.x[recipe.encoding].shape[1], self.classes)
        if recipe.is_closed(sizes[0], self.classes):
            return self._judged(recipe, self._closed(recipe, sizes))
        likelihood, decay = likelihood_of(recipe.noise), SHRINK if recipe.shrink else DECAY
        trained = train(self.x[recipe.encoding], self.t, self.folds, sizes, likelihood, self.seed, decay)
        held_out = torch.full((len(self.t),), torch.nan)
        with torch.no_grad():
            for fold, net in zip(self.folds, trained.nets, strict=True):
                y = net(self.x[recipe.encoding][fold.held])
                held_out[fold.held] = trained.likelihood(y, self.t[fold.held]).reshape(-1)
        return Part(recipe, [], held_out, trained=trained)

    def placed(self, part: Part) -> Part:
        """With a posterior around every network; what is in closed form has one."""
        x = self.x[part.recipe.encoding]
        if part.trained is None:
            return part
        posteriors = []
        for k, (net, fold) in enumerate(zip(part.trained.nets, self.folds, strict=True)):
            posterior = around(net, copy.deepcopy(part.trained.likelihood), copy.deepcopy(self.family))
            posteriors.append(posterior)
            posterior.model.num_data = len(fold.train)
            posterior.laplace(
                batches(x, self.t, fold.train),
                validation=batches(x, self.t, fold.held),
                progress=False,
                seed=self.seed + k,
            )
        return self._judged(part.recipe, posteriors)

    def _closed(self, recipe: Recipe, sizes: list[int]) -> list[Posterior]:
        x, found = self.x[recipe.encoding], []
        for k, fold in enumerate(self.folds):
            net = network(sizes, stream(self.seed + k))
            posterior = variationalize_head(net, likelihood_of(recipe.noise), num_data=len(fold.train))
            more = {"iterations": ITERATIONS} if recipe.noise == CLASSES else {}
            posterior.fit_head(batches(x, self.t, fold.train), progress=False, seed=self.seed, **more)
            found.append(posterior)
        return found

    def _judged(self, recipe: Recipe, posteriors: list[Posterior]) -> Part:
        held_out = torch.full((len(self.t),), torch.nan)
        for posterior, fold in zip(posteriors, self.folds, strict=True):
            for rows in fold.held.split(ROWS):
                predictive = posterior.predict(
                    self.x[recipe.encoding][rows], draws=2 * DRAWS, generator=stream(self.seed)
                )
                held_out[rows] = predictive.log_prob(self.t[rows]).reshape(-1)
        return Part(recipe, posteriors, held_out)
