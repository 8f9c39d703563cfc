"""One function at S weight vectors: by vmap where that is proven equal to a loop, else by the loop, in chunks."""

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
        if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
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
    return pytree.tree_map(lambda *rows: torch.stack(rows), outputs[0], *outputs[1:])


def _vmap(function: Callable[[Tensor], Any], theta: Tensor, chunk: int | None) -> Any:
    return vmap(function, randomness="different", chunk_size=chunk)(theta)


def _probe(function: Callable[[Tensor], Any], theta: Tensor) -> tuple[str, str]:
    """Outputs and gradients both ways, at two draws made different from each other."""
    theta = torch.stack([theta[0], theta[1] + 1e-3 * (1 + theta[1].abs())])
    expected, expected_grad = _with_gradient(lambda rows: _loop(function, rows), theta)  # its errors are the user's
    try:
        got, got_grad = _with_gradient(lambda rows: _vmap(function, rows, None), theta)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return "loop", f"vmap cannot run it: {str(error).strip().splitlines()[0][:200]}"
    same = _close(got, expected) and _close(got_grad, expected_grad)
    return ("vmap", "proven equal to the loop") if same else ("loop", "vmap gives other values than the loop")


def _with_gradient(function: Callable[[Tensor], Any], theta: Tensor) -> tuple[Any, Tensor]:
    with torch.enable_grad():
        theta = theta.detach().requires_grad_()
        outputs = function(theta)
        leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not leaves:
            return outputs, torch.zeros_like(theta)
        (gradient,) = torch.autograd.grad(sum(leaf.sum() for leaf in leaves), theta, allow_unused=True)  # pyright: ignore
    return outputs, torch.zeros_like(theta) if gradient is None else gradient


def _close(a: Any, b: Any) -> bool:
    """Equal up to the rounding of another order of summation, relative to the size of the whole tensor."""
    left, right = pytree.tree_leaves(a), pytree.tree_leaves(b)
    if len(left) != len(right):
        return False
    for x, y in zip(left, right, strict=True):
        if x.shape != y.shape:
            return False
        if not x.dtype.is_floating_point:
            if not torch.equal(x, y):
                return False
            continue
        x, y = x.detach().double(), y.detach().double()
        if not torch.equal(torch.isfinite(x), torch.isfinite(y)):
            return False
        x, y = x.nan_to_num(0.0, 0.0, 0.0), y.nan_to_num(0.0, 0.0, 0.0)
        size = y.abs().max().item() if y.numel() else 0.0
        if (x - y).abs().max().item() > 1e-3 * size if y.numel() else False:
            return False
    return True


def training_key(net: nn.Module) -> Hashable:
    """What of a network decides how it can be evaluated: which of its modules are in training mode."""
    return tuple(module.training for module in net.modules())
