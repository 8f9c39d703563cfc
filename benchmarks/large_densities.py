"""Many numbers, diagonal plus low rank, no P×P matrix: what does `vi.fit_density` cost, and how near does it come?

    python -m benchmarks.large_densities [--d 512 2048] [--rank 32] [--seeds 1] [--cases gaussian logistic student]

Gaussian targets are S(I + GGᵀ)S, as covariance and as precision, with log s ~ N(0, 1), G of the rank and singular
values from about 20 to 2, and a mean of the order of s; the family of the same form holds them, so that the excess is
KL[q‖p] itself, given as a share of the gain, KL(best mean field). The logistic regression has half as many rows as
columns, whose covariance has 16 factors, and the prior N(0, 1); the Student-t target is −P log(1 + a/P) for the
quadratic a of the Gaussian of precision form. Their optimum is not known: ELBOs are on 1024 fresh draws. `check` are
the evaluations of the check after the fit, `s` seconds of one core; `largest` is the largest tensor that the fit
makes, in multiples of P (P would be a P×P matrix), and `MB` what the process has grown to at most, with torch.
"""

import argparse
import resource
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import structvi as vi
from structvi.families.gaussian import LowRankDensity


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is made within it."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.untyped_storage().nbytes() // one.element_size())
        return result


class Exact:
    """A Gaussian of one of the two forms, as a target."""

    def __init__(self, P: int, rank: int, of_precision: bool, seed: int):
        options = {"generator": torch.Generator().manual_seed(1000 + seed), "dtype": torch.float64}
        log_scale = torch.randn(P, **options)
        sizes = torch.logspace(1.3, 0.3, rank, dtype=torch.float64)
        factor = torch.randn(P, rank, **options) / P**0.5 * sizes
        mean, scale = torch.randn(P, **options) * log_scale.exp(), log_scale.exp()
        self.density = LowRankDensity(mean, log_scale, factor, scale, of_precision)
        self.space = vi.Parameters({"z": torch.zeros(P, dtype=torch.float64)})

    def log_joint(self, theta, batch=None):
        return self.density.log_prob(theta)

    def kl(self, family) -> float:
        with torch.no_grad():
            return vi.kl(family(), self.density).item()

    def mean_field(self) -> float:
        """KL of the best mean field, 1/s² = Λ_ii."""
        q = vi.MeanField().bind(self.space)
        with torch.no_grad():
            q.mean.copy_(self.density.mean)
            q.log_scale.copy_(-0.5 * self.density.precision_diagonal().log())
        return self.kl(q)


class Student(Exact):
    """−(ν + P)/2 log(1 + a/ν) for the quadratic a of a Gaussian: heavy tails in all directions at once."""

    def log_joint(self, theta, batch=None):
        P = self.space.size
        return -P * torch.log1p(self.density.quadratic(theta - self.density.mean) / P)


def logistic(P: int, seed: int):
    options = {"generator": torch.Generator().manual_seed(1000 + seed), "dtype": torch.float64}
    rows, factors = P // 2, 16
    X = torch.randn(rows, factors, **options) @ torch.randn(factors, P, **options) / factors**0.5
    X = (X + torch.randn(rows, P, **options)) / (2 * P) ** 0.5
    y = torch.bernoulli(torch.sigmoid(X @ torch.randn(P, **options)), generator=options["generator"])

    def log_density(p):
        logits = X @ p["w"]
        return (y * logits - torch.nn.functional.softplus(logits)).sum() - 0.5 * p["w"].square().sum()

    return vi.LogDensity(log_density, vi.Parameters({"w": torch.zeros(P, dtype=torch.float64)}))


def run(target, recipe, seed: int):
    began = time.process_time()
    with Largest() as made:
        result = vi.fit_density(target, recipe, seed=seed, progress=False)
    seconds = time.process_time() - began
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    P = target.space.size
    cost = f"{result.evaluations:6d} {result.check_evaluations:6d} {seconds:6.1f} {made.elements / P:7.0f} {grown:6.0f}"
    return result, cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--cases", nargs="+", default=["gaussian", "logistic", "student"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    forms = {"covariance": vi.LowRankNormal(arguments.rank), "precision": vi.LowRankPrecision(arguments.rank)}
    families = {"mean field": vi.MeanField(), **forms}
    header = "evals  check      s largest     MB"
    for P in arguments.d:
        for seed in range(arguments.seeds):
            for form in forms if "gaussian" in arguments.cases else ():
                target = Exact(P, arguments.rank, form == "precision", seed)
                gain = target.mean_field()
                print(f"d = {P}, {form} form, seed {seed}: mean field's optimum {gain:.2f} nats; {header}")
                for name, recipe in families.items():
                    result, cost = run(target, recipe, seed)
                    kl = target.kl(result.family)
                    over = kl - (gain if name == "mean field" else 0.0)
                    share = f"{100 * over / gain:9.4f} %" if name in (form, "mean field") else " " * 11
                    print(f"  {name:11s} KL {kl:10.5f} {share} {cost} {result.verdict}", flush=True)
            for name, make in (("logistic", logistic), ("student", lambda P, s: Student(P, arguments.rank, True, s))):
                if name not in arguments.cases:
                    continue
                target = make(P, seed)
                print(f"d = {P}, {name}, seed {seed}; {header}")
                for family, recipe in families.items():
                    result, cost = run(target, recipe, seed)
                    print(f"  {family:11s} ELBO {result.elbo} {cost} {result.verdict}", flush=True)


if __name__ == "__main__":
    main()
