"""The parameters of M posteriors as rows of one tensor, and one Adam over all of them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..posterior import Posterior


BETAS, EPSILON = (0.9, 0.999), 1e-8


class Place(NamedTuple):
    """Where a tensor stands in its row."""

    kind: torch.dtype
    start: int
    shape: torch.Size
    #: a factor [P, K] that lies column by column keeps doing so
    by_columns: bool

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()

    def view(self, rows: Tensor) -> Tensor:
        """[.., Q] → [.., *shape]"""
        shape = self.shape[::-1] if self.by_columns else self.shape
        own = rows[..., self.start : self.stop].unflatten(-1, shape) if len(shape) else rows[..., self.start]
        return own.mT if self.by_columns else own


class Stack:
    """What M posteriors learn, [M, Q] for each type of number; while it stands, their tensors are views of its rows.

    Args:
        posteriors: of one form: the same names, shapes and types.

    Example:
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> nets = [torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)]
        >>> posteriors = [variationalize(net, likelihoods.Gaussian(1.0), MeanField()) for net in nets]
        >>> stack = Stack(posteriors)
        >>> stack.rows[torch.float32].shape, stack.views()["family.mean"].shape
        (torch.Size([2, 6]), torch.Size([2, 3]))
    """

    def __init__(self, posteriors: "Sequence[Posterior]"):
        named = [dict(one.named_parameters()) for one in posteriors]
        self.members = len(posteriors)
        self.places: dict[str, Place] = {}
        ends: dict[torch.dtype, int] = {}
        for name, tensor in named[0].items():
            by_columns = tensor.ndim == 2 and not tensor.is_contiguous() and tensor.mT.is_contiguous()
            self.places[name] = Place(tensor.dtype, ends.get(tensor.dtype, 0), tensor.shape, by_columns)
            ends[tensor.dtype] = self.places[name].stop
        device = posteriors[0].device
        #: [M, Q], leaves
        self.rows = {kind: torch.empty(self.members, size, dtype=kind, device=device) for kind, size in ends.items()}
        self._tensors = named
        self._buffers = [{f"family.{key}": x for key, x in one.family.named_buffers()} for one in posteriors]
        #: of the families, [M, ..] each: stages change them
        self.buffers = {name: torch.stack([own[name] for own in self._buffers]) for name in self._buffers[0]}
        for m, (own, buffers) in enumerate(zip(named, self._buffers, strict=True)):
            for name, tensor in own.items():
                self._move(tensor, self.places[name].view(self.rows[tensor.dtype][m]))
            for name, buffer in buffers.items():
                self._move(buffer, self.buffers[name][m])
        for rows in self.rows.values():
            rows.requires_grad_()

    @staticmethod
    def _move(tensor: Tensor, to: Tensor) -> None:
        to.copy_(tensor.detach())
        tensor.data = to

    def views(self, rows: Mapping[torch.dtype, Tensor] | None = None) -> dict[str, Tensor]:
        """Every parameter of all members, [M, *shape], of these rows or of its own, and the families' buffers."""
        rows = self.rows if rows is None else rows
        return {name: place.view(rows[place.kind]) for name, place in self.places.items()} | self.buffers

    def learns(self, name: str) -> Tensor:
        """Which members' tensor of this name learns now, [M]."""
        own = [named[name].requires_grad for named in self._tensors]
        return torch.tensor(own, device=next(iter(self.rows.values())).device)

    def values(self, rows: Mapping[torch.dtype, Tensor], member: int) -> dict[str, Tensor]:
        """One member's tensors of some rows [M, Q], by name."""
        return {name: place.view(rows[place.kind][member]).clone() for name, place in self.places.items()}

    def release(self) -> None:
        """Each posterior has tensors of its own again."""
        for own, buffers in zip(self._tensors, self._buffers, strict=True):
            for tensor in (*own.values(), *buffers.values()):
                tensor.data = tensor.data.clone(memory_format=torch.preserve_format)
        self._tensors, self._buffers = [], []


class Segment:
    """Neighbouring tensors of a row that learn at one rate and begin together, with Adam's moments of them.

    Args:
        name: of the first of them.
        kind, at: where they are.
        relative: their learning rate, relative to the row's.
        rows: what they are a part of.
    """

    def __init__(self, name: str, kind: torch.dtype, at: slice, relative: float, rows: Tensor):
        self.name, self.kind, self.at, self.relative = name, kind, at, relative
        part = rows.detach()[:, at]
        self.first, self.second = torch.zeros_like(part), torch.zeros_like(part)
        #: steps made, of each member
        self.count = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
        #: which members' it is that learn
        self.learning = torch.ones(len(rows), dtype=torch.bool, device=rows.device)


class StackedAdam:
    """Adam over rows [M, Q]: each row as if it were alone.

        m ← β₁m + (1 − β₁)g,  v ← β₂v + (1 − β₂)g²,  θ ← θ − lr/(1 − β₁ᵗ) · m/(√v/√(1 − β₂ᵗ) + ε)

    Args:
        stack: what is moved.
        rates: of each tensor, by name: its learning rate relative to the row's own.
    """

    def __init__(self, stack: Stack, rates: Mapping[str, float]):
        self.stack, self.segments = stack, list[Segment]()
        begins: dict[torch.dtype, tuple[Segment, bool]] = {}
        for name, place in stack.places.items():
            learns, rate = bool(stack.learns(name).any()), rates[name]
            last = begins.get(place.kind)
            rows = stack.rows[place.kind]
            start = place.start
            if last is not None and (last[0].relative, last[1]) == (rate, learns):
                self.segments.remove(last[0])
                start, name = last[0].at.start, last[0].name
            segment = Segment(name, place.kind, slice(start, place.stop), rate, rows)
            self.segments.append(segment)
            begins[place.kind] = segment, learns
        self.look()

    def look(self) -> None:
        """See what learns now: a stage may have changed it."""
        for segment in self.segments:
            segment.learning.copy_(self.stack.learns(segment.name))  # in place: a captured step reads it

    @torch.no_grad()
    def step(self, rate: Tensor, moves: Tensor, coefficient: Tensor) -> None:
        """One step.

        Args:
            rate: [M] in float64, the learning rate of each row.
            moves: [M], False for rows that stay as they are.
            coefficient: [M], by which gradients are clipped.
        """
        for segment in self.segments:
            kind, rows = segment.kind, self.stack.rows[segment.kind]
            assert rows.grad is not None
            made = (moves & segment.learning).unsqueeze(-1)
            clip = coefficient.float() if rows.is_cuda else coefficient
            clipped = rows.grad[:, segment.at] * clip.to(kind).unsqueeze(-1)
            gradient = torch.where(made, clipped, 0.0)
            t = segment.count.add_(made.squeeze(-1)).clamp(min=1.0)
            weight = made.to(kind)
            segment.first.lerp_(gradient, (1 - BETAS[0]) * weight)
            segment.second.lerp_(gradient.square_(), (1 - BETAS[1]) * weight)
            lr = rate * segment.relative
            if rows.is_cuda:  # rounded as a captured step of one fit reads it
                lr = lr.float().double()
            size = (lr / (1 - BETAS[0] ** t)).to(kind).unsqueeze(-1) * weight
            root = (1 - BETAS[1] ** t).sqrt().to(kind).unsqueeze(-1)
            below = (segment.second.sqrt() / root).add_(EPSILON)
            rows[:, segment.at].sub_((segment.first / below).mul_(size))

    @torch.no_grad()
    def norms(self) -> Tensor:
        """Of each row's gradient, over what learns: [M] in float64."""
        total: Tensor | float = 0.0
        for segment in self.segments:
            gradient = self.stack.rows[segment.kind].grad
            assert gradient is not None
            squares = gradient[:, segment.at].double().square().sum(-1)
            total = total + torch.where(segment.learning, squares, 0.0)
        assert isinstance(total, Tensor)
        return total.sqrt()
