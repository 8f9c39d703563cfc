"""One function at S weight vectors: by vmap where that was found equal to a loop and fits into memory, else a loop."""

import warnings
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from ..util.checks import check_integer, check_one_of, in_words
from .call import full_precision
from .plain_kernels import PlainKernels

Mode = Literal["auto", "vmap", "loop"]

#: bytes that the draws of one call of vmap may take on a CPU, where a loop over larger ones is as fast
MEMORY = 8e6
#: and on a GPU, as a share of its memory
SHARE = 0.125


class Choice(NamedTuple):
    way: str  # "vmap" or "loop"
    reason: str
    chunk: int | None = None  # how many draws vmap takes at once
    plain: bool = False  # whether vmap needs attention without fused kernels


class Evaluation:
    """Maps a function of one θ [P] over the rows of [S, P]; `choice` and `reason` tell how it did it last.

    With mode "auto" the first call with two or more draws runs the function at two draws both ways. It compares
    outputs and gradients. If they agree, vmap takes as many draws at once as fit into `MEMORY` bytes, counting what a
    draw keeps for the gradient with a batch of this form. If two do not fit, the loop takes them.

    Args:
        mode: "auto", "vmap" (an error where vmap cannot do it) or "loop".
        chunk: how many draws vmap takes at once; None for what memory allows.

    Example:
        >>> evaluation = Evaluation()
        >>> evaluation(lambda row: row.sum(), torch.ones(3, 2))
        tensor([2., 2., 2.])
        >>> print(evaluation)
        vmap: proven equal to the loop, a draw takes 8 B, at most 1000000 at once
    """

    def __init__(self, mode: Mode = "auto", chunk: int | None = None):
        check_one_of("evaluation", mode, get_args(Mode))
        check_integer("chunk", chunk, optional=True)
        self.mode: Mode = mode
        self.chunk = chunk
        #: "vmap" or "loop", and why; None before the first call with several draws
        self.choice: str | None = None
        self.reason: str | None = None
        self._proven: dict[Hashable, Choice] = {}
        self._choices: dict[Hashable, Choice] = {}

    def __str__(self) -> str:
        return "one draw at a time" if self.choice is None else f"{self.choice}: {self.reason}"

    def __call__(
        self,
        function: Callable[[Tensor], Any],
        theta: Tensor,
        key: Hashable = None,
        *,
        batch: Any = None,
        against: str = "",
    ) -> Any:
        """Return the function's outputs at rows [S, P], with a leading axis S.

        Args:
            function: of one row.
            theta: the rows.
            key: what else than the device decides whether vmap gives what the loop gives.
            batch: what the function is told beside θ: the forms of its tensors decide what a draw takes.
            against: what speaks against vmap, if the caller knows.
        """
        S = theta.shape[0]
        if S == 1:
            return _loop(function, theta)
        if self.mode != "auto" or against:
            chosen = Choice("loop", against) if self.mode == "auto" else Choice(self.mode, "as asked", self.chunk)
        else:
            chosen = self._choose(function, theta[:2].detach(), (theta.device.type, key), batch)
        self.choice, self.reason, chunk, plain = chosen
        if self.choice == "loop":
            return _loop(function, theta)
        with PlainKernels() if plain else nullcontext():
            return vmap(function, randomness="different", chunk_size=chunk if chunk and chunk < S else None)(theta)

    def _choose(self, function: Callable[[Tensor], Any], theta: Tensor, key: Hashable, batch: Any) -> Choice:
        leaves = tree_leaves(batch)
        form = key, tuple([(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves])
        if form not in self._choices:
            if key not in self._proven:
                with full_precision():  # the rounding of half precision hides whether the two ways are equal
                    self._proven[key] = _proof(function, theta)
            self._choices[form] = self._within_memory(self._proven[key], function, theta)
        return self._choices[form]

    def _within_memory(self, proven: Choice, function: Callable[[Tensor], Any], theta: Tensor) -> Choice:
        if proven.way == "loop":
            return proven
        try:
            size = _size(function, theta, proven.plain)
        except RuntimeError as error:  # in half precision
            return _cannot(error)
        memory = SHARE * torch.cuda.get_device_properties(theta.device).total_memory if theta.is_cuda else MEMORY
        chunk, takes = self.chunk or int(memory / max(1, size)), f"a draw takes {in_words(size)}"
        if chunk < 2:
            return Choice("loop", f"{takes}, too much for several at once")
        return Choice("vmap", f"{proven.reason}, {takes}, at most {chunk} at once", chunk, proven.plain)


def _loop(function: Callable[[Tensor], Any], theta: Tensor) -> Any:
    if len(theta) == 1:  # the backward passes of unbind and stack copy
        output = function(theta.squeeze(0))
        is_tensor = isinstance(output, Tensor)
        return output.unsqueeze(0) if is_tensor else tree_map(lambda y: _checked(y).unsqueeze(0), output)
    outputs = [function(row) for row in theta.unbind(0)]
    return tree_map(lambda *rows: torch.stack(list(map(_checked, rows))), outputs[0], *outputs[1:])


def _checked(y: Any) -> Tensor:
    if not isinstance(y, Tensor):
        raise TypeError(f"expected a tensor, or tensors in tuples, lists and dicts, got {type(y).__name__}")
    return y


def _proof(function: Callable[[Tensor], Any], theta: Tensor) -> Choice:
    """Compare outputs and gradients both ways, at two draws made different from each other."""
    theta = torch.stack([theta[0], theta[1] + 1e-3 * (1 + theta[1].abs())])
    *expected, usual = _with_gradient(partial(_loop, function), theta, False)  # its errors are the user's
    mapped = vmap(function, randomness="different")
    why = ""
    for plain in (False, True):
        try:
            *got, warned = _with_gradient(mapped, theta, plain)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            return _cannot(error)
        if slow := warned - usual:  # vmap's own fallback is a slower loop that warns
            why = f"vmap does not pay: {slow.pop()[:200]}"
        elif _close(got, expected):
            return Choice("vmap", "proven equal to the loop", None, plain)
        else:
            return Choice("loop", "vmap gives other values than the loop")
    return Choice("loop", why)


def _cannot(error: Exception) -> Choice:
    return Choice("loop", f"vmap cannot run it: {(str(error).strip() or repr(error)).splitlines()[0][:200]}")


def _with_gradient(function: Callable[[Tensor], Any], theta: Tensor, plain: bool) -> tuple[Any, Tensor, set[str]]:
    """Return the outputs, the gradient of an uneven sum of them, and what was warned of.

    The plain sum of a softmax or a normalised output has no gradient, only rounding.
    """
    with torch.enable_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        theta = theta.detach().requires_grad_()
        with PlainKernels() if plain else nullcontext():
            outputs = function(theta)
        total = (0 * theta).sum().double()
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                uneven = torch.arange(leaf.numel(), device=leaf.device, dtype=torch.float64).cos()
                total = total + (leaf * uneven.to(leaf.dtype).view(leaf.shape)).sum().double()
        if not total.requires_grad:  # in torch.inference_mode
            return outputs, torch.zeros_like(theta), {str(one.message) for one in caught}
        (gradient,) = torch.autograd.grad(total, theta)
    return outputs, gradient, {str(one.message).split(". ")[0] for one in caught if one.category is UserWarning}


def _close(a: Any, b: Any) -> bool:
    """Equal up to the rounding of another order of summation, relative to the size of the whole tensor."""
    left, right = tree_leaves(a), tree_leaves(b)
    if [(x.shape, x.dtype) for x in left] != [(y.shape, y.dtype) for y in right]:
        return False
    for x, y in zip(left, right, strict=True):
        # 1e-3 in float32, whose matrix products may run in TF32; 4e-8 in float64
        tolerance = 3 * torch.finfo(x.dtype).eps ** 0.5 if x.dtype.is_floating_point else 0.0
        x, y = x.detach().double(), y.detach().double()
        size = y.where(y.isfinite(), 0.0).abs().max().item() if y.numel() else 0.0
        if not torch.allclose(x, y, rtol=0.0, atol=tolerance * size, equal_nan=True):
            return False
    return True


def _size(function: Callable[[Tensor], Any], theta: Tensor, plain: bool) -> int:
    """Return the bytes of one draw more: vmap makes a backbone that is not random once for all draws."""
    sizes = []
    for rows in (theta[:1], theta):
        kept: dict[int, int] = {}

        def keep(x: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        kernels = PlainKernels() if plain else nullcontext()
        with torch.enable_grad(), saved_tensors_hooks(keep, lambda x: x), kernels:
            vmap(function, randomness="different")(rows.detach().requires_grad_())
        sizes.append(sum(kept.values()))
    return theta[0].nbytes + sizes[1] - sizes[0]
