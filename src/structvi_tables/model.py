"""A fitted table: columns, target and posteriors; saved in a folder as JSON and safetensors, and asked for new rows."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from structvi.loading import load
from structvi.util import __version__
from structvi.util.folder_files import write_together

from .choosing import CLASSES, NOISES, Part, Recipe, mixed
from .columns import Columns
from .mixture import Mixture
from .reading import Table, TableError, as_table, listed, pandas_module
from .target import Target
from .training import BATCH, network

KIND, FILE = "structvi table", "model.json"
#: bytes of the largest description
MOST_BYTES = 50_000_000


@dataclass(repr=False)
class TableModel:
    """A fitted table; `TableModel.load(folder).predict(table)` predicts new rows.

    Attributes:
        columns, target: how rows are read.
        parts: models with posteriors, and their weights.
        level: of the intervals.
        seed: of the draws.
    """

    columns: Columns
    target: Target
    parts: list[Part]
    level: float = 0.9
    seed: int = 0

    def mixtures(self, table: Table) -> Iterator[tuple[np.ndarray, Mixture]]:
        """Yield places of rows in the table, and the mixture for them; every row is in one of them.

        A value may be missing though none was when the model was fitted. The prediction is then a mixture over values
        of the column: it is wider, and the difference counts as epistemic.
        """
        rows = self.columns.values(table)
        gaps = self.columns.gaps(rows).any(1)
        for places, has_gaps in ((np.flatnonzero(~gaps), False), (np.flatnonzero(gaps), True)):
            for start in range(0, len(places), BATCH):
                some = places[start : start + BATCH]
                own = {name: values[some] for name, values in rows.items()}
                copies = self.columns.filled(own, self.seed) if has_gaps else [own]
                each = [mixed(self.parts, self.columns.inputs(copy), self.seed + d) for d, copy in enumerate(copies)]
                parts = [part for one in each for part in one.parts]
                yield some, Mixture(parts, [w / len(copies) for one in each for w in one.weights])

    def predict(self, table: Table, notes: list[str] | None = None) -> Table:
        """Return a row for each row of the table.

        Columns for amounts: mean, sd, the ends of the interval, epistemic_sd and aleatoric_sd with
        sd² = epistemic_sd² + aleatoric_sd². Columns for classes: the likeliest, the probability of each, and entropy,
        epistemic and aleatoric in nats. `outside` names the columns in which a row lies beyond the fitted values.
        """
        pandas, table = pandas_module(), as_table(table)
        if not len(table):
            raise TableError("the table has no rows: give at least one to predict")
        rows, each = self.columns.values(table), self.columns.each
        known = {*(column.name for column in each), *self.columns.left_out, self.target.name}
        more = [name for name in table.columns if name not in known]
        if more and notes is not None:
            notes.append(f"columns that the model was not fitted with are not used: {listed(more)}")
        frames = [pandas.DataFrame(self._numbers(mixture), index=places) for places, mixture in self.mixtures(table)]
        found = pandas.concat(frames).sort_index()
        beyond = np.stack([column.outside(rows[column.name]) for column in each], 1)
        found["outside"] = [" ".join(each[j].name for j in np.flatnonzero(row)) for row in beyond]
        return found

    def _numbers(self, mixture: Mixture) -> dict[str, Any]:
        """Return the columns of `predict` but the last, for the rows of one mixture."""
        if self.target.classes:
            p = mixture.mean / mixture.mean.sum(1, keepdim=True)
            entropy, aleatoric = mixture.entropy, mixture.expected_entropy
            columns: dict[str, Any] = {"prediction": [self.target.classes[c] for c in p.argmax(1).tolist()]}
            columns |= {f"p_{name}": p[:, c].numpy() for c, name in enumerate(self.target.classes)}
            parts = {"entropy": entropy, "epistemic": (entropy - aleatoric).clamp(min=0), "aleatoric": aleatoric}
            return columns | {name: part.numpy() for name, part in parts.items()}
        centre, scale = self.target.centre, self.target.scale
        epistemic, aleatoric = (x.reshape(-1).clamp(min=0) for x in (mixture.epistemic, mixture.aleatoric))
        tail = (1 - self.level) / 2
        ends = mixture.quantiles([tail, 1 - tail]) * scale + centre
        found = {"mean": mixture.mean.reshape(-1) * scale + centre, "sd": (epistemic + aleatoric).sqrt() * scale}
        found |= {"low": ends[:, 0], "high": ends[:, 1]}
        found |= {"epistemic_sd": epistemic.sqrt() * scale, "aleatoric_sd": aleatoric.sqrt() * scale}
        return {name: value.numpy() for name, value in found.items()}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write model.json and a posterior-PART-MEMBER.safetensors for each; no code and no row of the table."""
        save_files(Path(folder), self.write)

    def write(self, folder: Path) -> None:
        for c, part in enumerate(self.parts):
            for k, posterior in enumerate(part.posteriors):
                posterior.save(folder / f"posterior-{c}-{k}.safetensors")
        parts = [
            {"recipe": asdict(part.recipe), "weight": part.weight, "members": len(part.posteriors)}
            for part in self.parts
        ]
        record = {
            "kind": KIND, "version": __version__, "target": asdict(self.target), "columns": asdict(self.columns),
            "parts": parts, "level": self.level, "seed": self.seed,
        }  # fmt: skip
        (folder / FILE).write_text(json.dumps(record, indent=1, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "TableModel":
        """Read a folder that `save` wrote; nothing in it is run.

        Raises:
            TableError: the folder has no model, or a damaged one.
        """
        path = Path(folder) / FILE
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            raise TableError(f"{folder} has no {FILE} of a model: give the folder that `structvi fit --out` wrote")
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["kind"] != KIND:
                raise ValueError("it is no table model")
            columns, target = Columns.from_record(record["columns"]), Target.from_record(record["target"])
            described = [_described(one) for one in record["parts"]]
            level, seed = float(record["level"]), int(record["seed"])
            if not 0 < level < 1 or abs(sum(weight for _, weight, _ in described) - 1) > 1e-6:
                raise ValueError("its level or weights are none")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TableError(f"{path} is damaged ({type(error).__name__}: {error}): fit the table again") from None
        none = {c.name: np.zeros(0, dtype=str if c.kind == "category" else float) for c in columns.each}
        inputs, parts = columns.inputs(none), []
        for c, (recipe, weight, members) in enumerate(described):
            sizes = recipe.sizes(inputs[recipe.encoding].shape[1], len(target.classes))
            posteriors = [
                load(path.with_name(f"posterior-{c}-{k}.safetensors"), network(sizes)) for k in range(members)
            ]
            parts.append(Part(recipe, torch.zeros(0), posteriors, weight=weight))
        return cls(columns, target, parts, level, seed)


def save_files(folder: Path, make: Callable[[Path], None]) -> None:
    """Write what `make(hidden folder)` writes, together; the posteriors of a model that was there before go."""
    folder.mkdir(parents=True, exist_ok=True)
    written = write_together(folder, make)
    for path in set(folder.glob("posterior-*.safetensors")) - set(written):
        path.unlink()


def _described(one: Any) -> tuple[Recipe, float, int]:
    recipe = Recipe(**one["recipe"])
    known = recipe.encoding in ("plain", "bins") and recipe.noise in (*NOISES, CLASSES)
    if not known or not isinstance(recipe.deep, bool) or not isinstance(one["members"], int) or one["members"] < 1:
        raise ValueError("a part that is not known")
    return recipe, float(one["weight"]), one["members"]
