"""The tables as CSV and the whole as one self-contained page."""

import csv
import io
from base64 import b64encode
from html import escape
from typing import Any

from .commentary import commentary, number

TITLES = {
    "table1": "Table 1. Random 8-dimensional Gaussians",
    "table2": "Table 2. RBF regression, noise known",
    "table2_unknown_noise": "Table 2, second variant. Noise unknown",
    "figure1": "Figure 1. Model discrepancy",
    "figure2": "Figure 2. Posteriors in two dimensions",
    "figure3": "Figure 3. The 1024 functions of MC dropout",
    "couplings": "Couplings and estimators",
}
HEADINGS = {
    "method": "method",
    "rank": "rank",
    "kl_p_q": "KL[p‖q]",
    "paper_kl_p_q": "paper’s KL[p‖q]",
    "kl_q_p": "KL[q‖p]",
    "optimum_kl_q_p": "family’s best KL[q‖p]",
    "excess": "excess",
    "excess_max": "largest excess",
    "stochastic_excess": "excess, Adam",
    "seconds": "seconds a fit",
    "log_q_true": "log q(θ*)",
    "paper_log_q_true": "paper’s log q(θ*)",
    "noise": "σ under q",
    "coupling": "coupling",
    "estimator": "estimator",
    "phase": "phase",
    "var_mean": "mean",
    "var_scale": "log scale",
    "var_factor": "factor",
}
#: the columns on the page; the CSV files have all
COLUMNS = {
    "table1": [
        "method",
        "rank",
        "paper_kl_p_q",
        "kl_p_q",
        "kl_q_p",
        "optimum_kl_q_p",
        "excess",
        "excess_max",
        "stochastic_excess",
        "seconds",
    ],
    "table2": ["method", "rank", "paper_log_q_true", "log_q_true", "paper_kl_p_q", "kl_p_q"],
    "table2_unknown_noise": ["method", "rank", "log_q_true", "kl_p_q", "noise"],
    "couplings": ["coupling", "estimator", "phase", "var_mean", "var_scale", "var_factor"],
}
ALT = {
    "figure1": "Left: ellipses of the posterior shrink around a point that is not the truth. "
    "Right: the error of prediction in three layers; only the epistemic one vanishes.",
    "figure2": "Two heat maps of true posteriors with the point masses of MAP and MC dropout and the isolines of "
    "mean field, structured normal and mixture.",
    "figure3": "Three panels of functions: all of MC dropout's, draws of the structured normal and "
    "of the exact posterior, each with the data and the true function.",
    "couplings": "Gradient variances by coupling and estimator for mean, scale and factor, and the ELBO along fits.",
}
ORDER = ("figure1", "figure2", "table1", "table2", "table2_unknown_noise", "figure3", "couplings")
STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 66rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; color: #222;
  background: #fff; }
h1 { font-size: 1.7rem; line-height: 1.2; } h2 { margin-top: 2.5rem; font-size: 1.2rem; }
p, li { max-width: 46rem; } img { max-width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e4e4e4; }
thead th { white-space: normal; vertical-align: bottom; border-bottom: 2px solid #888; font-weight: 600; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
.range { display: block; color: #777; font-size: .75rem; } .muted { color: #666; font-size: .9rem; }
""".strip()


def csv_files(results: dict[str, Any]) -> dict[str, str]:
    """File name → content, one for each table."""
    files = {}
    for name in (*COLUMNS, "figure1"):
        if name in results:
            rows = results[name]["rows"]
            buffer = io.StringIO()
            writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
            files[f"{name}.csv"] = buffer.getvalue()
    return files


def table(name: str, results: dict[str, Any]) -> str:
    columns = COLUMNS[name]
    head = "".join(f"<th scope='col'>{escape(HEADINGS[column])}</th>" for column in columns)
    body = []
    own = results[name]
    if "exact_log_p_true" in own:
        exact = {"log_q_true": own["exact_log_p_true"], "kl_p_q": 0, "noise": own.get("exact_noise")}
        cells = "".join(f"<td>{number(exact[column]) if column in exact else ''}</td>" for column in columns[1:])
        body.append(f"<tr><td>exact posterior</td>{cells}</tr>")
    for row in own["rows"]:
        body.append("<tr>" + "".join(f"<td>{_cell(row, column)}</td>" for column in columns) + "</tr>")
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"


def _cell(row: dict[str, Any], column: str) -> str:
    text = escape(number(row[column]))
    low, high = row.get(f"{column}_min"), row.get(f"{column}_max")
    if column != "excess" and isinstance(low, float) and isinstance(high, float):
        text += f"<span class='range'>{number(low)} … {number(high)}</span>"
    return text


def page(results: dict[str, Any], pictures: dict[str, bytes]) -> str:
    """The report: no script, nothing from the network."""
    words = commentary(results)
    sections = []
    for name in ORDER:
        if name not in results:
            continue
        parts = [f"<section id='{name}'><h2>{escape(TITLES[name])}</h2>"]
        parts += [f"<p>{escape(sentence)}</p>" for sentence in words[name]["before"]]
        if name in pictures:
            source = b64encode(pictures[name]).decode()
            parts.append(f"<img src='data:image/png;base64,{source}' alt='{escape(ALT[name], quote=True)}'>")
        if name in COLUMNS:
            parts.append(table(name, results))
        after = words[name]["after"]
        if after:
            parts.append("<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in after) + "</ul>")
        sections.append("\n".join([*parts, "</section>"]))
    settings = ", ".join(f"{key} {value}" for key, value in results["settings"].items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>Is MC Dropout Bayesian? Redone with structvi</title><style>{STYLE}</style></head>
<body>
<h1>“Is MC Dropout Bayesian?” redone</h1>
<p>Every table and figure of Le Folgoc and others, computed again with structvi {escape(results["version"])}, with the
paper’s numbers beside ours. Medians over {results["settings"]["targets"]} random targets; the small numbers are ranges.
All divergences are in nats.</p>
{chr(10).join(sections)}
<p class="muted">Seed {results["seed"]}; {escape(settings)}.</p>
</body></html>
"""
