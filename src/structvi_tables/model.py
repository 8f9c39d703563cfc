"""A fitted table: columns, target and posteriors; kept in a folder as JSON and safetensors, and asked for new rows."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structvi.posterior import load
from structvi.util import __version__

from .columns import Columns, Encoded, values_of
from .members import network
from .pooled import Pooled
from .reading import Table, TableError, as_table, pandas_module
from .recipes import CLASSES, NOISES, Part, Recipe, pooled
from .stand_ins import Rows, StandIns, gaps_of
from .target import Target

KIND, FORMAT, FILE = "structvi table", 2, "model.json"
#: rows that are predicted at once, and of those with gaps, which have more draws in all and fewer for each value
ROWS, ROWS_WITH_GAPS, DRAWS_WITH_GAPS = 2048, 256, 4
MOST_BYTES = 50_000_000


@dataclass(repr=False)
class TableModel:
    """What `structvi fit` makes of a table; `TableModel.load(folder).predict(table)` for new rows.

    Attributes:
        columns, target: how rows are read.
        parts: models with posteriors, and their weights.
        ranges: smallest and largest value of each number that was fitted.
        level: of the intervals.
        seed: of the draws.
        stand_ins: values for what is missing in new rows and never was; None takes the mean.
    """

    columns: Columns
    target: Target
    parts: list[Part]
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    level: float = 0.9
    seed: int = 0
    stand_ins: StandIns | None = None

    def __repr__(self) -> str:
        names = ", ".join(column.name for column in self.columns.columns)
        return f"TableModel({self.target.name!r} as {self.target.task} from {names}; {len(self.parts)} models mixed)"

    def pooled(self, inputs: dict[str, Tensor]) -> Pooled:
        """The mixture for rows [B, F] by encoding, of the scaled target."""
        return pooled(self.parts, inputs, self.seed)

    def inputs(self, table: Table, notes: list[str] | None = None) -> dict[str, Tensor]:
        """Rows as tensors, by encoding; TableError where a column is missing or of another kind."""
        encoded = self.columns.encode(table)
        if notes is not None:
            notes += encoded.notes
        return tensors(encoded)

    def mixtures(self, table: Table) -> Iterator[tuple[np.ndarray, Pooled]]:
        """Places of rows in the table, and the mixture for them; every row is in one of them.

        A value that is missing, and never was when the model was fitted, makes a mixture over values that the row could
        have (`stand_ins.py`): what is not known of it widens the prediction, and counts as epistemic.
        """
        rows = self.columns.values(table)
        gaps = gaps_of(self.columns.columns, rows).any(1) & (self.stand_ins is not None)
        for some in _split(np.flatnonzero(~gaps), ROWS):
            yield some, self.pooled(tensors(self.columns.encoded(taken(rows, some))))
        for some in _split(np.flatnonzero(gaps), ROWS_WITH_GAPS):
            assert self.stand_ins is not None
            yield some, over_gaps(self.parts, self.columns, self.stand_ins, taken(rows, some), self.seed)

    def predict(self, table: Table, notes: list[str] | None = None) -> Table:
        """A row for each row of the table.

        Of amounts: mean, sd, the ends of the interval, epistemic_sd and aleatoric_sd with
        sd² = epistemic_sd² + aleatoric_sd². Of classes: the likeliest, the probability of each, and in nats the
        entropy and its two parts, epistemic (mutual information) and aleatoric. `outside` names the columns in which a
        row lies beyond what was fitted.
        """
        pandas = pandas_module()
        table = as_table(table)
        self.inputs(table, notes)
        known = {*(column.name for column in self.columns.columns), *self.columns.left_out, self.target.name}
        more = [name for name in table.columns if name not in known]
        if notes is not None and more:
            shown = ", ".join(map(repr, more[:5])) + (", .." if len(more) > 5 else "")
            notes.append(f"columns that the model was not fitted with are not used: {shown}")
        frames = [pandas.DataFrame(self.numbers(mixture), index=rows) for rows, mixture in self.mixtures(table)]
        found = pandas.concat(frames).sort_index()
        found["outside"] = self.outside(table)
        return found

    def numbers(self, pooled: Pooled) -> dict[str, Any]:
        """The columns of `predict` but the last, for the rows of one mixture."""
        if self.target.task == "classification":
            p = pooled.mean / pooled.mean.sum(1, keepdim=True)
            best = p.argmax(1).tolist()
            entropy, aleatoric = pooled.entropy, pooled.expected_entropy
            columns: dict[str, Any] = {"prediction": [self.target.classes[c] for c in best]}
            columns |= {f"p_{name}": p[:, c].numpy() for c, name in enumerate(self.target.classes)}
            epistemic = (entropy - aleatoric).clamp(min=0)
            return columns | {
                "entropy": entropy.numpy(),
                "epistemic": epistemic.numpy(),
                "aleatoric": aleatoric.numpy(),
            }
        centre, scale = self.target.centre, self.target.scale
        epistemic, aleatoric = (x.reshape(-1).clamp(min=0) for x in (pooled.epistemic, pooled.aleatoric))
        tail = (1 - self.level) / 2
        ends = pooled.quantiles([tail, 1 - tail]) * scale + centre
        return {
            "mean": (pooled.mean.reshape(-1) * scale + centre).numpy(),
            "sd": ((epistemic + aleatoric).sqrt() * scale).numpy(),
            "low": ends[:, 0].numpy(),
            "high": ends[:, 1].numpy(),
            "epistemic_sd": (epistemic.sqrt() * scale).numpy(),
            "aleatoric_sd": (aleatoric.sqrt() * scale).numpy(),
        }

    def outside(self, table: Table) -> list[str]:
        """The columns, with spaces between, in which a row is beyond the range or levels that were fitted, or has no
        value where none was ever missing."""
        names = [[] for _ in range(len(table))]
        for column in self.columns.columns:
            values = values_of(table[column.name], column.kind, column.name, column.form)
            if column.kind == "category":
                beyond = ~np.isin(values, [*column.levels, ""]) | ((values == "") & (not column.missing))
            else:
                low, high = self.ranges.get(column.name, (-np.inf, np.inf))
                beyond = (values < low) | (values > high) | (np.isnan(values) & (not column.missing))
            for row in np.flatnonzero(beyond):
                names[row].append(column.name)
        return [" ".join(found) for found in names]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """model.json and one posterior-PART-MEMBER.safetensors for each; no code and no row of the table."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        parts = []
        for c, part in enumerate(self.parts):
            for k, posterior in enumerate(part.posteriors):
                posterior.save(folder / f"posterior-{c}-{k}.safetensors")
            recipe = part.recipe
            parts.append(
                {
                    "encoding": recipe.encoding,
                    "hidden": list(recipe.hidden),
                    "noise": recipe.noise,
                    "weight": part.weight,
                    "members": len(part.posteriors),
                }
            )
        record = {
            "kind": KIND, "format": FORMAT, "version": __version__, "target": self.target.record(),
            "inputs": self.columns.record(), "ranges": self.ranges, "parts": parts, "level": self.level,
            "seed": self.seed, "stand_ins": None if self.stand_ins is None else self.stand_ins.record(),
        }  # fmt: skip
        (folder / FILE).write_text(json.dumps(record, indent=1, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "TableModel":
        """From a folder that `save` wrote; nothing in it is run.

        Raises:
            TableError: the folder has no model, or a damaged one.
        """
        path = Path(folder) / FILE
        if not path.is_file():
            raise TableError(f"{folder} has no {FILE}: give the folder that `structvi fit --out` wrote")
        if path.stat().st_size > MOST_BYTES:
            raise TableError(f"{path} is too large to be a model's description")
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record.get("kind") != KIND or record.get("format") != FORMAT:
                raise TableError(f"{path} is no table model of this format: fit it again with structvi {__version__}")
            columns, target = Columns.from_record(record["inputs"]), Target.from_record(record["target"])
            ranges = {str(name): (float(low), float(high)) for name, (low, high) in record["ranges"].items()}
            described = [_described(one) for one in record["parts"]]
            level, seed = float(record["level"]), int(record["seed"])
            stand_ins = record["stand_ins"] and StandIns.from_record(record["stand_ins"], columns.columns)
        except TableError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TableError(f"{path} is damaged ({type(error).__name__}: {error}): fit the table again") from None
        if not 0 < level < 1 or not described or abs(sum(weight for _, weight, _ in described) - 1) > 1e-6:
            raise TableError(f"{path} is damaged: its level or weights are none")
        widths = {name: x.shape[1] for name, x in _widths(columns).items()}
        parts = []
        for c, (recipe, weight, members) in enumerate(described):
            sizes = recipe.sizes(widths[recipe.encoding], len(target.classes))
            files = [Path(folder) / f"posterior-{c}-{k}.safetensors" for k in range(members)]
            posteriors = [load(file, network(sizes)) for file in files]
            parts.append(Part(recipe, posteriors, torch.zeros(0), weight))
        return cls(columns, target, parts, ranges, level, seed, stand_ins or None)


def over_gaps(parts: Sequence[Part], columns: Columns, stand_ins: StandIns, rows: Rows, seed: int) -> Pooled:
    """The mixture for rows with values that are missing for the first time, over values that may stand there."""
    copies = stand_ins.filled(columns.columns, rows, seed)
    each = [pooled(parts, tensors(columns.encoded(copy)), seed + d, DRAWS_WITH_GAPS) for d, copy in enumerate(copies)]
    weights = [weight / len(each) for one in each for weight in one.weights]
    return Pooled([part for one in each for part in one.parts], weights)


def tensors(encoded: Encoded) -> dict[str, Tensor]:
    return {name: torch.as_tensor(encoded.inputs(name), dtype=torch.float32) for name in ("plain", "bins")}


def taken(rows: Rows, some: np.ndarray) -> dict[str, np.ndarray]:
    return {name: values[some] for name, values in rows.items()}


def _split(places: np.ndarray, size: int) -> list[np.ndarray]:
    return [places[start : start + size] for start in range(0, len(places), size)]


def _described(one: Any) -> tuple[Recipe, float, int]:
    recipe = Recipe(one["encoding"], tuple(one["hidden"]), one["noise"])
    widths = all(isinstance(width, int) and 0 < width <= 4096 for width in recipe.hidden)
    known = recipe.encoding in ("plain", "bins") and recipe.noise in (*NOISES, CLASSES) and widths
    if not known or not isinstance(one["members"], int) or not 1 <= one["members"] <= 100:
        raise ValueError("a part that is not known")
    return recipe, float(one["weight"]), one["members"]


def _widths(columns: Columns) -> dict[str, np.ndarray]:
    """Inputs of no rows, for their number."""
    plain, bins = [], []
    for column in columns.columns:
        none = np.zeros(0, dtype=str) if column.kind == "category" else np.zeros(0)
        plain.append(column.plain(none))
        bins.append(column.bins(none))
    whole = np.concatenate(plain, 1)
    return {"plain": whole, "bins": np.concatenate([whole, *bins], 1)}
