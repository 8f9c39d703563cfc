"""One function at S weight vectors: by vmap where that is proven equal to a loop, else by the loop, in chunks."""

import warnings
from collections.abc import Callable, Hashable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils import _pytree as pytree

from .random import borrowed_stream

Mode = Literal["auto", "vmap", "loop"]


class Evaluation:
    """Maps a function of one θ [P] over the rows of [S, P].

    With mode "auto" the first call with two or more draws runs the function at two of them both ways and compares
    outputs and gradients: vmap is used only if they agree. The choice and its reason are recorded (`choice`,
    `reason`), and are made again only where the caller's `key` changes (a network that goes from `eval` to `train`).

    Args:
        mode: "auto", "vmap" (an error where vmap cannot do it) or "loop".
        chunk: how many draws vmap takes at once; None for all.
    """

    def __init__(self, mode: Mode = "auto", chunk: int | None = None):
        if mode not in ("auto", "vmap", "loop"):
            raise ValueError(f'evaluation must be "auto", "vmap" or "loop", got {mode!r}')
        if chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
            raise ValueError(f"chunk must be None or an integer ≥ 1, got {chunk!r}")
        self.mode: Mode = mode
        self.chunk = chunk
        self._choices: dict[Hashable, tuple[str, str]] = {}
        self._last: tuple[str, str] | None = None

    @property
    def choice(self) -> str | None:
        """ "vmap" or "loop", as last used; None before the first call with several draws."""
        return self._last[0] if self._last else None

    @property
    def reason(self) -> str | None:
        return self._last[1] if self._last else None

    def __repr__(self) -> str:
        return f"Evaluation(mode={self.mode!r}, chunk={self.chunk}, choice={self.choice!r}, reason={self.reason!r})"

    def __call__(self, function: Callable[[Tensor], Any], theta: Tensor, key: Hashable = None) -> Any:
        """[S, P] → the function's outputs with a leading axis S."""
        if theta.shape[0] == 1:
            return _loop(function, theta)
        self._last = self._choose(function, theta, key)
        return _loop(function, theta) if self._last[0] == "loop" else _vmap(function, theta, self.chunk)

    def _choose(self, function: Callable[[Tensor], Any], theta: Tensor, key: Hashable) -> tuple[str, str]:
        if self.mode != "auto":
            return self.mode, "as asked"
        if key not in self._choices:
            with borrowed_stream(torch.Generator().manual_seed(0)):
                self._choices[key] = _probe(function, theta.detach()[:2])
        return self._choices[key]


def _loop(function: Callable[[Tensor], Any], theta: Tensor) -> Any:
    outputs = [function(row) for row in theta.unbind(0)]
    return pytree.tree_map(_stack, outputs[0], *outputs[1:])


def _stack(*rows: Any) -> Tensor:
    if not isinstance(rows[0], Tensor):
        raise TypeError(f"expected a tensor, or tensors in tuples, lists and dicts, got {type(rows[0]).__name__}")
    return torch.stack(rows)


def _vmap(function: Callable[[Tensor], Any], theta: Tensor, chunk: int | None) -> Any:
    return vmap(function, randomness="different", chunk_size=chunk)(theta)


def _probe(function: Callable[[Tensor], Any], theta: Tensor) -> tuple[str, str]:
    """Outputs and gradients both ways, at two draws made different from each other."""
    theta = torch.stack([theta[0], theta[1] + 1e-3 * (1 + theta[1].abs())])
    expected, expected_grad = _with_gradient(lambda rows: _loop(function, rows), theta)  # its errors are the user's
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            got, got_grad = _with_gradient(lambda rows: _vmap(function, rows, None), theta)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            return "loop", f"vmap cannot run it: {(str(error).strip() or repr(error)).splitlines()[0][:200]}"
    # vmap's own fallback is a slower loop that warns at every call
    if fallbacks := [str(w.message) for w in caught if "batching rule" in str(w.message)]:
        return "loop", f"vmap does not pay: {fallbacks[0].split('. ')[0]}"
    same = _close(got, expected) and _close(got_grad, expected_grad)
    return ("vmap", "proven equal to the loop") if same else ("loop", "vmap gives other values than the loop")


def _with_gradient(function: Callable[[Tensor], Any], theta: Tensor) -> tuple[Any, Tensor]:
    with torch.enable_grad():
        theta = theta.detach().requires_grad_()
        outputs = function(theta)
        leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not leaves:
            return outputs, torch.zeros_like(theta)
        # uneven weights: the plain sum of a softmax or a normalised output has no gradient, only rounding
        total = torch.stack([(leaf * _uneven(leaf)).sum().double() for leaf in leaves]).sum()
        (gradient,) = torch.autograd.grad(total, theta, allow_unused=True)
    return outputs, torch.zeros_like(theta) if gradient is None else gradient


def _uneven(like: Tensor) -> Tensor:
    return torch.arange(like.numel(), device=like.device, dtype=torch.float64).cos().to(like.dtype).view(like.shape)


def _close(a: Any, b: Any) -> bool:
    """Equal up to the rounding of another order of summation, relative to the size of the whole tensor."""
    left, right = pytree.tree_leaves(a), pytree.tree_leaves(b)
    if len(left) != len(right):
        return False
    for x, y in zip(left, right, strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            return False
        if not x.dtype.is_floating_point:
            if not torch.equal(x, y):
                return False
            continue
        # 1e-3 in float32, whose matrix products may run in TF32; 4e-8 in float64
        tolerance = 3 * torch.finfo(x.dtype).eps ** 0.5
        x, y = x.detach().double(), y.detach().double()
        size = y.where(y.isfinite(), 0.0).abs().max().item() if y.numel() else 0.0
        if not torch.isclose(x, y, rtol=0.0, atol=tolerance * size, equal_nan=True).all():
            return False
    return True


def training_key(net: nn.Module) -> Hashable:
    """What of a network decides how it can be evaluated: which of its modules are in training mode."""
    return tuple(module.training for module in net.modules())
