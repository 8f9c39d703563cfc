"""Make the reference draws that come with the package: NUTS for logistic regression, HMC for the network.

    python tools/check_references.py [logistic-regression] [network]

It needs the extras "bench" (Pyro) and "diagnostics" (arviz), takes about ten minutes on two cores, and refuses draws
with R̂ above 1.01 or with fewer effective draws than are kept.
"""

# the peers are an extra:
# pyright: reportMissingImports=false

import sys
from collections.abc import Callable
from math import lgamma, log, pi
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from structvi.parameters import Parameters
from structvi_check.problems import (
    REFERENCES,
    Problem,
    logistic_data,
    network_data,
)

#: draws that are kept, in float32: below 300 kB together
KEPT = {"logistic-regression": 2000, "network": 1000}


def logistic_regression() -> None:
    """Four chains of Pyro's NUTS; log p(data) by importance sampling from a t around the draws."""
    import pyro
    from pyro.infer import MCMC, NUTS

    data, truth = logistic_data()
    P, log_joint = Parameters.of(data.build()).size, data.log_joint

    def potential(values: dict[str, Tensor]) -> Tensor:
        return -log_joint(values["theta"].unsqueeze(0))[0]

    pyro.set_rng_seed(0)
    chains = []
    for chain in range(4):
        start = truth + torch.randn(P, generator=torch.Generator().manual_seed(chain), dtype=torch.float64)
        sampler = MCMC(
            NUTS(potential_fn=potential, target_accept_prob=0.9), 2500, warmup_steps=500,
            initial_params={"theta": start}, disable_progbar=True,
        )  # fmt: skip
        sampler.run()
        chains.append(sampler.get_samples()["theta"])
    draws = torch.stack(chains)  # [C, T, P]
    name = "logistic-regression"
    report = check(draws, KEPT[name])
    everything = draws.flatten(0, 1)
    evidence, error = log_evidence(everything, log_joint)
    report |= {"log_evidence": repr(evidence), "log_evidence_standard_error": f"{error:.1e}", "sampler": "Pyro NUTS"}
    write(name, everything, report)


def log_evidence(draws: Tensor, log_joint: Callable[[Tensor], Tensor], S: int = 400_000) -> tuple[float, float]:
    """log p(data) and its standard error: importance sampling from a multivariate t with 5 degrees of freedom."""
    df, P = 5.0, draws.shape[-1]
    generator = torch.Generator().manual_seed(1)
    root = torch.linalg.cholesky(torch.cov(draws.mT))
    white = torch.randn(S, P, generator=generator, dtype=torch.float64)
    normals = torch.randn(S, int(df), generator=generator, dtype=torch.float64)
    z = white / (normals.square().sum(-1, keepdim=True) / df).sqrt()
    log_t = (
        lgamma((df + P) / 2) - lgamma(df / 2)
        - 0.5 * P * log(df * pi) - root.diagonal().log().sum() - 0.5 * (df + P) * torch.log1p(z.square().sum(-1) / df)
    )  # fmt: skip
    with torch.no_grad():
        log_weight = log_joint(draws.mean(0) + z @ root.mT) - log_t
    weight = (log_weight - log_weight.max()).exp()
    value = (log_weight.max() + weight.mean().log()).item()
    return value, (weight.std() / weight.mean() / S**0.5).item()


def network() -> None:
    """Hamiltonian Monte Carlo: 64 chains from the prior side by side, trajectories of random length."""
    data, truth = network_data()
    log_joint = data.log_joint
    space = Parameters.of(data.build())
    draws = hmc(log_joint, space.size, chains=64, warmup=400, keep=600, length=1.2)
    name = "network"
    target = Problem(name, "", space, log_joint, draws[0], truth, None, (), data, False)
    y = torch.stack([target.outputs(chain) for chain in draws])  # [C, T, G]: weights are not identified, functions are
    report = check(y, KEPT[name]) | {"sampler": "HMC"}
    write(name, draws.flatten(0, 1), report)


def hmc(log_joint: Callable[[Tensor], Tensor], P: int, *, chains: int, warmup: int, keep: int, length: float) -> Tensor:
    """[C, T, P]: leapfrog trajectories of length U(0.5, 1.5)·`length`, step size tuned in the warm-up, then fixed."""
    generator = torch.Generator().manual_seed(0)
    options = {"generator": generator, "dtype": torch.float64}

    def gradient(theta: Tensor) -> tuple[Tensor, Tensor]:
        theta = theta.detach().requires_grad_()
        value = log_joint(theta)
        return value.detach(), torch.autograd.grad(value.sum(), theta)[0]

    theta = torch.randn(chains, P, **options)
    value, slope = gradient(theta)
    step, kept = 1e-3, []
    for iteration in range(warmup + keep):
        jitter = 0.5 + torch.rand((), **options).item()
        steps = max(1, min(20 if iteration < 100 else 200, round(jitter * length / step)))
        momentum = torch.randn(chains, P, **options)
        energy = value - 0.5 * momentum.square().sum(-1)
        point, force = theta, slope
        for _ in range(steps):
            momentum = momentum + 0.5 * step * force
            point = point + step * momentum
            new_value, force = gradient(point)
            momentum = momentum + 0.5 * step * force
        log_accept = (new_value - 0.5 * momentum.square().sum(-1) - energy).nan_to_num(-torch.inf).clamp(max=0)
        accept = torch.rand(chains, **options).log() < log_accept
        theta = torch.where(accept.unsqueeze(-1), point, theta)
        slope = torch.where(accept.unsqueeze(-1), force, slope)
        value = torch.where(accept, new_value, value)
        rate = log_accept.exp().mean().item()
        if iteration < warmup:
            step *= 2.718281828 ** ((rate - 0.85) * min(0.5, 5 / (1 + iteration) ** 0.6))
        else:
            kept.append(theta)
        if iteration % 100 == 0:
            print(f"{iteration}: step {step:.4f}, accepted {rate:.2f}, log joint {value.mean():.2f}", flush=True)
    return torch.stack(kept, dim=1)


def check(draws: Tensor, least: int) -> dict[str, str]:
    """R̂ and effective size, bulk and tails, of every number: [C, T, Q]. Refuses chains that do not agree."""
    from arviz_base import convert_to_dataset
    from arviz_stats import ess, rhat

    data: Any = convert_to_dataset({"x": draws.numpy()})
    r_hat: Any = rhat(data)
    found = {
        "r_hat": float(r_hat["x"].max()),
        "ess_bulk": float(ess(data, method="bulk")["x"].min()),
        "ess_tail": float(ess(data, method="tail")["x"].min()),
    }
    print(found, flush=True)
    if found["r_hat"] > 1.01 or min(found["ess_bulk"], found["ess_tail"]) < least:
        raise SystemExit(f"the chains do not agree well enough for {least} draws: {found}")
    return {key: f"{value:.4f}" if key == "r_hat" else f"{value:.0f}" for key, value in found.items()}


def write(name: str, draws: Tensor, report: dict[str, str]) -> None:
    """Every so many-th draw, chain after chain, in float32."""
    rows = torch.linspace(0, len(draws) - 1, KEPT[name]).round().long()
    path = REFERENCES / f"{name}.safetensors"
    save_file({"draws": draws[rows].float().contiguous()}, path, metadata=report)
    path.chmod(0o644)
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB, {report}")


MAKERS = {"logistic-regression": logistic_regression, "network": network}

if __name__ == "__main__":
    for wanted in sys.argv[1:] or MAKERS:
        MAKERS[wanted]()
