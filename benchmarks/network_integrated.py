"""What does a normal over the 46 weights of `hard_densities`' network lack? Its last layer integrated out, for once.

    python -m benchmarks.network_integrated [--limits 12000 40000] [--seeds 2]

Given the 30 numbers a of the first layer the 16 of the last one, b, are normal, and log ∫ p(a, b) db is known: a log
density of 30 numbers. A normal is fitted to that; its draws are completed by b given a, exactly. The ELBO is a bound of
the same evidence as that of a family over all 46, so what it has more is what the normal shape of b costs. The
predictive density and the width of functions are compared with HMC's on the 30 numbers, 16 chains. An evaluation here
would be 17 of the log density of 46 numbers, if that were all that is known of it: a gradient and 16 products.
"""

import argparse
from math import log, pi

import torch
from torch import Tensor

import structvi as vi
from benchmarks.hard_densities import PREDICTING, Known, Network, normals
from benchmarks.hmc import hmc, r_hat

CHAINS, KEPT, WARM_UP, LEAPS = 16, 400, 200, 16


class Integrated(Known):
    """log ∫ p(a, b) db of a network's posterior."""

    def __init__(self, network: Network):
        self.network = network
        super().__init__(2 * network.units, self.evidence)

    def conditional(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """A root of the precision of b given a, and the slope at b = 0: [S, 16, 16], [S, 16]."""
        units, noise = self.network.units, self.network.noise
        first, bias = a.view(-1, 2, units).unbind(1)
        hidden = (self.network.x.view(-1, 1) * first.unsqueeze(1) + bias.unsqueeze(1)).tanh() / units**0.5
        features = torch.cat([hidden, torch.ones_like(hidden[..., :1])], dim=-1) / noise
        identity = torch.eye(units + 1, dtype=a.dtype)
        return torch.linalg.cholesky(features.mT @ features + identity), features.mT @ self.network.y / noise

    def evidence(self, a: Tensor) -> Tensor:
        root, slope = self.conditional(a)
        gained = torch.linalg.solve_triangular(root, slope.unsqueeze(-1), upper=False).squeeze(-1).square().sum(-1)
        y, noise = self.network.y, self.network.noise
        constant = len(y) * log(noise * (2 * pi) ** 0.5) + a.shape[-1] / 2 * log(2 * pi)
        log_det = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return (gained - (y / noise).square().sum() - a.square().sum(-1)) / 2 - log_det - constant

    def completed(self, a: Tensor, generator: torch.Generator) -> Tensor:
        """All 46 numbers."""
        root, slope = self.conditional(a)
        noise = normals(generator, *slope.shape, 1)
        b = torch.cholesky_solve(slope.unsqueeze(-1), root) + torch.linalg.solve_triangular(root.mT, noise, upper=True)
        return torch.cat([a, b.squeeze(-1)], dim=-1)


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--limits", type=int, nargs="*", default=[12_000, 40_000])
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for data in range(2):
        network = Network(data)
        target, generator = Integrated(network), torch.Generator().manual_seed(5)
        chains = hmc(target, normals(generator, CHAINS, target.space.size), KEPT, WARM_UP, LEAPS, seed=0)
        truth = target.completed(chains.theta.flatten(0, 1), generator)
        each = torch.stack(
            [network.predictive(target.completed(one, generator)).mean() for one in chains.theta.unbind(1)]
        )
        exact = network.functions(truth, network.x_new)
        outside = (network.x_new < network.x.min()) | (network.x_new > network.x.max())
        known, width = network.predictive(truth).mean().item(), exact.std(0).mean().item()
        error, rate = each.std().item() / CHAINS**0.5, r_hat(chains.log_p).item()
        print(f"data set {data}: HMC {known:.4f} ± {error:.4f} nats a row, R̂ of log p {rate:.3f}", flush=True)
        for limit in options.limits:
            for seed in range(options.seeds):
                result = vi.fit(target, vi.FullNormal(), seed=seed, max_evaluations=limit, progress=False)
                with torch.no_grad():
                    q, generator = result.family(), torch.Generator().manual_seed(seed)
                    a = q.draw(PREDICTING, vi.naive, generator).theta
                    over = target.log_joint(a) - q.log_prob(a)
                    theta = target.completed(a, generator)
                row = {"data": data, "limit": limit, "seed": seed, "elbo": over.mean().item()}
                row |= {"evidence": over.logsumexp(0).item() - log(PREDICTING)}
                row |= {"predictive": network.predictive(theta).mean().item() - known}
                functions = network.functions(theta, network.x_new)
                row |= {"width": functions.std(0).mean().item() / width}
                aside = (functions.mean(0) - exact.mean(0)).abs() / exact.std(0)
                row |= {"aside": aside[~outside].mean().item(), "outside": aside[outside].mean().item()}
                rows.append(row)
                print(
                    "  at most {limit}, seed {seed}: ELBO {elbo:.2f}, importance-sampled evidence {evidence:.2f}, "
                    "predictive density − HMC's {predictive:+.4f}, width {width:.2f}, means of functions aside by "
                    "{aside:.2f} sd, left and right of the data by {outside:.2f}".format(**row),
                    flush=True,
                )
    return rows


if __name__ == "__main__":
    main()
