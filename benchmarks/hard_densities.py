"""Log densities on which fits of normals go wrong: excess over the best of several seeds, and what the verdict says.

    python -m benchmarks.hard_densities [logistic collinear rank network posteriordb] [--seeds 10] [--first 0]
        [--data DIR] [--only NAME ..] [--families NAME ..] [--out results.json]

* logistic: 1600 rows, 120 binary columns (levels of 20 factors that depend on each other, or independent ones), three
  others and a constant: 124 numbers, prior N(0, 1). Families full, mean field, ranks 5, 10, 20 of both forms. The
  excess of a seed is the best ELBO of all seeds of its family minus its own, on 16384 common draws with exact second
  moments; told, if the verdict is not a plain "converged".
* collinear: regression with known noise on two columns that differ by 10⁻⁴ and three others: KL to the posterior, which
  is normal, and how far the mean is off in its standard deviations.
* rank: three numbers and rank 3, which contains the full normal: ELBO of the full normal minus that of the rank, for a
  Gaussian, a logistic regression and Poisson counts.
* network: 1-15-1, tanh, 46 weights with prior N(0, 1), 40 points with noise 0.1, two data sets, limits of evaluations
  up to 200,000, and without one. The ELBO, how far it is below the best stage (the highest ELBO that a stage of the fit
  began with on draws not fitted), the log predictive density of 200 held-out rows, a row, less HMC's, and how wide
  functions are beside HMC's: the mean over rows of the standard deviation, as a ratio.
* posteriordb: the twelve posteriors of `benchmarks.posteriordb` in DIR, seeds compared as for the logistic regressions;
  left out without --data.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from math import log, pi
from pathlib import Path

import torch
from torch import Tensor

import structvi as vi
from benchmarks.hmc import hmc, r_hat
from benchmarks.posteriordb import recipes
from benchmarks.posteriordb_models import MODELS, Posterior
from structvi.density.fixed_draws import FixedDraws, fixed_elbo
from structvi.families.full import FullNormalDensity
from structvi.models.target import Target

#: common draws on which seeds are compared
COMMON = 16384
#: of the logistic regression: levels of its factors, 120 in all, and ranks
LEVELS = (*range(3, 10), *range(3, 10), *(6,) * 6)
RANKS = (5, 10, 20)
#: of the network: limits of evaluations; draws that predict; of HMC: chains, draws that are kept of each and before,
#: and most steps of a path
LIMITS = (20_000, 50_000, 200_000)
PREDICTING = 4000
CHAINS, KEPT, WARM_UP, LEAPS = 16, 1000, 400, 64


class Known:
    """A target from a function [S, P] → [S]."""

    def __init__(self, P: int, log_density: Callable[[Tensor], Tensor]):
        self.space = vi.Parameters({"z": torch.zeros(P, dtype=torch.float64)})
        self.log_density = log_density

    def log_joint(self, theta: Tensor, batch: object = None) -> Tensor:
        return self.log_density(theta)


def normals(generator: torch.Generator, *size: int) -> Tensor:
    return torch.randn(*size, generator=generator, dtype=torch.float64)


def common(family: vi.Family, target: Target) -> float:
    """The ELBO of a normal on draws that no fit has seen, the same for all."""
    with torch.no_grad():
        return fixed_elbo(family, target, FixedDraws(COMMON, seed=987)).item()


def told(result) -> bool:
    return not result.converged or "many optima" in result.verdict


def logistic_data(kind: str, rows: int = 1600, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Columns [N, 124] and classes [N] of zeros and ones.

    Of "factors" the 120 binary ones are all levels of 20 factors. A row's levels depend on three hidden numbers; some
    are rare. Of "columns" they are independent, each one with a probability from 0.02 to 0.5.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = normals(generator, rows, 3)
    columns = [torch.ones(rows, 1, dtype=torch.float64), normals(generator, rows, 3) + hidden]
    if kind == "columns":
        chance = 0.02 + 0.48 * torch.rand(sum(LEVELS), generator=generator, dtype=torch.float64)
        drawn = torch.rand(rows, sum(LEVELS), generator=generator, dtype=torch.float64)
        columns.append((drawn < chance).double())
    for levels in LEVELS if kind == "factors" else ():
        logits = hidden @ normals(generator, 3, levels) + normals(generator, levels)
        level = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
        columns.append(torch.nn.functional.one_hot(level, levels).double())
    X = torch.cat(columns, dim=-1)
    weights = 0.5 * normals(generator, X.shape[1])
    return X, (torch.rand(rows, generator=generator, dtype=torch.float64) < (X @ weights).sigmoid()).double()


def logistic_target(X: Tensor, y: Tensor, prior: float = 1.0) -> Known:
    def log_density(theta: Tensor) -> Tensor:
        logits = theta @ X.mT  # [S, N]
        likelihood = logits @ y - torch.nn.functional.softplus(logits).sum(-1)
        return likelihood - 0.5 * (theta / prior).square().sum(-1)

    return Known(X.shape[1], log_density)


def logistic(seeds: range, families: Sequence[str] = (), only: Sequence[str] = ()) -> list[dict]:
    recipes: dict[str, vi.Family] = {"full": vi.FullNormal(), "mean field": vi.MeanField()}
    recipes |= {f"covariance {rank}": vi.LowRankNormal(rank) for rank in RANKS}
    recipes |= {f"precision {rank}": vi.LowRankPrecision(rank) for rank in RANKS}
    recipes = {name: recipe for name, recipe in recipes.items() if not families or name in families}
    rows = []
    for kind in chosen(("factors", "columns"), only):
        rows += over_seeds(kind, logistic_target(*logistic_data(kind)), recipes, seeds, first=not rows)
    return rows


def posteriordb(seeds: range, data: Path, only: Sequence[str] = ()) -> list[dict]:
    rows = []
    for name in chosen(MODELS, only):
        target = Posterior(name, data / "posteriordb")
        rows += over_seeds(name, target, recipes(target.P), seeds, first=not rows)
    return rows


def chosen(names: Iterable[str], only: Sequence[str]) -> list[str]:
    return [name for name in names if not only or name in only]


def over_seeds(name: str, target: Target, families: dict[str, vi.Family], seeds: range, first: bool) -> list[dict]:
    """Excess of each seed over the best of its family."""
    rows = []
    for family, recipe in families.items():
        own = []
        for seed in seeds:
            result = vi.fit_density(target, recipe, seed=seed, progress=False)
            row = {"target": name, "family": family, "seed": seed, "elbo": common(result.family, target)}
            row |= {"told": told(result), "evaluations": result.evaluations, "check": result.check_evaluations}
            own.append(row | {"seconds": result.seconds, "verdict": result.verdict})
        best = max(row["elbo"] for row in own)
        own = [row | {"excess": best - row["elbo"]} for row in own]
        line = {"target": name, "family": family, "seeds": len(seeds), "best ELBO": best}
        line |= {"excess, most": max(row["excess"] for row in own)}
        line |= {"silent ones, most": max((row["excess"] for row in own if not row["told"]), default="–")}
        line |= {"told": sum(row["told"] for row in own), "evaluations, most": max(row["evaluations"] for row in own)}
        show(line | {"seconds, mean": sum(row["seconds"] for row in own) / len(seeds)}, first=first and not rows)
        rows += own
    return rows


def collinear(seeds: range) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    X = normals(generator, 50, 5)
    X[:, 1] = X[:, 0] + 1e-4 * X[:, 1]
    y = X @ normals(generator, 5) + 0.5 * normals(generator, 50)
    precision = X.mT @ X / 0.25 + 1e-4 * torch.eye(5, dtype=torch.float64)
    mean = torch.linalg.solve(precision, X.mT @ y / 0.25)
    half = torch.linalg.cholesky(torch.linalg.inv(precision))
    exact = FullNormalDensity(mean, half)
    target = Known(5, lambda theta: -0.5 * ((y - theta @ X.mT).square().sum(-1) / 0.25 + 1e-4 * theta.square().sum(-1)))
    print(f"condition of the precision: {torch.linalg.cond(precision):.1e}")
    rows = []
    families = {"full": vi.FullNormal(), "covariance 5": vi.LowRankNormal(5)}
    families |= {"precision 5": vi.LowRankPrecision(5)}
    for name, recipe in families.items():
        for seed in seeds:
            result = vi.fit_density(target, recipe, seed=seed, progress=False)
            with torch.no_grad():
                q = result.family()
                theta = q.draw(1, FixedDraws(2 * q.noise_size, seed=0)).theta  # exact for a quadratic
                kl = (q.log_prob(theta) - exact.log_prob(theta)).mean().item()
            off = ((q.mean - mean) / half.norm(dim=-1)).abs().max().item()
            rows.append({"family": name, "seed": seed, "kl": kl, "mean": off, "told": told(result)})
            rows[-1] |= {"evaluations": result.evaluations, "verdict": result.verdict}
        show(worst(rows, name, ("kl", "mean", "evaluations")), first=name == "full")
    return rows


def threes() -> dict[str, Known]:
    """Targets of three numbers."""
    generator = torch.Generator().manual_seed(0)
    root = normals(generator, 3, 3)
    X, offset = normals(generator, 30, 3), normals(generator, 3)
    y = (torch.rand(30, generator=generator) < (2 * X.sum(-1)).sigmoid()).double()
    counts = torch.poisson((0.5 + 0.5 * X @ offset).exp(), generator=generator)
    exact = FullNormalDensity(offset, torch.linalg.cholesky(root @ root.mT))

    def poisson(theta: Tensor) -> Tensor:
        rates = theta @ X.mT
        return rates @ counts - rates.exp().sum(-1) - 0.5 * theta.square().sum(-1)

    return {"Gaussian": Known(3, exact.log_prob), "logistic": logistic_target(X, y, 3.0), "Poisson": Known(3, poisson)}


def rank(seeds: range) -> list[dict]:
    rows = []
    for name, target in threes().items():
        for form, recipe in (("covariance", vi.LowRankNormal(3)), ("precision", vi.LowRankPrecision(3))):
            for seed in seeds:
                full = vi.fit_density(target, vi.FullNormal(), seed=seed, progress=False)
                result = vi.fit_density(target, recipe, seed=seed, progress=False)
                short = common(full.family, target) - common(result.family, target)
                rows.append({"family": f"{name}, {form} 3", "seed": seed, "short": short, "told": told(result)})
                rows[-1] |= {"evaluations": result.evaluations, "verdict": result.verdict}
            show(worst(rows, rows[-1]["family"], ("short", "evaluations")), first=len(rows) == len(seeds))
    return rows


class Network(Known):
    """The posterior of the 46 weights of a 1-15-1 network, and rows that are held out."""

    units, noise = 15, 0.1

    def __init__(self, seed: int):
        generator = torch.Generator().manual_seed(100 + seed)
        x = 4 * torch.rand(240, generator=generator, dtype=torch.float64) - 2
        y = (2 * x).sin() * (0.3 * x).exp() / 2 + self.noise * normals(generator, 240)
        self.x, self.y, self.x_new, self.y_new = x[:40], y[:40], x[40:], y[40:]
        super().__init__(3 * self.units + 1, self.posterior)

    def functions(self, theta: Tensor, x: Tensor) -> Tensor:
        """[S, N]"""
        first, bias, last = theta[:, :-1].reshape(-1, 3, self.units).unbind(1)
        hidden = (x.view(-1, 1) * first.unsqueeze(1) + bias.unsqueeze(1)).tanh()  # [S, N, H]
        return (hidden @ last.unsqueeze(-1)).squeeze(-1) / self.units**0.5 + theta[:, -1:]

    def posterior(self, theta: Tensor) -> Tensor:
        residual = (self.y - self.functions(theta, self.x)) / self.noise
        constant = len(self.y) * log(self.noise * (2 * pi) ** 0.5) + theta.shape[1] / 2 * log(2 * pi)
        return -0.5 * residual.square().sum(-1) - 0.5 * theta.square().sum(-1) - constant

    def predictive(self, theta: Tensor) -> Tensor:
        """log of the mean over draws of N(y; f(x), noise²), for each held-out row."""
        residual = (self.y_new - self.functions(theta, self.x_new)) / self.noise
        return (-0.5 * residual.square() - log(self.noise * (2 * pi) ** 0.5)).logsumexp(0) - log(len(theta))


def network_cases() -> list[tuple[str, vi.Family, dict]]:
    """Families and options of `vi.fit_density`."""
    families = {"mean field": vi.MeanField(), "covariance 5": vi.LowRankNormal(5), "full": vi.FullNormal()}
    cases = [(name, family, {"max_evaluations": limit}) for name, family in families.items() for limit in LIMITS]
    mixture = vi.Mixture(vi.FullNormal(), components="auto")
    cases += [("mixture, auto", mixture, {"max_evaluations": LIMITS[-1]})]
    return [*cases, ("full", vi.FullNormal(), {}), ("mixture, auto", mixture, {})]


def case_name(name: str, recipe: vi.Family, options: dict) -> str:
    return f"{name} {options.get('max_evaluations', 'none')}"


def network(seeds: range, families: Sequence[str] = (), only: Sequence[str] = ()) -> list[dict]:
    rows = []
    cases = [case for case in network_cases() if not families or case_name(*case) in families]
    for data in map(int, chosen("01", only)):
        target = Network(data)
        truth = reference(target)
        print(
            "data set {data}: HMC {predictive:.4f} nats a row (± {error:.4f} by chains), R̂ {r_hat:.3f} at most, "
            "acceptance {accepted:.2f}, {evaluations} evaluations, {seconds:.0f} s".format(data=data, **truth),
            flush=True,
        )
        for name, recipe, options in cases:
            for seed in seeds:
                row = {"data": data, "family": name, "options": str(options), "seed": seed}
                rows.append(row | network_fit(target, recipe, options, seed, truth))
            own = rows[-len(seeds) :]
            line = {"data": data, "family": name, "limit": options.get("max_evaluations", "none")}
            line |= {"seeds": len(seeds), "ELBO, least": min(row["elbo"] for row in own)}
            line |= {f"{n}, most": max(row[n] for row in own) for n in ("error", "below its best stage", "evaluations")}
            line |= {"predictive − HMC's": ", ".join(f"{row['predictive']:+.4f}" for row in own)}
            line |= {"width / HMC's": ", ".join(f"{row['width']:.2f}" for row in own)}
            show(line | {"told": sum(row["told"] for row in own)}, first=len(rows) == len(seeds))
    return rows


def network_fit(target: Network, recipe: vi.Family, options: dict, seed: int, truth: dict) -> dict:
    result = vi.fit_density(target, recipe, seed=seed, progress=False, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        density = result.family.requires_grad_(False)()
        drawn = density.draw(PREDICTING, vi.couplings.naive, generator)
        over = target.log_joint(drawn.theta) - density.log_prob(drawn.theta)
        elbo = (drawn.weight * over).sum() / drawn.weight.sum()
        theta = drawn.theta[torch.multinomial(drawn.weight, PREDICTING, replacement=True, generator=generator)]
        predictive = target.predictive(theta).mean().item() - truth["predictive"]
        width = target.functions(theta, target.x_new).std(0).mean().item() / truth["width"]
    steps = zip(result.trace, result.trace[1:], strict=False)
    begins = [step.elbo for before, step in steps if (before.stage, before.draws) != (step.stage, step.draws)]
    return {
        "elbo": elbo.item(), "below its best stage": max(begins, default=-torch.inf) - elbo.item(),
        "error": over.std().item() / len(over) ** 0.5, "predictive": predictive, "width": width, "told": told(result),
        "evaluations": result.evaluations, "seconds": result.seconds, "verdict": result.verdict,
    }  # fmt: skip


def reference(target: Network) -> dict:
    """By HMC: the predictive density, its error from how chains differ, and R̂ of functions and of log p."""
    began = time.perf_counter()
    start = normals(torch.Generator().manual_seed(0), CHAINS, target.space.size)
    chains = hmc(target, start, KEPT, WARM_UP, LEAPS, seed=0)
    theta = chains.theta[:: max(1, KEPT // 500)]  # [n, C, P]
    f = target.functions(theta.flatten(0, 1), target.x_new[:50]).view(*theta.shape[:2], -1)
    largest = max(r_hat(f).max().item(), r_hat(chains.log_p).item())
    each = torch.stack([target.predictive(chain).mean() for chain in theta.unbind(1)])
    width = target.functions(theta.flatten(0, 1), target.x_new).std(0).mean().item()
    return {
        "predictive": target.predictive(theta.flatten(0, 1)).mean().item(), "width": width,
        "error": each.std().item() / CHAINS**0.5,
        "r_hat": largest, "accepted": chains.accepted, "evaluations": chains.evaluations,
        "seconds": time.perf_counter() - began,
    }  # fmt: skip


def worst(rows: list[dict], name: str, columns: tuple[str, ...]) -> dict:
    own = [row for row in rows if row["family"] == name]
    line = {"family": name, "seeds": len(own)} | {f"{c}, most": max(row[c] for row in own) for c in columns}
    return line | {"told": sum(row["told"] for row in own)}


def show(line: dict, first: bool) -> None:
    """A row of a table, after its head if it is the first."""
    if first:
        print("| " + " | ".join(line) + " |\n| " + " | ".join("---" for _ in line) + " |")
    cells = (f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in line.values())
    print("| " + " | ".join(cells) + " |", flush=True)


SECTIONS = {"logistic": logistic, "collinear": collinear, "rank": rank, "network": network}


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    every = [*SECTIONS, "posteriordb"]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(every)}; all by default")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--families", nargs="*", default=[], help='"precision 20", "mixture, auto 200000": these alone')
    parser.add_argument("--only", nargs="*", default=[], help="columns, 1, arK-arK: these targets alone")
    parser.add_argument("--data", type=Path, help="the folder that holds posteriordb/")
    parser.add_argument("--out", type=Path, help="write all rows as JSON")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(every):
        parser.error(f"expected names of {', '.join(every)}, got {', '.join(sorted(unknown))}")
    if "posteriordb" in options.names and not options.data:
        parser.error("posteriordb needs --data, the folder that holds posteriordb/")
    torch.set_num_threads(1)
    print(f"structvi {vi.__version__}, torch {torch.__version__}, {platform.machine()}")
    rows, seeds = {}, range(options.first, options.first + options.seeds)
    for name in options.names or every:
        if name == "posteriordb" and not options.data:
            continue
        print(f"\n{name}", flush=True)
        if name == "posteriordb":
            rows[name] = posteriordb(seeds, options.data, options.only)
        else:
            own = (options.families, options.only) if name in ("logistic", "network") else ()
            rows[name] = SECTIONS[name](seeds, *own)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1))
    return rows


if __name__ == "__main__":
    main()
