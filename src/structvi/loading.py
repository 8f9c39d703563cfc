"""`vi.load`: whatever structvi has saved, from its file."""

import os
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import nn

from .density.fit_file import load_fit
from .density.result import DensityFit
from .ensemble.ensemble import Ensemble, load_ensemble
from .files import posterior_file
from .models.target import Target
from .posterior import Posterior


@overload
def load(
    path: str | os.PathLike[str], of: nn.Module, *, device: torch.device | str | None = None, **given: Any
) -> Posterior: ...


@overload
def load(path: str | os.PathLike[str], of: Sequence[nn.Module], **given: Any) -> Ensemble: ...


@overload
def load(path: str | os.PathLike[str], of: Target, **given: Any) -> DensityFit: ...


def load(path: str | os.PathLike[str], of: Any, **given: Any) -> Posterior | Ensemble | DensityFit:
    """Return the posterior, ensemble or fit of a log density that a file holds; reading it runs no code.

    Networks, log densities, and classes and functions of your own are not in the file: give them again. A network's
    held tensors and buffers are part of the posterior: `load` copies them into the network, as `load_state_dict` does.
    Files of other versions of structvi are not read.

    Args:
        path: the file, or an ensemble's folder.
        of: the network of a posterior; the networks of an ensemble; or the log density of a fit.
        **given: for a posterior and an ensemble `family=`, `prior=`, `likelihood=` and `forward=` that you wrote
            yourself, made with the same arguments, and `device=`; for a fit `family=`, and in minibatches `loader=`.

    Raises:
        CheckpointError: the file is missing, damaged, of another version or of another kind.
        ValueError: the network, or a part that you gave, differs from the saved one.

    Example:
        >>> import tempfile
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> path = os.path.join(tempfile.mkdtemp(), "posterior.safetensors")
        >>> variationalize(nn.Linear(3, 2), likelihoods.Categorical(), MeanField(), num_data=100).save(path)
        >>> load(path, nn.Linear(3, 2)).family
        MeanField(initial_mean='current', initial_scale=0.1)
    """
    if isinstance(of, nn.Module):
        return posterior_file.load(Posterior, path, of, **given)
    if isinstance(of, Sequence) and all(isinstance(net, nn.Module) for net in of):
        return load_ensemble(path, of, **given)
    if isinstance(of, Target):
        return DensityFit(**load_fit(path, of, **given))
    raise TypeError(
        f"load expects what was saved after the path: a network (nn.Module), a list of networks or a log density; got "
        f"{type(of).__name__}"
    )
