"""The methods that families had before `normal` and `set_normal`, until no caller is left."""

from importlib import import_module
from math import inf
from typing import Any, NamedTuple

import torch

from .forms import Factor, LowRankForm, MeanAndScale, PartsSought, Profile, RelativeForm
from .normal import Diagonal, LowRank, NormalForm, Triangle


def _of(module):
    return import_module(f".{module}", __package__)


STARTS, LEAST, LEAST_HELD, SEARCH_FACTOR = 8, 1e-13, 1e-9, 0.1


class NormalPart(NamedTuple):
    log_weight: float
    mean: Any
    covariance: Any


class LowRankPart(NamedTuple):
    factor: Any
    cholesky: Any
    of_precision: bool


class LegacyDensity:
    enumerates = False

    def latent_kl(self):
        return 0.0

    def normals(self):
        weighted_normals = _of("mixture").weighted_normals

        return [
            NormalPart(float(torch.tensor(w, dtype=torch.float64).log()), own.mean, own.covariance())
            for w, own in weighted_normals(self)
        ]

    def low_rank_part(self):
        LowRankDensity = _of("low_rank").LowRankDensity

        if not isinstance(self, LowRankDensity):
            return None
        return LowRankPart(self.factor * self.ratio.unsqueeze(-1), self.cholesky(), self.of_precision)


class LegacyFamily:
    def families(self):
        Family = _of("family").Family

        return (module for module in self.modules() if isinstance(module, Family))

    @torch.no_grad()
    def mean_and_scale(self):
        own = dict(self.named_parameters())
        if self.space is None or own.keys() != {"mean", "log_scale"} or self.normal() is None:
            return None
        return MeanAndScale(own["mean"], own["log_scale"])

    def place(self, mean, scale, columns=None):
        rotation = _of("rotated").rotation

        if any(type(one).__name__ == "Mixture" for one in [self]):
            raise TypeError('start="trained" is for normal families, MAP and blocks of them, not for Mixture')
        space = self.bound_space()
        flat = [space.ravel({name: x[name] for name in space.names}) for x in (mean, scale)]
        root = Diagonal(flat[1])
        if columns is not None:
            W = torch.cat([columns[name].reshape(n, -1) for name, n in zip(space.names, space.numels, strict=True)])
            root = LowRank(flat[1], W * flat[1].unsqueeze(-1), True) if W.shape[1] else root
        turned = rotation(self)
        if turned is not None:
            turned.part.set_normal(NormalForm(turned.basis(flat[0], back=True), root))
        else:
            LowRankFamily = _of("low_rank").LowRankFamily

            low = [own for own in self.families() if isinstance(own, LowRankFamily)]
            kept = [own.factor.detach().clone() for own in low]
            self.set_normal(NormalForm(flat[0], root))
            for own, factor in zip(low, kept, strict=True):
                if not isinstance(root, LowRank) or not own.density.of_precision:
                    with torch.no_grad():
                        own.factor.copy_(factor)

    def move_to(self, theta):
        form = self.normal()
        if form is None:
            raise TypeError(
                f"grow(components=) is for normal families and mixtures of them, not for {type(self).__name__}"
            )
        self.set_normal(form._replace(mean=theta))

    @property
    def has_stages(self):
        LowRankFamily = _of("low_rank").LowRankFamily

        return isinstance(self, LowRankFamily) and self.rank > 0

    def first_stage(self):
        if self.has_stages:
            with torch.no_grad():
                self.factor.zero_().requires_grad_(False)

    def second_stage(self, generator=None):
        if self.has_stages:
            self.start_factor(generator, 0.01)

    def learn_all(self):
        if self.has_stages:
            self.factor.requires_grad_(True)

    def factors(self):
        LowRankFamily = _of("low_rank").LowRankFamily

        own = {id(f): f for f in self.families() if isinstance(f, LowRankFamily) and f.rank}
        return [Factor(f.factor, (f.mean, f.log_scale), len(f.factor)) for f in own.values()]

    def low_rank_form(self):
        LowRankFamily = _of("low_rank").LowRankFamily

        if isinstance(self, LowRankFamily):
            unit = self.unit if self.rank else self.log_scale.exp()
            return LowRankForm(self.mean, self.log_scale, unit, self.factor, type(self))
        own = self.mean_and_scale()
        return None if own is None else LowRankForm(*own, own[1].exp(), own[0].new_empty(len(own[0]), 0), None)

    def mixture_parts(self):
        mixture_of = _of("mixture").mixture_of

        own = mixture_of(self)
        return ([self], self().mean.new_ones(1)) if own is None else (own.parts(), own.proportions)

    def parts_sought(self):
        mixture_of = _of("mixture").mixture_of

        own = mixture_of(self)
        return None if own is None else PartsSought(own.parts(), None if own.components == "auto" else len(own.parts()))

    def of_parts(self, parts, log_weights):
        Mixture = _of("mixture").Mixture

        return Mixture.weighted(parts, log_weights)

    @property
    def coordinates(self):
        mixture_of = _of("mixture").mixture_of

        if self.space is None or mixture_of(self) is not None or self.parts():
            return None
        form = self.normal()
        if form is None or not bool((form.variance > 0).all()):
            return None
        return "full" if isinstance(form.root, Triangle) else "diagonal"

    @torch.no_grad()
    def standardise(self, generator):
        release_factors = _of("low_rank").release_factors

        self.set_normal(self.normal().standard())
        release_factors(self, generator, SEARCH_FACTOR)

    @torch.no_grad()
    def change_coordinates(self, shift, root):
        mixture_of = _of("mixture").mixture_of

        if mixture_of(self) is not None:
            for part in self.parts():
                part.space = self.space
                part.change_coordinates(shift, root)
        elif self.has_stages and root.ndim == 1:
            self.mean.copy_(shift + self.mean * root)
            self.log_scale.add_(root.log())
            self.unit.mul_(root)
        else:
            self.set_normal(self.normal().affine(shift, root))

    @property
    def starts(self):
        return STARTS if self.has_stages else 1

    @torch.no_grad()
    def start_at(self, index, mean, precision, noise):
        conditional = -0.5 * precision.diagonal().log()
        if not self.has_stages:
            self.set_normal(NormalForm(mean, Diagonal(conditional.exp())))
            return
        marginal = 0.5 * torch.cholesky_inverse(torch.linalg.cholesky(precision)).diagonal().log()
        log_scale = torch.lerp(conditional, marginal, (index % 3) / 2)
        if index > 2:
            log_scale = log_scale + 0.25 * (1 + index % 4) * noise()
        self.mean.copy_(mean)
        self.take_scales(log_scale, precision)

    def profile(self, log_scale, precision):
        LowRankFamily = _of("low_rank").LowRankFamily

        if not isinstance(self, LowRankFamily):
            return None
        return profile(log_scale, precision, self.rank, self.density.of_precision)

    @torch.no_grad()
    def take_scales(self, log_scale, precision):
        factor = self.profile(log_scale, precision).factor
        ratio = log_scale.exp() / self.unit
        self.log_scale.copy_(log_scale)
        self.factor.copy_(factor * (1 / ratio if self.density.of_precision else ratio).unsqueeze(-1))

    @torch.no_grad()
    def relative_form(self):
        if self.parts() or self.space is None:
            return None
        form = self.normal()
        if form is None or isinstance(form.root, Triangle):
            return None
        if isinstance(form.root, Diagonal):
            return RelativeForm(form.mean, form.root.scale, form.mean.new_empty(len(form.mean), 0), False)
        return RelativeForm(form.mean, *form.root)

    def take_relative_form(self, form):
        self.set_normal(NormalForm(form.mean, LowRank(form.scale, form.factor, form.of_precision)))

    def ridge(self):
        return (self.log_scale - self.unit.log()).square().sum() if self.has_stages else 0.0


def profile(log_scale, precision, rank, of_precision):
    scale = log_scale.exp()
    nothing = Profile(inf, torch.zeros_like(scale), torch.zeros_like(precision[:, :rank]))
    try:
        values, vectors = torch.linalg.eigh(scale.unsqueeze(-1) * precision * scale)
    except torch.linalg.LinAlgError:
        return nothing
    if of_precision:
        values, vectors = values.flip(0), vectors.flip(1)
    if not values.min() > LEAST * values.max():
        return nothing
    first = values[:rank]
    held = first.clamp(1.0, 1 / LEAST_HELD) if of_precision else first.clamp(LEAST_HELD, 1.0)
    left = torch.cat([first / held, values[rank:]])
    size = ((held if of_precision else 1 / held) - 1).clamp(min=SEARCH_FACTOR**4).sqrt()
    kl = 0.5 * (left - 1 - left.log()).sum().item()
    return Profile(kl, vectors.square() @ (left - 1), vectors[:, :rank] * size)
