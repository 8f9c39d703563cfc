"""The ELBO beside what a predictor that ignores the input is worth."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from ..models.bayesian_model import BayesianModel
from ..models.likelihoods import Likelihood, split_mask


class Watched:
    """Batches, of whose targets the best constant output is found on the way; nothing is read twice.

    Args:
        batches: what is read.
        model: its likelihood says what a constant is worth. A plain function does not, nor does `forward=`, whose
            targets are not known without a pass of the network.
    """

    def __init__(self, batches: Iterable[Any], model: BayesianModel):
        likelihood = model.likelihood
        self.batches, self.model, self.rows = batches, model, 0
        self._likelihood = likelihood if isinstance(likelihood, Likelihood) and model.user_forward is None else None
        self._sums: Tensor | None = None

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            if self._likelihood is not None:
                target, mask = split_mask(self.model.split(batch)[1])
                sums = self._likelihood.sums(target, mask)
                self._sums = sums if sums is None or self._sums is None else _added(self._sums, sums)
                self.rows += len(target)
            yield batch

    @property
    def log_likelihood(self) -> float | None:
        """Of the best constant, in nats for the whole data set."""
        if self._likelihood is None or self._sums is None:
            return None
        return self._likelihood.best_constant(self._sums) * (self.model.num_data / self.rows)


def _added(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two, where the shorter has zeros at its end: labels that a batch does not have."""
    longest = max(a.shape[-1], b.shape[-1])
    return pad(a, (0, longest - a.shape[-1])) + pad(b, (0, longest - b.shape[-1]))


def worse_than_nothing(elbo: float, standard_error: float, constant: float | None) -> bool:
    """Whether the ELBO is below it by more than its noise."""
    noise = 2 * standard_error if standard_error == standard_error else 0.0
    return constant is not None and elbo + noise < constant


def explain(elbo: float, constant: float, improving: bool) -> str:
    more = "It still rises; fit on only while held-out likelihood rises too (evaluate). " if improving else ""
    return (
        f"worse than knowing nothing: an output that ignores the input has {constant:.4g} nats, this posterior "
        f"{elbo:.4g}; the KL of its weights costs more than the data say. {more}Fewer random weights (select=, "
        "PerLayer), a narrower prior or more data help; λ < 1 (temperature=) predicts better and is not the posterior"
    )
