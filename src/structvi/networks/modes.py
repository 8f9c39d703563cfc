"""Modes in which a posterior calls its network: dropout on or off, and where batch norm takes its statistics from."""

from typing import Literal

from torch import nn

Dropout = Literal["off", "on"]
BatchNorm = Literal["frozen", "deterministic", "reestimated"]
DROPOUT: tuple[Dropout, ...] = ("off", "on")
BATCH_NORM: tuple[BatchNorm, ...] = ("frozen", "deterministic", "reestimated")

BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
# the last three drop inside themselves, or skip their own dropout layers on a fast path that only training closes
DROPOUTS = (nn.modules.dropout._DropoutNd, nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer)


def is_in_training(module: nn.Module, dropout: Dropout, batch_norm: BatchNorm) -> bool:
    """Return whether a layer is called in training mode; every other layer is called in eval mode."""
    if dropout == "on" and isinstance(module, DROPOUTS):
        return True
    return batch_norm == "reestimated" and isinstance(module, BATCH_NORMS)


def draws(module: nn.Module) -> bool:
    """Return whether a layer draws random numbers when it is called in its present mode."""
    share = getattr(module, "p", getattr(module, "dropout", 0.0))
    return module.training and isinstance(module, DROPOUTS) and isinstance(share, float) and share > 0
