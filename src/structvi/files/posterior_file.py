"""Save and load: a posterior as one file of tensors and a description, without code.

Nothing is made before it has been checked: the header fits the file, the description is one of a posterior, the network
is the one that was saved, and the tensors in the header are those that the family, bound on the meta device, would
have. Then they are read, and their SHA-256 and values are checked.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..families.family import Family
from ..models.bayesian_model import BayesianModel, check_keys
from ..models.calibration import Calibration, Conformal
from ..models.likelihoods import Bernoulli, Categorical, Gaussian, Poisson, StudentT
from ..models.priors import Prior, SeparablePrior
from ..networks.call import BATCH_NORM, DROPOUT, BatchNorm, Dropout, alone_with, padding_rows
from ..networks.vmap_or_loop import Evaluation
from ..parameters import Parameters
from ..result import Status
from ..util.checks import check_one_of, is_integer
from .describe import Kind, OfYourOwn, decode, encode, refusing
from .file import CheckpointError, Table, brief, digest, opened, write

if TYPE_CHECKING:
    from ..posterior import Posterior

KIND = "posterior"
PARTS: tuple[Kind, ...] = ("family", "likelihood", "prior")
FIELDS = {
    "kind", *PARTS, "forward", "random", "hash", "num_data", "dropout", "batch_norm", "checkpoint_activations",
    "evaluation", "linearised", "calibration", "chosen_on", "keys", "fit_status",
}  # fmt: skip
#: lines of differences in a message
LINES = 20


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
    check_one_of("network", network, ("store", "hash"))
    model, calibration = posterior.model, posterior.calibration
    with alone_with(model.net):  # no call has drawn weights in it
        random, held = _tensors_of(model.net, model.net_space.names)
    parts = {"family": posterior.family, "likelihood": model.likelihood, "prior": model.prior}
    tensors: dict[str, Tensor] = {}
    for part, module in parts.items():
        own = module.state_dict() if isinstance(module, nn.Module) else {}
        if not all(bool(x.isfinite().all()) for x in own.values()):
            raise ValueError(f"the {part} has values that are not finite: save a posterior whose fit has not failed")
        tensors |= {f"{part}.{name}": tensor for name, tensor in own.items()}
    if network == "store":
        tensors |= {f"network.{name}": tensor for name, tensor in held.items()}
    if model.linearised_at is not None:
        tensors |= {f"linearised.{n}": t for n, t in model.net_space.unravel(model.linearised_at).items()}
    if calibration is not None and calibration.conformal is not None:
        tensors["calibration.scores"] = calibration.conformal.values
    description = {
        "kind": KIND,
        **{part: describe_part(value) for part, value in parts.items()},
        "forward": model.user_forward is not None,
        "random": [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in random.items()],
        "hash": digest(held) if network == "hash" else None,
        "num_data": model.known_num_data,
        "dropout": posterior.dropout,
        "batch_norm": posterior.batch_norm,
        "checkpoint_activations": model.checkpoint_activations,
        "evaluation": [model.evaluation.mode, model.evaluation.chunk],
        "linearised": model.linearised_at is not None,
        "calibration": None if calibration is None else calibration.described(),
        "chosen_on": posterior.chosen_on,
        "keys": model.keys,
        "fit_status": None if posterior.fit_status is None else str(posterior.fit_status),
    }
    for part in PARTS:  # what `load` would refuse
        if "value" in description[part]:
            decode(description[part]["value"], part, _patterns(random))
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
    if family is not None and not isinstance(family, Family):
        raise TypeError(f"family must be a family such as MeanField(), got {family!r}")
    given = {"family": family, "likelihood": likelihood, "prior": prior, "forward": forward}
    with opened(path) as stored:
        saved = stored.description
        if saved.get("kind") != KIND:
            raise CheckpointError(f"{path} holds no posterior of a network, but {brief(saved.get('kind'))}")
        with refusing(path):
            if saved.keys() != FIELDS:
                raise ValueError(f"expected the fields {sorted(FIELDS)}, got {brief(sorted(saved), 400)}")
            for field in ("forward", "linearised", "checkpoint_activations"):
                if not isinstance(saved[field], bool):
                    raise ValueError(f"{field} must be true or false, got {brief(saved[field])}")
            needed = _needed(saved, given)
            random, held = _tensors_of(net, [name for name, _, _ in saved["random"]])
            there = {str(name): (tuple(shape), str(dtype)) for name, shape, dtype in saved["random"]}
        if needed:
            raise ValueError(
                f"{path}: what you wrote yourself is not in the file, {', '.join(needed.values())}; give it again: "
                f"load(path, net, {', '.join(f'{part}=…' for part in needed)})"
            )
        table = {"network": held, "linearised": random if saved["linearised"] else {}}
        inside = {part: _names(under(part, stored.table)) for part in (*PARTS, *table, "calibration")}
        file = {**there, **(inside["network"] if saved["hash"] is None else _table(held))}
        if different := differences(file, {**_table(random), **_table(held)}):
            raise ValueError(f"{path} was saved with another network. Its tensors are\n" + "\n".join(different))
        if saved["hash"] is not None and (inside["network"] or saved["hash"] != digest(held)):
            raise ValueError(
                f"{path} holds the hash of the network's tensors that are not random, and here they have other values: "
                "give the network as it was when the posterior was saved"
            )
        space = Parameters(random, net=net)
        with refusing(path):
            parts: dict[Kind, Any] = {
                part: decode(saved[part]["value"], part, _patterns(random)) if given[part] is None else given[part]
                for part in PARTS
            }
            for module in parts["prior"].modules() if prior is None else ():
                if isinstance(module, SeparablePrior):
                    module.check(space)
            keys = None if saved["keys"] is None else (_tuple(saved["keys"][0]), saved["keys"][1])
            if keys is not None:
                check_keys(keys)
            N = saved["num_data"]
            if N is not None and (not is_integer(N) or N >= 2**63):
                raise ValueError(f"num_data must be null or a number of observations, got {brief(N)}")
            model = BayesianModel(
                net, parts["likelihood"], parts["prior"], N, parameters=space, forward=forward,
                keys=None if forward is not None else keys, linearise=saved["linearised"],
                checkpoint_activations=saved["checkpoint_activations"],
            )  # fmt: skip
            mode, chunk = saved["evaluation"]
            model.evaluation = Evaluation(mode, chunk)
            check_one_of("dropout", saved["dropout"], DROPOUT)
            check_one_of("batch_norm", saved["batch_norm"], BATCH_NORM)
            status = None if saved["fit_status"] is None else Status(saved["fit_status"])
            chosen_on = _fingerprint(saved["chosen_on"])
            described = saved["calibration"]
            forms = None if described is None else described["conformal"]
            scores = {} if forms is None else {"scores": ((Conformal.size(*forms),), str(torch.float64))}
            expected = {"linearised": _table(table["linearised"]), "calibration": scores}
            for part in PARTS:
                module = parts[part]
                expected[part] = _table(module.state_dict()) if isinstance(module, nn.Module) else {}
            if not parts["family"].is_bound:
                expected["family"] = shapes_of(parts["family"], model.space)
        stray = {name: entry for name, entry in stored.table.items() if name.split(".")[0] not in inside}
        for part in expected:
            # learned numbers of likelihood and prior may be of another precision than a new one has
            file = inside[part] if part not in ("likelihood", "prior") else _loose(inside[part])
            here = expected[part] if part not in ("likelihood", "prior") else _loose(expected[part])
            if (different := differences(file, here)) or stray:
                text = f"{path}: the {part} is not the one that was saved. Its tensors are\n" + "\n".join(different)
                ours = given.get(part) is None and likelihood is None
                raise (CheckpointError if ours else ValueError)(text)
        tensors = stored.tensors()
    for name, tensor in tensors.items():
        part = name.split(".")[0]
        if part != "network" and given.get(part) is None and not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{path} has values that are not finite in {brief(name)}")
    with refusing(path):
        calibration = None if described is None else Calibration.of(described, tensors.get("calibration.scores"))
        if calibration is not None:
            check_calibration(calibration, model.likelihood)
        if not parts["family"].is_bound:
            parts["family"] = parts["family"].bind(model.space, torch.Generator().manual_seed(0))
        for part in PARTS:
            if own := under(part, tensors):
                parts[part].load_state_dict(own, assign=True)  # with the dtypes of the file
            if isinstance(parts[part], nn.Module):
                parts[part].to(space.device)
    if model.linearised_at is not None:
        model.linearised_at = space.ravel(under("linearised", tensors)).to(model.linearised_at)
    with torch.no_grad():
        for name, tensor in under("network", tensors).items():
            held[name].copy_(tensor)
    return Loaded(model, parts["family"], saved["dropout"], saved["batch_norm"], calibration, chosen_on, status)


def describe_part(part: Any) -> dict[str, Any]:
    """Return {"value": its description}, or {"own": its name} where it is the user's own.

    Example:
        >>> describe_part(len)
        {'own': 'len'}
    """
    try:
        return {"value": encode(part)}
    except OfYourOwn as name:
        return {"own": str(name)}


def shapes_of(family: Family, space: Parameters) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shapes and dtypes of the tensors that a recipe would have over a space, without making them.

    Example:
        >>> from structvi import LowRankNormal
        >>> shapes_of(LowRankNormal(rank=2), Parameters({"z": torch.zeros(3)}))["factor"]
        ((3, 2), 'torch.float32')
    """
    return _table(family.bind(_Shapes(space)).state_dict())


class _Shapes(Parameters):
    """A space on the meta device: what is bound to it has shapes and no numbers."""

    def __init__(self, space: Parameters):
        vars(self).update(vars(space))
        self._whole, self._subsets = space, {}
        self.initial, self._scales = space.initial.to("meta"), space.scales.to("meta")
        self.device = self.initial.device

    @property
    def scale(self) -> Tensor:
        return self.initial

    def at(self, theta: Tensor) -> Parameters:
        return self

    def fresh(self, generator: torch.Generator | None = None) -> Tensor:
        return self.initial

    def subset(self, names: Iterable[str]) -> Parameters:
        return _Shapes(self._whole.subset(names))


def under(part: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a part, by their names in it.

    Example:
        >>> under("family", {"family.mean": 1, "prior.scale": 2})
        {'mean': 1}
    """
    return {name.removeprefix(f"{part}."): t for name, t in tensors.items() if name.startswith(f"{part}.")}


def differences(saved: Mapping[str, tuple], here: Mapping[str, tuple]) -> list[str]:
    """Return lines that tell two tables apart, name → tuple; none where they are the same.

    Example:
        >>> differences({"a": ((2,), "float")}, {"a": ((3,), "float")})
        ["  'a': (2,) float in the file, (3,) float here"]
    """
    names = [name for name in {**saved, **here} if saved.get(name) != here.get(name)]
    text = {name: tuple(brief(" ".join(map(str, t.get(name, ("no such tensor",)))), 200)[1:-1] for t in (saved, here))
            for name in names}  # fmt: skip
    lines = [f"  {brief(name, 200)}: {a} in the file, {b} here" for name, (a, b) in text.items()]
    return lines if len(lines) <= LINES else [*lines[:LINES], f"  … and {len(lines) - LINES} more"]


def check_calibration(calibration: Calibration, likelihood: Any) -> None:
    """Raise ValueError where a calibration is not one of the likelihood's targets, as far as that is ours."""
    labels = isinstance(likelihood, Categorical | Bernoulli)
    if not labels and not isinstance(likelihood, Gaussian | Poisson | StudentT):
        return
    one, two = calibration.adjustment, calibration.conformal
    if one is not None and (one.kind == "temperature") != labels:
        raise ValueError(f"{type(likelihood).__name__} has no {one.kind}")
    if two is not None and (two.form == "number") == labels:
        raise ValueError(f"conformal scores of a {two.form} are not those of {type(likelihood).__name__}")


def _needed(saved: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, str]:
    """The parts that the user has to give, with their names."""
    own = {part: saved[part]["own"] for part in PARTS if "own" in saved[part]}
    if saved["forward"]:
        own["forward"] = "(net, batch) → (output, target)"
    return {part: f"the {part} ({brief(name, 200)})" for part, name in own.items() if given[part] is None}


def _tensors_of(net: nn.Module, names: Iterable[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters of these names, as far as there are such, and all else that the network's state dict has.

    Rows of random tensors that are padding are held too: views of the network's own.
    """
    parameters: dict[str, Tensor] = dict(net.named_parameters())
    persistent = net.state_dict().keys()
    buffers = {name: buffer for name, buffer in net.named_buffers() if name in persistent}
    random = {name: parameters.pop(name) for name in names if name in parameters}
    rows = {f"{name}.padding": random[name].detach()[row] for name, row in padding_rows(net, random).items()}
    return random, {**parameters, **buffers, **rows}


def _table(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}


def _names(table: Table) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (shape, str(dtype)) for name, (shape, dtype) in table.items()}


def _loose(table: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, tuple]:
    return {name: (shape, "a float" if "float" in dtype else dtype) for name, (shape, dtype) in table.items()}


def _patterns(random: Mapping[str, Tensor]) -> int:
    """How many patterns can have a tensor of their own: one of the network's, or of the few that a likelihood adds."""
    return len(random) + 100


def _fingerprint(text: Any) -> str | None:
    """Of the cases of held-out data, see `predict/calibration.py`."""
    if text is not None and not re.fullmatch(r"([0-9a-f]{8}(,[0-9a-f]{8}){0,511})?", text):
        raise ValueError(f"expected null or the fingerprint of held-out data, got {brief(text)}")
    return text


def _tuple(keys: Any) -> Any:
    return keys if isinstance(keys, str) else tuple(keys)
