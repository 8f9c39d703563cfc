"""Independent families for different parts of one network: q(θ) = ∏_b q_b(θ_b)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

import torch
from torch import Tensor, nn

from ..couplings import Coupling, naive
from ..parameters import Parameters
from ..util.patterns import assign, check_patterns
from .family import Density, Draws, Family
from .gaussian import Gaussian, LowRankCovariance
from .normal import Diagonal, LowRank, NormalForm, Triangle
from .point import PointMass


class BlockLayout:
    """Which stretches of a flat vector belong to which part.

    Args:
        tensors: for each tensor, in the order in which they lie in the vector, its part (a number from 0) and its size.
    """

    def __init__(self, tensors: Iterable[tuple[int, int]]):
        self.runs = [(own, sum(n for _, n in run)) for own, run in groupby(tensors, key=lambda tensor: tensor[0])]
        self.owners, self.sizes = zip(*self.runs, strict=True)

    def split(self, x: Tensor) -> list[Tensor]:
        """[.., P] → one [.., P_b] for each part."""
        parts: list[list[Tensor]] = [[] for _ in range(max(self.owners) + 1)]
        for own, piece in zip(self.owners, x.split(self.sizes, dim=-1), strict=True):
            parts[own].append(piece)
        return [_joined(pieces, -1) for pieces in parts]

    def join(self, parts: Sequence[Tensor], dim: int = -1) -> Tensor:
        """The inverse of `split`."""
        sizes = [[size for own, size in self.runs if own == b] for b in range(len(parts))]
        pieces = [iter(part.split(own, dim=dim)) for part, own in zip(parts, sizes, strict=True)]
        return _joined([next(pieces[own]) for own in self.owners], dim)

    def covariance(self, parts: Sequence[Density], rows: slice, columns: slice) -> Tensor:
        like = parts[0].mean
        result = like.new_zeros(rows.stop - rows.start, columns.stop - columns.start)
        for part, positions in zip(parts, self.split(torch.arange(sum(self.sizes), device=like.device)), strict=True):
            # a part keeps the order of the vector, so a stretch of the vector is a stretch of the part
            ends = torch.tensor([[s.start, s.stop] for s in (rows, columns)], device=like.device)
            r, c = (slice(*own) for own in torch.searchsorted(positions, ends).tolist())
            at = (positions[r] - rows.start).unsqueeze(-1), positions[c] - columns.start
            result = result.index_put(at, part.covariance_block(r, c))
        return result


def _joined(pieces: list[Tensor], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim)


class BlockDiagonalNormal(Gaussian):
    """∏_b N(μ_b, Σ_b): a Gaussian with rank Σ K_b, each block by its own algebra.

    One coupling makes the noise of all blocks, over P = Σ P_b and K = Σ K_b: every row of it is standard normal, so
    the blocks are independent, and all have the same draws to a group whatever their ranks.
    """

    def __init__(self, blocks: Sequence[Gaussian], layout: BlockLayout):
        self.blocks, self.layout = blocks, layout
        self.location = layout.join([block.mean for block in blocks])
        self.rank = sum(block.rank for block in blocks)

    def _parts(self, x: Tensor) -> Iterator[tuple[Gaussian, Tensor]]:
        return zip(self.blocks, self.layout.split(x), strict=True)

    def transform(self, diagonal: Tensor, low_rank: Tensor) -> Tensor:
        z = low_rank.split([block.rank for block in self.blocks], dim=-1)
        return self.layout.join([b.transform(e, k) for (b, e), k in zip(self._parts(diagonal), z, strict=True)])

    def precision_product(self, x: Tensor) -> Tensor:
        return self.layout.join([block.precision_product(part) for block, part in self._parts(x)])

    def quadratic(self, x: Tensor) -> Tensor:
        return torch.stack([block.quadratic(part) for block, part in self._parts(x)]).sum(0)

    def half_log_det(self) -> Tensor:
        return torch.stack([block.half_log_det() for block in self.blocks]).sum()

    def low_rank(self) -> LowRankCovariance:
        ds, Vs, Cs = zip(*(block.low_rank() for block in self.blocks), strict=True)
        V = torch.block_diag(*Vs).split([block.P for block in self.blocks])
        return LowRankCovariance(self.layout.join(ds), self.layout.join(V, dim=0), torch.block_diag(*Cs))

    def precision_diagonal(self) -> Tensor:
        return self.layout.join([block.precision_diagonal() for block in self.blocks])

    @property
    def variance(self) -> Tensor:
        return self.layout.join([block.variance for block in self.blocks])

    def covariance_block(self, rows: slice, columns: slice) -> Tensor:
        return self.layout.covariance(self.blocks, rows, columns)


class PerLayerDensity(Density):
    """A Gaussian over some tensors, and points for the others.

    The points stay out of `theta`: draws have them in `fixed`, and `log_prob` and `score` take θ over the other
    tensors, in the order of the space. `mean`, `variance` and `covariance` are over all tensors.

    Args:
        random: the Gaussian.
        points: the points, each over its own subspace.
        layout: of [random, *points].
    """

    def __init__(self, random: Gaussian, points: Sequence[PointMass], layout: BlockLayout):
        self.random, self.points, self.layout = random, points, layout

    @property
    def bound(self) -> bool:
        return False

    @property
    def mean(self) -> Tensor:
        return self.layout.join([block.mean for block in (self.random, *self.points)])

    @property
    def variance(self) -> Tensor:
        return self.layout.join([block.variance for block in (self.random, *self.points)])

    def covariance_block(self, rows: slice, columns: slice) -> Tensor:
        return self.layout.covariance([self.random, *self.points], rows, columns)

    def draw(self, groups: int = 1, coupling: Coupling = naive, generator: torch.Generator | None = None) -> Draws:
        fixed = {name: x for block in self.points for name, x in block.named_space().unravel(block.mean).items()}
        return self.random.draw(groups, coupling, generator)._replace(fixed=MappingProxyType(fixed))

    def log_prob(self, theta: Tensor) -> Tensor:
        return self.random.log_prob(theta)

    def score(self, theta: Tensor) -> Tensor:
        return self.random.score(theta)

    def entropy(self) -> Tensor:
        return self.random.entropy()


class PerLayer(Family):
    """Independent families for different parts of one network, q(θ) = ∏_b q_b(θ_b) (the groupwise mean field).

    `MAP` blocks are learned but stay out of the draws [S, P]: with MAP on the backbone and a random head a step costs
    about one pass of the backbone, however many draws there are. There is then no lower bound (`density.bound` is
    False): the entropy of the point part is dropped.

    Args:
        blocks: glob pattern on tensor names → Gaussian family, or `MAP()`. Every tensor must match exactly one pattern;
            the pattern "*" stands for what no other matches.

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
        check_patterns(blocks, "PerLayer")
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
        kinds = {form.root.of_precision for form in forms if isinstance(form.root, LowRank)}
        if len(forms) < len(self.inner) or len(kinds) > 1 or any(isinstance(form.root, Triangle) for form in forms):
            return None
        layout, of_precision = self._layout(), True in kinds
        low = [form.low_rank(form.rank, of_precision) for form in forms]
        mean, scale = layout.join([form.mean for form in forms]), layout.join([root.scale for root in low])
        rows = torch.block_diag(*(root.factor for root in low)).split([len(root.scale) for root in low])
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
        return BlockLayout(zip(self.owners, self.bound_space().numels, strict=True))

    def forward(self) -> Density:
        blocks = [part() for part in self.inner]
        normals = {b: block for b, block in enumerate(blocks) if isinstance(block, Gaussian)}
        points = {b: block for b, block in enumerate(blocks) if isinstance(block, PointMass)}
        if len(normals) + len(points) < len(blocks):
            raise TypeError(f"the blocks of PerLayer are Gaussian families and MAP, got {list(self.inner)}")
        if not normals:
            return PointMass(self._layout().join([point.mean for point in points.values()]))
        tensors = list(zip(self.owners, self.bound_space().numels, strict=True))
        own = BlockLayout((list(normals).index(b), size) for b, size in tensors if b in normals)
        random = BlockDiagonalNormal(list(normals.values()), own)
        if not points:
            return random
        place = dict.fromkeys(normals, 0) | {b: i for i, b in enumerate(points, start=1)}
        return PerLayerDensity(random, list(points.values()), BlockLayout((place[b], size) for b, size in tensors))
