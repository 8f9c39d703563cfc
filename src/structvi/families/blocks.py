"""Independent families for different parts of one network: q(θ) = ∏_b q_b(θ_b)."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

import torch
from torch import Tensor, nn

from ..couplings import Coupling, naive
from ..parameters import Parameters
from ..util.checks import check_theta
from ..util.patterns import assign, check_patterns
from .family import Density, Draws, Family, check_draw
from .gaussian import Gaussian, LowRankCovariance
from .normal import Diagonal, LowRank, NormalForm, Triangle
from .point import PointMass


class BlockLayout:
    """Which stretches of a flat vector belong to which part.

    Args:
        owners: the part of each tensor, as a number from 0.
        numels: the size of each tensor, in the order in which they lie in the vector.
    """

    def __init__(self, owners: Sequence[int], numels: Sequence[int]):
        pairs = zip(owners, numels, strict=True)
        self.runs = [(owner, sum(n for _, n in run)) for owner, run in groupby(pairs, key=lambda pair: pair[0])]
        self.parts = max(owners) + 1
        self.size = sum(numels)

    def split(self, x: Tensor) -> list[Tensor]:
        """[.., P] → one [.., P_b] for each part."""
        pieces = torch.split(x, [size for _, size in self.runs], dim=-1)
        own = [[p for p, (owner, _) in zip(pieces, self.runs, strict=True) if owner == b] for b in range(self.parts)]
        return [some[0] if len(some) == 1 else torch.cat(some, dim=-1) for some in own]

    def join(self, parts: Sequence[Tensor], dim: int = -1) -> Tensor:
        """The inverse of `split`."""
        sizes = [[size for owner, size in self.runs if owner == b] for b in range(self.parts)]
        pieces = [iter(torch.split(x, size, dim=dim)) for x, size in zip(parts, sizes, strict=True)]
        ordered = [next(pieces[owner]) for owner, _ in self.runs]
        return ordered[0] if len(ordered) == 1 else torch.cat(ordered, dim=dim)

    def covariance(self, parts: Sequence[Density], rows: slice, columns: slice) -> Tensor:
        """The block of the covariance of independent parts: zero between different ones."""
        like = parts[0].mean
        result = like.new_zeros(rows.stop - rows.start, columns.stop - columns.start)
        for part, positions in zip(parts, self.split(torch.arange(self.size, device=like.device)), strict=True):
            # a part keeps the order of the vector, so a stretch of the vector is a stretch of the part
            own = [
                slice(*torch.searchsorted(positions, positions.new_tensor([s.start, s.stop])).tolist())
                for s in (rows, columns)
            ]
            if any(s.start == s.stop for s in own):
                continue
            r, c = positions[own[0]] - rows.start, positions[own[1]] - columns.start
            result = result.index_put((r.unsqueeze(-1), c.unsqueeze(0)), part.covariance_block(*own))
        return result


class BlockDiagonalNormal(Gaussian):
    """∏_b N(μ_b, Σ_b): a Gaussian with rank Σ K_b, each block by its own algebra.

    One coupling makes the noise of all blocks, over P = Σ P_b and K = Σ K_b: every row of it is standard normal, so
    the blocks are independent, and all have the same draws to a group whatever their ranks.
    """

    def __init__(self, blocks: Sequence[Gaussian], layout: BlockLayout):
        self.blocks, self.layout = blocks, layout
        self.location = layout.join([block.mean for block in blocks])
        self.rank = sum(block.rank for block in blocks)

    def transform(self, diagonal: Tensor, low_rank: Tensor) -> Tensor:
        z = torch.split(low_rank, [block.rank for block in self.blocks], dim=-1)
        epsilon = self.layout.split(diagonal)
        return self.layout.join([b.transform(e, k) for b, e, k in zip(self.blocks, epsilon, z, strict=True)])

    def precision_product(self, x: Tensor) -> Tensor:
        return self.layout.join([block.precision_product(part) for block, part in self._parts(x)])

    def quadratic(self, x: Tensor) -> Tensor:
        return torch.stack([block.quadratic(part) for block, part in self._parts(x)]).sum(0)

    def _parts(self, x: Tensor) -> Iterator[tuple[Gaussian, Tensor]]:
        return zip(self.blocks, self.layout.split(x), strict=True)

    def half_log_det(self) -> Tensor:
        return torch.stack([block.half_log_det() for block in self.blocks]).sum()

    def low_rank(self) -> LowRankCovariance:
        forms = [block.low_rank() for block in self.blocks]
        V = torch.split(torch.block_diag(*(form.V for form in forms)), [block.P for block in self.blocks])
        C = torch.block_diag(*(form.C for form in forms))
        return LowRankCovariance(self.layout.join([form.d for form in forms]), self.layout.join(V, dim=0), C)

    def precision_diagonal(self) -> Tensor:
        return self.layout.join([block.precision_diagonal() for block in self.blocks])

    @property
    def variance(self) -> Tensor:
        return self.layout.join([block.variance for block in self.blocks])

    def covariance_block(self, rows: slice, columns: slice) -> Tensor:
        return self.layout.covariance(self.blocks, rows, columns)


class PerLayerDensity(Density):
    """∏_b q_b(θ_b) where some blocks are not Gaussian, or are point estimates.

    Point masses stay out of `theta`: draws have them in `fixed`, and `log_prob` and `score` take θ over the other
    blocks' tensors, in the order of the space. `mean`, `variance` and `covariance` are over all tensors. Blocks
    without a density add nothing to `log_prob` and `entropy`.

    Args:
        blocks: the densities, each over its own subspace.
        owners: the block of each of the space's tensors.
        space: the whole space.
    """

    def __init__(self, blocks: Sequence[Density], owners: Sequence[int], space: Parameters):
        self.space = space
        gaussian = [b for b, block in enumerate(blocks) if isinstance(block, Gaussian)]
        points = [b for b, block in enumerate(blocks) if isinstance(block, PointMass)]
        others = [b for b in range(len(blocks)) if b not in gaussian and b not in points]
        # parts: all Gaussian blocks as one, then the others, the points last
        self.random: list[Density] = [blocks[b] for b in others]
        if gaussian:
            inner = [(gaussian.index(o), n) for o, n in zip(owners, space.numels, strict=True) if o in gaussian]
            merged = [block for block in blocks if isinstance(block, Gaussian)]
            self.random.insert(0, BlockDiagonalNormal(merged, BlockLayout(*zip(*inner, strict=True))))
        self.points = [blocks[b] for b in points]
        order = [gaussian] * bool(gaussian) + [[b] for b in others + points]
        part = {b: i for i, members in enumerate(order) for b in members}
        pairs = [(part[o], n) for o, n in zip(owners, space.numels, strict=True)]
        self.layout = BlockLayout(*zip(*pairs, strict=True))
        self.random_layout = BlockLayout(*zip(*(pair for pair in pairs if pair[0] < len(self.random)), strict=True))
        self.has_density = any(block.has_density for block in self.random)

    @property
    def centred(self) -> bool:
        return all(block.centred for block in self.random)

    @property
    def bound(self) -> bool:
        return not self.points and all(block.bound for block in self.random)

    @property
    def P(self) -> int:
        return self.layout.size

    @property
    def mean(self) -> Tensor:
        return self.layout.join([block.mean for block in self.random + self.points])

    @property
    def variance(self) -> Tensor:
        return self.layout.join([block.variance for block in self.random + self.points])

    def covariance_block(self, rows: slice, columns: slice) -> Tensor:
        return self.layout.covariance(self.random + self.points, rows, columns)

    def draw(self, groups: int = 1, coupling: Coupling = naive, generator: torch.Generator | None = None) -> Draws:
        """The Gaussian blocks are drawn from the coupling's noise, the others independently, as often."""
        check_draw(groups, coupling, generator)
        draws: list[Draws] = []
        S = groups
        for block in self.random:
            if isinstance(block, Gaussian):
                draws.append(block.draw(groups, coupling, generator))
                S = draws[0].theta.shape[0]
            else:
                draws.append(_equal_draws(block, S, generator))
        theta = self.random_layout.join([one.theta for one in draws])
        fixed = {name: x for block in self.points for name, x in block.named_space().unravel(block.mean).items()}
        return Draws(theta, theta.new_full((S,), 1 / S), MappingProxyType(fixed))

    def offers(self, method: str) -> bool:
        return all(block.offers(method) for block in self.random if block.has_density)

    def log_prob(self, theta: Tensor) -> Tensor:
        parts = self._parts(theta)
        return torch.stack([block.log_prob(part) for block, part in parts if block.has_density]).sum(0)

    def score(self, theta: Tensor) -> Tensor:
        parts = self._parts(theta)
        return self.random_layout.join(
            [block.score(part) if block.has_density else torch.zeros_like(part) for block, part in parts]
        )

    def entropy(self) -> Tensor:
        return torch.stack([block.entropy() for block in self.random if block.has_density]).sum()

    def _parts(self, theta: Tensor) -> Iterator[tuple[Density, Tensor]]:
        return zip(self.random, self.random_layout.split(check_theta(theta, self.random_layout.size)), strict=True)


def _equal_draws(block: Density, S: int, generator: torch.Generator | None) -> Draws:
    """S independent draws of equal weight, which is what draws of independent blocks must be."""
    draws = block.draw(S, naive, generator)
    weight = draws.weight.detach()
    equal = weight.shape == (S,) and torch.equal(weight, torch.full_like(weight, 1 / S))
    if draws.weight.requires_grad or not equal:
        raise ValueError(
            f"{type(block).__name__} cannot be a block: it weights its own draws (a mixture's components)"
            ", and draws of independent blocks need equal weights; use it alone over the whole network"
        )
    return draws


class PerLayer(Family):
    """Independent families for different parts of one network, q(θ) = ∏_b q_b(θ_b) (the groupwise mean field).

    `MAP` blocks are learned but stay out of the draws [S, P]: with MAP on the backbone and a random head a step costs
    about one pass of the backbone, however many draws there are. There is then no lower bound (`density.bound` is
    False): the entropy of the point part is dropped.

    Args:
        blocks: glob pattern on tensor names → family. Every tensor must match exactly one pattern; the pattern "*"
            stands for what no other matches.

    Example:
        >>> from structvi import MAP, Parameters, LowRankNormal
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> q = PerLayer({"0.*": MAP(), "2.*": LowRankNormal(rank=2)}).bind(Parameters.of(net))
        >>> draws = q().draw(groups=8)
        >>> draws.theta.shape, list(draws.fixed)
        (torch.Size([8, 5]), ['0.weight', '0.bias'])
    """

    def __init__(self, blocks: Mapping[str, Family]):
        super().__init__()
        if not isinstance(blocks, Mapping):
            raise TypeError(f"PerLayer expects a dict of patterns and families, got {type(blocks).__name__}")
        check_patterns(blocks, "PerLayer")
        for pattern, family in blocks.items():
            if not isinstance(family, Family):
                raise TypeError(f"PerLayer: {pattern!r} needs a family such as MAP(), got {family!r}")
            if family.space is not None:
                raise ValueError(f"PerLayer: the family of {pattern!r} is bound already; give a recipe")
            if isinstance(family, PerLayer):
                raise ValueError(f"PerLayer: {pattern!r} holds PerLayer again; write all patterns in one dict")
        self.patterns = tuple(blocks)
        self.inner = nn.ModuleList(blocks.values())
        self.owners: tuple[int, ...] = ()

    @property
    def blocks(self) -> dict[str, Family]:
        return dict(zip(self.patterns, self.inner, strict=True))  # pyright: ignore[reportReturnType]

    def initialise(self, parameters: Parameters, generator: torch.Generator | None) -> None:
        self.owners = tuple(assign(parameters.names, self.patterns, "PerLayer"))
        bound = []
        for b, family in enumerate(self.blocks.values()):
            names = [name for name, owner in zip(parameters.names, self.owners, strict=True) if owner == b]
            bound.append(family.bind(parameters.subset(names), generator))
        self.inner = nn.ModuleList(bound)

    def parts(self) -> list[Family]:
        return list(self.blocks.values())

    @torch.no_grad()
    def normal(self) -> NormalForm | None:
        """Return the product of the blocks' normals; None unless they are diagonal or low-rank, all of one form."""
        forms = [form for part in self.parts() if (form := part.normal()) is not None]
        roots = [form.root for form in forms if not isinstance(form.root, Triangle)]
        kinds = {root.of_precision for root in roots if isinstance(root, LowRank)}
        if len(roots) < len(self.inner) or len(kinds) > 1:
            return None
        layout, of_precision = self._layout(), True in kinds
        low = [form.low_rank(form.rank, of_precision) for form in forms]
        rows = torch.split(torch.block_diag(*(root.factor for root in low)), [len(root.scale) for root in low])
        mean, scale = (layout.join(x) for x in ([form.mean for form in forms], [root.scale for root in low]))
        return NormalForm(mean, LowRank(scale, layout.join(rows, dim=0), of_precision) if kinds else Diagonal(scale))

    @torch.no_grad()
    def set_normal(self, form: NormalForm) -> None:
        """Give each block its own rows of the root, the longest columns first; drop correlations between blocks."""
        layout, root = self._layout(), form.root
        if not isinstance(root, LowRank):
            root = form.low_rank(0, of_precision=True)
        for part, mean, scale, columns in zip(
            self.parts(), *(layout.split(x) for x in (form.mean, root.scale, root.factor.mT)), strict=True
        ):
            order = columns.square().sum(-1).argsort(descending=True, stable=True)
            part.set_normal(NormalForm(mean, LowRank(scale, columns[order].mT, root.of_precision)))

    def _layout(self) -> BlockLayout:
        return BlockLayout(self.owners, self.bound_space().numels)

    def forward(self) -> Density:
        assert self.space is not None
        densities: list[Density] = [part() for part in self.inner]
        layout = BlockLayout(self.owners, self.space.numels)
        gaussians = [density for density in densities if isinstance(density, Gaussian)]
        if len(gaussians) == len(densities):
            return BlockDiagonalNormal(gaussians, layout)
        if all(isinstance(density, PointMass) for density in densities):
            return PointMass(layout.join([density.mean for density in densities]))
        return PerLayerDensity(densities, self.owners, self.space)
