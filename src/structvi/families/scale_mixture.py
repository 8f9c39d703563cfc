"""Scale mixtures of normals: one mean and one set of leading directions, several widths."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..parameters import Parameters
from ..util.checks import check_integer
from .density import LowRankPart
from .family import Family
from .mixture import LOGIT_UNIT, MixtureDensity
from .normal import LowRank, NormalForm
from .precision import LowRankPrecision, LowRankPrecisionDensity

#: scales of a part start at this share of those of the part before
SHARE = 1 / 3


class ScaleMixtureDensity(MixtureDensity):
    """Σ_c π_c N(μ, Λ_c⁻¹): the mean is that of every part, to the last digit.

    Each part has noise of its own: with one for all, draws of the parts would lie along the same few directions.
    """

    centred = True

    def __init__(self, parts: Sequence[LowRankPrecisionDensity], log_proportions: Tensor):
        super().__init__(parts, log_proportions, common_noise=False)
        self.widest = parts[0]

    @property
    def mean(self) -> Tensor:
        return self.widest.mean

    @property
    def variance(self) -> Tensor:
        return self.proportions @ torch.stack([part.variance for part in self.parts])

    def covariance_block(self, rows: slice, columns: slice) -> Tensor:
        blocks = torch.stack([part.covariance_block(rows, columns) for part in self.parts])
        return torch.tensordot(self.proportions, blocks, dims=1)

    def low_rank_part(self) -> LowRankPart:
        """That of the first part: all have one W."""
        return self.widest.low_rank_part()


class ScaleMixture(Family):
    """Σ_c π_c N(μ, Λ_c⁻¹) with Λ_c = diag(1/s_c²) + WWᵀ: all parts have one mean and one W of rank K.

    A normal whose width is not known: its tails are heavier than those of any one normal. At the same price where the
    parts agree it is wider where they do not. It is what `fit(loader, validation=held_out)` places around a trained
    network: the parts are the posteriors of priors of several widths. They share all but their diagonals, so that C
    parts have P(K + C + 1) numbers, not C·P(K + 2).

    Args:
        rank: K, from 0 to P.
        components: C.
        initial_mean: as of `LowRankPrecision`.
        initial_scale: that of the first part; the others start at a third, a ninth, ..
        initial_factor: as of `LowRankPrecision`.

    Example:
        >>> q = ScaleMixture(rank=1, components=2).bind(Parameters({"z": torch.zeros(3)}))
        >>> q().draw(groups=4).theta.shape, q().proportions.tolist()
        (torch.Size([8, 3]), [0.5, 0.5])
    """

    raw_logits: Tensor
    log_ratio: Tensor

    def __init__(
        self,
        rank: int,
        components: int = 3,
        initial_mean: str = "current",
        initial_scale: float = 0.1,
        initial_factor: float = 0.1,
    ):
        super().__init__()
        check_integer("components", components)
        self.part = LowRankPrecision(rank, initial_mean, initial_scale, initial_factor)
        self.rank, self.components = rank, components
        self.initial_mean, self.initial_scale, self.initial_factor = initial_mean, initial_scale, initial_factor

    def initialise(self, parameters: Parameters, generator: torch.Generator | None) -> None:
        self.part = self.part.bind(parameters, generator)
        steps = torch.arange(1, self.components).to(parameters.initial).unsqueeze(-1)
        #: log s_c/s_0 of all parts but the first
        self.log_ratio = nn.Parameter(steps * torch.full_like(parameters.initial, SHARE).log())  # [C − 1, P]
        self.raw_logits = nn.Parameter(parameters.initial.new_zeros(self.components))

    def forward(self) -> ScaleMixtureDensity:
        part = self.part
        log_scales = [part.log_scale, *(part.log_scale + ratio for ratio in self.log_ratio)]
        parts = [LowRankPrecisionDensity(part.mean, one, part.factor, part.unit) for one in log_scales]
        return ScaleMixtureDensity(parts, (LOGIT_UNIT * self.raw_logits).log_softmax(-1))

    @property
    def precision_columns(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.part.precision_columns

    @property
    def scale_count(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.components

    @torch.no_grad()
    def place(
        self, mean: Mapping[str, Tensor], scale: Mapping[str, Tensor], columns: Mapping[str, Tensor] | None = None
    ) -> None:
        """All parts at one normal, equally likely; `place_scales` then sets them apart."""
        self.part.place(mean, scale, columns)
        self.log_ratio.zero_()
        self.raw_logits.zero_()

    @torch.no_grad()
    def place_scales(self, scales: Tensor) -> None:
        self.part.log_scale.copy_(scales[0].log())
        self.log_ratio.copy_((scales[1:] / scales[0]).log())

    def normal(self) -> None:
        """None: a mixture is no single normal."""

    def set_normal(self, form: NormalForm) -> None:
        """Set all parts to one normal, equally likely."""
        self.set_normals([form] * self.components)

    @torch.no_grad()
    def normals(self) -> list[NormalForm]:
        """Return the normal of every part: one mean and one W, scales of their own."""
        form = self.part.normal()
        assert isinstance(form.root, LowRank)
        ratios = [torch.ones_like(form.mean), *self.log_ratio.exp()]
        roots = [LowRank(form.root.scale * r, form.root.factor * r.unsqueeze(-1), True) for r in ratios]
        return [NormalForm(form.mean, root) for root in roots]

    @torch.no_grad()
    def set_normals(self, forms: Sequence[NormalForm]) -> None:
        """Set the parts to these normals, equally likely; mean and W are those of the first."""
        if len(forms) != self.components:
            raise ValueError(f"a ScaleMixture of {self.components} parts needs as many normals, got {len(forms)}")
        scales = torch.stack([form.low_rank(self.rank, of_precision=True).scale for form in forms])
        self.part.set_normal(forms[0])
        self.log_ratio.copy_((scales[1:] / scales[0]).log())
        self.raw_logits.zero_()

    def move_to(self, theta: Tensor) -> None:
        self.part.move_to(theta)

    def hold_mean(self) -> None:
        """The part holds it."""

    def begin_again(self, generator: torch.Generator) -> None:
        self.part.begin_again(generator)
