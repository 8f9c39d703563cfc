"""One function at S weight vectors: by vmap where that is proven equal to a loop and pays, else by the loop."""

import threading
import warnings
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..util.checks import check_integer
from ..util.garbage import uncollected
from ..util.random_streams import alone, borrowed_stream
from ..util.sizes import in_words
from .batched_linear import BatchedLinear
from .batched_products import Room

Mode = Literal["auto", "vmap", "loop"]

#: On a CPU the loop is as fast as vmap or faster for draws that take more bytes than this (docs/design.md).
LARGE = 2**20
#: What the draws of one call of vmap may take: so much on a CPU, on a GPU its memory over this.
MEMORY = 2**30
MEMORY_PART = 8
#: Loop and vmap are timed so many times each, in turn, after one time that does not count.
REPEATS = 3


class Choice(NamedTuple):
    way: str  # "vmap" or "loop"
    reason: str
    chunk: int | None = None  # how many draws vmap takes at once


class _Own(threading.local):
    captured = False

    def __reduce__(self) -> tuple:  # a copy begins anew
        return _Own, ()


class Evaluation:
    """Maps a function of one θ [P] over the rows of [S, P].

    With mode "auto" the first call with two or more draws runs the function at two of them both ways and compares
    outputs and gradients. Only where they agree vmap comes into question; whether it pays is then decided

    - by a rule, without a clock: vmap, but the loop for convolutions with a kernel for each draw, of which nothing is
      compared, and, on a CPU, for draws that take more than `LARGE` bytes, θ and what is made of it;
    - or by time: both ways at all S draws, forward and, where gradients are on, backward.

    vmap takes so many draws at once as take `MEMORY` bytes, measured at two draws; with gradients on, all of it is kept
    until the backward pass all the same. The choice is recorded (`choice`, `reason`, `record`), and is made again only
    where the caller's `key` changes (a network that goes from `eval` to `train`) or the kind of device.

    Args:
        mode: "auto", "vmap" (an error where vmap cannot do it) or "loop".
        chunk: how many draws vmap takes at once; None for what memory allows.
        deterministic: True for the rule, False for time, where a seed no longer gives the same bits in every run. By
            default the rule on a CPU, and time on other devices, whose bits differ from run to run anyway.

    Example:
        >>> evaluation = Evaluation()
        >>> evaluation(lambda row: row.sum(), torch.ones(3, 2))
        tensor([2., 2., 2.])
        >>> print(evaluation)
        vmap, at most 89478485 draws at once: proven equal to the loop, a draw takes 12 B
    """

    def __init__(self, mode: Mode = "auto", chunk: int | None = None, deterministic: bool | None = None):
        if mode not in ("auto", "vmap", "loop"):
            raise ValueError(f'evaluation must be "auto", "vmap" or "loop", got {mode!r}')
        check_integer("chunk", chunk, optional=True)
        if deterministic not in (None, True, False):
            raise ValueError(f"deterministic must be True, False or None, got {deterministic!r}")
        self.mode: Mode = mode
        self.chunk = chunk
        self.deterministic = deterministic
        self._own = _Own()
        self._choices: dict[Hashable, Choice] = {}
        self._last: Choice | None = None

    @property
    def captured(self) -> bool:
        """Set it where this thread's steps are captured as CUDA graphs: the two ways are then captured before they are
        timed, for a loop would mostly wait for its launches."""
        return self._own.captured

    @captured.setter
    def captured(self, captured: bool) -> None:
        self._own.captured = captured

    @property
    def choice(self) -> str | None:
        """ "vmap" or "loop", as last used; None before the first call with several draws."""
        return self._last[0] if self._last else None

    @property
    def reason(self) -> str | None:
        return self._last[1] if self._last else None

    @property
    def record(self) -> tuple[dict[Hashable, tuple[Any, ...]], tuple[Any, ...] | None]:
        """All choices and the last one, to be kept: one that is set again is used as it is."""
        choices, last = self._choices.copy(), self._last  # another thread may add one
        return {key: tuple(choice) for key, choice in choices.items()}, last and tuple(last)

    @record.setter
    def record(self, record: tuple[dict[Hashable, tuple[Any, ...]], tuple[Any, ...] | None]) -> None:
        choices, last = record
        self._choices = {key: Choice(*choice) for key, choice in choices.items()}
        self._last = Choice(*last) if last else None

    def __repr__(self) -> str:
        settings = f"mode={self.mode!r}, chunk={self.chunk}, deterministic={self.deterministic}"
        return f"Evaluation({settings}, choice={self.choice!r}, reason={self.reason!r})"

    def __str__(self) -> str:
        if self._last is None:
            return "one draw at a time"
        way, reason, chunk = self._last
        return f"{way}{f', at most {chunk} draws at once' if chunk else ''}: {reason}"

    def times(self, device: torch.device) -> bool:
        """Whether a clock decides there, and so a seed may give other bits in another run."""
        timed = device.type != "cpu" if self.deterministic is None else not self.deterministic
        return timed and self.mode == "auto"

    def __call__(
        self,
        function: Callable[[Tensor], Any],
        theta: Tensor,
        key: Hashable = None,
        *,
        against: str = "",
        convolves: Callable[[], bool] = lambda: False,
        exactly: Callable[[], AbstractContextManager] = nullcontext,
    ) -> Any:
        """[S, P] → the function's outputs with a leading axis S.

        Args:
            function: of one row.
            theta: the rows.
            key: what else than the device decides how the function can be evaluated.
            against: what speaks against vmap, if the caller knows.
            convolves: whether the function has convolutions whose kernel is part of the row.
            exactly: a context in which the function runs in full precision: in half precision the rounding of the
                two ways differs too much to prove them equal.
        """
        if theta.shape[0] == 1:
            return _loop(function, theta)
        way, _, chunk = self._last = self._choose(function, theta, key, against, convolves, exactly)
        if way == "loop":
            return _loop(function, theta)
        return _vmap(function, theta, chunk if chunk is not None and chunk < theta.shape[0] else None)

    def _choose(self, function: Any, theta: Tensor, key: Any, against: str, convolves: Any, exactly: Any) -> Choice:
        if self.mode != "auto":
            return Choice(self.mode, "as asked", self.chunk)
        if against:
            return Choice("loop", against)
        key = (key, theta.device.type, self.captured)
        if key not in self._choices:
            with alone(), borrowed_stream(torch.Generator().manual_seed(0)):
                if key not in self._choices:  # no other thread was faster
                    self._choices[key] = self._probe(function, theta.detach(), convolves, exactly)
        return self._choices[key]

    def _probe(self, function: Any, theta: Tensor, convolves: Any, exactly: Any) -> Choice:
        if not self.times(theta.device) and convolves():
            return Choice("loop", "convolutions with a kernel for each draw are slow under vmap")
        with exactly():
            if against := _prove(function, theta[:2]):
                return Choice("loop", against)
        try:  # in the precision that it will run in
            size = theta[0].nbytes + _bytes_made(function, theta[:2]) - _bytes_made(function, theta[:1])
        except RuntimeError as error:
            return Choice("loop", f"vmap cannot run it in this precision: {str(error).strip().splitlines()[0][:200]}")
        device = theta.device
        fits = _memory(device) // max(1, size)
        if fits < 2:
            return Choice("loop", f"a draw takes {in_words(size)}: there is memory for one at a time")
        chunk = self.chunk or fits
        if self.times(device):
            loop, batched = _seconds(function, theta, chunk, self.captured)
            times = f"timed at {theta.shape[0]} draws: loop {1e3 * loop:.3g} ms, vmap {1e3 * batched:.3g} ms"
            return Choice("vmap", times, chunk) if batched < loop else Choice("loop", times)
        if device.type == "cpu" and size > LARGE:
            return Choice("loop", f"a draw takes {in_words(size)}: on a CPU the loop is as fast")
        return Choice("vmap", f"proven equal to the loop, a draw takes {in_words(size)}", chunk)


def _loop(function: Callable[[Tensor], Any], theta: Tensor) -> Any:
    if len(theta) == 1:  # the backward passes of unbind and stack copy
        return pytree.tree_map(_one, out) if not isinstance(out := function(theta.squeeze(0)), Tensor) else _one(out)
    outputs = [function(row) for row in theta.unbind(0)]
    return pytree.tree_map(_stack, outputs[0], *outputs[1:])


def _stack(*rows: Any) -> Tensor:
    _check_tensor(rows[0])
    return torch.stack(rows)


def _one(row: Any) -> Tensor:
    _check_tensor(row)
    return row.unsqueeze(0)


def _check_tensor(row: Any) -> None:
    if not isinstance(row, Tensor):
        raise TypeError(f"expected a tensor, or tensors in tuples, lists and dicts, got {type(row).__name__}")


def _vmap(function: Callable[[Tensor], Any], theta: Tensor, chunk: int | None) -> Any:
    if not pays_batched(theta):
        return vmap(function, randomness="different", chunk_size=chunk)(theta)
    with BatchedLinear() as batched:

        def at(row: Tensor) -> Any:
            batched.row, batched.room = row, Room()
            return function(row)

        return vmap(at, randomness="different", chunk_size=chunk)(theta)


def pays_batched(theta: Tensor) -> bool:
    """Whether copies of weight gradients are worth avoiding."""
    return theta.is_cuda


def _prove(function: Callable[[Tensor], Any], theta: Tensor) -> str:
    """Outputs and gradients both ways, at two draws made different from each other: what speaks against vmap, or ""."""
    theta = torch.stack([theta[0], theta[1] + 1e-3 * (1 + theta[1].abs())])
    expected, expected_grad = _with_gradient(lambda rows: _loop(function, rows), theta)  # its errors are the user's
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            got, got_grad = _with_gradient(lambda rows: _vmap(function, rows, None), theta)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            return f"vmap cannot run it: {(str(error).strip() or repr(error)).splitlines()[0][:200]}"
    # vmap's own fallback is a slower loop that warns at every call
    if fallbacks := [str(w.message) for w in caught if "batching rule" in str(w.message)]:
        return f"vmap does not pay: {fallbacks[0].split('. ')[0]}"
    same = _close(got, expected) and _close(got_grad, expected_grad)
    return "" if same else "vmap gives other values than the loop"


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


class _BytesMade(TorchDispatchMode):
    """The bytes of all tensors that operations inside make: those kept for the gradient, and temporary ones."""

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


def _bytes_made(function: Callable[[Tensor], Any], theta: Tensor) -> int:
    """What vmap makes for these draws: what they share, such as a backbone that is not random, it makes once."""
    with _BytesMade() as count:
        _vmap(function, theta, None)
    return count.made


def _memory(device: torch.device) -> int:
    return MEMORY if device.type != "cuda" else torch.cuda.get_device_properties(device).total_memory // MEMORY_PART


def _seconds(
    function: Callable[[Tensor], Any], theta: Tensor, chunk: int | None, captured: bool
) -> tuple[float, float]:
    """Median seconds of the loop and of vmap, in turn; where gradients are on, forward and backward."""
    ways = (lambda rows: _loop(function, rows), lambda rows: _vmap(function, rows, chunk))
    measure = _with_gradient if torch.is_grad_enabled() else lambda way, rows: way(rows)
    works = [lambda way=way: measure(way, theta) for way in ways]
    if captured and theta.is_cuda:
        works = [_captured(work) for work in works]
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(1 + REPEATS):
        for work, record in zip(works, seconds, strict=True):
            _wait(theta.device)
            started = perf_counter()
            work()
            _wait(theta.device)
            record.append(perf_counter() - started)
    return median(seconds[0][1:]), median(seconds[1][1:])


def _captured(work: Callable[[], Any]) -> Callable[[], Any]:
    """The same work as a CUDA graph; as it is where it cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with uncollected(), torch.cuda.graph(graph):
            work()
    except RuntimeError:
        torch.cuda.synchronize()
        return work
    return graph.replay


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def training_key(net: nn.Module) -> tuple[bool, ...]:
    """What of a network decides how it can be evaluated: which of its modules are in training mode."""
    return tuple(module.training for module in net.modules())
