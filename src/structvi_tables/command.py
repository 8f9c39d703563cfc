"""What `structvi fit` and `structvi predict` do, without their command line."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from structvi.util.folder_files import write_together

from .assessing import Assessment, assess
from .baselines import baselines
from .fitting import TableFit, fit_table, silent
from .model import TableModel
from .page import headline, page
from .reading import TableError, read_table

#: what is written, beside model.json and the posteriors
REPORT, PREDICTIONS = "report.html", "predictions.csv"


def fit_file(
    path: Path,
    target: str,
    encoding: str = "utf-8",
    *,
    task: str = "auto",
    noise: str = "auto",
    kinds: Mapping[str, str] | None = None,
    without: Sequence[str] = (),
    level: float = 0.9,
    seed: int = 0,
    say: Callable[[str], None] = silent,
) -> "Fitted":
    """Read a file, fit it, and see how it does on its test rows; arguments as of `fit_table`."""
    start = time.monotonic()
    notes: list[str] = []
    table = read_table(path, encoding, notes)
    for note in notes:
        say(note)
    fit = fit_table(
        table, target, task=task, noise=noise, categories=kinds, without=without, level=level, seed=seed,
        say=say,
    )  # fmt: skip
    fit.notes[:0] = notes
    say("comparing with scikit-learn's models on the test rows")
    found = assess(fit, baselines(fit, seed))
    return Fitted(fit, found, Path(path).name, time.monotonic() - start)


class Fitted:
    """A fit with its assessment, to be written to a folder."""

    def __init__(self, fit: TableFit, found: Assessment, source: str, seconds: float):
        self.fit, self.found, self.source, self.seconds = fit, found, source, seconds

    def save(self, folder: Path) -> None:
        """Write everything into a folder, together."""
        write_together(folder, self.write)

    def write(self, folder: Path) -> None:
        """report.html, predictions.csv, model.json and the posteriors."""
        self.fit.model.save(folder)
        self.found.predictions.to_csv(folder / PREDICTIONS, index=False, float_format="%.8g")
        text = page(self.fit, self.found, self.source, self.seconds)
        (folder / REPORT).write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        return "\n".join(headline(self.fit, self.found))


def predict_file(folder: Path, path: Path, out: Path | None, encoding: str = "utf-8") -> tuple[str, list[str]]:
    """Predictions for the rows of a file, as CSV: written to `out`, or returned; and sentences on the rows."""
    notes: list[str] = []
    model = TableModel.load(folder)
    table = read_table(path, encoding, notes)
    found = model.predict(table, notes)
    found.insert(0, "row", range(1, len(found) + 1), allow_duplicates=True)
    far = int((found["outside"] != "").sum())
    if far:
        notes.append(f"{far} of {len(found)} rows lie beyond what was fitted, see the column 'outside'")
    text = found.to_csv(index=False, float_format="%.8g")
    if out is not None:
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise TableError(f"cannot write {out}: {error.strerror or error}") from None
    return text, notes
