"""`update`: rows are added to a posterior over the last layer, or removed, without another pass over the others.

The posterior's own mean and precision are all that it has to know of the rows before: Λ' = Λ ± Σ_n H_n ⊗ φ_n φ_nᵀ and
Λ'(μ' − μ) = ± Σ_n ∇ log p(t_n | μ). For Gaussian noise that is the posterior; else one step of Newton's method.
"""

from math import exp
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..families.matrix_normal import MatrixNormal, matrix_normal
from ..predict.one_pass import layer_of
from .layer_data import LayerData
from .rows import check_head, rows_of

if TYPE_CHECKING:
    from ..posterior import Posterior


@torch.no_grad()
def update(posterior: "Posterior", batch: Any, *, remove: bool = False) -> None:
    """Add the rows of a batch to a posterior that `fit_head` made, or remove them again, in place.

    With `Gaussian` noise the posterior is afterwards the one that a fit to all rows gives, at the same prior and noise.
    With labels it takes one step of Newton's method: call `fit_head` on all data after many updates. Remove only rows
    that were fitted or added before. A temperature stays.

    Args:
        posterior: over the last layer, fitted.
        batch: (input, target), as `fit_head` reads it.
        remove: take the rows away.

    Example:
        >>> from structvi import likelihoods, variationalize_head
        >>> from structvi.models.priors import NormalPrior
        >>> bayes = variationalize_head(torch.nn.Linear(3, 1), likelihoods.Gaussian(0.5), NormalPrior(1.0))
        >>> more = torch.randn(8, 3), torch.randn(8, 1)
        >>> bayes.fit_head([(torch.randn(32, 3), torch.randn(32, 1))], progress=False).converged
        True
        >>> bayes.update(more)
        >>> bayes.model.num_data
        40
    """
    check_head(posterior, "update")
    family, model = matrix_normal(posterior.family), posterior.model
    if posterior.fit_status is None or family is None:
        raise ValueError("update is for a posterior that fit_head made: call bayes.fit_head(loader) first")
    ((rows, B),) = rows_of(posterior, layer_of(posterior), [batch], posterior.family().mean.detach())
    if remove and B >= model.num_data:
        raise ValueError(f"the posterior is of {model.num_data} observations: {B} of them cannot be removed")
    sign = -1.0 if remove else 1.0
    _move(family, LayerData([rows], model.likelihood, family.unit, 1.0), sign)
    model.num_data += int(sign) * B


def _move(family: MatrixNormal, data: LayerData, sign: float) -> None:
    """Add the rows to a normal with Kronecker axes; the axes turn only where the curvature has a Kronecker product."""
    density = family.forward()
    T, left, right = density.matrix(family.mean), family.left.double(), family.right.double()
    precision = density.scale.double().square().reciprocal()  # [C, D], in units of the prior
    if data.is_exact and torch.allclose(precision, precision[:1], rtol=1e-5, atol=0.0):
        phi = (data.rows.features * data.unit * data.rows.weight[:, :1] * exp(-data.log_noise)).double()
        whole = (right * precision[0]) @ right.mT + sign * phi.mT @ phi
        _root(whole)
        along, right = torch.linalg.eigh(whole)
        precision = along.expand_as(precision)
    else:
        found = data.curvature(T, family.left, family.right).double()
        precision = (precision + sign * found).clamp(min=1.0)  # the prior's own
    gradient = sign * data.log_likelihood(T)[1].double()
    axes = data.unit.double().unsqueeze(-1) * right
    step = left @ ((left.mT @ gradient @ axes) / precision) @ axes.mT
    family.mean.copy_(density.vector(T + step.to(T)))
    family.set_axes(family.left, right, family.unit, precision.rsqrt())


def _root(precision: Tensor) -> Tensor:
    """Return the lower Cholesky root of a precision; raise if it is not positive."""
    root, failed = torch.linalg.cholesky_ex(precision)
    if int(failed):
        raise ValueError("no posterior is left without these rows: remove only rows that were fitted or added before")
    return root
