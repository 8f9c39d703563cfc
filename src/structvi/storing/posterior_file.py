"""Save and load: a posterior as one file of tensors and a description, without code."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from ..families.family import Family
from ..models.bayesian_model import BayesianModel
from ..models.priors.base import Prior
from ..networks.vmap_or_loop import Evaluation
from ..parameters import Parameters
from ..posterior import BATCH_NORM, DROPOUT, PosteriorBase
from .describe import OfYourOwn, decode, encode
from .file import CheckpointError, digest, read, write

_KIND = "posterior"
_PARTS = ("family", "likelihood", "prior")

#: tensor names with their shape and dtype
Table = dict[str, tuple[tuple[int, ...], str]]


def save(posterior: PosteriorBase, path: str | os.PathLike, network: Literal["store", "hash"] = "store") -> None:
    """Write a posterior to one file, see `Posterior.save`."""
    posterior.check_whole()
    if network not in ("store", "hash"):
        raise ValueError(f'network must be "store" or "hash", got {network!r}')
    model = posterior.model
    random, held = _tensors_of(model.net, model.net_space.names)
    parts = {"family": posterior.family, "likelihood": model.likelihood, "prior": model.prior}
    tensors = {
        f"{part}.{name}": tensor
        for part, module in parts.items()
        if isinstance(module, nn.Module)
        for name, tensor in module.state_dict().items()
    }
    if network == "store":
        tensors |= {f"network.{name}": tensor for name, tensor in held.items()}
    evaluation = model.evaluation
    description = {
        "kind": _KIND,
        **{part: _describe(value) for part, value in parts.items()},
        "forward": model.user_forward is not None,
        "random": encode(_table(random)),
        "held": encode(_table(held)),
        "hashes": {name: digest({name: tensor}) for name, tensor in held.items()} if network == "hash" else None,
        "num_data": model.known_num_data,
        "dropout": posterior.dropout,
        "batch_norm": posterior.batch_norm,
        "checkpoint_activations": model.checkpoint_activations,
        "evaluation": [evaluation.mode, evaluation.chunk, evaluation.deterministic, encode(evaluation.record)],
    }
    write(path, tensors, description)


def load(
    path: str | os.PathLike,
    net: nn.Module,
    *,
    family: Family | None = None,
    prior: Prior | None = None,
    likelihood: Callable[[Any, Any], Tensor] | None = None,
    forward: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None,
    device: torch.device | str | None = None,
) -> PosteriorBase:
    """The posterior of a file, see `structvi.load`."""
    if not isinstance(net, nn.Module):
        raise TypeError(f"load expects the network, an nn.Module, after the path, got {type(net).__name__}")
    tensors, description = read(path)
    saved = _Saved.of(description, path)
    given = {"family": family, "likelihood": likelihood, "prior": prior, "forward": forward}
    needed = {part: name for part, name in saved.own.items() if given[part] is None}
    if needed:
        raise ValueError(
            f"{path}: what you wrote yourself is not in the file, "
            + ", ".join(f"the {part} ({name})" for part, name in needed.items())
            + "; give it again: load(path, net, "
            + ", ".join(f"{part}=…" for part in needed)
            + ")"
        )
    _check_tensors(saved, tensors, path)
    random, held = _tensors_of(net, saved.random)
    _check_network(saved, random, held, path)

    parts = {part: saved.parts[part] if given[part] is None else given[part] for part in _PARTS}
    space = Parameters(random, net=net)
    model = BayesianModel(net, parts["likelihood"], parts["prior"], saved.num_data, parameters=space, forward=forward)
    model.evaluation, model.checkpoint_activations = saved.evaluation, saved.checkpoint_activations
    bound = parts["family"]
    if not bound.is_bound:  # its values come from the file: any start will do
        bound = bound.bind(model.space, torch.Generator().manual_seed(0))
    parts["family"] = bound
    for part in _PARTS:
        _set_tensors(parts[part], _under(part, tensors), f"{path}: the {part} ({type(parts[part]).__name__})")
        if isinstance(parts[part], nn.Module):
            parts[part].to(space.device)
    with torch.no_grad():
        for name, tensor in _under("network", tensors).items():
            held[name].copy_(tensor)
    posterior = PosteriorBase(model, bound, dropout=saved.dropout, batch_norm=saved.batch_norm)
    return posterior if device is None else posterior.to(device)


class _Saved(NamedTuple):
    """A description, decoded."""

    parts: dict[str, Any]  # the family as a recipe, likelihood and prior; None where they are the user's own
    own: dict[str, str]  # part → the name of what the user has to give
    random: Table
    held: Table
    hashes: dict[str, str] | None
    num_data: int | None
    dropout: Literal["off", "on"]
    batch_norm: Literal["frozen", "deterministic", "reestimated"]
    evaluation: Evaluation
    checkpoint_activations: bool

    @classmethod
    def of(cls, description: Mapping[str, Any], path: Any) -> Self:
        if description.get("kind") != _KIND:
            raise CheckpointError(f"{path} holds no posterior: its description is of kind {description.get('kind')!r}")
        try:
            own = {part: description[part]["own"] for part in _PARTS if "own" in description[part]}
            if description["forward"] not in (True, False):
                raise ValueError("forward must be true or false")
            if description["forward"]:
                own["forward"] = "(net, batch) → (output, target)"
            *settings, record = description["evaluation"]
            evaluation = Evaluation(*settings)
            evaluation.record = decode(record)
            if not isinstance(description["checkpoint_activations"], bool):
                raise ValueError("checkpoint_activations must be true or false")
            if description["dropout"] not in DROPOUT or description["batch_norm"] not in BATCH_NORM:
                raise ValueError("unknown dropout or batch_norm")
            return cls(
                {part: None if part in own else decode(description[part]["value"]) for part in _PARTS},
                own,
                dict(decode(description["random"])),
                dict(decode(description["held"])),
                description["hashes"],
                description["num_data"],
                description["dropout"],
                description["batch_norm"],
                evaluation,
                description["checkpoint_activations"],
            )
        # a description with the right hash that `save` did not write: another version's, or made by hand
        except (AttributeError, IndexError, KeyError, RecursionError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} does not describe a posterior: {type(error).__name__} {error}") from None


def _describe(part: Any) -> dict[str, Any]:
    try:
        return {"value": encode(part)}
    except OfYourOwn as name:
        return {"own": str(name)}


def _tensors_of(net: nn.Module, names: Iterable[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters of these names, as far as there are such, and all else that the network's state dict has."""
    parameters: dict[str, Tensor] = dict(net.named_parameters())
    persistent = net.state_dict().keys()
    buffers = {name: buffer for name, buffer in net.named_buffers() if name in persistent}
    random = {name: parameters.pop(name) for name in names if name in parameters}
    return random, {**parameters, **buffers}


def _table(tensors: Mapping[str, Tensor]) -> Table:
    return {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}


def _under(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(f"{part}."): t for name, t in tensors.items() if name.startswith(f"{part}.")}


def _differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    lines = [f"  missing: {name} {_text(saved[name])}" for name in saved if name not in here]
    lines += [f"  extra: {name} {_text(here[name])}" for name in here if name not in saved]
    return lines + [
        f"  {name}: {_text(saved[name])} in the file, {_text(here[name])} here"
        for name in saved
        if name in here and saved[name] != here[name]
    ]


def _text(entry: tuple) -> str:
    return " ".join(str(list(item) if isinstance(item, tuple) else item) for item in entry)


def _check_tensors(saved: _Saved, tensors: Mapping[str, Tensor], path: Any) -> None:
    """The file's tensors are those that its description speaks of; the parts check their own."""
    stray = [name for name in tensors if name.split(".")[0] not in (*_PARTS, "network")]
    different = _differences(saved.held if saved.hashes is None else {}, _table(_under("network", tensors)))
    if stray or different:
        raise CheckpointError(f"{path} does not hold the tensors that it describes: {stray}\n" + "\n".join(different))


def _check_network(saved: _Saved, random: Mapping[str, Tensor], held: Mapping[str, Tensor], path: Any) -> None:
    different = _differences({**saved.random, **saved.held}, _table({**random, **held}))
    if different:
        raise ValueError(f"{path} was saved with another network. Its tensors are\n" + "\n".join(different))
    if saved.hashes is not None:
        others = [name for name, tensor in held.items() if digest({name: tensor}) != saved.hashes.get(name)]
        if others:
            raise ValueError(
                f"{path} holds the hashes of the network's non-random tensors, and here these have other values: "
                f"{', '.join(others)}; give the network as it was when the posterior was saved"
            )


def _set_tensors(module: Any, tensors: Mapping[str, Tensor], what: str) -> None:
    here = module.state_dict() if isinstance(module, nn.Module) else {}
    different = _differences(
        {name: (tuple(t.shape),) for name, t in tensors.items()}, {name: (tuple(t.shape),) for name, t in here.items()}
    )
    if different:
        raise ValueError(f"{what} is not the one that was saved. Its tensors are\n" + "\n".join(different))
    if here:
        module.load_state_dict(tensors, assign=True)  # assign: with the dtype of the file
