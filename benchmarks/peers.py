"""One training step of each peer, on the same network, batch and optimizer as ours. Imported only when it is built.

Every peer minimises its −ELBO/N, in the way its own documentation shows, with the settings that favour it where there
is a choice: Pyro without validation, fused Adam wherever a torch optimizer is taken.
"""

import importlib.util
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .nets import Problem, negative_log_likelihood
from .timing import Step

N = 50_000
LR = 1e-4
#: what a peer may raise when it cannot run a network here: reported in its row
ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
_numbers = count()


@dataclass(frozen=True)
class Peer:
    name: str
    module: str
    build: Callable[[Problem, int], Step]  # (problem, draws)
    draws: tuple[int, ...] = (1,)
    rank: int | None = None

    @property
    def installed(self) -> bool:
        return installed(self.module)


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def adam(parameters, capturable: bool = False) -> torch.optim.Optimizer:
    """The optimizer of every method that takes one."""
    return torch.optim.Adam(parameters, lr=LR, fused=True, capturable=capturable)


def trained(parameters, objective: Callable[[], Tensor]) -> Step:
    """zero_grad, backward, Adam."""
    optimizer = adam(parameters)

    def step() -> None:
        optimizer.zero_grad()
        objective().backward()
        optimizer.step()

    return step


def pyro_low_rank(rank: int) -> Callable[[Problem, int], Step]:
    def build(problem: Problem, draws: int) -> Step:
        import pyro
        from pyro.distributions import Normal
        from pyro.infer import SVI, Trace_ELBO
        from pyro.infer.autoguide import AutoLowRankMultivariateNormal

        pyro.enable_validation(False)
        priors = {
            name: Normal(torch.zeros_like(p), torch.ones_like(p)).to_event(p.dim())
            for name, p in problem.net.named_parameters()
        }

        def model(x: Tensor, t: Tensor) -> None:
            weights = {name: pyro.sample(name, prior) for name, prior in priors.items()}
            nll = negative_log_likelihood(functional_call(problem.net, weights, (x,)), t)
            pyro.factor("likelihood", -N * nll)

        # Pyro keeps parameters in one store, by the guide's name: another name for every guide
        guide_type = type(f"Guide{next(_numbers)}", (AutoLowRankMultivariateNormal,), {})
        guide = guide_type(model, rank=rank, init_scale=0.01)
        optimizer = pyro.optim.Adam({"lr": LR, "fused": True})  # pyright: ignore[reportAttributeAccessIssue]
        svi = SVI(model, guide, optimizer, Trace_ELBO(num_particles=draws))
        return lambda: svi.step(*problem.batch)

    return build


def forget() -> None:
    """Free what peers keep of steps that are no longer used: Pyro's store."""
    if "pyro" in sys.modules:
        sys.modules["pyro"].clear_param_store()


def bayesian_torch(problem: Problem, draws: int) -> Step:
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    net, (x, t) = problem.net, problem.batch
    settings = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -4.0}
    dnn_to_bnn(net, settings | {"type": "Reparameterization", "moped_enable": False, "moped_delta": 0.5})
    net.to(x.device)

    def objective() -> Tensor:
        data = torch.stack([negative_log_likelihood(net(x), t) for _ in range(draws)]).mean()
        kl: Any = get_kl_loss(net)
        return data + kl / N

    return trained(net.parameters(), objective)


def ivon(problem: Problem, draws: int) -> Step:
    from ivon import IVON

    net, (x, t) = problem.net, problem.batch
    optimizer = IVON(net.parameters(), lr=LR, ess=N, mc_samples=draws)

    def step() -> None:
        for _ in range(draws):
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                negative_log_likelihood(net(x), t).backward()
        optimizer.step()

    return step


def posteriors_diagonal(problem: Problem, draws: int) -> Step:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its own defaults
        import posteriors
        import torchopt

    def log_posterior(weights: Any, batch: tuple[Tensor, Tensor]) -> Any:
        x, t = batch
        log_prior = posteriors.diag_normal_log_prob(weights, 0.0, 1.0)
        nll = negative_log_likelihood(functional_call(problem.net, weights, (x,)), t)
        return log_prior / N - nll, x.new_zeros(())

    transform = posteriors.vi.diag.build(
        log_posterior, torchopt.adam(lr=LR), temperature=1 / N, n_samples=draws, init_log_sds=-4.0
    )
    weights: Any = {name: p.detach().clone() for name, p in problem.net.named_parameters()}
    state = transform.init(weights)

    def step() -> None:
        nonlocal state
        state, _ = transform.update(state, problem.batch)

    return step


def blitz(problem: Problem, draws: int) -> Step:
    from blitz.losses import kl_divergence_from_nn
    from blitz.modules import BayesianConv2d, BayesianEmbedding, BayesianLinear

    net, (x, t) = problem.net, problem.batch

    def convert(module: nn.Module) -> None:
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, BayesianLinear(child.in_features, child.out_features))
            elif type(child) is nn.Conv2d:
                sizes: Any = {"stride": child.stride, "padding": child.padding}
                setattr(module, name, BayesianConv2d(child.in_channels, child.out_channels, child.kernel_size, **sizes))
            elif type(child) is nn.Embedding:
                setattr(module, name, BayesianEmbedding(child.num_embeddings, child.embedding_dim))
            else:
                convert(child)

    convert(net)
    net.to(x.device)

    def objective() -> Tensor:
        terms = [negative_log_likelihood(net(x), t) + kl_divergence_from_nn(net) / N for _ in range(draws)]
        return torch.stack(terms).mean()

    return trained(net.parameters(), objective)


def pyvarinf(problem: Problem, draws: int) -> Step:
    from pyvarinf import Variationalize

    (x, t) = problem.batch
    net = Variationalize(problem.net)
    net.to(x.device)

    def objective() -> Tensor:
        data = torch.stack([negative_log_likelihood(net(x), t) for _ in range(draws)]).mean()
        return data + net.prior_loss() / N

    return trained(net.parameters(), objective)


PEERS = (
    Peer("Pyro, low rank", "pyro", pyro_low_rank(4), (1, 2), rank=4),
    Peer("Pyro, low rank", "pyro", pyro_low_rank(16), (1, 2), rank=16),
    Peer("bayesian-torch, mean field", "bayesian_torch", bayesian_torch),
    Peer("IVON, diagonal", "ivon", ivon),
    Peer("posteriors, diagonal", "posteriors", posteriors_diagonal),
    Peer("BLiTZ, mean field", "blitz", blitz),
    Peer("pyvarinf, mean field", "pyvarinf", pyvarinf),
)
#: peers that have no training step of a posterior over all weights to compare
NOT_COMPARED = {
    "laplace-torch": "fitted after an ordinary training, not by steps",
    "zuko": "its flows over P weights have conditioners of P inputs and outputs",
}
