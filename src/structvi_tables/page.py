"""The report of a fitted table: one page, no script, nothing from the network."""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from math import log
from typing import Any

from structvi.util import __version__

from .assessing import NAMED_ROWS, OURS, Assessment
from .fitting import TableFit
from .pictures import pictures

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; color: #222;
  background: #fff; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { margin-top: 2.2rem; font-size: 1.2rem; }
p, li { max-width: 46rem; } img { max-width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; overflow-wrap: normal; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #e4e4e4; white-space: nowrap; }
thead th { vertical-align: bottom; border-bottom: 2px solid #888; font-weight: 600; }
th:first-child, td:first-child, .left { text-align: left; }
td.words { white-space: normal; min-width: 16rem; text-align: left; }
.verdict { border-left: 4px solid #20639b; padding: .2rem 1rem; background: #f4f7fa; }
.muted { color: #666; font-size: .9rem; }
""".strip()


def page(fit: TableFit, found: Assessment, source: str, seconds: float) -> str:
    """HTML with the pictures inside.

    Args:
        fit: what was fitted.
        found: how it does on the test rows.
        source: the file's name.
        seconds: that the fit took.
    """
    model = fit.model
    drawn = pictures(model, found)
    title = f"{model.target.name} from {source}"
    uncertain = "entropy" if model.target.classes else "sd"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<div class='verdict'>{_list(headline(fit, found))}</div>",
        "<h2>Test rows: beside scikit-learn</h2>",
        _comparison(fit, found),
        _words(comparison_in_words(fit, found)),
        "<h2>Are the probabilities right?</h2>",
        _image(*drawn["calibration"]),
        _words(calibration_in_words(fit, found)),
        f"<h2>{'How sure it is' if model.target.classes else 'Predictions and intervals'}</h2>",
        _image(*drawn["rows"]),
        "<h2>Which rows are uncertain, and why</h2>",
        _uncertain(fit, found, uncertain),
        _words([
            "Uncertainty has two parts. Epistemic: the models that fit the data disagree; more rows like this one "
            "would help. Aleatoric: rows like this one differ among themselves; more rows would not help, more columns "
            "might. Distance is that to the nearest fitted row, in units of what is far for fitted rows: above 1 a row "
            "is far from the data. All rows are in predictions.csv."
        ]),
        "<h2>How the table was read</h2>",
        _list(fit.notes),
        _table(["column", "read as"], [[c.name, c.describe()] for c in model.columns.columns], words=1),
        "<h2>Models that were tried</h2>",
        _table(
            ["model", "held-out log density (nats a row)", "weight"],
            [[one.name, f"{one.density - log(model.target.scale):.3f}", f"{one.weight:.2f}" if one.weight else "–"]
             for one in fit.tried],
        ),
        _words(models_in_words(fit)),
        f"<p class='muted'>structvi {__version__}, seed {model.seed}, {seconds:.0f} s. "
        "Predict new rows: structvi predict THIS-FOLDER new.csv</p>",
    ]  # fmt: skip
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>{escape(title)}: structvi fit</title><style>{STYLE}</style></head>
<body>
{chr(10).join(parts)}
</body></html>
"""


def headline(fit: TableFit, found: Assessment) -> list[str]:
    """The result in a few sentences, as the command line prints them."""
    model, gain = fit.model, found.gain
    n = len(found.log_prob)
    if gain.is_better:
        words = f"better than {found.best}"
    elif gain.is_worse:
        words = f"worse than {found.best}: use that where the mean density matters most"
    else:
        words = f"not to be told from {found.best}"
    lines = [
        f"Log-likelihood of {n} test rows: {found.densities[OURS]:.3f} nats a row, {words}, "
        f"scikit-learn's best by the folds ({found.densities[found.best]:.3f}; difference {gain}, 95 %, row by row)."
    ]
    if model.target.classes:
        lines.append(f"{100 * found.quality[OURS]:.1f} % of the test rows are told right.")
    else:
        inside = found.coverage[min(found.coverage, key=lambda level: abs(level - 0.9))]
        lines.append(
            f"The typical error (RMSE) is {found.quality[OURS]:.4g}; the 90 % intervals hold {100 * inside:.0f} % of "
            "the test rows."
        )
    if found.crps_gain is not None:
        lines.append(
            f"CRPS {found.crps:.4g}; of gradient-boosted quantiles {found.crps_trees:.4g} (gain {found.crps_gain})."
        )
    return lines


def comparison_in_words(fit: TableFit, found: Assessment) -> list[str]:
    what = "normal noise as wide as its residuals on the folds" if not fit.model.target.classes else "its probabilities"
    lines = [
        "Log-likelihood is the mean log density of what was observed: higher is better, and a model that is too sure "
        f"loses by it. Each of scikit-learn's models has {what}; its settings were chosen on the same folds, and it "
        "was then fitted to all rows but the test rows."
    ]
    if found.crps_gain is not None:
        lines.append(
            f"Quantile models have no density and are compared by the CRPS, lower is better: {found.crps:.4g} here, "
            f"{found.crps_trees:.4g} of boosted quantiles; gain {found.crps_gain} with its 95 % interval."
        )
    return lines


def calibration_in_words(fit: TableFit, found: Assessment) -> list[str]:
    n = len(found.log_prob)
    if fit.model.target.classes:
        p = sum(p * count for p, _, count in found.reliability) / n
        right = sum(r * count for _, r, count in found.reliability) / n
        return [
            f"On average the likeliest class has the probability {p:.3f}, and {right:.3f} of the test rows are right."
        ]
    shares = ", ".join(f"{100 * level:g} %: {100 * share:.0f} %" for level, share in found.coverage.items())
    return [f"Share of {n} test rows inside the intervals of {shares}."]


def models_in_words(fit: TableFit) -> list[str]:
    members = len(fit.model.parts[0].posteriors)
    return [
        f"Every model is fitted {members} times, each time without one fold, by which it is judged. The prediction is "
        "the mixture of all that have a weight, over draws from the posterior of each. Densities of networks are a "
        "little optimistic here, since the folds also decided when their training stopped; those of the test rows are "
        "not.",
        "Linear and additive models have the posterior of all their coefficients; networks one of their last layer, "
        "unless a family was asked for. Choices were made on the folds: the test rows took no part in any.",
    ]


def _comparison(fit: TableFit, found: Assessment) -> str:
    quality = "right" if fit.model.target.classes else "RMSE"
    rows = []
    for name, density in found.densities.items():
        gain = "" if name == OURS else str(found.against[name])
        value = found.quality[name]
        shown = f"{100 * value:.1f} %" if fit.model.target.classes else f"{value:.4g}"
        chosen = " (chosen)" if name == found.best else ""
        rows.append([name + chosen, f"{density:.3f}", gain, shown])
    return _table(["model", "log-likelihood (nats a row)", "structvi gains (95 %)", quality], rows)


def _uncertain(fit: TableFit, found: Assessment, by: str) -> str:
    table = found.predictions.sort_values(by, ascending=False).head(NAMED_ROWS)
    if fit.model.target.classes:
        columns = ["row", "prediction", "entropy", "epistemic", "aleatoric", "distance"]
    else:
        columns = ["row", "mean", "low", "high", "epistemic_sd", "aleatoric_sd", "distance"]
    observed = table.iloc[:, 1]
    rows = []
    for i, (_, row) in enumerate(table.iterrows()):
        cells = [_number(row[name]) for name in columns]
        rows.append([cells[0], _number(observed.iloc[i]), *cells[1:], row["why"]])
    head = ["row", "observed", *(name.replace("_", " ") for name in columns[1:]), "why"]
    return _table(head, rows, words=len(head) - 1)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int | None = None) -> str:
    top = "".join(f"<th scope='col'{_left(i == words)}>{escape(text)}</th>" for i, text in enumerate(head))
    body = []
    for row in rows:
        cells = "".join(
            f"<td{' class=words' if i == words else ''}>{escape(str(cell))}</td>" for i, cell in enumerate(row)
        )
        body.append(f"<tr>{cells}</tr>")
    return f"<div class='scroll'><table><thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"


def _left(yes: bool) -> str:
    return " class='left'" if yes else ""


def _list(sentences: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def _words(sentences: Iterable[str]) -> str:
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


def _image(png: bytes, words: str) -> str:
    source = b64encode(png).decode()
    image = f"<img src='data:image/png;base64,{source}' alt='{escape(words, quote=True)}'>"
    return f"{image}<p class='muted'>{escape(words)}</p>"
