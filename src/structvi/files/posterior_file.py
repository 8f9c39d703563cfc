"""Save and load: a posterior as one file of tensors and a description, without code.

`load` checks before it makes anything: the header fits the file, the description is one of a posterior, and the network
is the one that was saved. Tensors are read with their SHA-256, and given to a family on the meta device, which takes no
memory. Only if they are the tensors of that family, a family is made for them.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ..families.family import Family
from ..models.bayesian_model import BayesianModel
from ..models.calibration import Calibration
from ..models.priors import Prior
from ..networks.call import alone_with, padding_rows
from ..networks.learned_variance import LearnedVariance
from ..networks.out_of_distribution import OutOfDistribution
from ..parameters import Parameters
from ..result import Status
from ..util.checks import check_one_of
from .describe import Kind, OfYourOwn, decode, encode, refusing
from .file import CheckpointError, all_finite, brief, digest, read, write

if TYPE_CHECKING:
    from ..posterior import Posterior

AnyPosterior = TypeVar("AnyPosterior", bound="Posterior")
AnyModule = TypeVar("AnyModule", bound=nn.Module)

KIND = "posterior"
PARTS: tuple[Kind, ...] = ("family", "likelihood", "prior")
Table = dict[str, tuple[Any, ...]]
#: tensors of no part: θ₀, and scores of conformal sets
LINEARISED, SCORES = "linearised", "calibration.scores"
#: lines of differences in a message
LINES = 20


def save(posterior: "Posterior", path: str | os.PathLike[str], network: Literal["store", "hash"] = "store") -> None:
    """Write a posterior to one file, see `Posterior.save`."""
    posterior.check_whole()
    check_one_of("network", network, ("store", "hash"))
    model, status = posterior.model, posterior.fit_status
    calibration, tensors = describe_calibration(posterior.calibration)
    for part, module in _modules(posterior).items():
        own = module.state_dict()
        tensors |= {f"{part}.{name}": tensor for name, tensor in own.items()}
        if not all(map(all_finite, own.values())):
            raise ValueError(f"the {part} has values that are not finite: save a posterior whose fit has not failed")
    with alone_with(model.net):  # no call has drawn weights in it
        random, held = _tensors_of(model.net, model.net_space.names)
    if network == "store":
        tensors |= {f"network.{name}": tensor for name, tensor in held.items()}
    if model.linearised_at is not None:
        tensors[LINEARISED] = model.linearised_at
    variance, ood = posterior.learned_variance, posterior.ood
    description = {
        "kind": KIND,
        **{part: describe_part(value) for part, value in _parts(posterior).items()},
        "random": [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in random.items()],
        "hash": digest(held) if network == "hash" else None,
        "model": encode({
            "num_data": model.known_num_data, "keys": model.keys, "evaluation": model.evaluation.mode,
            "chunk": model.evaluation.chunk, "checkpoint_activations": model.checkpoint_activations,
            "linearise": model.linearised_at is not None,
        }),
        "modes": encode({"dropout": posterior.dropout, "batch_norm": posterior.batch_norm}),
        "calibration": calibration,
        "chosen_on": posterior.chosen_on,
        "variance": None if variance is None else [variance.layer, *variance.slope.shape],
        "ood": None if ood is None else [ood.layer, *ood.means.shape],
        "fit_status": None if status is None else str(status),
    }  # fmt: skip
    if "value" in description["family"]:  # `load` would refuse more families than it counts
        decode(description["family"]["value"], "family")
    write(path, tensors, description)


def load(
    kind: Callable[..., AnyPosterior],
    path: str | os.PathLike[str],
    net: nn.Module,
    *,
    family: Family | None = None,
    prior: Prior | None = None,
    likelihood: Callable[[Any, Any], Tensor] | None = None,
    forward: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None,
    device: torch.device | str | None = None,
) -> AnyPosterior:
    """Return the posterior of a file, see `structvi.load`; `kind` is the class, made of a model and a family."""
    if family is not None and not isinstance(family, Family):
        raise TypeError(f"family must be a family such as MeanField(), got {family!r}")
    given = {"family": family, "likelihood": likelihood, "prior": prior, "forward": forward}
    tensors, saved = read(path)
    _check_own_parts(saved, given, path)
    random, held = _check_network(saved, net, under("network", tensors), path)
    with refusing(path):
        own = {part: decode(saved[part]["value"], part) if given[part] is None else given[part] for part in PARTS}
        space, options, recipe = Parameters(random, net=net), decode(saved["model"]), own["family"]
        model = BayesianModel(net, own["likelihood"], own["prior"], parameters=space, forward=forward, **options)
        shapes = recipe if recipe.is_bound else recipe.bind(_Shapes(model.space))
        posterior = kind(model, shapes, **decode(saved["modes"]))
        posterior.learned_variance = _of_features(LearnedVariance, saved["variance"], space, net)
        posterior.ood = _of_features(OutOfDistribution, saved["ood"], space, net)
        posterior.fit_status = None if saved["fit_status"] is None else Status(saved["fit_status"])
        posterior.chosen_on = saved["chosen_on"]
        if not isinstance(posterior.chosen_on, str | None):
            raise TypeError(f"expected null or the fingerprint of held-out data, got {brief(posterior.chosen_on)}")
        posterior.calibration = Calibration.of(saved["calibration"], tensors.get(SCORES))
        _set_tensors(posterior, tensors)
        if not recipe.is_bound:  # with memory now: the file has as many numbers
            posterior.family = recipe.bind(model.space, torch.Generator().manual_seed(0))
            posterior.family.load_state_dict(under("family", tensors), assign=True)
        for module in _modules(posterior).values():
            module.to(space.device)
    with torch.no_grad():
        for name, tensor in under("network", tensors).items():
            held[name].copy_(tensor)
    return posterior if device is None else posterior.to(device)


def _check_own_parts(saved: dict[str, Any], given: Mapping[str, Any], path: Any) -> None:
    """Raise if the description is none of a posterior, or has a part that the user has to give."""
    if saved.get("kind") != KIND:
        raise CheckpointError(f"{path} holds no posterior of a network, but {brief(saved.get('kind'))}")
    with refusing(path):
        needed = {part: saved[part]["own"] for part in given if given[part] is None and "own" in saved[part]}
    if needed:
        asked = ", ".join(f"{part}=<{brief(own)}>" for part, own in needed.items())
        raise ValueError(f"{path}: what you wrote yourself is not in the file; give it again: load(path, net, {asked})")


def _check_network(
    saved: Mapping[str, Any], net: nn.Module, stored: Mapping[str, Tensor], path: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the network's random tensors and its others; raise if it is not the network that was saved."""
    with refusing(path):
        there = {str(name): (tuple(shape), str(dtype)) for name, shape, dtype in saved["random"]}
        sha = saved["hash"]
    random, held = _tensors_of(net, there)
    here = table(held) if sha is None else {}
    if different := differences({**there, **table(stored)}, {**table(random), **here}):
        raise ValueError(f"{path} was saved with another network. Its tensors are\n" + "\n".join(different))
    if sha not in (None, digest(held)):
        raise ValueError(
            f"{path} holds the hash of the network's tensors that are not random, and here they have other values: "
            "give the network as it was when the posterior was saved"
        )
    return random, held


def _of_features(kind: Callable[..., AnyModule], described: Any, space: Parameters, net: nn.Module) -> AnyModule | None:
    """Return what was learned from a layer's features, of the shapes in a file and without numbers."""
    if described is None:
        return None
    net.get_submodule(described[0])
    with torch.device("meta"):
        return kind(*described).to(space.dtype)


def _set_tensors(posterior: "Posterior", tensors: Mapping[str, Tensor]) -> None:
    """Give all parts their tensors, in the precision of the file; raise if there are others, or of other shapes."""
    model, parts = posterior.model, _modules(posterior)
    if model.linearised_at is not None:
        model.linearised_at = tensors[LINEARISED].view_as(model.linearised_at).to(model.linearised_at)
    for name, tensor in tensors.items():
        part = name.split(".")[0]
        if part not in (*parts, "network") and name != SCORES and (name != LINEARISED or model.linearised_at is None):
            raise ValueError(f"{brief(name)} belongs to no part")
        if part != "network" and not all_finite(tensor):
            raise ValueError(f"{brief(name)} has values that are not finite")
        if part == "family" and tensor.dtype != posterior.space.dtype:
            raise ValueError(f"{brief(name)} is in {tensor.dtype}, the network in {posterior.space.dtype}")
    for part, module in parts.items():
        module.load_state_dict(under(part, tensors), assign=True)


def _parts(posterior: "Posterior") -> dict[str, Any]:
    """Return the parts that a user may have written."""
    model = posterior.model
    return {
        "family": posterior.family, "likelihood": model.likelihood, "prior": model.prior, "forward": model.user_forward,
    }  # fmt: skip


def _modules(posterior: "Posterior") -> dict[str, nn.Module]:
    """Return the parts with tensors of their own, by the name in front of these."""
    every = {**_parts(posterior), "variance": posterior.learned_variance, "ood": posterior.ood}
    return {name: part for name, part in every.items() if isinstance(part, nn.Module) and name != "forward"}


def describe_part(part: Any) -> dict[str, Any]:
    """Return {"value": its description}, or {"own": its name} for what the user wrote.

    Example:
        >>> describe_part(len)
        {'own': 'len'}
    """
    try:
        return {"value": encode(part)}
    except OfYourOwn as name:
        return {"own": str(name)}


def shapes_of(family: Family, space: Parameters) -> Table:
    """Return the shapes and dtypes of the tensors that a recipe would have over a space, without making them.

    Example:
        >>> from structvi import LowRankNormal
        >>> shapes_of(LowRankNormal(rank=2), Parameters({"z": torch.zeros(3)}))["factor"]
        ((3, 2), 'torch.float32')
    """
    return table(family.bind(_Shapes(space)).state_dict())


class _Shapes(Parameters):
    """A space on the meta device: a family that is bound to it has shapes and no numbers."""

    def __init__(self, space: Parameters):
        vars(self).update(vars(space))
        self._whole, self._subsets, self.initial = space, {}, space.initial.to("meta")
        self._scales, self.device = self.initial.new_empty(len(space)), self.initial.device

    @property
    def scale(self) -> Tensor:
        return self.initial

    def at(self, theta: Tensor) -> Parameters:
        return self

    def fresh(self, generator: torch.Generator | None = None) -> Tensor:
        return self.initial

    def subset(self, names: Iterable[str]) -> Parameters:
        return _Shapes(self._whole.subset(names))


def table(tensors: Mapping[str, Tensor]) -> Table:
    """Return the shapes and dtypes of tensors, by name."""
    return {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}


def under(part: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a part, by their names in it.

    Example:
        >>> under("family", {"family.mean": 1, "prior.scale": 2})
        {'mean': 1}
    """
    return {name.removeprefix(f"{part}."): t for name, t in tensors.items() if name.startswith(f"{part}.")}


def differences(saved: Mapping[str, tuple[Any, ...]], here: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Return a line for each entry that differs between two tables, name → tuple.

    Example:
        >>> differences({"a": ((2,), "float")}, {"a": ((3,), "float")})
        ["  'a': (2,) float in the file, (3,) float here"]
    """
    lines = []
    for name in {**saved, **here}:
        a, b = (" ".join(map(str, one.get(name, ["no such tensor"]))) for one in (saved, here))
        if a != b:
            lines.append(f"  {brief(name)}: {a:.80} in the file, {b:.80} here")
    return lines[:LINES]


def describe_calibration(calibration: Calibration | None) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """Return what `Calibration.of` takes: a description, and the scores of conformal sets, if there are some."""
    if calibration is None:
        return None, {}
    scores = calibration.conformal
    return calibration.described(), {} if scores is None else {SCORES: scores.values}


def _tensors_of(net: nn.Module, names: Iterable[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters of these names, if there are such, and all else that the network's state dict has.

    Rows of random tensors that are padding are held too: views of the network's own.
    """
    parameters: dict[str, Tensor] = dict(net.named_parameters())
    persistent = net.state_dict().keys()
    buffers = {name: buffer for name, buffer in net.named_buffers() if name in persistent}
    random = {name: parameters.pop(name) for name in names if name in parameters}
    rows = {f"{name}.padding": random[name].detach()[row] for name, row in padding_rows(net, random).items()}
    return random, {**parameters, **buffers, **rows}
