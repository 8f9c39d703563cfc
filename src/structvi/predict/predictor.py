"""A posterior kept as S drawn networks, for serving: `predictor = bayes.predictor(draws=32)`."""

import copy
from typing import TYPE_CHECKING, Any

from ..families.point import MAP
from ..networks.call import alone_with
from .predict import WeightDraws, draws_for
from .predictive import Predictive

if TYPE_CHECKING:
    from ..posterior import Posterior


class Predictor:
    """S draws of the weights, made once, and a network of its own: `predictor(x)` is `posterior.predict(x)` at them.

    It does not change where the posterior is fitted on, and the posterior is not needed any more. Threads may call it
    side by side. It holds S·P drawn numbers beside the network: `nbytes`.

    Args:
        drawn: of a posterior, which is copied but for its family.
    """

    def __init__(self, drawn: WeightDraws):
        posterior = drawn.posterior
        with alone_with(posterior.net):  # no call has drawn weights in it
            model = copy.deepcopy(posterior.model).requires_grad_(False)
        drawn.hold()
        drawn.posterior = type(posterior)(model, MAP(), dropout=posterior.dropout, batch_norm=posterior.batch_norm)
        self.drawn, self.draws = drawn, drawn.draws

    @property
    def nbytes(self) -> int:
        """Bytes of the draws and of the network, its held tensors and buffers included."""
        model, every = self.drawn.posterior.model, self.drawn.every()
        held = [*model.parameters(), *model.buffers(), every.theta, every.weight, *every.fixed.values()]
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}.values())

    def predict(self, x: Any) -> Predictive:
        """Return the mixture over the draws: of `posterior.predict` with the same draws, the same bits."""
        return self.drawn(x)

    __call__ = predict


def predictor(posterior: "Posterior", draws: int = 32, **options: Any) -> Predictor:
    """Return the posterior as S drawn networks, for serving: `predictor(x)` is `posterior.predict(x, S)`.

    Args:
        posterior: what `variationalize` returns.
        draws, **options: as in `predict`; the same generator gives the same draws.

    Example:
        >>> import torch
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(torch.nn.Linear(3, 2), likelihoods.Categorical(), num_data=10)
        >>> served, x = bayes.predictor(draws=4), torch.zeros(5, 3)
        >>> torch.equal(served(x).mean, bayes.predict(x, 4).mean)
        True
    """
    posterior.check_whole()
    found = draws_for(posterior, None, draws, **options)
    assert isinstance(found, WeightDraws)
    return Predictor(found)
