"""From a posterior to predictions, to drawn weights, and to networks that have them."""

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ..couplings import Coupling, naive
from ..networks.call import alone_with
from ..util.checks import check_integer
from ..util.random_streams import borrowed_stream
from .draws import IndependentDraws
from .member_chunks import chunks_for
from .predictive import Predictive

if TYPE_CHECKING:
    from ..posterior import EnsembleBase, Posterior


def predict(
    posterior: "Posterior | EnsembleBase",
    x: Any,
    draws: int | None = None,
    *,
    coupling: Coupling = naive,
    chunk: int = 16,
    reference: Any = None,
    generator: torch.Generator | None = None,
    linearise: bool | None = None,
    calibrated: bool = True,
) -> Predictive:
    """The mixture over draws, Σ_s w_s p(t | y_s(x)), without gradients and with the network's mode as it was.

    Args:
        posterior: what `variationalize` returns.
        x: a tensor [B, ..]; a tuple is passed to the network as several arguments, a dict as keywords. With
            `variationalize(forward=)` the batch as your function sees it: what it returns as target is not used and
            may be None, so write it to do without (`batch.get("y")`).
        draws: of the weights, how many; S is rounded up to whole groups of the coupling, and families with finitely
            many states give each once: see `Predictive.draws` and `note`. None: where the outputs of an input are few
            and known to be normal, those of a linearised network, they are drawn themselves, at 256 evenly spread
            points, without draws of weights: exact at every input, but how inputs go together is not told (`sample`
            and `joint_log_prob` want draws of weights). Elsewhere 64 draws of the weights.
        coupling: independent draws by default, for couplings that pay in a fit need not in a prediction. The variance
            of mean, variance, 95 % quantile and log density at 64 draws, relative to theirs, fitted tanh network of 32
            units: `paired` 1.1, 1.0, 1.0, 1.0, `unscented` 1.8, 1.9, 1.9, 1.7. Draws are used with their weights.
        chunk: how many draws are evaluated at once; the seeds go by chunk, so another one gives other draws.
        reference: for batch_norm="reestimated", inputs of the training data: the network sees them above x in one
            batch, and only x's rows are kept.
        generator: of draws and dropout; the global stream is then left alone.
        linearise: True for y = f(x; θ₀) + J(x)(θ − θ₀), θ₀ the posterior's mean (of a linearised posterior its own);
            False for the network at the drawn weights; None for what the posterior was fitted with. The other one is
            not the predictive of the posterior that was fitted, and often the better prediction.
        calibrated: False for the mixture as it is, without what `calibrate` put on top of it; `note` tells which.

    Example:
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(nn.Linear(3, 2), likelihoods.Categorical(), num_data=10)
        >>> pred = predict(bayes, torch.zeros(5, 3), draws=8)
        >>> pred.mean.shape, pred.mutual_information.shape
        (torch.Size([5, 2]), torch.Size([5]))
    """
    if isinstance(x, np.ndarray | DataLoader | Dataset):
        raise TypeError(
            f"predict expects the network's inputs as tensors, got {type(x).__name__}; of an array make one with "
            "torch.as_tensor, of a loader give the inputs of its batches one by one, or use evaluate"
        )
    arguments = (posterior, draws, coupling, chunk, reference, generator, linearise, calibrated)
    return chunks_for(lambda: x, *arguments).whole(x)


def sample(posterior: "Posterior", n: int = 1, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """n independent draws of the weights, by tensor name: [n, *shape] each.

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
    check_integer("n", n)
    space = posterior.space
    with torch.no_grad():
        every = list(IndependentDraws(posterior.family(), n, generator))
        drawn = space.unravel(torch.cat([space.join(one.theta, one.fixed) for one in every]))
        return dict(posterior.model.with_padding(drawn))


def sample_network(posterior: "Posterior", generator: torch.Generator | None = None) -> nn.Module:
    """A copy of the network with drawn weights: an ordinary module with parameters of its own.

    Example:
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(nn.Linear(3, 2), likelihoods.Categorical(), num_data=10)
        >>> sample_network(bayes)
        Linear(in_features=3, out_features=2, bias=True)
    """
    if posterior.model.linearised_at is not None:
        raise ValueError(
            "the posterior is one of the linearised network, and no network has its draws: predict(x) uses them, "
            "sample(n) gives them; a posterior with linearise=False has drawn networks"
        )
    with torch.no_grad(), borrowed_stream(generator):
        draws = posterior.family().draw(1)
        which = torch.multinomial(draws.weight, 1)
        return _network_at(posterior, posterior.space.join(draws.theta[which], draws.fixed)[0])


def mean_network(posterior: "Posterior") -> nn.Module:
    """A copy of the network at the posterior mean of its weights; for masked weights that is θ̂ times keep.

    Of a linearised posterior it is the network at that mean, not the linear function.
    """
    with torch.no_grad():
        return _network_at(posterior, posterior.family().mean)


def _network_at(posterior: "Posterior", theta: Tensor) -> nn.Module:
    with alone_with(posterior.net):  # no call has drawn weights in it
        net = copy.deepcopy(posterior.net)  # ties stay: they are taken once, under their first name
    named = posterior.model.with_padding(posterior.space.unravel(theta))
    for name, parameter in net.named_parameters():
        if name in named:
            parameter.copy_(named[name])
    return net
