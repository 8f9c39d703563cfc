"""Twelve posteriors with reference draws: errors of mean and standard deviation, k̂, evaluations and seconds.

    python -m benchmarks.posteriordb --data DIR [--only NAME ..] [--seeds 1]
        [--peers pyro pymc laplace pathfinder dadvi nuts] [--out results.json]

`vi.fit_density` with its defaults on every posterior. Pyro's guides and PyMC's ADVI get the evaluations that our fit of
the same shape took; a Laplace approximation, pymc-extras' Pathfinder and DADVI, and PyMC's NUTS keep their defaults.
Errors are on the unconstrained scale against DIR/posteriordb/NAME/summary.json; those of the mean in posterior
deviations, those of the standard deviation as |log ratio|. Corrected errors are those of Pareto-smoothed importance
sampling, from draws of q alone ("plain") and as `diagnostics.importance` does it, with as many draws that have tails
("corrected").
"""

import argparse
import json
import platform
from pathlib import Path
from statistics import median

import torch

import structvi as vi
from benchmarks.posteriordb_models import MODELS, Posterior
from benchmarks.posteriordb_peers import BUDGETED, OWN, RANK, RATES, advi, available, pyro_guide
from structvi.density.fixed_draws import FixedDraws
from structvi.diagnostics import diagnose, importance
from structvi.families.full import FullNormalDensity
from structvi.families.gaussian import Gaussian

#: draws of the importance weights
DRAWS = 20000
#: what a sound posterior keeps to: error of the mean in sd, and of the sd
LIMITS = 0.1, 0.1


def measure(posterior: Posterior, q: Gaussian, seed: int) -> dict:
    """Errors of q itself, k̂, and errors after importance weighting."""
    # exact, also where the diagonal of the covariance is a difference of large numbers
    deviations = q.draw(1, FixedDraws(2 * q.noise_size, seed=0)).theta - q.mean
    moments = {"": (q.mean, deviations.square().mean(0).sqrt())}
    row: dict = {}
    for name, tails in (("plain ", False), ("corrected ", True)):
        try:
            weighted = importance(Fixed(q, posterior.space), posterior, DRAWS, tails=tails, seed=seed)
        except vi.NonFiniteError:  # the log density is no number where q has draws
            return lost()
        row |= {"k": weighted.k, "elbo": weighted.log_weights.mean().item(), f"{name}effective": weighted.effective}
        moments[name] = (weighted.moments().mean, weighted.moments().sd)
    for name, (mean, sd) in moments.items():
        row |= errors(posterior, name, mean, sd)
    return row


class Fixed(vi.Family):
    """A density as it is, also that of a peer."""

    def __init__(self, density: Gaussian, space: vi.Parameters):
        super().__init__()
        self.density, self.space = density, space

    def forward(self) -> Gaussian:
        return self.density


def recipes(P: int) -> dict[str, vi.Family]:
    low = min(RANK, P)
    return {
        "mean field": vi.MeanField(),
        "full": vi.FullNormal(),
        f"structured {RANK}": vi.LowRankNormal(low),
        f"precision {RANK}": vi.LowRankPrecision(low),
    }


def ours(posterior: Posterior, seed: int) -> list[dict]:
    rows = []
    for name, recipe in recipes(posterior.P).items():
        result = vi.fit_density(posterior, recipe, seed=seed, progress=False)
        q = result.family.requires_grad_(False)()
        assert isinstance(q, Gaussian)
        row = {"posterior": posterior.name, "method": name, "seed": seed, "evaluations": result.evaluations}
        row |= {"seconds": result.seconds, "verdict": result.verdict, "converged": result.converged}
        row |= measure(posterior, q, seed)
        row["flagged"] = not diagnose(result.family, posterior, seed=seed).sound
        rows.append(row)
    return rows


def attempt(posterior: Posterior, mean: torch.Tensor, covariance: torch.Tensor, seed: int) -> dict:
    """`measure` of a peer, which may be lost."""
    finite = bool(torch.isfinite(mean).all() and torch.isfinite(covariance).all())
    if not finite or torch.linalg.cholesky_ex(covariance).info.item():
        return lost()
    return measure(posterior, FullNormalDensity(mean, torch.linalg.cholesky(covariance)), seed)


def lost() -> dict:
    names = ("mean", "mean max", "sd", "sd max")
    off = dict.fromkeys([f"{kind}{name}" for kind in ("", "plain ", "corrected ") for name in names], torch.inf)
    return {"k": torch.inf, "elbo": -torch.inf, "plain effective": 0.0, "corrected effective": 0.0, **off}


def peers(posterior: Posterior, rows: list[dict], seed: int, chosen: list[str]) -> list[dict]:
    """Pyro and PyMC's ADVI at the evaluations of our fit of their shape, the others as they are."""
    budget = {row["method"]: row["evaluations"] for row in rows}
    found = {}
    if "pyro" in chosen:
        for name, ours, low_rank in (("full", "full", False), (f"low rank {RANK}", f"structured {RANK}", True)):
            tries = [pyro_guide(posterior, seed, budget[ours], rate, low_rank) for rate in RATES]
            best = max((judged(posterior, one, seed) for one in tries), key=lambda row: row["elbo"])
            found[f"Pyro {name}"] = best | {"seconds": sum(one["seconds"] for one in tries)}
    if "pymc" in chosen:
        found["PyMC full"] = judged(posterior, advi(posterior, seed, budget["full"]), seed)
    for name, (_, fit) in OWN.items():
        if name in chosen:
            found[name] = judged(posterior, fit(posterior, seed), seed)
    return [{"posterior": posterior.name, "method": name, "seed": seed, **row} for name, row in found.items()]


def judged(posterior: Posterior, found: dict, seed: int) -> dict:
    """Errors of what a peer found: a normal, draws, or nothing."""
    cost = {"evaluations": found.get("evaluations", 0), "seconds": found.get("seconds", 0.0)}
    if "left out" in found:
        return lost() | cost | {"left out": found["left out"]}
    if "draws" in found:
        return lost() | errors(posterior, "", found["draws"].mean(0), found["draws"].std(0)) | cost
    return attempt(posterior, found["mean"], found["covariance"], seed) | cost


def errors(posterior: Posterior, kind: str, mean: torch.Tensor, sd: torch.Tensor) -> dict:
    """Of the mean in posterior deviations, of the sd |log ratio|: over parameters the mean, and the worst."""
    off, ratio = ((mean - posterior.mean) / posterior.sd).abs(), (sd / posterior.sd).log().abs()
    row = {f"{kind}mean": off.mean().item(), f"{kind}mean max": off.max().item()}
    return row | {f"{kind}sd": ratio.mean().item(), f"{kind}sd max": ratio.max().item()}


def missed(row: dict, kind: str = "") -> bool:
    """Whether mean or standard deviation of some parameter is farther off than the limits; sd by 10 %."""
    return row[f"{kind}mean max"] > LIMITS[0] or abs(row[f"{kind}sd max"]) > torch.tensor(1 + LIMITS[1]).log().item()


def summary(rows: list[dict]) -> list[dict]:
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        line = {"method": method, "fits": len(own), "within limits": sum(not missed(row) for row in own)}
        for name in ("mean", "mean max", "sd", "sd max", "k", "evaluations", "seconds"):
            line[name] = median(row[name] for row in own)
        low = [row for row in own if row["k"] < 0.7]
        line["k < 0.7"] = len(low)
        for kind in ("plain ", "corrected "):
            line[f"{kind}within limits"] = f"{sum(not missed(row, kind) for row in low)}/{len(low)}"
        if "flagged" in own[0]:
            bad, good = [row for row in own if missed(row)], [row for row in own if not missed(row)]
            line["missed, flagged"] = f"{sum(row['flagged'] for row in bad)}/{len(bad)}"
            line["sound, not flagged"] = f"{sum(not row['flagged'] for row in good)}/{len(good)}"
        lines.append(line)
    return lines


def table(lines: list[dict]) -> str:
    columns = list(dict.fromkeys(name for line in lines for name in line))
    text = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    for line in lines:
        cells = [line.get(name, "–") for name in columns]
        text.append("| " + " | ".join(f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells) + " |")
    return "\n".join(text)


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds posteriordb/")
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=list(MODELS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--peers", nargs="*", default=[], choices=[*BUDGETED, *OWN])
    parser.add_argument("--out", type=Path, help="write rows and summary as JSON, after every posterior")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"structvi {vi.__version__}, torch {torch.__version__}, {platform.machine()}")
    rows: list[dict] = []
    chosen = available(options.peers)
    for name in options.only:
        posterior = Posterior(name, options.data / "posteriordb")
        for seed in range(options.seeds):
            fits = ours(posterior, seed)
            fits += peers(posterior, fits, seed, chosen)
            for row in fits:
                print(
                    "{posterior:40} {method:17} mean {mean:.3f} (max {mean max:.3f}), sd {sd:.3f} (max {sd max:.3f}), "
                    "k̂ {k:.2f}; corrected {corrected mean max:.3f}, {corrected sd max:.3f}, "
                    "without tails {plain mean max:.3f}, {plain sd max:.3f}; {evaluations} evaluations, "
                    "{seconds:.1f} s".format(**row),
                    f" flagged: {row['flagged']}, {row['verdict']}" if "flagged" in row else row.get("left out", ""),
                    flush=True,
                )
            rows += fits
        results = {"rows": rows, "summary": summary(rows)}
        if options.out:
            options.out.write_text(json.dumps(results, indent=1))
    print(table(results["summary"]))
    return results


if __name__ == "__main__":
    main()
