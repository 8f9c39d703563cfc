"""From a posterior to predictions, to drawn weights, to networks that have them, and to a summary."""

import copy
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ..networks.call import alone_with
from ..util.checks import check_integer
from ..util.random_streams import borrowed_stream
from .draws import IndependentDraws, MemberDraws, PredictiveDraws, WeightDraws
from .linearised import POINTS, LinearisedDraws, is_normal
from .predictive import Predictive

if TYPE_CHECKING:
    from ..ensemble.ensemble import Ensemble
    from ..posterior import Posterior

#: draws of weights where no number is asked for
DRAWS = 64


def predict(
    posterior: "Posterior | Ensemble",
    x: Any,
    draws: int | None = None,
    *,
    reference: Any = None,
    generator: torch.Generator | None = None,
    linearise: bool | None = None,
    calibrated: bool = True,
) -> Predictive:
    """Return the mixture over draws, Σ_s w_s p(t | y_s(x)), without gradients and with the network's mode as it was.

    Args:
        posterior: what `variationalize` returns.
        x: a tensor [B, ..]; a tuple is passed to the network as several arguments, a dict as keywords. With
            `variationalize(forward=)` the batch as your function sees it: what it returns as target is not used.
        draws: of the weights, how many; S is rounded up to whole groups, and families with finitely many states give
            each once: see `note`. None: where the outputs of an input are few and known to be normal, those of a
            linearised network, there are no draws of weights: exact at every input, but how inputs go together is not
            told (`sample` and `joint_log_prob` want draws of weights). Elsewhere 64.
        reference: for batch_norm="reestimated", inputs of the training data: the network sees them above x in one
            batch, and only x's rows are kept.
        generator: of draws and dropout. None: the same draws in every call, thread and process.
        linearise: True for y = f(x; θ₀) + J(x)(θ − θ₀), θ₀ the posterior's mean (of a linearised posterior its own);
            False for the network at the drawn weights; None for what the posterior was fitted with. The other one is
            not the predictive of the posterior that was fitted, and often the better prediction.
        calibrated: False for the mixture without what `calibrate` put on top of it; `note` tells which.

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
    return draws_for(
        posterior, x, draws, reference=reference, generator=generator, linearise=linearise, calibrated=calibrated
    )(x)


def draws_for(
    posterior: "Posterior | Ensemble",
    inputs: Any,
    draws: int | None,
    *,
    reference: Any = None,
    generator: torch.Generator | None = None,
    linearise: bool | None = None,
    calibrated: bool = True,
) -> PredictiveDraws:
    """Return what predicts at inputs like these, with the arguments of `predict`."""
    members = posterior.posteriors
    if any(one.fit_status is None and one.warns_unfitted for one in members):
        warnings.warn(
            "this posterior was never fitted, so it predicts from its start: call bayes.fit(loader, epochs=..) or "
            "bayes.laplace(loader) first",
            stacklevel=3,
        )
    for one in members:
        one.warns_unfitted = False  # once is enough
    is_ensemble = posterior is not members[0]
    own = calibrated and not is_ensemble
    if draws is None and reference is None and all(is_normal(one, inputs, linearise) for one in members):
        points = max(64, POINTS // 2 ** (len(members) - 1).bit_length())
        found: list[PredictiveDraws] = [LinearisedDraws(one, generator, own, points) for one in members]
    else:
        each = DRAWS if draws is None else draws
        each = -(-each // len(members)) if isinstance(each, int) else each
        found = [
            WeightDraws(one, each, reference=reference, generator=generator, linearise=linearise, calibrated=own)
            for one in members
        ]
    as_fitted = linearise is None or all(linearise == (one.model.linearised_at is not None) for one in members)
    return MemberDraws(posterior, found, calibrated and as_fitted) if is_ensemble else found[0]  # pyright: ignore


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
    check_integer("n", n)
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
            "the posterior is one of the linearised network, and no network has its draws: predict(x) uses them, "
            "sample(n) gives them; a posterior with linearise=False has drawn networks"
        )
    with torch.no_grad(), borrowed_stream(generator):
        draws = posterior.family().draw(1)
        which = torch.multinomial(draws.weight, 1)
        return _network_at(posterior, posterior.space.join(draws.theta[which], draws.fixed)[0])


def mean_network(posterior: "Posterior") -> nn.Module:
    """Return a copy of the network at the posterior mean of its weights; for masked weights that is θ̂ times keep.

    Of a linearised posterior it is the network at that mean, not the linear function.
    """
    with torch.no_grad():
        return _network_at(posterior, posterior.family().mean)


@torch.no_grad()
def summary(posterior: "Posterior") -> str:
    """Return a posterior on one page: what is random, how wide it is, and how its last fit ended.

    A line for each tensor has its shape, the root mean square of its mean, the median of its standard deviations, and
    the share of its weights that are more than two standard deviations from zero.

    Example:
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> bayes = variationalize(nn.Linear(3, 2), likelihoods.Categorical(), MeanField(), num_data=100)
        >>> print(bayes.summary().splitlines()[0])
        MeanField over 8 numbers, likelihood Categorical, N = 100
    """
    posterior.check_whole()
    model, space, density = posterior.model, posterior.space, posterior.family()
    mean, sd = (space.unravel(x) for x in (density.mean, density.variance.clamp(min=0).sqrt()))
    N = "not known yet" if model.known_num_data is None else model.known_num_data
    names = f"{type(posterior.family).__name__} over {space.size} numbers, likelihood {type(model.likelihood).__name__}"
    lines = [f"{names}, N = {N}", f"{'tensor':30} {'shape':>16} {'rms of mean':>12} {'median sd':>10} |mean| > 2 sd"]
    for name in space.names:
        m, s = mean[name].double(), sd[name].double()
        shape = " × ".join(map(str, m.shape)) or "1"
        clear, rms = 100 * (m.abs() > 2 * s).double().mean(), m.square().mean().sqrt()
        lines.append(f"{name:30} {shape:>16} {rms:12.3g} {s.median():10.3g} {clear:11.0f} %")
    held = [name for name, _ in posterior.net.named_parameters() if name not in space.names]
    if held:
        few = ", ".join(held[:4]) + (", .." if len(held) > 4 else "")
        lines.append(f"held at the network's values: {len(held)} tensors ({few})")
    fitted = posterior.last_fit
    last = "not fitted in this session: bayes.fit(loader, ..)" if fitted is None else f"last fit: {fitted.verdict}"
    return "\n".join([*lines, last])


def _network_at(posterior: "Posterior", theta: Tensor) -> nn.Module:
    with alone_with(posterior.net):  # no call has drawn weights in it
        net = copy.deepcopy(posterior.net)  # ties stay: they are taken once, under their first name
    named = posterior.model.with_padding(posterior.space.unravel(theta))
    for name, parameter in net.named_parameters():
        if name in named:
            parameter.copy_(named[name])
    return net
