"""Kernels of a GPU that networks with drawn weights cannot have as they are: cuDNN's recurrence, torch's attention."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn


class _Network(Protocol):
    @property
    def recurrent(self) -> Sequence[nn.Module]:
        """Those of its modules that are an LSTM, a GRU or an RNN of torch."""
        ...

    @property
    def attends(self) -> bool:
        """Whether it has an attention layer of torch."""
        ...


@contextmanager
def kernels_that_serve(net: _Network, some: Tensor) -> Iterator[None]:
    """Inside, the network can be called on the device of `some`, with gradients where they are on.

    Args:
        net: a twin of the network, this thread's own.
        some: one of the tensors that it is called with.

    Example:
        >>> from structvi.networks.twins import Twins
        >>> with Twins(nn.Linear(1, 1)).borrowed() as twin, kernels_that_serve(twin, torch.zeros(1)):
        ...     pass
    """
    if not (net.recurrent or net.attends) or not on_a_gpu(some):
        yield
        return
    with ExitStack() as stack:
        if torch.is_grad_enabled():
            stack.enter_context(differentiable(net.recurrent))
        if net.attends:
            stack.enter_context(plain_attention())
        yield


@contextmanager
def forgotten(recurrent: Sequence[nn.Module]) -> Iterator[None]:
    """Afterwards, modules hold the list of weights that they had before.

    torch's recurrent modules keep the weights of their last call in a list of their own: drawn weights would stay in
    memory, and with them the graph that they come from, whose nodes belong to the stream of that call.

    Example:
        >>> gru = nn.GRU(1, 1)
        >>> before = gru._flat_weights
        >>> with forgotten([gru]):
        ...     gru._init_flat_weights()
        >>> gru._flat_weights is before
        True
    """
    names = ("_flat_weights", "_flat_weight_refs")
    had = [(vars(module), {name: vars(module)[name] for name in names if name in vars(module)}) for module in recurrent]
    try:
        yield
    finally:
        for own, before in had:
            own.update(before)


def on_a_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


@contextmanager
def differentiable(recurrent: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, modules in eval mode are in training mode and have no dropout: the same numbers, with a way back.

    cuDNN keeps what its backward pass needs in training mode alone, and networks are fitted in eval mode.

    Example:
        >>> lstm = nn.LSTM(2, 2, num_layers=2, dropout=0.5).eval()
        >>> with differentiable([lstm]):
        ...     lstm.training, lstm.dropout
        (True, 0.0)
        >>> lstm.training, lstm.dropout
        (False, 0.5)
    """
    changed = [(vars(module), module.dropout) for module in recurrent if not module.training]
    try:
        for own, _ in changed:  # past nn.Module's own, as in `Twin.set_modes`
            own["training"], own["dropout"] = True, 0.0
        yield
    finally:
        for own, dropout in changed:
            own["training"], own["dropout"] = False, dropout


class _Off:
    """How many are inside `plain_attention`, and what was set before the first came."""

    lock = threading.Lock()
    inside = 0
    before = True


@contextmanager
def plain_attention() -> Iterator[None]:
    """Inside, encoder layers and attention are made of plain operations, in the whole process.

    Their fast path, taken in eval mode without gradients, reads four numbers of `in_proj_bias` at once, and only looks
    whether its address is a multiple of 4 bytes, not of 16. Drawn weights lie side by side in one vector, each where
    the one before it ends: on a GPU that is a misaligned address, after which the process can do nothing there.

    Example:
        >>> with plain_attention(), plain_attention():
        ...     torch.backends.mha.get_fastpath_enabled()
        False
        >>> torch.backends.mha.get_fastpath_enabled()
        True
    """
    mha = torch.backends.mha
    with _Off.lock:
        if _Off.inside == 0:
            _Off.before = mha.get_fastpath_enabled()
            mha.set_fastpath_enabled(False)
        _Off.inside += 1
    try:
        yield
    finally:
        with _Off.lock:
            _Off.inside -= 1
            if _Off.inside == 0:
                mha.set_fastpath_enabled(_Off.before)
