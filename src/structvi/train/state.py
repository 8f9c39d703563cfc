"""The state of a fit: one value, which a step maps to the next and a checkpoint keeps as it is."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from torch import Tensor

from ..files.describe import decode, encode
from .options import Settings
from .result import History, Skipped


@dataclass(frozen=True)
class FitState:
    """All that a fit is between two steps.

    Numbers are values: a step gives a new state. Tensors are the living ones: a step changes `learned`, `average`
    and the optimizer's moments in place, and appends to the history.
    """

    settings: Settings
    #: of the optimizer: its class, and the highest learning rate of each group
    optimizer: str
    rates: tuple[float, ...]
    #: all that the fit changes, by name
    learned: Mapping[str, Tensor]
    #: of the draws, as the last step left it
    stream: Tensor
    history: History
    #: at which step the fit ends
    end: int
    #: 1: what has to wait is held back; 2: all learns
    stage: int
    #: steps made; the epoch, and the batch in it, at which the next one begins
    step: int = 0
    epoch: int = 0
    index: int = 0
    #: observations of all steps
    rows: int = 0
    #: batches in a row without a finite loss
    failures: int = 0
    #: the step from which the learning rate falls to its end, once the fit has been found converged
    cooling: int | None = None
    skipped: tuple[Skipped, ...] = ()
    #: parameters to go back to, and the step before which they were taken
    snapshot: Mapping[str, Tensor] = field(default_factory=dict)
    snapshot_step: int = 0
    #: the mean over the last iterates, and of how many
    average: Mapping[str, Tensor] = field(default_factory=dict)
    averaged: int = 0
    #: what stage one ended with
    without_factor: Mapping[str, Tensor] = field(default_factory=dict)
    #: the step at which the present cycle of the learning rate began: where a finished fit was extended
    begun: int = 0
    #: what it is a fit of, see `fingerprint`; of fits that keep checkpoints
    problem: Mapping[str, str] = field(default_factory=dict)
    # of what has a memory of its own, filled in for a checkpoint:
    moments: Mapping[str, Any] = field(default_factory=dict)
    gradient_scale: tuple[float, int] | None = None

    def pack(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by "field" or "field/name", and everything else as JSON."""
        tensors: dict[str, Tensor] = {}
        plain: dict[str, Any] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, History):
                tensors[one.name] = value.to_tensor()
            elif isinstance(value, Tensor):
                tensors[one.name] = value
            elif isinstance(value, Mapping):
                plain[one.name] = {name: x for name, x in value.items() if not isinstance(x, Tensor)}
                tensors |= {f"{one.name}/{name}": x for name, x in value.items() if isinstance(x, Tensor)}
            elif isinstance(value, Settings):
                plain[one.name] = asdict(value)
            elif one.name == "skipped":
                plain[one.name] = [asdict(row) for row in value]
            else:
                plain[one.name] = encode(value)
        return tensors, plain

    @classmethod
    def unpack(cls, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> Self:
        """The inverse of `pack`."""
        values: dict[str, Any] = {}
        for one in fields(cls):
            if one.name == "history":
                values[one.name] = History.from_tensor(tensors[one.name])
            elif one.name in tensors:
                values[one.name] = tensors[one.name]
            elif one.name == "settings":
                values[one.name] = Settings(**plain[one.name])
            elif one.name == "skipped":
                values[one.name] = tuple(Skipped(**row) for row in plain[one.name])
            elif one.name == "learned" or one.default_factory is dict:
                under = f"{one.name}/"
                own = {path.removeprefix(under): x for path, x in tensors.items() if path.startswith(under)}
                values[one.name] = {**plain[one.name], **own}
            else:
                values[one.name] = decode(plain[one.name])
        return cls(**values)
