"""A posterior kept as S drawn networks, for serving: `predictor = bayes.predictor(draws=32)`."""

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..families.point import MAP
from ..networks.call import alone_with
from ..util.checks import in_words
from .predict import WeightDraws, draws_for
from .predictive import Predictive

if TYPE_CHECKING:
    from ..posterior import Posterior


class Predictor:
    """S draws of the weights, made once, and a network of its own: `predictor(x)` is `posterior.predict(x)` at them.

    It does not change where the posterior is fitted on, and the posterior is not needed any more. Threads may call it
    side by side. It holds S·P drawn numbers beside the network: `nbytes`.

    Args:
        draws: of the weights, of a posterior that is copied but for its family.
    """

    def __init__(self, draws: WeightDraws):
        posterior = draws.posterior
        with alone_with(posterior.net):  # no call has drawn weights in it
            model = copy.deepcopy(posterior.model).requires_grad_(False)
        draws.keep(type(posterior)(model, MAP(), dropout=posterior.dropout, batch_norm=posterior.batch_norm))
        self.drawn = draws

    @property
    def draws(self) -> int:
        """S."""
        return self.drawn.draws

    @property
    def weights(self) -> Tensor:
        """The weights of the draws in the mixture, [S]: they sum to one."""
        return self.drawn.every().weight

    @property
    def device(self) -> torch.device:
        return self.drawn.device

    @property
    def nbytes(self) -> int:
        """Bytes of the draws and of the network, its held tensors and buffers included."""
        model, drawn = self.drawn.posterior.model, self.drawn.every()
        held = [*model.parameters(), *model.buffers(), drawn.theta, drawn.weight, *drawn.fixed.values()]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
        return sum(storages.values())

    def __repr__(self) -> str:
        size = self.drawn.posterior.space.size
        return f"Predictor({self.draws} draws of {size} weights, {in_words(self.nbytes)} on {self.device})"

    def predict(self, x: Any) -> Predictive:
        """Return the mixture over the draws: of `posterior.predict` with the same draws, the same bits."""
        return self.drawn(x)

    __call__ = predict


def predictor(
    posterior: "Posterior",
    draws: int = 32,
    *,
    reference: Any = None,
    generator: torch.Generator | None = None,
    linearise: bool | None = None,
    calibrated: bool = True,
) -> Predictor:
    """Return the posterior as S drawn networks, for serving: `predictor(x)` is `posterior.predict(x, S)`.

    Args:
        posterior: what `variationalize` returns.
        draws, reference, generator, linearise, calibrated: as in `predict`; the same generator gives the same draws.

    Example:
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(torch.nn.Linear(3, 2), likelihoods.Categorical(), num_data=10)
        >>> served = bayes.predictor(draws=4)
        >>> served
        Predictor(4 draws of 8 weights, 176 B on cpu)
        >>> x = torch.zeros(5, 3)
        >>> torch.equal(served(x).mean, bayes.predict(x, 4).mean)
        True
    """
    posterior.check_whole()
    options: Any = {"reference": reference, "generator": generator, "linearise": linearise, "calibrated": calibrated}
    found = draws_for(posterior, None, draws, **options)
    assert isinstance(found, WeightDraws)
    return Predictor(found)
