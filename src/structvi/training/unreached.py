"""Weights that the output depends on and that no gradient reaches: `torch.no_grad()` or `detach()` in forward."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..basics.patterns import few
from ..basics.random_streams import borrowed_stream
from ..posterior import PosteriorBase
from ..predicting.draws import on_device
from .batches import Batches

#: by how much weights are moved to see whether the output follows, in units of their root mean square
STEP = 0.1


def warn_of_unreached(posterior: PosteriorBase, batches: Batches) -> None:
    """A warning that names them: a fit moves them to the prior, and a curvature knows nothing of them.

    Found on two items of the data: tensors without a gradient, whose change changes the output.
    """
    found, loader = batches.probe(), batches.loader
    if found is not None:
        batch = found[0]
    elif isinstance(loader, list | tuple):
        batch = loader[0]
    else:
        return
    try:
        names = unreached(posterior, on_device(batch, posterior.device))
    except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError):  # the first step says what is wrong
        return
    if names:
        warnings.warn(
            f"the network's output depends on {few(names)}, but no gradient reaches them: torch.no_grad() or detach() "
            "in its forward? As random tensors they would be drawn from the prior. Hold them: requires_grad_(False) "
            "before variationalize, or variationalize(.., exclude=[..])",
            stacklevel=2,
        )


def unreached(posterior: PosteriorBase, batch: Any) -> list[str]:
    """Names of random tensors that have no gradient on a batch, and change its output."""
    space = posterior.model.net_space
    own = {name: p.detach() for name, p in posterior.net.named_parameters() if name in space}
    leaves = {name: tensor.requires_grad_() for name, tensor in own.items()}
    with torch.enable_grad():
        outputs = [leaf for leaf in _outputs(posterior, leaves, batch) if leaf.requires_grad]
        gradients: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if outputs:
            total = torch.stack([leaf.double().sum() for leaf in outputs]).sum()
            gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    without = [name for name, gradient in zip(leaves, gradients, strict=True) if gradient is None]
    if not without:
        return []
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        before = _outputs(posterior, own, batch)

        def moves(name: str) -> bool:
            noise = torch.randn(own[name].shape, generator=generator).to(own[name])
            size = STEP * own[name].square().mean().sqrt().clamp(min=1e-3)
            after = _outputs(posterior, {**own, name: own[name] + size * noise}, batch)
            return any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))

        return [name for name in without if moves(name)]


def _outputs(posterior: PosteriorBase, named: Mapping[str, Tensor], batch: Any) -> list[Tensor]:
    """Of the network itself, with the same random numbers at each call."""
    model = posterior.model
    with posterior.network_mode(), model.linearised_around(None), borrowed_stream(torch.Generator().manual_seed(0)):
        return [leaf for leaf in tree_leaves(model.call(named, batch)[0]) if isinstance(leaf, Tensor)]
