"""A network with likelihood and prior as a target, and the batches that it takes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from inspect import Parameter, signature
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from ..families.numerics import reads, sum_weights
from ..networks.call import alone_with, call_network, draws, padding_rows, with_padding
from ..networks.linearised import Linearised
from ..networks.vmap_or_loop import Evaluation, Mode
from ..parameters import Parameters
from ..util.checks import check_integer, check_theta
from .likelihoods import Categorical, Likelihood, check_log_prob
from .priors.separable import Prior, SeparablePrior, log_prior
from .target import NOTHING

TARGET_KEYS = ("target", "targets", "label", "labels", "y")
#: keys of a dict batch: of the input, or of several inputs, and of the target
Keys = tuple[str | tuple[str, ...], str]
#: θ₀ [P] at which this thread linearises networks; None: not at all; `...`: the model's own.
_AROUND: ContextVar[Any] = ContextVar("around", default=...)


class BayesianModel(nn.Module):
    """log p(T, θ | X) = (N/B) Σ_batch log p(t | y_θ(x)) + log p(θ) for a network y_θ, unbiased for uniform batches.

    A call puts the drawn weights, and copies of the buffers that a call may change, in place of the network's own, and
    puts those back. Threads take turns with a network; while one of them is inside, do not call the network yourself.
    Trainable tensors that are not in `parameters` are held at the values the network has.

    Args:
        net: the network.
        likelihood: called with (output, target), gives log p(t | y) of each observation [B, ..]. Random tensors of
            its own (an unknown noise) are appended to the space as "likelihood.<name>" and have its prior.
        prior: called with (parameters, theta [S, P]), gives log p(θ) [S]; of the network's tensors, `net_space`.
        num_data: N, the size of the whole data set; None until it is known (`model.num_data = N`).
        parameters: the random tensors; all trainable ones by default.
        forward: for other batches than (input, target) and dicts: (net, batch) → (output, target).
        keys: of dict batches with more in them the entries that count, ("image", "label"); of several inputs
            (("image", "age"), "label").
        evaluation: how S weights are evaluated: "vmap", "loop", or "auto": vmap where it is right and pays.
        chunk: how many draws vmap takes at once.
        checkpoint_activations: keep no activations of the network: the backward pass computes those of one draw at a
            time again. Less memory, about a third more time; always the loop.
        linearise: y_θ(x) = f(x; θ₀) + J(x)(θ − θ₀) in place of the network, with θ₀ the values that `parameters` have:
            a generalised linear model around the network. The prior stays on θ.

    Batches are pairs (input, target), where a tuple of inputs is passed as several arguments, or dicts with one of
    the keys "target", "targets", "label", "labels", "y": of the rest a single entry is passed as the argument,
    several as keywords; paths, headers and other entries that are no tensors are left out where the network does not
    name them. With `keys` and `Categorical` labels [B, 1, ..] of floats, as MONAI has them, count as [B, ..]. A target
    may be a pair (t, mask), see `likelihoods`; B is the number of rows of t.

    Example:
        >>> from structvi import likelihoods
        >>> from structvi.models.priors import NormalPrior
        >>> net = nn.Linear(3, 1)
        >>> model = BayesianModel(net, likelihoods.Gaussian(noise=0.1), NormalPrior(1.0), num_data=100)
        >>> model.log_joint(torch.zeros(2, 4), (torch.zeros(10, 3), torch.zeros(10, 1))).shape
        torch.Size([2])
    """

    def __init__(
        self,
        net: nn.Module,
        likelihood: Callable[[Any, Any], Tensor],
        prior: Prior,
        num_data: int | None,
        *,
        parameters: Parameters | None = None,
        forward: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None,
        keys: Keys | None = None,
        evaluation: Mode = "auto",
        chunk: int | None = None,
        checkpoint_activations: bool = False,
        linearise: bool = False,
    ):
        super().__init__()
        _check_arguments(net, likelihood, prior, parameters)
        if keys is not None:
            check_keys(keys)
            if forward is not None:
                raise ValueError("give keys= or forward=, not both: forward= takes what it wants of a batch itself")
        if not isinstance(checkpoint_activations, bool):
            raise TypeError(f"checkpoint_activations must be True or False, got {checkpoint_activations!r}")
        if checkpoint_activations and evaluation == "vmap":
            raise ValueError('checkpoint_activations=True takes one draw at a time: use evaluation="auto" or "loop"')
        self.net, self.likelihood, self.prior = net, likelihood, prior
        self._num_data: int | None = None
        #: True if a fit took N from its loader: the next fit takes N from its own loader
        self.num_data_of_loader = False
        if num_data is not None:
            self.num_data = num_data
        self.net_space = Parameters.of(net) if parameters is None else parameters
        self.user_forward, self.keys = forward, keys
        self.evaluation = Evaluation(evaluation, chunk)
        self.checkpoint_activations = checkpoint_activations
        #: bfloat16 or float16: the network alone runs in it, and its outputs are converted back; None for neither
        self.precision: torch.dtype | None = None
        #: `torch.func.functional_call` compiled, while a fit asks for it
        self.compiled: Callable[..., Any] | None = None
        known = {name: tensor.shape for name, tensor in net.named_parameters()}
        for name, shape in zip(self.net_space.names, self.net_space.shapes, strict=True):
            if known.get(name) != shape:
                raise ValueError(f"parameters: the network has no tensor {name!r} of shape {tuple(shape)}")
        self._padding = padding_rows(net, self.net_space.names)
        convolutions = [one for one in net.modules() if isinstance(one, nn.modules.conv._ConvNd)]
        kernels = {id(tensor) for one in convolutions for tensor in one.parameters()}
        #: the random tensors of convolutions
        self._kernels = {name for name, x in net.named_parameters() if name in self.net_space and id(x) in kernels}
        #: θ₀ of the network's random tensors, [P]; None where it is not linearised
        self.linearised_at: Tensor | None
        self.register_buffer("linearised_at", self.net_space.initial.clone() if linearise else None)
        if isinstance(prior, SeparablePrior):
            prior.check(self.net_space)
        own = likelihood.random_tensors() if isinstance(likelihood, Likelihood) else {}
        #: the likelihood's random tensors: their names in `space` → their names in the likelihood
        self.likelihood_names = {f"likelihood.{name}": name for name in own}
        self.space = self.net_space
        if own:
            appended = {f"likelihood.{name}": tensor.detach().to(self.space.initial) for name, tensor in own.items()}
            self.space = self.net_space.append(appended, scale=1.0)

    @property
    def is_linearised(self) -> bool:
        """True if a call in this context uses the linearised network."""
        return self._around() is not None

    def _around(self) -> Tensor | None:
        at = _AROUND.get()
        return self.linearised_at if at is ... else at

    @contextmanager
    def linearised_around(self, at: Tensor | None) -> Iterator[None]:
        """Linearise the network at θ₀ [P] of its random tensors, in this thread; at None call the network itself."""
        token = _AROUND.set(at)
        try:
            yield
        finally:
            _AROUND.reset(token)

    @property
    def known_num_data(self) -> int | None:
        """N, or None until it is known."""
        return self._num_data

    @property
    def num_data(self) -> int:
        if self._num_data is None:
            raise ValueError("num_data is not known yet: set it, give num_data= to variationalize, or fit first")
        return self._num_data

    @num_data.setter
    def num_data(self, value: int) -> None:
        check_integer("num_data, the number of observations in the whole data set,", value)
        self._num_data = value

    def log_joint(self, theta: Tensor, batch: Any = None, fixed: Mapping[str, Tensor] = NOTHING) -> Tensor:
        return self.log_likelihood(theta, batch, fixed) + self.log_prior(theta, fixed)

    def log_prior(self, theta: Tensor, fixed: Mapping[str, Tensor] = NOTHING) -> Tensor:
        """log p(θ): [S, P] → [S]."""
        check_theta(theta, self.space.without(fixed).size)
        shared = {name: tensor for name, tensor in fixed.items() if name in self.net_space}
        size = self.net_space.size - sum(tensor.numel() for tensor in shared.values())
        # a split has a backward pass of its own: none where there is nothing to split off
        net = theta if size == theta.shape[-1] else torch.split(theta, [size, theta.shape[-1] - size], dim=-1)[0]
        value = _per_draw(log_prior(self.prior, self.net_space, net, shared), theta, "prior")
        if isinstance(self.likelihood, Likelihood) and self.likelihood_names:
            own = self.likelihood.log_prior(self.likelihood_values(theta, fixed))
            value = value + _per_draw(own, theta, "likelihood's log_prior")
        return value

    def likelihood_values(self, theta: Tensor, fixed: Mapping[str, Tensor] = NOTHING) -> dict[str, Tensor]:
        """The likelihood's random tensors at the draws θ [S, P], by its own names: [S, *shape] each."""
        shared = {name: tensor.expand(theta.shape[0], *tensor.shape) for name, tensor in fixed.items()}
        return self._tensors(theta, shared)[1] if self.likelihood_names else {}

    def _tensors(self, theta: Tensor, fixed: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors of the network by name, and those of the likelihood by its own names."""
        named = {**self.space.without(fixed).unravel(theta), **fixed}
        return named, {own: named.pop(name) for name, own in self.likelihood_names.items()}

    def log_likelihood(self, theta: Tensor, batch: Any, fixed: Mapping[str, Tensor] = NOTHING) -> Tensor:
        """(N/B) Σ_batch log p(t | y_θ(x)): [S, P] → [S]."""
        total, B = self.batch_log_likelihood(theta, batch, fixed)
        return total * (self.num_data / B)

    def batch_log_likelihood(
        self, theta: Tensor, batch: Any, fixed: Mapping[str, Tensor] = NOTHING, share: int = 1
    ) -> tuple[Tensor, int]:
        """Σ_batch log p(t | y_θ(x)), not scaled to the whole data set, [S, P] → [S]; and B.

        If `share` is above one, each draw sees its own rows of the batch, and its sum is `share` times theirs. The
        mean over `share` draws has every row once, and they cost one pass of the network together.
        """
        whole, B = self.on(batch), 0

        def one(row: Tensor, on: Callable[[Mapping[str, Tensor]], tuple[Any, Any]] = whole) -> Tensor:
            nonlocal B
            named, values = self._tensors(row, fixed)
            output, target = on(named)
            B = batch_size(target)
            if B > self.num_data:
                raise ValueError(f"the batch has {B} observations, more than num_data = {self.num_data}")
            if values:
                assert isinstance(self.likelihood, nn.Module)
                with alone_with(self.likelihood):
                    log_prob = functional_call(self.likelihood, values, (output, target))
            else:
                log_prob = self.likelihood(output, target)
            check_log_prob(log_prob, output, target, B)
            return sum_weights(log_prob.reshape(-1)).to(log_prob.dtype)

        with self.held(fixed) as how:
            if share == 1:
                return self.evaluation(one, theta, batch=batch, **how), B
            rows = rows_of(batch)
            if rows is None or rows < share:
                raise ValueError(f"share_rows=True takes batches of {share} rows or more, each tensor with all rows")
            parts = [self.on(tree_map(itemgetter(slice(s, None, share)), batch)) for s in range(share)]
            values = [share * one(row, parts[s % share]) for s, row in enumerate(theta.unbind(0))]
        return torch.stack(values), rows

    def outputs(self, theta: Tensor, inputs: Any, fixed: Mapping[str, Tensor] = NOTHING) -> Any:
        """The network at S weights: [S, P], inputs [B, ..] → [S, B, ..]."""
        if self.keys is not None and isinstance(inputs, Mapping):  # a batch as it comes, with or without its target
            inputs = taken(inputs, self.keys[0])
        network, (arguments, keywords) = self._network(), arguments_of(self.net, plain(inputs))

        def one(row: Tensor) -> Any:
            return logits_of(network(self._tensors(row, fixed)[0], arguments, keywords))

        with self.held(fixed, "outputs") as how:
            return self.evaluation(one, theta, batch=inputs, **how)

    @contextmanager
    def held(self, fixed: Mapping[str, Tensor] = NOTHING, what: str = "") -> Iterator[dict[str, Any]]:
        """Hold the network, and tell what `Evaluation` has to know of a function of one θ before it takes many.

        Args:
            fixed: the tensors that all draws share.
            what: tells functions apart that vmap may treat differently.
        """
        with alone_with(self.net) as turn:
            modes = tuple([module.training for module in turn.modules])
            against = ""
            if self.checkpoint_activations:
                against = "activations are checkpointed"
            elif self.compiled is not None:
                against = "the network is compiled"
            elif any(modes) and any(map(draws, turn.modules)):
                against = "the network draws random numbers"
            elif self._kernels - fixed.keys():
                against = "convolutions with a kernel for each draw are slow under vmap"
            yield {"key": (what, frozenset(fixed), modes, self.is_linearised), "against": against}

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Return the inputs of a batch and its target; with `forward=` only that function knows them."""
        inputs, target = plain(split_batch(batch, self.keys))
        if self.keys is not None and isinstance(batch, Mapping) and isinstance(self.likelihood, Categorical):
            target = as_labels(target)
        return inputs, target

    def call(self, random: Mapping[str, Tensor], batch: Any) -> tuple[Any, Any]:
        """Output and target of a batch, for the network with these tensors in place of its own."""
        return self.on(batch)(random)

    def on(self, batch: Any) -> Callable[[Mapping[str, Tensor]], tuple[Any, Any]]:
        """Return the function of the network's tensors, by name, that gives output and target of this batch."""
        network = self._network()
        forward: Any = self.user_forward
        if forward is None:
            inputs, target = self.split(batch)
            batch_size(target)  # an empty batch is named before the network meets it
            arguments, keywords = arguments_of(self.net, inputs)
            return lambda random: (logits_of(network(random, arguments, keywords)), target)
        own = plain(batch)

        def by_user(random: Mapping[str, Tensor]) -> tuple[Any, Any]:
            result = forward(lambda *arguments, **keywords: network(random, arguments, keywords), own)
            if not isinstance(result, tuple) or len(result) != 2:
                raise TypeError("forward= must return a pair (output, target)")
            return result

        return by_user

    def _network(self) -> Callable[[Mapping[str, Tensor], Any, Any], Any]:
        """Return the function of the network's tensors, by name, and of its arguments and keywords."""
        at = self._around()
        functional = self.compiled if at is None else Linearised(self.net_space.unravel(at))
        options: Any = {"precision": self.precision, "checkpointed": self.checkpoint_activations}
        network = partial(call_network, self.net, functional=functional, **options)
        if not self._padding:
            return network
        return lambda random, arguments, keywords: network(self.with_padding(random), arguments, keywords)

    def with_padding(self, random: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tensors by name, their padding rows (`nn.Embedding(padding_idx=)`) the network's: these are no weights."""
        return with_padding(random, self._padding, self.net) if self._padding else random


def _check_arguments(net: Any, likelihood: Any, prior: Any, parameters: Any) -> None:
    if not isinstance(net, nn.Module):
        raise TypeError(f"BayesianModel expects an nn.Module, got {type(net).__name__}")
    for name, value in (("likelihood", likelihood), ("prior", prior)):
        if not callable(value) or isinstance(value, type):
            raise TypeError(
                f"the {name} must be a callable object, got {value!r}: write likelihoods.Categorical() or "
                'likelihoods.Gaussian("point"), and NormalPrior(1.0) or DistributionPrior({"*": Normal(0.0, 1.0)})'
            )
    if isinstance(likelihood, nn.modules.loss._Loss):
        raise TypeError(
            f"{type(likelihood).__name__} is a loss, which training makes small; the likelihood is log p(t | y) of "
            'each observation: give likelihoods.Categorical(), Bernoulli(), Poisson() or Gaussian("point")'
        )
    if parameters is not None and (not isinstance(parameters, Parameters) or parameters.constraints):
        raise TypeError(f"write parameters=Parameters.of(net, select), without constraints, got {parameters!r}")


def _per_draw(value: Any, theta: Tensor, what: str) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != theta.shape[:1]:
        came = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"the {what} must return [S] = [{theta.shape[0]}], got {came}")
    return value


# --- batches


def split_batch(batch: Any, keys: Keys | None = None) -> tuple[Any, Any]:
    """Return the inputs and the target of a batch; of a dict by `keys`, or without them by the usual names."""
    if isinstance(batch, Mapping):
        if keys is not None:
            return taken(batch, keys[0]), taken(batch, keys[1])
        found = [key for key in TARGET_KEYS if key in batch]
        rest = {key: value for key, value in batch.items() if key not in found}
        if len(found) != 1 or not rest:
            raise ValueError(
                f"a dict batch needs an input and exactly one of the keys {TARGET_KEYS}, got "
                f'{sorted(map(str, batch))}; or tell which they are: variationalize(.., keys=("image", "mask"))'
            )
        return (next(iter(rest.values())) if len(rest) == 1 else rest), batch[found[0]]
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    came = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, tuple | list) else type(batch).__name__
    raise TypeError(
        f"a batch must be (input, target) or a dict, got {came}; for others write variationalize(.., forward=lambda "
        "net, batch: (net(*batch[:-1]), batch[-1]))"
    )


def taken(batch: Mapping[Any, Any], keys: str | tuple[str, ...]) -> Any:
    """Return the entry of a dict, or a tuple of several."""
    names = (keys,) if isinstance(keys, str) else keys
    if missing := [name for name in names if name not in batch]:
        raise ValueError(f"the batch has no {missing}, which keys= names; it has {sorted(map(str, batch))}")
    return batch[keys] if isinstance(keys, str) else tuple(batch[name] for name in names)


def check_keys(keys: Any) -> None:
    """Raise unless they are a pair: one key, or a tuple of them, for the inputs, and one for the target."""
    if isinstance(keys, tuple | list) and len(keys) == 2:
        inputs, target = keys
        names = (inputs,) if isinstance(inputs, str) else inputs
        if isinstance(names, tuple | list) and names and all(isinstance(name, str) for name in (*names, target)):
            return
    raise TypeError(f'keys must be (input, target) of a dict batch, such as ("image", "label"), got {keys!r}')


def plain(batch: Any) -> Any:
    """Tensors as torch's own: MONAI's MetaTensor and other subclasses, that carry more than numbers, without the rest.

    Subclasses with a storage of another kind (`__torch_dispatch__`: nested, distributed) are returned unchanged.

    Example:
        >>> import torch
        >>> class WithName(Tensor): ...
        >>> type(plain({"image": torch.zeros(2).as_subclass(WithName)})["image"]).__name__
        'Tensor'
    """
    if type(batch) is Tensor or (isinstance(batch, tuple | list) and all(type(one) is Tensor for one in batch)):
        return batch  # nearly always, and asked for at every draw
    return tree_map(lambda leaf: leaf.as_subclass(Tensor) if _is_dressed(leaf) else leaf, batch)


def _is_dressed(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) or type(leaf) in (Tensor, nn.Parameter):
        return False
    return type(leaf).__torch_dispatch__ is Tensor.__torch_dispatch__  # pyright: ignore


def as_labels(target: Any) -> Any:
    """Class labels as MONAI gives them, [B, 1, ..] of any dtype, as [B, ..] of integers; with a mask alike.

    Example:
        >>> import torch
        >>> as_labels(torch.ones(4, 1, 8, 8)).shape, as_labels(torch.ones(4, 1, 8, 8)).dtype
        (torch.Size([4, 8, 8]), torch.int64)
    """
    if isinstance(target, tuple | list):
        return type(target)(as_labels(part) for part in target)
    labels = target.squeeze(1) if target.ndim > 1 and target.shape[1] == 1 else target
    if not labels.dtype.is_floating_point:
        return labels
    if reads() and bool((labels != labels.floor()).any()):
        raise ValueError(
            "labels must be whole numbers, got fractions or NaN: after a Resize or a Spacing with interpolation? "
            'Give labels mode="nearest"'
        )
    return labels.long()


def arguments_of(net: nn.Module, inputs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the positional arguments and the keywords of a call of the network.

    From a dict it takes the entries that `forward` names, or, if it names none, the only tensor. Entries beside them
    that are no tensors (paths, headers) are left out.
    """
    if not isinstance(inputs, Mapping):
        return (inputs if isinstance(inputs, tuple | list) else (inputs,)), {}
    known = signature(net.forward).parameters
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in known.values()):
        return (), inputs
    named = {key: value for key, value in inputs.items() if key in known}
    strange = [key for key, value in inputs.items() if key not in known and isinstance(value, Tensor)]
    if named and not strange:
        return (), named
    if not named and len(strange) == 1:
        return (inputs[strange[0]],), {}
    raise ValueError(
        f"the batch is a dict with the inputs {list(inputs)}, which are passed to the network by name, and its "
        f"forward({', '.join(known)}) does not take {strange}: tell which entries count, variationalize(.., "
        'keys=(("image", "age"), "label")), or give it a function forward='
    )


def logits_of(output: Any) -> Any:
    """Return the logits of an output that is a mapping, as a Hugging Face model's is; any other output unchanged.

    Logits of tokens [B, T, C] are returned as [B, C, T], the shape that `Categorical` takes.

    Example:
        >>> logits_of({"logits": torch.zeros(2, 5, 3)}).shape
        torch.Size([2, 3, 5])
    """
    if not isinstance(output, Mapping) or not isinstance(output.get("logits"), Tensor):
        return output
    logits = output["logits"]
    return logits.movedim(-1, 1) if logits.ndim == 3 else logits


def batch_size(target: Any) -> int:
    """Return B, the number of rows of a target t, or of t in (t, mask)."""
    if isinstance(target, tuple | list) and len(target) == 2:
        target, _ = target  # (t, mask)
    if not isinstance(target, Tensor) or target.ndim == 0 or target.shape[0] == 0:
        came = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(f"the target must be a tensor [B, ..] with B ≥ 1, got {came}")
    return target.shape[0]


def rows(batch: Any) -> int:
    """Return B as far as a batch tells it: the rows of its target, of its first tensor, or one."""
    try:
        return batch_size(split_batch(batch)[1])
    except (TypeError, ValueError):  # of a form that only the user's `forward` knows
        return next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), 1)


def rows_of(batch: Any) -> int | None:
    """The number of observations, where every leaf of the batch is a tensor with one row for each; else None.

    Example:
        >>> import torch
        >>> rows_of({"x": torch.zeros(8, 3), "t": torch.zeros(8)})
        8
    """
    counts = {len(leaf) if isinstance(leaf, Tensor) and leaf.ndim else None for leaf in tree_leaves(batch)}
    return counts.pop() if len(counts) == 1 else None
