"""A predictive with fixed draws as a `torch.export` program: it runs without structvi."""

import copy
import warnings
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical
from torch.export import Dim, ExportedProgram
from torch.func import functional_call
from torch.utils import _pytree as pytree

from ..models import likelihoods
from ..models.calibration import Calibration
from ..models.likelihoods import Likelihood
from ..networks.learned_variance import OnePass
from ..posterior import Posterior
from ..predict.one_pass import LearnedDraws, predictive_of
from ..predict.predict import Predictor, WeightDraws
from ..predict.predictive import Predictive, PredictiveDraws, on_device
from ..predict.sample import network_with

__all__ = ["export_predictive"]

#: draws of a posterior without a learned variance, if not given
DRAWS = 8
#: roots of the rounding by which a program may differ from `predict`: sums are taken in another order
CLOSE = 10.0


class FixedPredictive(nn.Module):
    """x → class probabilities [B, C, ..], or (mean, variance) of t [B, ..] each, at S draws that never change.

    The network is held once, and so are tensors that all draws share; drawn tensors are buffers [S, *shape].

    Args:
        chunks: the draws, of a posterior that is copied, not changed.
        calibration: of the predictions, if any.
    """

    def __init__(self, chunks: WeightDraws, calibration: Calibration | None):
        super().__init__()
        posterior, model = chunks.posterior, chunks.posterior.model
        theta, weight, fixed = chunks.every()  # [S, P], [S]
        drawn = dict(model.with_padding(posterior.space.without(fixed).unravel(theta)))
        values = model.likelihood_values(theta, fixed)
        # a drawn tensor takes the place of the network's own, which is zero, at every call
        self.net = _network_with(posterior, {**{name: torch.zeros(()) for name in drawn}, **fixed})
        self.likelihood, self.calibration = copy.deepcopy(model.likelihood), calibration
        self.names = [name for name in drawn if name not in model.likelihood_names]
        self.value_names = list(values)
        self.register_buffer("weight", weight)
        for index, name in enumerate(self.names):
            self.register_buffer(f"draws_{index}", drawn[name].clone())
        for index, name in enumerate(self.value_names):
            self.register_buffer(f"value_{index}", values[name].clone())

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        weight = self.get_buffer("weight")
        drawn = {name: self.get_buffer(f"draws_{index}") for index, name in enumerate(self.names)}
        outputs = [
            functional_call(self.net, {name: rows[s] for name, rows in drawn.items()}, arguments, keywords)
            for s in range(weight.shape[0])
        ]
        stacked = pytree.tree_map(lambda *leaves: torch.stack(leaves), outputs[0], *outputs[1:])
        values = {name: self.get_buffer(f"value_{index}") for index, name in enumerate(self.value_names)}
        return _told(Predictive(stacked, weight, self.likelihood, values).calibrated(self.calibration))


class OnePassPredictive(nn.Module):
    """The same by one pass of the network at θ₀, with the learned variance of its outputs, at any batch size.

    Args:
        source: of the predictions, with a posterior that is copied, not changed.
        calibration: of the predictions, if any.
    """

    def __init__(self, source: LearnedDraws, calibration: Calibration | None):
        super().__init__()
        posterior, model = source.posterior, source.posterior.model
        drawn = model.with_padding(model.net_space.unravel(source.theta.unsqueeze(0)))
        self.net = _network_with(posterior, {name: rows[0] for name, rows in drawn.items()})
        self.learned, self.likelihood = copy.deepcopy(source.learned), copy.deepcopy(model.likelihood)
        self.calibration = calibration

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        seen: list[Tensor] = []
        layer = self.net.get_submodule(self.learned.layer)
        hook = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            y = self.net(*arguments, **keywords)
        finally:
            hook.remove()
        one = OnePass.of(y, layer, seen[-1], isinstance(self.likelihood, likelihoods.Categorical))
        pred = predictive_of(y, self.learned(one), self.likelihood)
        return _told(pred.calibrated(self.calibration))


def _network_with(posterior: Posterior, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of the network, in the mode in which it predicts, with these values."""
    with posterior.network_mode() as net:
        return network_with(net, tensors).requires_grad_(False)


def export_predictive(
    posterior: Posterior | Predictor,
    example_inputs: Any,
    draws: int | None = None,
    *,
    dynamic_batch: bool = True,
    generator: torch.Generator | None = None,
) -> ExportedProgram:
    """Return the predictive as a program: `torch.export.save` it, and load it without structvi.

    Call it as you call the network. It returns what `posterior.predict` returns with the same arguments and a generator
    of the same seed: class probabilities, `mean`, or for numbers the pair (`mean`, `variance`). With fixed draws it
    takes S times the work of the network, and S times the memory of its random tensors; with a learned variance it is
    one pass. A temperature or scale from `calibrate` is applied; conformal sets are left out. The program has the
    shapes of the example inputs, not their values.

    Args:
        posterior: what `variationalize` returns; or `posterior.predictor(..)`, with its draws.
        example_inputs: as `predict` takes them: a tensor [B, ..], a tuple of arguments or a dict of keywords.
        draws: S; of a predictor its own. None for the learned variance if `laplace` has found one, else 8 draws.
        generator: as in `predict`.
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
        source, calibration = posterior.drawn, posterior.drawn.calibration
        _check(source.posterior)
    else:
        _check(posterior)
        learned, calibration = draws is None and posterior.learned_variance is not None, posterior.calibration
        count = DRAWS if draws is None else draws
        source = LearnedDraws(posterior) if learned else WeightDraws(posterior, count, generator=generator)
    if isinstance(source, WeightDraws) and source.around is not None:
        raise ValueError(
            "draws of a linearised network are no program: export the learned variance that laplace finds (draws=None)"
        )
    example = on_device(example_inputs, source.device)
    tensors = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)]
    if not tensors or any(leaf.ndim == 0 or leaf.shape[0] != tensors[0].shape[0] for leaf in tensors):
        came = [tuple(leaf.shape) for leaf in tensors]
        raise ValueError(f"example_inputs must be tensors [B, ..] of one B, as predict takes them, got shapes {came}")

    rows = 2 if dynamic_batch else tensors[0].shape[0]  # one would be taken for a constant

    def blank(leaf: Any) -> Any:
        """Return zeros of this form: a program keeps its example inputs, with all of the memory they are a view of."""
        return leaf.new_zeros(rows, *leaf.shape[1:]) if isinstance(leaf, Tensor) else leaf

    example = pytree.tree_map(blank, example)
    arguments, keywords = ((), dict(example)) if isinstance(example, dict) else (_tuple(example), {})
    # an end: where a dimension is sliced, torch 2.6 asks that the size is not the largest number there is
    batch = {0: Dim("batch", max=2**31 - 1)} if dynamic_batch else None
    given = keywords or {"arguments": arguments}  # as `forward` names them
    shapes = pytree.tree_map(lambda leaf: batch if isinstance(leaf, Tensor) else None, given)
    try:
        # without gradients: `no_grad` inside would be a part of the program, which torch 2.6 cannot read again
        with torch.no_grad(), warnings.catch_warnings():
            # an LSTM keeps a list of its weights, and gets it back after every draw
            warnings.filterwarnings("ignore", message="The tensor attributes .*_flat_weights")
            kind = OnePassPredictive if isinstance(source, LearnedDraws) else FixedPredictive
            module = kind(source, calibration)  # pyright: ignore[reportArgumentType]
            if keywords:  # torch.export reads the names of keywords from a signature, and fails at **keywords
                module.forward = _with_signature(module.forward, list(keywords))
            program = torch.export.export(module, arguments, keywords, dynamic_shapes=shapes, strict=False)
    except RuntimeError as error:  # of torch.export: branches on values, sizes that are constants, operators it lacks
        raise ValueError(
            f"torch.export cannot trace {type(source.posterior.net).__name__}: {error}\nIt takes networks without "
            "branches on the values of tensors; where only the batch size is the trouble, give dynamic_batch=False"
        ) from error
    _check_program(program, source, calibration, example, rows + dynamic_batch)
    return program


def _check_program(
    program: ExportedProgram, source: PredictiveDraws, calibration: Calibration | None, example: Any, rows: int
) -> None:
    """Raise ValueError unless program and posterior have the same predictions, at `rows` random rows."""
    generator = torch.Generator().manual_seed(0)

    def random(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        made = torch.rand(rows, *leaf.shape[1:], generator=generator) if leaf.is_floating_point() else torch.zeros(())
        return made.to(leaf).expand(rows, *leaf.shape[1:])

    x = pytree.tree_map(random, example)
    with torch.no_grad():
        got = program.module()(**x) if isinstance(x, dict) else program.module()(*_tuple(x))
        expected = _told(source.mixture(x).calibrated(calibration))
    for one, other in zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True):
        tolerance = CLOSE * torch.finfo(other.dtype).eps ** 0.5
        if not torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True):
            raise ValueError(
                f"the exported program differs from predict by up to {(one - other).abs().max():.2g}: the network "
                "computes something else while it is traced, or at another batch size (dynamic_batch=False)"
            )


def _told(pred: Predictive) -> Any:
    """Return class probabilities, or mean and variance."""
    return pred.mean if isinstance(pred.components, Categorical | Bernoulli) else (pred.mean, pred.variance)


def _tuple(example: Any) -> tuple[Any, ...]:
    return tuple(example) if isinstance(example, tuple | list) else (example,)


def _with_signature(forward: Callable[..., Any], keywords: list[str]) -> Callable[..., Any]:
    def named(**inputs: Any) -> Any:
        return forward(**inputs)

    named.__signature__ = Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in keywords])  # pyright: ignore
    return named


def _check(posterior: Posterior) -> None:
    reasons = {
        "the likelihood is a plain function, of which no probabilities are known: write a Likelihood": not isinstance(
            posterior.model.likelihood, Likelihood
        ),
        "forward= takes a batch with its target, which a deployed program does not have: wrap the network in a module "
        "that takes the inputs, and variationalize that": posterior.model.user_forward is not None,
        'dropout="on" draws anew at every call: use dropout="off"': posterior.dropout == "on",
        'batch_norm="reestimated" needs a reference batch at every call: use "frozen"': (
            posterior.batch_norm == "reestimated"
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"this posterior cannot be exported: {reason}")
