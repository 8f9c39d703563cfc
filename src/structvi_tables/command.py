"""The commands `structvi fit` and `structvi predict`, and the page of a fitted table."""

import time
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

from structvi.util import __version__
from structvi_paper.pages import render

from .assessing import Assessment, assess
from .choosing import Say
from .fitting import TableFit, fit_table, silent
from .model import TableModel, save_files
from .reading import read_table

#: files beside model.json and the posteriors
REPORT, PREDICTIONS = "report.html", "predictions.csv"
#: rows that the page names
NAMED = 12


def fit_file(path: Path, target: str, encoding: str = "utf-8", *, say: Say = silent, **options: Any) -> "Fitted":
    """Read and fit a file, and assess it on its test rows; return all. The options are for `fit_table`."""
    start, notes = time.monotonic(), []
    table = read_table(path, encoding, notes)
    for note in notes:
        say(note)
    fit = fit_table(table, target, say=say, **options)
    fit.notes[:0] = notes
    say("comparing with scikit-learn's models on the test rows")
    return Fitted(fit, assess(fit), Path(path).name, time.monotonic() - start)


@dataclass
class Fitted:
    """A fit with its assessment, to be written to a folder."""

    fit: TableFit
    found: Assessment
    source: str
    seconds: float

    def save(self, folder: Path) -> None:
        """Write report.html, predictions.csv, model.json and the posteriors, together."""
        save_files(folder, self._write)

    def _write(self, folder: Path) -> None:
        self.fit.model.write(folder)
        self.found.predictions.to_csv(folder / PREDICTIONS, index=False, float_format="%.8g")
        (folder / REPORT).write_text(self.page(), encoding="utf-8")

    def __str__(self) -> str:
        """The result in a few sentences, as the command line prints them."""
        found, best, gain = self.found, self.found.best, self.found.gain
        words = {
            "better": f"better than {best.name}",
            "as good": f"not to be told from {best.name}",
            "worse": f"worse than {best.name}: use that where the mean density matters most",
        }
        lines = [
            f"Log-likelihood of {len(found.log_prob)} test rows: {found.log_prob.mean():.3f} nats a row, "
            f"{words[gain.verdict]}, scikit-learn's best by the folds ({best.log_prob.mean():.3f}; difference {gain}, "
            "95 %, row by row)."
        ]
        if self.fit.model.target.classes:
            lines.append(f"{100 * found.quality:.1f} % of the test rows are told right.")
        else:
            level, share, _ = found.calibration[-1]
            held = f"{100 * level:.0f} % intervals hold {100 * share:.0f} % of test rows"
            lines.append(f"The typical error (RMSE) is {found.quality:.4g}; {held}.")
        return "\n".join(lines)

    def page(self) -> str:
        """Return HTML; the template makes the tables."""
        model, found, is_class = self.fit.model, self.found, bool(self.fit.model.target.classes)
        uncertain = found.predictions.sort_values("entropy" if is_class else "sd", ascending=False).head(NAMED)
        kinds = ["prediction", "entropy"] if is_class else ["mean", "low", "high"]
        columns = [*kinds, *(["epistemic", "aleatoric"] if is_class else ["epistemic_sd", "aleatoric_sd"]), "outside"]
        values = {"rows": uncertain[["row", *columns]].to_numpy().tolist(), "observed": uncertain.iloc[:, 1].tolist()}
        return render(
            Path(__file__).with_name("report.html"), fit=self.fit, model=model, found=found, headline=str(self),
            source=self.source, seconds=self.seconds, is_class=is_class, columns=columns, **values,
            unit=log(model.target.scale), version=__version__,
        )  # fmt: skip


def predict_file(folder: Path, path: Path, out: Path | None, encoding: str = "utf-8") -> tuple[str, list[str]]:
    """Return predictions for the rows of a file, as CSV, also written to `out`; and sentences on the rows."""
    notes: list[str] = []
    found = TableModel.load(folder).predict(read_table(path, encoding, notes), notes)
    found.insert(0, "row", range(1, len(found) + 1), allow_duplicates=True)
    far = found["outside"]
    if (far != "").any():
        notes.append(
            f"{int((far != '').sum())} of {len(found)} rows have values beyond what was fitted, levels that were not "
            "fitted, or gaps where none were: see the column 'outside'"
        )
    text = found.to_csv(index=False, float_format="%.8g")
    if out is not None:
        out.write_text(text, encoding="utf-8")
    return text, notes
