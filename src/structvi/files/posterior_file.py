"""Save and load: a posterior as one file of tensors and a description, without code.

What a file says is checked in this order, and nothing is made before it has passed: the header fits the file, the
description is one of a posterior, the network is the one that was saved, the tensors in the header are those that
description and network ask for; then they are read, their SHA-256 and values are checked, and the parts are built.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..families.family import Family
from ..models.bayesian_model import BayesianModel
from ..models.calibration import Calibration, Conformal
from ..models.likelihoods import Bernoulli, Categorical, Gaussian, Poisson, StudentT
from ..models.priors.base import Prior, SeparablePrior
from ..networks.call import alone_with
from ..networks.modes import BatchNorm, Dropout
from ..networks.padding import padding_rows
from ..parameters import Parameters
from ..result import Status
from ..util.patterns import few
from .describe import Kind, check, decode, encode
from .file import CheckpointError, digest, opened, write
from .header import Entry
from .implied import tensors_of_family
from .parts import any_start, check_values, describe_part, differences, set_tensors, shown, under
from .posterior_description import KIND, PARTS, Saved, Table, most_patterns, refusing

if TYPE_CHECKING:
    from ..posterior import Posterior

#: the tensors at which a network is linearised
LINEARISED = "linearised"
#: the scores of conformal sets
SCORES = "calibration"


class Loaded(NamedTuple):
    """Parts of a posterior, read from a file."""

    model: BayesianModel
    family: Family
    dropout: Dropout
    batch_norm: BatchNorm
    calibration: Calibration | None
    chosen_on: str | None
    fit_status: Status | None


def save(posterior: "Posterior", path: str | os.PathLike[str], network: Literal["store", "hash"] = "store") -> None:
    """Write a posterior to one file, see `Posterior.save`."""
    posterior.check_whole()
    if network not in ("store", "hash"):
        raise ValueError(f'network must be "store" or "hash", got {network!r}')
    model = posterior.model
    with alone_with(model.net):  # no call has drawn weights in it
        random, held = _tensors_of(model.net, model.net_space.names)
        held |= _padding_of(model.net, random)
    parts = {"family": posterior.family, "likelihood": model.likelihood, "prior": model.prior}
    tensors = {
        f"{part}.{name}": tensor
        for part, module in parts.items()
        if isinstance(module, nn.Module)
        for name, tensor in module.state_dict().items()
    }
    if network == "store":
        tensors |= {f"network.{name}": tensor for name, tensor in held.items()}
    if model.linearised_at is not None:
        tensors |= {f"{LINEARISED}.{n}": t for n, t in model.net_space.unravel(model.linearised_at).items()}
    for part in PARTS:  # what `load` would refuse
        if not bool(all(x.isfinite().all() for x in under(part, tensors).values() if x.is_floating_point())):
            raise ValueError(
                f"the {part} has values that are not finite, and a file of it could not be loaded: save a posterior "
                "whose fit has not failed"
            )
    calibration = posterior.calibration
    if calibration is not None and calibration.conformal is not None:
        tensors[f"{SCORES}.scores"] = calibration.conformal.values
    evaluation = model.evaluation
    description = {
        "kind": KIND,
        **{part: describe_part(value) for part, value in parts.items()},
        "forward": model.user_forward is not None,
        "random": encode(_table(random)),
        "held": encode(_table(held)),
        "hashes": {name: digest({name: tensor}) for name, tensor in held.items()} if network == "hash" else None,
        "num_data": model.known_num_data,
        "dropout": posterior.dropout,
        "batch_norm": posterior.batch_norm,
        "checkpoint_activations": model.checkpoint_activations,
        "evaluation": [evaluation.mode, evaluation.chunk],
    }
    if model.linearised_at is not None:
        description["linearised"] = True
    if calibration is not None:
        description["calibration"] = calibration.described()
    if model.keys is not None:
        description["keys"] = model.keys
    if posterior.chosen_on is not None:
        description["chosen_on"] = posterior.chosen_on
    if posterior.fit_status is not None:
        description["fit_status"] = str(posterior.fit_status)
    for part in PARTS:
        if "value" in description[part]:
            try:
                check(description[part]["value"], part, most_patterns(random))
            except ValueError as error:
                raise ValueError(f"the {part} cannot be saved, for it could not be loaded: {error}") from None
    write(path, tensors, description)


def load(
    path: str | os.PathLike[str],
    net: nn.Module,
    *,
    family: Family | None = None,
    prior: Prior | None = None,
    likelihood: Callable[[Any, Any], Tensor] | None = None,
    forward: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None,
) -> Loaded:
    """Return the parts of the posterior of a file, see `structvi.load`."""
    if not isinstance(net, nn.Module):
        raise TypeError(
            f"load expects the network, an nn.Module, after the path, got {type(net).__name__}; a fit of a log density "
            "is read by vi.load_fit(path, target)"
        )
    if family is not None and not isinstance(family, Family):
        raise TypeError(f"family must be a family such as MeanField(), got {family!r}")
    given = {"family": family, "likelihood": likelihood, "prior": prior, "forward": forward}
    with opened(path) as stored:
        saved = Saved.of(stored.description, path)
        _check_given(saved, given, path)
        _check_held(saved, stored.table, path)
        random, held = _tensors_of(net, saved.random)
        held |= {name: row for name, row in _padding_of(net, random).items() if name in saved.held}  # not in old files
        _check_network(saved, random, held, path)
        parts = {part: _part(saved, part, path) if given[part] is None else given[part] for part in PARTS[1:]}
        space = Parameters(random, net=net)
        if prior is None:
            with refusing(path):
                _check_prior(parts["prior"], space)
        model = BayesianModel(
            net, parts["likelihood"], parts["prior"], saved.num_data, parameters=space, forward=forward,
            keys=None if forward is not None else saved.keys, linearise=saved.linearised,
        )  # fmt: skip
        model.evaluation, model.checkpoint_activations = saved.evaluation, saved.checkpoint_activations
        if family is not None:
            parts["family"] = family if family.is_bound else family.bind(model.space, any_start())
        for part in PARTS:
            _check_part(saved, part, parts.get(part), under(part, stored.table), model, given, path)
        tensors = stored.tensors()
    calibration = _calibration(saved, tensors, model.likelihood, path)
    if model.linearised_at is not None:
        check_values(under(LINEARISED, tensors), f"{path}: the network's values")
        model.linearised_at = space.ravel(under(LINEARISED, tensors)).to(model.linearised_at)
    for part in PARTS:
        if given[part] is None:
            check_values(under(part, tensors), f"{path}: the {part}")
    if family is None:
        with refusing(path):
            parts["family"] = _part(saved, "family", path).bind(model.space, any_start())
    for part in PARTS:
        set_tensors(parts[part], under(part, tensors), f"{path}: the {part} ({type(parts[part]).__name__})")
        if isinstance(parts[part], nn.Module):
            parts[part].to(space.device)
    with torch.no_grad():
        for name, tensor in under("network", tensors).items():
            held[name].copy_(tensor)
    return Loaded(
        model, parts["family"], saved.dropout, saved.batch_norm, calibration, saved.chosen_on, saved.fit_status
    )


def _part(saved: Saved, part: Kind, path: Any) -> Any:
    with refusing(path):
        return decode(saved.parts[part], part, most_patterns(saved.random))


def _check_prior(prior: nn.Module, space: Parameters) -> None:
    """That it fits the space; of a sum, each of its priors."""
    for module in prior.modules():
        if isinstance(module, SeparablePrior):
            module.check(space)


def _tensors_of(net: nn.Module, names: Iterable[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters of these names, as far as there are such, and all else that the network's state dict has."""
    parameters: dict[str, Tensor] = dict(net.named_parameters())
    persistent = net.state_dict().keys()
    buffers = {name: buffer for name, buffer in net.named_buffers() if name in persistent}
    random = {name: parameters.pop(name) for name in names if name in parameters}
    return random, {**parameters, **buffers}


def _padding_of(net: nn.Module, random: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The rows of random tensors that are held: views of the network's own."""
    return {f"{name}.padding": random[name].detach()[row] for name, row in padding_rows(net, random).items()}


def _table(tensors: Mapping[str, Tensor]) -> Table:
    return {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}


def _check_given(saved: Saved, given: Mapping[str, Any], path: Any) -> None:
    needed = {part: name for part, name in saved.own.items() if given[part] is None}
    if needed:
        raise ValueError(
            f"{path}: what you wrote yourself is not in the file, "
            + ", ".join(f"the {part} ({name})" for part, name in needed.items())
            + "; give it again: load(path, net, "
            + ", ".join(f"{part}=…" for part in needed)
            + ")"
        )


def _check_held(saved: Saved, table: Mapping[str, Entry], path: Any) -> None:
    """The network's tensors in the file are those that its description speaks of, and none belongs to nobody."""
    stray = [shown(name) for name in table if name.split(".")[0] not in (*PARTS, "network", LINEARISED, SCORES)]
    inside = {
        part: {name: (entry.shape, str(entry.dtype)) for name, entry in under(part, table).items()}
        for part in ("network", LINEARISED, SCORES)
    }
    different = differences(saved.held if saved.hashes is None else {}, inside["network"])
    different += differences(saved.random if saved.linearised else {}, inside[LINEARISED])
    different += differences(_scores(saved), inside[SCORES])
    if stray or different:
        raise CheckpointError(
            f"{path} does not hold the tensors that it describes: {few(stray)}\n" + "\n".join(different)
        )


def _scores(saved: Saved) -> Table:
    """The tensors of a calibration."""
    described = None if saved.calibration is None else saved.calibration["conformal"]
    return {} if described is None else {"scores": ((Conformal.size(*described),), str(torch.float64))}


def _calibration(saved: Saved, tensors: Mapping[str, Tensor], likelihood: Any, path: Any) -> Calibration | None:
    if saved.calibration is None:
        return None
    with refusing(path):
        calibration = Calibration.of(saved.calibration, tensors.get(f"{SCORES}.scores"))
        check_calibration(calibration, likelihood)
        return calibration


def check_calibration(calibration: Calibration, likelihood: Any) -> None:
    """ValueError where it is not one of the likelihood's targets, as far as that is ours."""
    labels = isinstance(likelihood, Categorical | Bernoulli)
    if not labels and not isinstance(likelihood, Gaussian | Poisson | StudentT):
        return
    one, two = calibration.adjustment, calibration.conformal
    if one is not None and (one.kind == "temperature") != labels:
        raise ValueError(f"{type(likelihood).__name__} has no {one.kind}")
    if two is not None and (two.form == "number") == labels:
        raise ValueError(f"conformal scores of a {two.form} are not those of {type(likelihood).__name__}")


def _check_network(saved: Saved, random: Mapping[str, Tensor], held: Mapping[str, Tensor], path: Any) -> None:
    different = differences({**saved.random, **saved.held}, _table({**random, **held}))
    if different:
        raise ValueError(f"{path} was saved with another network. Its tensors are\n" + "\n".join(different))
    if saved.hashes is not None:
        others = [name for name, tensor in held.items() if digest({name: tensor}) != saved.hashes.get(name)]
        if others:
            raise ValueError(
                f"{path} holds the hashes of the network's non-random tensors, and here these have other values: "
                f"{', '.join(others)}; give the network as it was when the posterior was saved"
            )


def _check_part(
    saved: Saved,
    part: Kind,
    module: Any,
    table: Mapping[str, Entry],
    model: BayesianModel,
    given: Mapping[str, Any],
    path: Any,
) -> None:
    """The tensors in the file are those that a part has, by name, shape and kind of number; none is read."""
    if part == "family" and module is None:
        with refusing(path):
            shapes = tensors_of_family(saved.parts[part], model.space)
        what = saved.parts[part]["structvi"][0]
    else:
        here = module.state_dict() if isinstance(module, nn.Module) else {}
        shapes = {name: tuple(tensor.shape) for name, tensor in here.items()}
        what = type(module).__name__
    file = {name: (entry.shape,) for name, entry in table.items()}
    if different := differences(file, {name: (shape,) for name, shape in shapes.items()}):
        text = f"{path}: the {part} ({what}) is not the one that was saved. Its tensors are\n" + "\n".join(different)
        raise (CheckpointError if given[part] is None and given["likelihood"] is None else ValueError)(text)
    if given[part] is None:
        dtypes = {model.space.dtype} if part == "family" else {model.space.dtype, torch.float32, torch.float64}
        wrong = [f"{name} in {entry.dtype}" for name, entry in table.items() if entry.dtype not in dtypes]
        if wrong:
            expected = " or ".join(sorted(map(str, dtypes)))
            raise CheckpointError(f"{path}: the {part} ({what}) must be in {expected}, but it has {few(wrong)}")
    else:
        here = module.state_dict() if isinstance(module, nn.Module) else {}
        wrong = [name for name, entry in table.items() if _floats(entry.dtype) != _floats(here[name].dtype)]
        if wrong:
            raise ValueError(f"{path}: the {part} ({what}) has other kinds of numbers than were saved, in {few(wrong)}")


def _floats(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex
