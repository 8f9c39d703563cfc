"""Rows of embeddings that are no weights: that of `padding_idx` has no gradient in torch, and stays as it is.

A draw would change what the network makes of padding, and neither a fit nor a curvature would see it.
"""

from collections.abc import Collection, Mapping
from operator import attrgetter

import torch
from torch import Tensor, nn


def padding_rows(net: nn.Module, names: Collection[str]) -> dict[str, int]:
    """Of these tensors those of embeddings with a padding row, and which it is.

    One that has another name too, an output layer's, is not among them: there the row is a weight.

    Example:
        >>> padding_rows(nn.Sequential(nn.Embedding(5, 2, padding_idx=1), nn.Linear(2, 1)), ["0.weight", "1.weight"])
        {'0.weight': 1}
    """
    every = [id(tensor) for _, tensor in net.named_parameters(remove_duplicate=False)]
    found = {}
    for prefix, module in net.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.padding_idx is not None:
            name = f"{prefix}.weight".removeprefix(".")
            if name in names and every.count(id(module.weight)) == 1:
                found[name] = module.padding_idx
    return found


def with_padding(tensors: Mapping[str, Tensor], rows: Mapping[str, int], net: nn.Module) -> Mapping[str, Tensor]:
    """Tensors [.., n, d] by name, with the network's own padding rows.

    Example:
        >>> net = nn.Embedding(3, 2, padding_idx=0)
        >>> with_padding({"weight": torch.ones(3, 2)}, {"weight": 0}, net)["weight"].sum(1)
        tensor([0., 2., 2.])
    """
    changed = {}
    for name, row in rows.items():
        if name in tensors:
            own = attrgetter(name)(net).detach()  # no parameter inside a functional_call
            is_padding = (torch.arange(len(own), device=own.device) == row).unsqueeze(1)
            changed[name] = torch.where(is_padding, own, tensors[name])
    return {**tensors, **changed} if changed else tensors
