"""Draws of the weights, and networks that have them; the xarray `DataTree` that arviz reads."""

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..couplings import naive
from ..families.family import Density, Draws
from ..networks.call import alone_with
from ..util.checks import check_integer
from ..util.random_streams import borrowed_stream, seed_from
from .predictive import DRAWN_NUMBERS

if TYPE_CHECKING:
    from xarray import DataTree

    from ..posterior import Posterior


class IndependentDraws:
    """S independent draws of q with equal weights, made again from their seeds as often as asked, chunk by chunk.

    If a group holds several draws (the parts of a mixture, masks), then one of each group is taken, with the
    probability of its weight.

    Example:
        >>> from structvi import MeanField, Parameters
        >>> q = MeanField().bind(Parameters({"z": torch.zeros(2)}))()
        >>> [draws.theta.shape for draws in IndependentDraws(q, 5, torch.Generator().manual_seed(0))]
        [torch.Size([5, 2])]
    """

    def __init__(
        self, density: Density, count: int, generator: torch.Generator | None = None, chunk: int | None = None
    ):
        check_integer("draws", count)
        self.density, self.count = density, count
        size = max(1, DRAWN_NUMBERS // density.P) if chunk is None else chunk
        self.sizes = [min(size, count - start) for start in range(0, count, size)]
        self.seeds = seed_from(generator, len(self.sizes))

    def __iter__(self) -> Iterator[Draws]:
        for size, seed in zip(self.sizes, self.seeds, strict=True):
            yield _one_of_each(self.density, size, torch.Generator(self.density.mean.device).manual_seed(seed))


@torch.no_grad()
def _one_of_each(density: Density, count: int, generator: torch.Generator) -> Draws:
    draws = density.draw(count, naive, generator)
    S = draws.weight.shape[0]
    if count == S:
        return draws
    within = torch.multinomial(draws.weight.reshape(count, -1), 1, generator=generator).squeeze(-1)
    which = torch.arange(count, device=within.device) * (S // count) + within
    return Draws(draws.theta[which], draws.weight.new_full((count,), 1 / count), draws.fixed)


def sample(posterior: "Posterior", n: int = 1, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """Return n independent draws of the weights, by tensor name: [n, *shape] each.

    Args:
        posterior: what `variationalize` returns.
        n: how many.
        generator: the source of all randomness; the global stream if None.

    Example:
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(nn.Linear(3, 2), likelihoods.Categorical(), num_data=10)
        >>> {name: tuple(draws.shape) for name, draws in sample(bayes, 5).items()}
        {'weight': (5, 2, 3), 'bias': (5, 2)}
    """
    space = posterior.space
    with torch.no_grad():
        every = list(IndependentDraws(posterior.family(), n, generator))
        drawn = space.unravel(torch.cat([space.join(one.theta, one.fixed) for one in every]))
        return dict(posterior.model.with_padding(drawn))


def sample_network(posterior: "Posterior", generator: torch.Generator | None = None) -> nn.Module:
    """Return a copy of the network with drawn weights: an ordinary module with parameters of its own.

    Example:
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(nn.Linear(3, 2), likelihoods.Categorical(), num_data=10)
        >>> sample_network(bayes)
        Linear(in_features=3, out_features=2, bias=True)
    """
    if posterior.model.linearised_at is not None:
        raise ValueError(
            "no network has the draws of a linearised posterior: predict(x) uses them, sample(n) gives them"
        )
    with torch.no_grad(), borrowed_stream(generator):
        draws = posterior.family().draw(1)
        which = torch.multinomial(draws.weight, 1)
        return _network_at(posterior, posterior.space.join(draws.theta[which], draws.fixed)[0])


def mean_network(posterior: "Posterior") -> nn.Module:
    """Return a copy of the network at the posterior mean of its weights; for masked weights that is θ̂ times keep.

    If the posterior is linearised, it is still the network at that mean, not the linear function.
    """
    with torch.no_grad():
        return _network_at(posterior, posterior.family().mean)


def _network_at(posterior: "Posterior", theta: Tensor) -> nn.Module:
    with alone_with(posterior.net):  # no call has drawn weights in it
        return network_with(posterior.net, dict(posterior.model.with_padding(posterior.space.unravel(theta))))


def network_with(net: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a network with these values of its parameters; ties stay, under their first name."""
    net = copy.deepcopy(net)
    for name, parameter in net.named_parameters():
        if name in tensors:
            parameter.copy_(tensors[name])
    return net


Named = Mapping[str, Tensor]


def data_tree(posterior: Named, *, observed: Named | None = None, **groups: Named) -> "DataTree":
    """Return draws [S, ..] by name as one chain, [1, S, ..].

    Args:
        posterior: the draws.
        observed: the data, without an axis of draws.
        groups: other groups of arviz with a value at each draw: `log_likelihood`, `posterior_predictive`.

    Example:
        >>> import torch
        >>> data_tree({"z": torch.zeros(50, 3)}).posterior["z"].shape
        (1, 50, 3)
    """
    try:
        from arviz_base import from_dict
    except ImportError:
        raise ImportError('to_arviz needs arviz-base: pip install "structvi[diagnostics]"') from None
    chains: dict[str, Any] = {
        group: {name: draws.detach().cpu().unsqueeze(0).numpy() for name, draws in named.items()}
        for group, named in {"posterior": posterior, **groups}.items()
    }
    if observed is not None:
        chains["observed_data"] = {name: values.detach().cpu().numpy() for name, values in observed.items()}
    return from_dict(chains)
