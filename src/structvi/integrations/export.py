"""A predictive with fixed draws as a `torch.export` program: it runs without structvi."""

import copy
import warnings
from collections.abc import Callable, Iterable
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical
from torch.export import Dim, ExportedProgram
from torch.func import functional_call
from torch.utils import _pytree as pytree

from ..couplings import Coupling, naive
from ..models.calibration import Calibration
from ..models.likelihoods import Likelihood
from ..networks.linearised import Linearised
from ..posterior import Posterior
from ..predict.draws import DrawChunks, on_device
from ..predict.predictive import Predictive
from ..predict.predictor import Predictor


class FixedPredictive(nn.Module):
    """x → class probabilities [B, C, ..], or (mean, variance) of t [B, ..] each, at S draws that never change.

    The network is held once, the drawn tensors as buffers [S, *shape]; what is the same in every draw is held once too.

    Args:
        chunks: the draws, of a posterior that is copied, not changed.
        calibration: of the predictions, if any.
    """

    def __init__(self, chunks: DrawChunks, calibration: Calibration | None):
        super().__init__()
        posterior = chunks.posterior
        with torch.no_grad():
            every = [chunks.draw(index)[0] for index in range(len(chunks))]
            theta = torch.cat([one.theta for one in every])  # [S, P]
            weight = torch.cat([chunks.share(index) * one.weight for index, one in enumerate(every)])
            fixed = every[0].fixed
            values = posterior.model.likelihood_values(theta, fixed)
            random = dict(posterior.model.with_padding(posterior.space.without(fixed).unravel(theta)))
            own = set(posterior.model.likelihood_names)
            with posterior.network_mode() as net:
                self.net = copy.deepcopy(net).requires_grad_(False)
            linear = {} if chunks.around is None else posterior.model.net_space.unravel(chunks.around)
            if linear:
                random |= {name: tensor.expand(len(theta), *tensor.shape) for name, tensor in fixed.items()}
            for name, parameter in self.net.named_parameters():
                if name in linear:
                    parameter.copy_(linear[name])
                elif name in fixed:
                    parameter.copy_(fixed[name])
                elif name in random:
                    parameter.zero_()  # a draw takes its place at every call
        self.linearised = bool(linear)
        self.likelihood = copy.deepcopy(posterior.model.likelihood)
        self.calibration = calibration
        self.names = [name for name in random if name not in own]
        self.value_names = list(values)
        self.register_buffer("weight", weight)
        for index, name in enumerate(self.names):
            self.register_buffer(f"draws_{index}", random[name].clone())
        for index, name in enumerate(self.value_names):
            self.register_buffer(f"value_{index}", values[name].clone())

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        weight = self.get_buffer("weight")
        drawn = {name: self.get_buffer(f"draws_{index}").unbind() for index, name in enumerate(self.names)}
        call = functional_call
        if self.linearised:
            own = dict(self.net.named_parameters())
            call = Linearised({name: own[name] for name in self.names})
        outputs = [
            call(self.net, {name: rows[s] for name, rows in drawn.items()}, arguments, keywords)
            for s in range(weight.shape[0])
        ]
        stacked = pytree.tree_map(lambda *leaves: torch.stack(leaves), outputs[0], *outputs[1:])
        values = {name: self.get_buffer(f"value_{index}") for index, name in enumerate(self.value_names)}
        pred = Predictive(stacked, weight, self.likelihood, values).calibrated(self.calibration)
        if isinstance(pred.components, Categorical | Bernoulli):
            return pred.mean
        return pred.mean, pred.variance


def export_predictive(
    posterior: Posterior | Predictor,
    example_inputs: Any,
    draws: int = 8,
    *,
    coupling: Coupling = naive,
    chunk: int = 16,
    dynamic_batch: bool = True,
    generator: torch.Generator | None = None,
) -> ExportedProgram:
    """The predictive mixture at fixed draws as a program: `torch.export.save` it, and load it without structvi.

    Called as the network is, it gives what `posterior.predict` does with the same arguments and a generator of the same
    seed: of labels the class probabilities, `mean`, otherwise the pair (`mean`, `variance`). It takes S times the work
    of the network, and S times the memory of what is random in it. A temperature or scale that `calibrate` found is
    in it, conformal sets are not.

    Args:
        posterior: what `variationalize` returns; or `posterior.predictor(..)`, whose draws are those of the program.
        example_inputs: as `predict` takes them: a tensor [B, ..], a tuple of arguments or a dict of keywords.
        draws, coupling, chunk, generator: as in `predict`; of a predictor they are its own.
        dynamic_batch: whether B may be another at every call; False where the network only takes the example's.

    Example:
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(nn.Linear(3, 1), likelihoods.Gaussian(noise=0.1), num_data=10)
        >>> program = export_predictive(bayes, torch.zeros(4, 3), draws=2)
        >>> mean, variance = program.module()(torch.zeros(7, 3))
        >>> mean.shape, variance.shape
        (torch.Size([7, 1]), torch.Size([7, 1]))
    """
    if isinstance(posterior, Predictor):
        chunks, calibration = posterior.chunks, posterior.chunks.calibration
        _check(chunks.posterior)
    else:
        _check(posterior)
        chunks = DrawChunks(posterior, draws, coupling, chunk, None, generator)
        calibration = posterior.calibration
    if dynamic_batch and chunks.around is not None:
        raise ValueError(
            "torch traces forward-mode derivatives for one batch size alone: export a linearised posterior with "
            "dynamic_batch=False, at the batch size it will be called with"
        )
    module = FixedPredictive(chunks, calibration)
    example = on_device(example_inputs, module.get_buffer("weight").device)
    tensors = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)]
    if not tensors or any(leaf.ndim == 0 or leaf.shape[0] != tensors[0].shape[0] for leaf in tensors):
        came = [tuple(leaf.shape) for leaf in tensors]
        raise ValueError(f"example_inputs must be tensors [B, ..] of one B, as predict takes them, got shapes {came}")
    if dynamic_batch and tensors[0].shape[0] < 2:  # a size of one would be taken for a constant
        example = pytree.tree_map(
            lambda leaf: leaf.repeat_interleave(2, 0) if isinstance(leaf, Tensor) else leaf, example
        )
    arguments, keywords = ((), dict(example)) if isinstance(example, dict) else (_tuple(example), {})
    # an end: where a dimension is sliced, torch 2.6 asks that the size is not the largest number there is
    batch = {0: Dim("batch", max=2**31 - 1)} if dynamic_batch else None
    if keywords:  # torch.export reads the names of keywords from a signature, and fails at **keywords
        module.forward = _with_signature(module.forward, keywords)
    given = keywords or {"arguments": arguments}  # as `forward` names them
    shapes = pytree.tree_map(lambda leaf: batch if isinstance(leaf, Tensor) else None, given)
    try:
        # without gradients: `no_grad` inside would be a part of the program, which torch 2.6 cannot read again
        with torch.no_grad(), warnings.catch_warnings():
            # an LSTM keeps a list of its weights, and gets it back after every draw
            warnings.filterwarnings("ignore", message="The tensor attributes .*_flat_weights")
            program = torch.export.export(module, arguments, keywords, dynamic_shapes=shapes, strict=False)
    except RuntimeError as error:  # of torch.export: branches on values, sizes that are constants, operators it lacks
        raise ValueError(
            f"torch.export cannot trace {type(chunks.posterior.net).__name__}: {error}\nIt takes networks without "
            "branches on the values of tensors; where only the batch size is the trouble, give dynamic_batch=False"
        ) from error
    if chunks.around is not None:
        _check_it_runs(program, arguments, keywords)
    return program


def _check_it_runs(program: ExportedProgram, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Of forward-mode derivatives torch 2.6 makes programs that cannot be called."""
    try:
        with torch.no_grad():
            program.module()(*arguments, **keywords)
    except RuntimeError as error:
        raise ValueError(
            f"torch {torch.__version__} makes a program of a linearised posterior that does not run ({error}): take a "
            "newer torch, 2.13 for example; or a posterior that is not linearised"
        ) from error


def _tuple(example: Any) -> tuple[Any, ...]:
    return tuple(example) if isinstance(example, tuple | list) else (example,)


def _with_signature(forward: Callable[..., Any], keywords: Iterable[str]) -> Callable[..., Any]:
    def named(**inputs: Any) -> Any:
        return forward(**inputs)

    named.__signature__ = Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in keywords])  # pyright: ignore
    return named


def _check(posterior: Posterior) -> None:
    if not isinstance(posterior.model.likelihood, Likelihood):
        raise TypeError(
            "the likelihood is a plain function, of which no mean and no probabilities are known: write a Likelihood, "
            "whose distribution(output, values) is p(t | y)"
        )
    if posterior.model.user_forward is not None:
        raise ValueError(
            "forward= takes a batch with its target, which a deployed program does not have: wrap the network in a "
            "module that takes the inputs and returns the output, and variationalize that"
        )
    if posterior.dropout == "on":
        raise ValueError('dropout="on" draws anew at every call, and a program has fixed draws: use dropout="off"')
    if posterior.batch_norm == "reestimated":
        raise ValueError(
            'batch_norm="reestimated" needs a reference batch at every call: export with "frozen" or "deterministic"'
        )
