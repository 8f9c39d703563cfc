"""`update`: rows are added to a posterior over the last layer, or removed, without another pass over the others.

The posterior's own mean and precision are all that it has to know of the rows before: Λ' = Λ ± Σ_n H_n ⊗ φ_n φ_nᵀ and
Λ'(μ' − μ) = ± Σ_n ∇ log p(t_n | μ). For Gaussian noise that is the posterior; else one step of Newton's method.
"""

from math import exp
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..families.matrix_normal import MatrixNormal, matrix_normal
from ..families.normal import NormalForm, Triangle
from ..models.likelihoods import Bernoulli, Gaussian
from ..networks.last_layer import LastLayer
from ..predict.last_layer import layer_of
from .bound import GaussianBound, LabelBound
from .kronecker import Kronecker
from .rows import Rows, check_head, rows_of

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
    form, family, model = posterior.family.normal(), matrix_normal(posterior.family), posterior.model
    is_dense = form is not None and isinstance(form.root, Triangle)
    if posterior.fit_status is None or (family is None and not is_dense):
        raise ValueError("update is for a posterior that fit_head made: call bayes.fit_head(loader) first")
    layer, sign = layer_of(posterior), -1.0 if remove else 1.0
    ((rows, B),) = rows_of(posterior, layer, [batch], posterior.family().mean.detach())
    if remove and B >= model.num_data:
        raise ValueError(f"the posterior is of {model.num_data} observations: {B} of them cannot be removed")
    if family is not None:
        _move(family, Kronecker([rows], model.likelihood, family.unit, 1.0), sign)
    elif form is not None:
        posterior.family.set_normal(_moved(form, layer, rows, model.likelihood, sign))
    model.num_data += int(sign) * B


def _moved(form: NormalForm, layer: LastLayer, rows: Rows, likelihood: Any, sign: float) -> NormalForm:
    """Return a normal with all covariances after the rows."""
    order = layer.order
    back, root = torch.argsort(order), form.triangle().double()
    covariance, mean = (root @ root.mT)[order][:, order], form.mean.double()[order]
    bound: GaussianBound | LabelBound = LabelBound(layer, isinstance(likelihood, Bernoulli), 0)
    if isinstance(likelihood, Gaussian):
        bound = GaussianBound(layer, likelihood)
    bound.add(rows.double())
    found = bound.expect(mean, covariance)
    precision = torch.cholesky_inverse(torch.linalg.cholesky(covariance)) + sign * found.precision
    lower = _root(precision)
    mean = mean + torch.cholesky_solve(sign * found.gradient.unsqueeze(-1), lower).squeeze(-1)
    covariance = torch.cholesky_inverse(lower)[back][:, back]
    return NormalForm(mean[back].to(form.mean), Triangle(torch.linalg.cholesky(covariance).to(form.mean)))


def _move(family: MatrixNormal, data: Kronecker, sign: float) -> None:
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
