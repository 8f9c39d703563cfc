"""Mixtures: common or independent noise across parts, and whether both modes of a bimodal target are found.

    python benchmarks/mixture_noise.py variance     # variances, common over independent noise: two minutes
    python benchmarks/mixture_noise.py modes 3      # modes found at ±3, plain and annealed: ten minutes on one core
    python benchmarks/mixture_noise.py modes 5

Target: 0.7 N((m, m), I) + 0.3 N((−m, −m), I) by two parts. Fits: Adam 0.1 with cosine decay, 2000 steps of 4 groups of
antithetic pairs, float64.
"""

import sys
from math import log, pi

import torch
from torch import Tensor

import structvi as vi

PARTS = {"MeanField": vi.MeanField(), "StructuredNormal(1)": vi.StructuredNormal(rank=1), "FullNormal": vi.FullNormal()}


def space(start: Tensor | None = None) -> vi.Parameters:
    return vi.Parameters({"z": torch.zeros(2, dtype=torch.float64) if start is None else start})


def bimodal(m: float) -> vi.LogDensity:
    """0.7 N((m, m), I) + 0.3 N((−m, −m), I), normalised."""
    modes = torch.tensor([[m, m], [-m, -m]], dtype=torch.float64)
    log_weights = torch.tensor([0.7, 0.3], dtype=torch.float64).log()

    def log_p(p: dict[str, Tensor]) -> Tensor:
        return (log_weights - 0.5 * (p["z"] - modes).square().sum(-1)).logsumexp(0) - log(2 * pi)

    return vi.LogDensity(log_p, space(), evaluation="vmap")


def bound_at_random(recipe: vi.Family, generator: torch.Generator, **options) -> vi.Mixture:
    """Two parts bound at independent points of N(0, 3²I)."""
    starts = 3 * torch.randn(2, 2, generator=generator, dtype=torch.float64)
    return vi.Mixture([recipe.bind(space(start), generator) for start in starts], **options)


def fit(
    q: vi.Family, target: vi.LogDensity, generator: torch.Generator, *, anneal: bool, stage: bool, steps: int = 2000
) -> None:
    """Adam 0.1 → 0. With `anneal` the target starts hot; with `stage` correlations join in the second half."""
    later = [p for name, p in q.named_parameters() if name.endswith(("factor", "lower"))] if stage else []
    optimizer = torch.optim.Adam(q.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        for parameter in later:
            parameter.requires_grad_(2 * step >= steps)
        now = vi.annealed(target, step / steps) if anneal else target
        optimizer.zero_grad()
        (-vi.elbo(q, now, groups=4, generator=generator)).backward()
        optimizer.step()
        schedule.step()


def found(q: vi.Mixture, m: float) -> tuple[bool, float]:
    """Whether each mode has a part within half a standard deviation, and the proportion on the mode of weight 0.7."""
    with torch.no_grad():
        means, proportions = torch.stack([part().mean for part in q.part]), q.proportions
        modes = torch.tensor([[m, m], [-m, -m]], dtype=torch.float64)
        distance = torch.cdist(means, modes)  # [C, 2]
        both = bool((distance.min(0).values < 0.5).all())
        return both, proportions[distance.argmin(-1) == 0].sum().item()


def modes_table(m: float, seeds: int = 10) -> None:
    target = bimodal(m)
    for name, recipe in PARTS.items():
        for starts in ("recipe", "bound at N(0, 9 I)"):
            for how in ("plain", "annealed", "annealed, staged"):
                if how.endswith("staged") and name == "MeanField":
                    continue
                good, worst = 0, 0.0
                for seed in range(seeds):
                    generator = torch.Generator().manual_seed(seed)
                    if starts == "recipe":
                        q = vi.Mixture(recipe, components=2).bind(space(), generator)
                    else:
                        q = bound_at_random(recipe, generator)
                    fit(q, target, generator, anneal=how != "plain", stage=how.endswith("staged"))
                    both, proportion = found(q, m)
                    good += both and abs(proportion - 0.7) <= 0.02
                    worst = max(worst, abs(proportion - 0.7)) if both else worst
                print(
                    f"±{m:.0f}  {name:20s} {starts:19s} {how:17s} {good:2d} of {seeds}, "
                    f"largest |π̂ − 0.7| of those with both modes {worst:.4f}",
                    flush=True,
                )


def variances(q: vi.Mixture, target: vi.LogDensity, estimator, coupling, repeats: int = 2000) -> dict[str, float]:
    """Variance of one group's ELBO and of its gradient, summed over the entries of each kind of parameter."""
    generator = torch.Generator().manual_seed(1)
    names, parameters = zip(*q.named_parameters(), strict=True)
    samples, values = [], []
    for _ in range(repeats):
        value = vi.elbo(q, target, coupling=coupling, estimator=estimator, generator=generator)
        samples.append(torch.autograd.grad(value, parameters))
        values.append(value.detach())
    result = {"elbo": torch.stack(values).var().item()}
    for name, gradients in zip(names, zip(*samples, strict=True), strict=True):
        kind = name.rsplit(".", 1)[-1]
        result[kind] = result.get(kind, 0.0) + torch.stack(gradients).var(0).sum().item()
    return result


def variance_table() -> None:
    target = bimodal(3.0)
    places = {
        "at the start": lambda g: bound_at_random(vi.StructuredNormal(rank=1), g),
        "parts overlap": lambda g: _near([[0.5, 0.5], [-0.5, -0.5]], [2.0, 1.0], g),
        "near the optimum": lambda g: _near([[3.2, 2.9], [-2.9, -3.2]], [0.9, 0.9], g),
        "one too narrow": lambda g: _near([[3.2, 2.9], [-2.9, -3.2]], [0.3, 0.9], g),
    }
    for place, make in places.items():
        q = make(torch.Generator().manual_seed(0))
        for estimator, label, coupling in (
            ("path", "naive", vi.naive),
            ("path", "paired", vi.paired),
            ("path", "unscented", vi.unscented),
            ("log_q", "paired", vi.paired),
        ):
            q.common_noise = True
            common = variances(q, target, estimator, coupling)
            q.common_noise = False
            independent = variances(q, target, estimator, coupling)
            ratios = "  ".join(f"{kind} {common[kind] / independent[kind]:5.3f}" for kind in common)
            print(f"{place:17s} {estimator:6s} {label:10s} common / independent:  {ratios}", flush=True)


def _near(means: list[list[float]], scales: list[float], generator: torch.Generator) -> vi.Mixture:
    """Structured parts of rank 1 at these means, with these scales."""
    starts = [space(torch.tensor(mean, dtype=torch.float64)) for mean in means]
    recipes = [
        vi.StructuredNormal(1, initial_scale=s / start.scale[0].item()) for s, start in zip(scales, starts, strict=True)
    ]
    return vi.Mixture([recipe.bind(start, generator) for recipe, start in zip(recipes, starts, strict=True)])


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["variance"]:
        variance_table()
    elif sys.argv[1:2] == ["modes"] and len(sys.argv) == 3:
        modes_table(float(sys.argv[2]))
    else:
        sys.exit(__doc__)
