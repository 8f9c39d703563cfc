"""Mixtures of Gaussians of other makings than those of `benchmarks.multimodal`: are all parts found, is a miss told?

    python -m benchmarks.multimodal_others [--first 0] [--last 12] [--apart mean widest narrowest]

`vi.fit(target, vi.Mixture(vi.FullNormal(), components="auto"))` from zeros. Two to six parts of 2, 5, 10, 20 numbers,
standard deviations evenly from 1 to 3, round or turned ellipsoids, weights of at least 0.05, all together 0, 10 or 30
away from the start. Centres are 4 to 12 deviations apart, in the mean of the two parts' mean ones, in the widest of
all axes of both, or in the narrowest. The evidence is one; short is more than 0.02 nats below it.
"""

import argparse
from math import log, pi

import torch
from torch import Tensor

import structvi as vi
from benchmarks.multimodal import DIMENSIONS, Multimodal, normal, precise, rotation, uniform, weights

AWAY = (0.0, 10.0, 30.0)
#: attempts to place the centres
ATTEMPTS = 10_000


def in_units(sds: Tensor, apart: str) -> Tensor:
    """The deviation in which two parts' distance is told: [C, P] → [C, C]."""
    if apart == "mean":
        own = sds.mean(-1)
        return (own + own.unsqueeze(-1)) / 2
    own = sds.amax(-1) if apart == "widest" else sds.amin(-1)
    choose = torch.maximum if apart == "widest" else torch.minimum
    return choose(own.unsqueeze(-1), own)


def centres(units: Tensor, P: int, generator: torch.Generator) -> Tensor | None:
    """[C, P], all 4 to 12 units apart; None where chance has found none."""
    C = len(units)
    for _ in range(ATTEMPTS):
        placed = [torch.zeros(P, dtype=torch.float64)]
        for index in range(1, C):
            base, direction = int(torch.randint(index, (1,), generator=generator)), normal(generator, P)
            away = uniform(generator, 4, 12, 1) * units[base, index] / direction.norm()
            placed.append(placed[base] + away * direction)
        means = torch.stack(placed)
        distance = torch.cdist(means, means) / units + 8 * torch.eye(C)
        if bool((distance >= 4).all() and (distance <= 12).all()):
            return means - means.mean(0)
    return None


def gaussians(P: int, round_parts: bool, apart: str, index: int) -> Multimodal | None:
    generator = torch.Generator().manual_seed(5000 + index)
    C = int(torch.randint(2, 7, (1,), generator=generator))
    sds = uniform(generator, 1, 3, C, 1).expand(C, P) if round_parts else uniform(generator, 1, 3, C, P)
    roots = torch.stack([rotation(P, generator) * sd for sd in sds])
    means = centres(in_units(sds, apart), P, generator)
    if means is None:
        return None
    direction, away = normal(generator, P), AWAY[index % len(AWAY)]
    means = means + away * direction / direction.norm()
    inverse = torch.linalg.inv(roots)
    constant = weights(C, generator).log() - sds.log().sum(-1) - P / 2 * log(2 * pi)

    def log_density(theta: Tensor) -> Tensor:
        z = torch.einsum("cij,scj->sci", inverse, theta.unsqueeze(1) - means)
        return (constant - z.square().sum(-1) / 2).logsumexp(-1)

    kind = "round" if round_parts else "turned"
    return Multimodal(f"{apart}-{kind}-{P}-{C}-{away:g}", "gaussians", means, log_density)


def main(arguments: list[str] | None = None) -> dict[str, list[int]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=12)
    parser.add_argument("--apart", nargs="*", default=["mean", "widest", "narrowest"])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    counts: dict[str, list[int]] = {}
    for index in range(options.first, options.last):
        for apart in options.apart:
            for P in DIMENSIONS:
                for round_parts in (False, True):
                    target = gaussians(P, round_parts, apart, index)
                    if target is None:
                        continue
                    result = vi.fit(target, vi.Mixture(vi.FullNormal(), components="auto"), seed=index, progress=False)
                    value, error = precise(result.family, target)
                    short = -value > 0.02 + 2 * error
                    own = counts.setdefault(f"{apart}, {P} numbers", [0, 0, 0])
                    own[0] += 1
                    own[1] += short
                    own[2] += short and result.converged
                    if short or not result.converged:
                        print(
                            f"{target.name:28}{index:4}{-value:9.3f}  {result.status}, modes {len(result.modes)} of "
                            f"{len(target.modes)}, {result.evaluations} evaluations, {result.seconds:.1f} s",
                            flush=True,
                        )
        print(f"{index}: " + "; ".join(f"{name} {own}" for name, own in counts.items()), flush=True)
    print("| | fits | short | of these called converged |\n| --- | --- | --- | --- |")
    for name, own in counts.items():
        print(f"| {name} | " + " | ".join(str(n) for n in own) + " |")
    return counts


if __name__ == "__main__":
    main()
