"""What `structvi fit` and `structvi predict` do, and the page of a fitted table."""

import time
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from structvi.util import __version__
from structvi_paper.pages import figure, picture, render

from .assessing import OURS, Assessment, assess
from .choosing import Say
from .fitting import TableFit, fit_table, silent
from .model import TableModel, save_files
from .reading import TableError, read_table

#: what is written, beside model.json and the posteriors
REPORT, PREDICTIONS = "report.html", "predictions.csv"
#: rows that the page names
NAMED = 12


def fit_file(path: Path, target: str, encoding: str = "utf-8", *, say: Say = silent, **options: Any) -> "Fitted":
    """Read a file, fit it, and see how it does on its test rows; options are those of `fit_table`."""
    start, notes = time.monotonic(), []
    table = read_table(path, encoding, notes)
    for note in notes:
        say(note)
    fit = fit_table(table, target, say=say, **options)
    fit.notes[:0] = notes
    say("comparing with scikit-learn's models on the test rows")
    return Fitted(fit, assess(fit), Path(path).name, time.monotonic() - start)


class Fitted:
    """A fit with its assessment, to be written to a folder."""

    def __init__(self, fit: TableFit, found: Assessment, source: str, seconds: float):
        self.fit, self.found, self.source, self.seconds = fit, found, source, seconds

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
            held = f"{100 * found.coverage[0.9]:.0f} %"
            lines.append(f"The typical error (RMSE) is {found.quality:.4g}; 90 % intervals hold {held} of test rows.")
        return "\n".join(lines)

    def page(self) -> str:
        """Return HTML with the pictures inside."""
        model, found = self.fit.model, self.found
        is_class = bool(model.target.classes)

        def quality(value: float) -> str:
            return f"{100 * value:.1f} %" if is_class else f"{value:.4g}"

        compared = [[OURS, f"{found.log_prob.mean():.3f}", "", quality(found.quality)]]
        for one in found.baselines:
            name = f"{one.name} (chosen)" if one is found.best else one.name
            compared.append([name, f"{one.log_prob.mean():.3f}", str(found.against(one)), quality(one.quality)])
        table = found.predictions.sort_values("entropy" if is_class else "sd", ascending=False).head(NAMED)
        kinds = ["prediction", "entropy"] if is_class else ["mean", "low", "high"]
        columns = [*kinds, *(["epistemic", "aleatoric"] if is_class else ["epistemic_sd", "aleatoric_sd"]), "outside"]
        shown = table[["row", *columns]].map(lambda value: f"{value:.4g}" if isinstance(value, float) else value)
        shown.insert(1, "observed", table.iloc[:, 1].to_numpy(), allow_duplicates=True)
        tried = [
            [one.recipe, f"{one.density - log(model.target.scale):.3f}", f"{one.weight:.2f}" if one.weight else "–"]
            for one in self.fit.tried
        ]
        return render(
            Path(__file__).with_name("report.html"), fit=self.fit, model=model, found=found, headline=str(self),
            source=self.source, seconds=self.seconds, is_class=is_class, compared=compared, tried=tried,
            uncertain=shown.to_numpy().tolist(), columns=columns, picture=calibration(found), version=__version__,
        )  # fmt: skip


def calibration(found: Assessment) -> tuple[bytes, str]:
    """Return a PNG, and what it shows in words: on the line where the probabilities are right."""
    made, axes = figure(1, 1, 4.6, 3.6)
    if found.coverage:
        p, right = np.array(list(found.coverage)), np.array(list(found.coverage.values()))
        count, what = len(found.log_prob), ("probability of the interval", "share of test rows inside")
    else:
        p, right, count = (np.array(x) for x in zip(*found.reliability, strict=True))
        what = ("probability of the likeliest class", "share that is right")
    axes.plot([0, 1], [0, 1], color="#888888", lw=1)
    error = 1.96 * np.sqrt(np.maximum(p * (1 - p), 1e-4) / count)
    axes.errorbar(p, right, error, fmt="o", color="#20639b", capsize=3)
    axes.set(xlabel=what[0], ylabel=what[1], xlim=(0, 1.02), ylim=(0, 1.05))
    return picture(made), f"The {what[1]} by the {what[0]}: on the line where the probabilities are right."


def predict_file(folder: Path, path: Path, out: Path | None, encoding: str = "utf-8") -> tuple[str, list[str]]:
    """Return predictions for the rows of a file, as CSV, also written to `out`; and sentences on the rows."""
    notes: list[str] = []
    found = TableModel.load(folder).predict(read_table(path, encoding, notes), notes)
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
