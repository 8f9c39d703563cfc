"""The predictive density of `hard_densities`' network of 46 weights: what do its posteriors lack, and what brings it?

    python -m benchmarks.network_posterior [--data 0 1 2 3] [--seeds 2] [--limits 20000 50000]
        [--joint 8 32] [--steps 6000]

* HMC, 16 chains of 1000 draws, its error by how chains differ, and once more from other starts.
* A full normal with at most so many evaluations, q, and draws led from it to the posterior:
  `result.sample(4000, corrected="annealed")`; evaluations of both together.
* With `--joint C`: a mixture of C full normals, begun around the full normal of the last limit and fitted all together
  by Adam on fresh draws, so many steps of 16 C draws (a stratified group of mirrored pairs).

Predictive densities are nats a held-out row, less HMC's; "width" is the mean standard deviation of functions, as a
ratio to HMC's.
"""

import argparse
import time
import warnings

import torch
from torch import Tensor

import structvi as vi
from benchmarks.hard_densities import CHAINS, KEPT, LEAPS, PREDICTING, WARM_UP, Network, normals, reference
from benchmarks.hmc import hmc
from structvi.searching.drawing import annealed_draws


def again(target: Network, seed: int) -> float:
    """HMC's predictive density from other starts."""
    start = normals(torch.Generator().manual_seed(seed), CHAINS, target.space.size)
    chains = hmc(target, start, KEPT, WARM_UP, LEAPS, seed=seed)
    return target.predictive(chains.theta[::2].flatten(0, 1)).mean().item()


def compared(target: Network, theta: Tensor, truth: dict) -> str:
    predictive = target.predictive(theta).mean().item() - truth["predictive"]
    width = target.functions(theta, target.x_new).std(0).mean().item() / truth["width"]
    return f"predictive density − HMC's {predictive:+.4f}, width {width:.2f}"


def joint(target: Network, family: vi.Family, parts: int, steps: int, seed: int) -> tuple[vi.Family, int]:
    """All parts together, from copies of one normal a part of its spread aside; and the evaluations."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        density = family()
        root, mean = torch.linalg.cholesky(density.covariance()), density.mean
        bound = []
        for _ in range(parts):
            at = mean + 0.5 * root @ normals(generator, len(mean))
            bound.append(vi.FullNormal().bind(target.space.at(at)))
            bound[-1].load_state_dict(family.state_dict())
            dict(bound[-1].named_parameters())["mean"].copy_(at)
    mixture = vi.Mixture(bound)
    optimizer = torch.optim.Adam(mixture.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    evaluations = 0
    for _ in range(steps):
        optimizer.zero_grad()
        groups = 8
        loss = -vi.elbo(mixture, target, groups=groups, coupling=vi.paired, generator=generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(mixture.parameters(), 10.0)
        optimizer.step()
        schedule.step()
        evaluations += 2 * groups * parts
    return mixture, evaluations


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=int, nargs="*", default=[0, 1, 2, 3])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--limits", type=int, nargs="*", default=[20_000, 50_000])
    parser.add_argument("--joint", type=int, nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=6000)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "annealed draws")
    for data in options.data:
        target = Network(data)
        truth = reference(target)
        print(
            "data set {data}: HMC {predictive:.4f} ± {error:.4f} nats a row, R̂ {r_hat:.3f} at most, {evaluations} "
            "evaluations, {seconds:.0f} s".format(data=data, **truth)
            + f"; from other starts {again(target, 1) - truth['predictive']:+.4f}",
            flush=True,
        )
        for limit in options.limits:
            for seed in range(options.seeds):
                one(target, truth, limit, seed, options.joint if limit == options.limits[-1] else [], options.steps)


def one(target: Network, truth: dict, limit: int, seed: int, parts: list[int], steps: int) -> None:
    """One fit, its draws, those led on to the posterior, and mixtures begun at it."""
    result = vi.fit(target, vi.FullNormal(), seed=seed, max_evaluations=limit, progress=False)
    family = result.family.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    theta = target.space.ravel(result.sample(PREDICTING, generator=generator))
    print(f"  at most {limit}, seed {seed}: q, {result.elbo}: {compared(target, theta, truth)}", flush=True)
    began = time.perf_counter()
    annealed = annealed_draws(family, target, PREDICTING, generator)
    print(
        f"    annealed: {compared(target, annealed.theta, truth)}, R̂ {annealed.r_hat:.2f}, broken "
        f"{annealed.broken:.2f}, {annealed.evaluations} evaluations, with q's "
        f"{annealed.evaluations + result.evaluations}, {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    for C in parts:
        mixture, evaluations = joint(target, family, C, steps, seed)
        mixture.requires_grad_(False)
        drawn = mixture().draw(PREDICTING // C, generator=generator)
        chosen = torch.multinomial(drawn.weight, PREDICTING, replacement=True, generator=generator)
        over = target.log_joint(drawn.theta) - mixture().log_prob(drawn.theta)
        elbo = (drawn.weight * over).sum().item() / drawn.weight.sum().item()
        print(
            f"    mixture of {C} together: ELBO {elbo:.2f}, {compared(target, drawn.theta[chosen], truth)}, "
            f"{evaluations} evaluations",
            flush=True,
        )


if __name__ == "__main__":
    main()
