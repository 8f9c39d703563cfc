"""One function at S weight vectors: by vmap where that is proven equal to a loop and pays, else by the loop."""

import warnings
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..util.checks import check_integer, in_words
from .call import full_precision
from .plain_kernels import PlainKernels

Mode = Literal["auto", "vmap", "loop"]

#: bytes of a draw from which on a CPU the loop is as fast as vmap
LARGE = 2**20
#: bytes that the draws of one call of vmap may take: on a CPU
MEMORY = 2**30
#: and on a GPU, as a share of its memory
SHARE = 1 / 8


class Choice(NamedTuple):
    way: str  # "vmap" or "loop"
    reason: str
    chunk: int | None = None  # how many draws vmap takes at once
    plain: bool = False  # whether vmap needs attention without fused kernels


class Evaluation:
    """Maps a function of one θ [P] over the rows of [S, P].

    With mode "auto" the first call with two or more draws runs the function at two draws both ways. It compares
    outputs and gradients. If they agree, a rule decides for every form of a batch, without a clock. A draw that takes
    more than `LARGE` bytes on a CPU, for θ and all tensors made from it, goes by the loop. All others go by vmap, with
    as many draws at once as fit into `MEMORY` bytes. The last choice is in `choice` and `reason`.

    Args:
        mode: "auto", "vmap" (an error where vmap cannot do it) or "loop".
        chunk: how many draws vmap takes at once; None for what memory allows.

    Example:
        >>> evaluation = Evaluation()
        >>> evaluation(lambda row: row.sum(), torch.ones(3, 2))
        tensor([2., 2., 2.])
        >>> print(evaluation)
        vmap, at most 89478485 draws at once: proven equal to the loop, a draw takes 12 B
    """

    def __init__(self, mode: Mode = "auto", chunk: int | None = None):
        if mode not in ("auto", "vmap", "loop"):
            raise ValueError(f'evaluation must be "auto", "vmap" or "loop", got {mode!r}')
        check_integer("chunk", chunk, optional=True)
        self.mode: Mode = mode
        self.chunk = chunk
        self._proven: dict[Hashable, Choice] = {}
        self._choices: dict[Hashable, Choice] = {}
        self._last: Choice | None = None

    @property
    def choice(self) -> str | None:
        """ "vmap" or "loop", as last used; None before the first call with several draws."""
        return self._last.way if self._last else None

    @property
    def reason(self) -> str | None:
        return self._last.reason if self._last else None

    def __str__(self) -> str:
        if self._last is None:
            return "one draw at a time"
        way, reason, chunk, _ = self._last
        return f"{way}{f', at most {chunk} draws at once' if chunk else ''}: {reason}"

    def __call__(self, function: Callable[[Tensor], Any], theta: Tensor, batch: Any = None) -> Any:
        """[S, P] → the function's outputs with a leading axis S; arguments as in `over`."""
        return self.over(function, theta, batch=batch)(theta)

    def over(
        self,
        function: Callable[[Tensor], Any],
        theta: Tensor,
        key: Hashable = None,
        *,
        batch: Any = None,
        against: str = "",
    ) -> Callable[[Tensor], Any]:
        """Return the function of S rows [S, P] that gives the outputs of each with a leading axis S.

        Args:
            function: of one row.
            theta: rows like the later ones.
            key: what else than the device decides whether vmap gives what the loop gives.
            batch: what the function is told beside θ: the forms of its tensors decide what a draw takes.
            against: what speaks against vmap, if the caller knows.
        """
        if theta.shape[0] == 1:
            return partial(_loop, function)
        if self.mode != "auto":
            choice = Choice(self.mode, "as asked", self.chunk)
        elif against:
            choice = Choice("loop", against)
        else:
            form = theta.device.type, key, tuple([_form(leaf) for leaf in pytree.tree_leaves(batch)])
            choice = self._choices.get(form)
            if choice is None:
                choice = self._choices[form] = self._choose(function, theta[:2].detach(), form[:2])
        self._last = choice
        if choice.way == "loop":
            return partial(_loop, function)
        chunk = choice.chunk if choice.chunk is not None and choice.chunk < theta.shape[0] else None
        mapped = vmap(function, randomness="different", chunk_size=chunk)
        return partial(_plainly, mapped) if choice.plain else mapped

    def _choose(self, function: Any, theta: Tensor, key: Hashable) -> Choice:
        device = theta.device
        if key not in self._proven:
            with full_precision():  # the rounding of half precision hides whether the two ways are equal
                self._proven[key] = _proof(function, theta)
        proven = self._proven[key]
        if proven.way == "loop":
            return proven
        size = _size(function, theta, proven.plain)
        if isinstance(size, str):
            return Choice("loop", size)
        fits, takes = _memory(device) // max(1, size), f"a draw takes {in_words(size)}"
        if fits < 2:
            return Choice("loop", f"{takes}: there is memory for one at a time")
        if device.type == "cpu" and size > LARGE:
            return Choice("loop", f"{takes}: on a CPU the loop is as fast")
        return Choice("vmap", f"{proven.reason}, {takes}", self.chunk or fits, proven.plain)


def _loop(function: Callable[[Tensor], Any], theta: Tensor) -> Any:
    if len(theta) == 1:  # the backward passes of unbind and stack copy
        return pytree.tree_map(lambda y: _checked(y).unsqueeze(0), function(theta.squeeze(0)))
    outputs = [function(row) for row in theta.unbind(0)]
    return pytree.tree_map(lambda *rows: torch.stack(list(map(_checked, rows))), outputs[0], *outputs[1:])


def _checked(y: Any) -> Tensor:
    if not isinstance(y, Tensor):
        raise TypeError(f"expected a tensor, or tensors in tuples, lists and dicts, got {type(y).__name__}")
    return y


def _vmap(function: Callable[[Tensor], Any], theta: Tensor, plain: bool) -> Any:
    mapped = vmap(function, randomness="different")
    return _plainly(mapped, theta) if plain else mapped(theta)


def _plainly(mapped: Callable[[Tensor], Any], theta: Tensor) -> Any:
    with PlainKernels():
        return mapped(theta)


def _form(leaf: Any) -> Hashable:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None


def _proof(function: Callable[[Tensor], Any], theta: Tensor) -> Choice:
    """Compare outputs and gradients both ways, at two draws made different from each other."""
    theta = torch.stack([theta[0], theta[1] + 1e-3 * (1 + theta[1].abs())])
    expected, expected_grad = _with_gradient(lambda rows: _loop(function, rows), theta)  # its errors are the user's
    for plain in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                got, got_grad = _with_gradient(lambda rows, plain=plain: _vmap(function, rows, plain), theta)
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                return Choice("loop", f"vmap cannot run it: {_first_line(error)}")
        # vmap's own fallback is a slower loop that warns at every call
        fallbacks = [str(w.message).split(". ")[0] for w in caught if "batching rule" in str(w.message)]
        if not any("attention" in text for text in fallbacks):
            break
    if fallbacks:
        return Choice("loop", f"vmap does not pay: {fallbacks[0]}")
    if not (_close(got, expected) and _close(got_grad, expected_grad)):
        return Choice("loop", "vmap gives other values than the loop")
    return Choice("vmap", "proven equal to the loop", None, plain)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0][:200]


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
    if [(x.shape, x.dtype) for x in left] != [(y.shape, y.dtype) for y in right]:
        return False
    for x, y in zip(left, right, strict=True):
        # 1e-3 in float32, whose matrix products may run in TF32; 4e-8 in float64
        tolerance = 3 * torch.finfo(x.dtype).eps ** 0.5 if x.dtype.is_floating_point else 0.0
        x, y = x.detach().double(), y.detach().double()
        size = y.where(y.isfinite(), 0.0).abs().max().item() if y.numel() else 0.0
        if not torch.isclose(x, y, rtol=0.0, atol=tolerance * size, equal_nan=True).all():
            return False
    return True


class _BytesMade(TorchDispatchMode):
    """The bytes of all tensors that operations inside make, kept for the gradient or temporary."""

    made = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else all of torch.compile is imported, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        new = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor) and _storage(x) not in given]
        self.made += sum(x.untyped_storage().nbytes() for x in new)
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _size(function: Callable[[Tensor], Any], theta: Tensor, plain: bool) -> int | str:
    """Return the bytes of one draw more: vmap makes a backbone that is not random once for all draws.

    If vmap cannot run in this precision, return the reason.
    """
    made = []
    try:
        for rows in (theta[:1], theta):
            with torch.no_grad(), _BytesMade() as count:
                _vmap(function, rows, plain)
            made.append(count.made)
    except RuntimeError as error:
        return f"vmap cannot run it in this precision: {_first_line(error)}"
    return theta[0].nbytes + made[1] - made[0]


def _memory(device: torch.device) -> int:
    return MEMORY if device.type != "cuda" else int(SHARE * torch.cuda.get_device_properties(device).total_memory)
