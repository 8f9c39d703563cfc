"""A posterior kept as S drawn networks, for serving: `predictor = bayes.predictor(draws=32)`."""

import copy
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..couplings import Coupling, naive
from ..families.density import Draws
from ..families.mixture import Mixture
from ..families.point import MAP
from ..files import posterior_file
from ..networks.call import alone_with
from ..util.sizes import in_words
from .draws import DrawChunks
from .predictive import Predictive

if TYPE_CHECKING:
    from ..posterior import Posterior


class Predictor:
    """S draws of the weights, made once, and a network of its own: `predictor(x)` is `posterior.predict(x)` at them.

    It does not change where the posterior is fitted on, and the posterior is not needed any more. Threads may call it
    side by side. It holds S·P drawn numbers beside the network: `nbytes`.

    Attributes:
        draws: S.
        nbytes: of all that is held.

    Args:
        posterior: what `variationalize` returns; it is copied, but for its family.
        draws, coupling, chunk, reference, generator, linearise, calibrated: as in `predict`.
    """

    def __init__(
        self,
        posterior: "Posterior",
        draws: int,
        coupling: Coupling,
        chunk: int,
        reference: Any,
        generator: torch.Generator | None,
        linearise: bool | None,
        calibrated: bool,
    ):
        self.chunks = DrawChunks(posterior, draws, coupling, chunk, reference, generator, linearise, calibrated)
        with torch.no_grad():
            self.chunks.keep(_without_family(posterior))
        self.draws = self.chunks.draws

    @property
    def weights(self) -> Tensor:
        """Of the draws in the mixture, [S]: they sum to one."""
        parts = [self.chunks.share(index) * draws.weight for index, draws in enumerate(self._every())]
        return torch.cat(parts)

    @property
    def device(self) -> torch.device:
        return self.chunks.device

    @property
    def nbytes(self) -> int:
        """Bytes of the draws and of the network, its held tensors and buffers included."""
        model = self.chunks.posterior.model
        held = [*model.parameters(), *model.buffers()]
        drawn = [x for draws in self._every() for x in (draws.theta, draws.weight, *draws.fixed.values())]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in (*held, *drawn)}
        return sum(storages.values())

    def __repr__(self) -> str:
        size = self.chunks.posterior.space.size
        return f"Predictor({self.draws} draws of {size} weights, {in_words(self.nbytes)} on {self.device})"

    @overload
    def predict(self, x: DataLoader[Any] | Iterator[Any]) -> Iterator[Predictive]: ...

    @overload
    def predict(self, x: Any) -> Predictive: ...

    def predict(self, x: Any) -> Predictive | Iterator[Predictive]:
        """The mixture over the draws, Σ_s w_s p(t | y_s(x)): of `posterior.predict` with the same draws, the same bits.

        Args:
            x: as `posterior.predict` takes it. Or a `DataLoader`, or an iterator of batches as `fit` takes them: then
                an iterator of predictions, batch by batch, in memory that does not grow with their number; targets,
                where batches have them, are left aside.
        """
        if isinstance(x, DataLoader | Iterator):
            return self._stream(x)
        return self.chunks.whole(x)

    __call__ = predict

    def _stream(self, batches: Any) -> Iterator[Predictive]:
        for batch in batches:
            yield self.chunks.whole(self._inputs(batch))

    def _inputs(self, batch: Any) -> Any:
        """Of a batch with its target, or of one without."""
        if self.chunks.posterior.model.user_forward is not None or isinstance(batch, Tensor):
            return batch
        if isinstance(batch, tuple | list) and len(batch) == 1:  # of a TensorDataset(x)
            return batch[0]
        try:
            return self.chunks.posterior.model.split(batch)[0]
        except (TypeError, ValueError):  # inputs alone, several or by name
            return batch

    def to(self, device: torch.device | str) -> "Predictor":
        """Move draws and network, in place, and return it."""
        self.chunks.posterior.model.to(device)
        self.chunks.move(torch.device(device))
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file of a posterior, that of S points: `structvi.load(path, net).predictor()` reads it."""
        posterior = self.chunks.posterior
        if posterior.dropout == "on":
            raise ValueError(
                'dropout="on" has a stream of its own beside the drawn weights, which no file holds: save the posterior'
            )
        if (self.chunks.around is None) != (posterior.model.linearised_at is None):
            raise ValueError(
                "the predictor was made with a linearise= other than the posterior's, which its file would not know: "
                "save the posterior, and give linearise= to predictor() after loading it"
            )
        space = posterior.space
        theta = torch.cat([space.join(one.theta, one.fixed) for one in self._every()])
        parts = [MAP().bind(space.at(row)) for row in theta]
        points = Mixture(parts).of_parts(parts, self.weights.log())
        saved = type(posterior)(posterior.model, points, dropout=posterior.dropout, batch_norm=posterior.batch_norm)
        saved.calibration = self.chunks.calibration
        posterior_file.save(saved, path)

    def _every(self) -> list[Draws]:
        return [self.chunks.draw(index)[0] for index in range(len(self.chunks))]


def predictor(
    posterior: "Posterior",
    draws: int = 32,
    *,
    coupling: Coupling = naive,
    chunk: int = 16,
    reference: Any = None,
    generator: torch.Generator | None = None,
    linearise: bool | None = None,
    calibrated: bool = True,
) -> Predictor:
    """The posterior as S drawn networks, for serving: `predictor(x)` is `posterior.predict(x)` without new draws.

    Args:
        posterior: what `variationalize` returns.
        draws, coupling, chunk, reference, generator, linearise, calibrated: as in `predict`; the same generator gives
            the same draws.

    Example:
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(torch.nn.Linear(3, 2), likelihoods.Categorical(), num_data=10)
        >>> served = bayes.predictor(draws=4, generator=torch.Generator().manual_seed(0))
        >>> served
        Predictor(4 draws of 8 weights, 176 B on cpu)
        >>> x = torch.zeros(5, 3)
        >>> torch.equal(served(x).mean, bayes.predict(x, 4, generator=torch.Generator().manual_seed(0)).mean)
        True
    """
    posterior.check_whole()
    return Predictor(posterior, draws, coupling, chunk, reference, generator, linearise, calibrated)


def _without_family(posterior: "Posterior") -> "Posterior":
    """The same model and modes in tensors of their own."""
    with alone_with(posterior.net):  # no call has drawn weights in it
        model = copy.deepcopy(posterior.model)
    return type(posterior)(
        model.requires_grad_(False), MAP(), dropout=posterior.dropout, batch_norm=posterior.batch_norm
    )
