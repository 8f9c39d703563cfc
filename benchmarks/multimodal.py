"""Forty log densities with several modes: does a mixture find them all, and does it say so where it does not?

    python -m benchmarks.multimodal [--suite 0] [--seeds 1] [--only NAME ..] [--auto] [--out results.json]

`vi.fit_density(target, vi.Mixture(vi.FullNormal(), components=C))` with its defaults, from zeros, C the number of modes
that the target is made of; with `--auto`, components="auto". `--suite` is the seed that makes all targets: others
are a held-out set.

* Mixtures of Gaussians (28): d = 2, 5, 10, 20; two to six modes, weights of at least 0.05, standard deviations
  within a factor of 3, centres 4 to 12 deviations apart. Their evidence is one: the ELBO is short by −ELBO.
* Others (12): posteriors of unlabelled mixtures of two and three normals, rings of modes, banana-shaped modes. They
  are short of the fit that starts at every mode that the target is made of.

Short is more than 0.02 nats for mixtures of Gaussians and 0.05 for the others, beyond two standard errors.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from math import log, pi

import torch
from torch import Tensor

import structvi as vi

#: nats: short of the evidence, and of the fit that starts at every mode
SHORT = {"gaussians": 0.02, "other": 0.05}
DIMENSIONS = (2, 5, 10, 20)
#: mixtures of Gaussians of each dimension
EACH = 7


@dataclass
class Multimodal:
    """A log density and the modes that it is made of, [C, P]."""

    name: str
    kind: str
    modes: Tensor
    log_density: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        self.space = vi.Parameters({"z": torch.zeros(self.modes.shape[-1], dtype=torch.float64)})

    def log_joint(self, theta: Tensor, batch: object = None) -> Tensor:
        return self.log_density(theta)


def suite(seed: int) -> list[Multimodal]:
    """The forty targets of one seed."""
    generator = torch.Generator().manual_seed(1000 + seed)
    made = [gaussians(d, index, generator) for d in DIMENSIONS for index in range(EACH)]
    made += [unlabelled(2, generator, f"unlabelled-2-{i}", wide) for i, wide in enumerate((False, True, True))]
    made += [unlabelled(3, generator, f"unlabelled-3-{i}", wide) for i, wide in enumerate((False, False, True))]
    made += [ring(k, P, generator) for k, P in ((3, 2), (5, 3), (6, 2))]
    made += [bananas(C, P, generator) for C, P in ((2, 2), (3, 2), (2, 5))]
    return made


def uniform(generator: torch.Generator, low: float, high: float, *size: int) -> Tensor:
    return low + (high - low) * torch.rand(*size, generator=generator, dtype=torch.float64)


def normal(generator: torch.Generator, *size: int) -> Tensor:
    return torch.randn(*size, generator=generator, dtype=torch.float64)


def rotation(P: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(normal(generator, P, P)).Q


def weights(C: int, generator: torch.Generator) -> Tensor:
    """Of a Dirichlet distribution, all at least 0.05."""
    raw = -uniform(generator, 1e-9, 1.0, C).log()
    return 0.05 + (1 - 0.05 * C) * raw / raw.sum()


def gaussians(P: int, index: int, generator: torch.Generator) -> Multimodal:
    """Σ w_c N(μ_c, Σ_c): of odd index round parts of different widths, of even index turned ellipsoids."""
    C = int(torch.randint(2, 7, (1,), generator=generator))
    if index % 2:
        sds = (3 ** uniform(generator, -0.5, 0.5, C, 1)).expand(C, P)
    else:
        sds = 3 ** uniform(generator, -0.5, 0.5, C, P)
    roots = torch.stack([rotation(P, generator) * sd for sd in sds])  # [C, P, P]
    widths = sds.log().mean(-1).exp()
    while True:
        centres = [torch.zeros(P, dtype=torch.float64)]
        while len(centres) < C:
            direction = normal(generator, P)
            away = uniform(generator, 4, 12, 1) * (direction / direction.norm())
            base = int(torch.randint(len(centres), (1,), generator=generator))
            centres.append(centres[base] + away * (widths[base] + widths[len(centres)]) / 2)
        means = torch.stack(centres)
        apart = torch.cdist(means, means) / ((widths + widths.unsqueeze(-1)) / 2) + 8 * torch.eye(C)
        if bool((apart >= 4).all() and (apart <= 12).all()):
            break
    means = means - means.mean(0) + 3 * normal(generator, P) / P**0.5
    log_weights = weights(C, generator).log()
    inverse = torch.linalg.inv(roots)
    constant = log_weights - roots.det().abs().log() - P / 2 * log(2 * pi)

    def log_density(theta: Tensor) -> Tensor:
        z = torch.einsum("cij,scj->sci", inverse, theta.unsqueeze(1) - means)
        return (constant - z.square().sum(-1) / 2).logsumexp(-1)

    return Multimodal(f"gaussians-{P}-{index}", "gaussians", means, log_density)


def unlabelled(C: int, generator: torch.Generator, name: str, wide: bool) -> Multimodal:
    """The posterior of the C means of a mixture of normals; if wide, of log scales and logits too."""
    means = 3.0 * torch.arange(C, dtype=torch.float64) + uniform(generator, -0.5, 0.5, C)
    labels = torch.multinomial(torch.ones(C), 60, replacement=True, generator=generator)
    data = means[labels] + normal(generator, 60) * 0.8
    data = data - data.mean()

    def log_density(theta: Tensor) -> Tensor:
        mu = theta[:, :C]
        scale = theta[:, C : 2 * C] if wide else torch.full_like(mu, log(0.8))
        logits = theta[:, 2 * C :] if wide else torch.zeros_like(mu)
        prior = -mu.square().sum(-1) / 50
        if wide:
            prior = prior - (scale / 0.5).square().sum(-1) / 2 - logits.square().sum(-1) / 2
        z = (data.view(-1, 1, 1) - mu) / scale.exp()  # [n, S, C]
        each = (logits.log_softmax(-1) - scale - z.square() / 2).logsumexp(-1)
        return prior + each.sum(0)

    first = means - means.mean()
    rest = torch.zeros(2 * C if wide else 0, dtype=torch.float64)
    modes = torch.stack([torch.cat([first[list(order)], rest]) for order in permutations(range(C))])
    return Multimodal(name, "other", climbed(modes, log_density), log_density)


def ring(k: int, P: int, generator: torch.Generator) -> Multimodal:
    """k modes on a circle of the first two numbers, the others normal; turned."""
    radius, turn = 6.0, rotation(P, generator)
    phase = uniform(generator, 0, 2 * pi, 1)
    angles = 2 * pi * torch.arange(k) / k + phase
    height = uniform(generator, 0.0, 1.0, k)

    def log_density(theta: Tensor) -> Tensor:
        z = theta @ turn
        r = z[:, :2].norm(dim=-1).clamp(min=1e-9)
        cosine = (z[:, :1] * angles.cos() + z[:, 1:2] * angles.sin()) / r.unsqueeze(-1)
        modes = (height + 20.0 * (cosine - 1)).logsumexp(-1)
        return modes - (r - radius).square() / (2 * 0.5) - z[:, 2:].square().sum(-1) / 2

    start = radius * torch.stack([angles.cos(), angles.sin()], dim=-1)
    modes = torch.cat([start, torch.zeros(k, P - 2, dtype=torch.float64)], dim=-1) @ turn.mT
    return Multimodal(f"ring-{k}-{P}", "other", climbed(modes, log_density), log_density)


def bananas(C: int, P: int, generator: torch.Generator) -> Multimodal:
    """Σ w_c of bent normals, θ₂ = z₂ + b(z₁² − 1): their evidence is one."""
    turns = torch.stack([rotation(P, generator) for _ in range(C)])
    bends, log_weights = uniform(generator, 0.3, 0.6, C), weights(C, generator).log()
    direction = normal(generator, C, P)
    means = 7.0 * direction / direction.norm(dim=-1, keepdim=True)
    while bool((torch.cdist(means, means) + 9 * torch.eye(C) < 8).any()):
        direction = normal(generator, C, P)
        means = 7.0 * direction / direction.norm(dim=-1, keepdim=True)

    def log_density(theta: Tensor) -> Tensor:
        z = torch.einsum("sci,cij->scj", theta.unsqueeze(1) - means, turns)
        second = z[..., 1] - bends * (z[..., 0].square() - 1)
        squares = z[..., 0].square() + second.square() + z[..., 2:].square().sum(-1)
        return (log_weights - squares / 2 - P / 2 * log(2 * pi)).logsumexp(-1)

    return Multimodal(f"bananas-{C}-{P}", "other", climbed(means, log_density), log_density)


def climbed(modes: Tensor, log_density: Callable[[Tensor], Tensor]) -> Tensor:
    """The maxima above these points, by L-BFGS of torch."""
    tops = []
    for start in modes:
        x = start.clone().requires_grad_()
        optimizer = torch.optim.LBFGS([x], max_iter=200, line_search_fn="strong_wolfe")

        def closure(x: Tensor = x) -> Tensor:
            x.grad = None
            loss = -log_density(x.unsqueeze(0)).sum()
            loss.backward()
            return loss

        optimizer.step(closure)  # pyright: ignore[reportArgumentType]
        tops.append(x.detach())
    return torch.stack(tops)


def reference(target: Multimodal) -> float:
    """The ELBO of the fit that starts at every mode; of mixtures of Gaussians the evidence."""
    if target.kind == "gaussians":
        return 0.0
    best = -float("inf")
    for scale in (0.1, 0.5):
        parts = [vi.FullNormal(initial_scale=scale).bind(target.space.at(mode)) for mode in target.modes]
        result = vi.fit_density(target, vi.Mixture(parts), progress=False)
        best = max(best, precise(result.family, target)[0])
    return best


def precise(family: vi.Family, target: Multimodal, groups: int = 4096) -> tuple[float, float]:
    """The ELBO and its standard error, on many fresh draws."""
    with torch.no_grad():
        generator = torch.Generator().manual_seed(12345)
        values = vi.objective.elbo_terms(
            family,
            target,
            estimator=vi.Estimator("log_q", groups=groups, coupling=vi.couplings.naive),
            generator=generator,
        ).objective()
    return values.mean().item(), values.std().item() / groups**0.5


def run(target: Multimodal, seed: int, auto: bool, known: float | None) -> dict:
    began = time.perf_counter()
    family = vi.Mixture(vi.FullNormal(), components="auto" if auto else len(target.modes))
    result = vi.fit_density(target, family, seed=seed, progress=False)
    seconds = time.perf_counter() - began
    value, error = precise(result.family, target)
    short = (reference(target) if known is None else known) - value
    return {
        "target": target.name, "seed": seed, "short": short, "error": error, "status": str(result.status),
        "is_short": short > SHORT[target.kind] + 2 * error, "kind": target.kind, "true": len(target.modes),
        "found": len(result.modes), "parts": len(result.family.parts()),
        "evaluations": result.evaluations, "check": result.check_evaluations, "seconds": seconds,
    }  # fmt: skip


def summary(rows: list[dict]) -> str:
    lines = []
    for kind in SHORT:
        own = [row for row in rows if row["kind"] == kind]
        if own:
            good = sum(not row["is_short"] for row in own)
            lines.append(f"{kind}: {good} of {len(own)} within {SHORT[kind]} nats")
    wrong = sum(row["is_short"] and row["status"] == "converged" for row in rows)
    said = sum(not row["is_short"] and row["status"] != "converged" for row in rows)
    lines.append(f"short and called converged: {wrong} of {len(rows)}; not short and not called so: {said}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description="Forty log densities with several modes.")
    parser.add_argument("--suite", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--auto", action="store_true")
    parser.add_argument("--out")
    options = parser.parse_args(arguments)
    rows = []
    names = f"{'target':18}{'seed':>5}{'short':>9}{'±':>8}  {'status':14}"
    print(f"{names}{'modes':>7}{'parts':>6}{'evaluations':>12}{'s':>7}")
    for target in suite(options.suite):
        if options.only and not any(part in target.name for part in options.only):
            continue
        known = reference(target)
        for seed in range(options.seeds):
            row = run(target, seed, options.auto, known)
            rows.append(row)
            print(
                f"{row['target']:18}{seed:5}{row['short']:9.3f}{row['error']:8.3f}  {row['status']:14}"
                f"{row['found']:4}/{row['true']}{row['parts']:6}{row['evaluations']:12}{row['seconds']:7.1f}",
                flush=True,
            )
    print(summary(rows))
    if options.out:
        with open(options.out, "w") as file:
            json.dump(rows, file, indent=1)
    return rows


if __name__ == "__main__":
    main()
