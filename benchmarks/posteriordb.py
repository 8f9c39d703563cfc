"""Twelve posteriors with reference draws: errors of mean and standard deviation, k̂, evaluations and seconds.

    python -m benchmarks.posteriordb --data DIR [--only NAME ..] [--seeds 1] [--peers pyro pymc] [--out results.json]

`vi.fit` with its defaults on every posterior; peers get the evaluations that our fit of the same shape took. Errors are
on the unconstrained scale against DIR/posteriordb/NAME/summary.json; those of the mean in posterior deviations,
those of the standard deviation as |log ratio|. Corrected errors are those of Pareto-smoothed importance sampling, from
draws of q alone ("plain") and as `diagnostics.importance` does it, with as many draws that have tails ("corrected").
"""

import argparse
import json
import platform
import time
from pathlib import Path
from statistics import median

import torch

import structvi as vi
from benchmarks.posteriordb_models import MODELS, Posterior
from structvi.diagnostics import diagnose, importance
from structvi.families.full import FullNormalDensity
from structvi.families.gaussian import Gaussian
from structvi.searching.fixed_draws import FixedDraws

#: of the families of low rank, ours and Pyro's
RANK = 5
#: draws of the importance weights
DRAWS = 20000
#: what a sound posterior keeps to: error of the mean in sd, and of the sd
LIMITS = 0.1, 0.1
#: of Adam: a peer has each of them with the whole budget, and keeps the better by ELBO
RATES = (0.01, 0.1)
#: a peer makes no more steps than this, and averages more draws a step instead
STEPS = 5000


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
    for name, (m, sd) in moments.items():
        off, ratio = ((m - posterior.mean) / posterior.sd).abs(), (sd / posterior.sd).log().abs()
        row |= {f"{name}mean": off.mean().item(), f"{name}mean max": off.max().item()}
        row |= {f"{name}sd": ratio.mean().item(), f"{name}sd max": ratio.max().item()}
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
        f"structured {RANK}": vi.StructuredNormal(low),
        f"precision {RANK}": vi.StructuredPrecision(low),
    }


def ours(posterior: Posterior, seed: int) -> list[dict]:
    rows = []
    for name, recipe in recipes(posterior.P).items():
        result = vi.fit(posterior, recipe, seed=seed, progress=False)
        q = result.family.requires_grad_(False)()
        assert isinstance(q, Gaussian)
        row = {"posterior": posterior.name, "method": name, "seed": seed, "evaluations": result.evaluations}
        row |= {"seconds": result.seconds, "verdict": result.verdict, "converged": result.converged}
        row |= measure(posterior, q, seed)
        row["flagged"] = not diagnose(result.family, posterior, gradients=False, seed=seed).sound
        rows.append(row)
    return rows


def pyro_fit(posterior: Posterior, low_rank: bool, budget: int, seed: int) -> dict:
    """AutoMultivariateNormal or AutoLowRankMultivariateNormal by Adam, the better of two rates."""
    import pyro
    from pyro.distributions import ImproperUniform, constraints
    from pyro.infer import SVI, Trace_ELBO
    from pyro.infer.autoguide import AutoLowRankMultivariateNormal, AutoMultivariateNormal, init_to_value

    def model():
        u = pyro.sample("u", ImproperUniform(constraints.real_vector, (), (posterior.P,)))
        pyro.factor("log density", posterior.log_density(u.reshape(-1, posterior.P)).reshape(u.shape[:-1]))

    pyro.enable_validation(False)  # half of its time
    particles = -(-budget // STEPS)
    steps = -(-budget // particles)
    best, seconds = None, 0.0
    for rate in RATES:
        pyro.set_rng_seed(seed)
        pyro.clear_param_store()
        start = init_to_value(values={"u": posterior.space.initial})
        options = {"rank": min(RANK, posterior.P)} if low_rank else {}
        guide = (AutoLowRankMultivariateNormal if low_rank else AutoMultivariateNormal)(
            model, init_loc_fn=start, **options
        )
        objective = Trace_ELBO(num_particles=particles, vectorize_particles=particles > 1, max_plate_nesting=0)
        svi = SVI(model, guide, pyro.optim.Adam({"lr": rate}), objective)  # pyright: ignore
        began = time.perf_counter()
        for _ in range(steps):
            svi.step()
        seconds += time.perf_counter() - began
        fitted = guide.get_posterior()
        row = attempt(posterior, fitted.mean.detach(), fitted.covariance_matrix.detach(), seed)
        if best is None or row["elbo"] > best["elbo"]:
            best = row | {"rate": rate}
    assert best is not None
    return best | {"evaluations": steps * particles, "seconds": seconds}


def pymc_fit(posterior: Posterior, budget: int, seed: int) -> dict:
    """Full-rank ADVI with PyMC's defaults, the log density called through an operator with gradient."""
    import numpy as np
    import pymc
    import pytensor.tensor as pt
    from pytensor.graph.basic import Apply
    from pytensor.graph.op import Op

    def at(u, gradient):
        theta = torch.tensor(np.asarray(u)).reshape(1, -1).requires_grad_(gradient)
        value = posterior.log_density(theta)
        return torch.autograd.grad(value.sum(), theta)[0][0].numpy() if gradient else value.detach().numpy()[0]

    class Gradient(Op):
        def make_node(self, u):
            return Apply(self, [pt.as_tensor_variable(u)], [pt.dvector()])

        def perform(self, node, inputs, outputs):
            outputs[0][0] = at(inputs[0], True)

    class Value(Op):
        def make_node(self, u):
            return Apply(self, [pt.as_tensor_variable(u)], [pt.dscalar()])

        def perform(self, node, inputs, outputs):
            outputs[0][0] = np.asarray(at(inputs[0], False))

        def grad(self, inputs, output_gradients):
            return [output_gradients[0] * Gradient()(inputs[0])]

    with pymc.Model():
        u = pymc.Flat("u", shape=posterior.P, initval=np.zeros(posterior.P))
        pymc.Potential("log density", Value()(u))
        began = time.perf_counter()
        try:
            fitted = pymc.fit(budget, method="fullrank_advi", random_seed=seed, progressbar=False)
        except FloatingPointError:  # its ELBO is nan
            return lost() | {"evaluations": budget, "seconds": time.perf_counter() - began}
        seconds = time.perf_counter() - began
    mean, covariance = (torch.tensor(np.asarray(x.eval())) for x in (fitted.mean, fitted.cov))
    return attempt(posterior, mean, covariance, seed) | {"evaluations": budget, "seconds": seconds}


def attempt(posterior: Posterior, mean: torch.Tensor, covariance: torch.Tensor, seed: int) -> dict:
    """`measure` of a peer, which may be lost."""
    finite = bool(torch.isfinite(mean).all() and torch.isfinite(covariance).all())
    if not finite or torch.linalg.cholesky_ex(covariance).info.item():
        return lost()
    return measure(posterior, FullNormalDensity(mean, torch.linalg.cholesky(covariance)), seed)


def lost() -> dict:
    names = ("mean", "mean max", "sd", "sd max")
    errors = dict.fromkeys([f"{kind}{name}" for kind in ("", "plain ", "corrected ") for name in names], torch.inf)
    return {"k": torch.inf, "elbo": -torch.inf, "plain effective": 0.0, "corrected effective": 0.0, **errors}


def peers(posterior: Posterior, rows: list[dict], seed: int, chosen: list[str]) -> list[dict]:
    """Each at the evaluations of our fit of its shape."""
    budget = {row["method"]: row["evaluations"] for row in rows}
    found = {}
    if "pyro" in chosen:
        found["Pyro full"] = pyro_fit(posterior, False, budget["full"], seed)
        found[f"Pyro low rank {RANK}"] = pyro_fit(posterior, True, budget[f"structured {RANK}"], seed)
    if "pymc" in chosen:
        found["PyMC full"] = pymc_fit(posterior, budget["full"], seed)
    return [{"posterior": posterior.name, "method": name, "seed": seed, **row} for name, row in found.items()]


def missed(row: dict, kind: str = "") -> bool:
    """Whether mean or standard deviation of some parameter is farther off than the limits; sd by 10 %."""
    return row[f"{kind}mean max"] > LIMITS[0] or abs(row[f"{kind}sd max"]) > torch.tensor(1 + LIMITS[1]).log().item()


def summary(rows: list[dict]) -> list[dict]:
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        line = {"method": method, "fits": len(own)}
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds posteriordb/")
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=list(MODELS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--peers", nargs="*", default=[], choices=["pyro", "pymc"])
    parser.add_argument("--out", type=Path, help="write rows and summary as JSON, after every posterior")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"structvi {vi.__version__}, torch {torch.__version__}, {platform.machine()}")
    rows: list[dict] = []
    for name in options.only:
        posterior = Posterior(name, options.data / "posteriordb")
        for seed in range(options.seeds):
            fits = ours(posterior, seed)
            fits += peers(posterior, fits, seed, options.peers)
            for row in fits:
                print(
                    "{posterior:40} {method:17} mean {mean:.3f} (max {mean max:.3f}), sd {sd:.3f} (max {sd max:.3f}), "
                    "k̂ {k:.2f}; corrected {corrected mean max:.3f}, {corrected sd max:.3f}, "
                    "without tails {plain mean max:.3f}, {plain sd max:.3f}; {evaluations} evaluations, "
                    "{seconds:.1f} s".format(**row),
                    f" flagged: {row['flagged']}, {row['verdict']}" if "flagged" in row else "",
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
