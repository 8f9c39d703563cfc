"""Save and load: a posterior as one file of tensors and a description, without code.

`load` checks everything before it makes anything: the header fits the file, the description is one of a posterior, the
network is the one that was saved, and the header has the tensors that the family, bound on the meta device, would have.
Then it reads the tensors, and checks their SHA-256 and values.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ..families.family import Family
from ..models.bayesian_model import BayesianModel
from ..models.calibration import Calibration, Conformal
from ..models.likelihoods import Bernoulli, Categorical, Gaussian, Poisson, StudentT
from ..models.priors import Prior
from ..networks.call import alone_with, padding_rows
from ..networks.learned_variance import LearnedVariance
from ..networks.out_of_distribution import OutOfDistribution
from ..parameters import Parameters
from ..result import Status
from ..util.checks import check_one_of, is_integer
from .describe import Kind, OfYourOwn, decode, encode, refusing
from .file import CheckpointError, Table, all_finite, brief, digest, opened, write

if TYPE_CHECKING:
    from ..posterior import Posterior

AnyPosterior = TypeVar("AnyPosterior", bound="Posterior")
AnyModule = TypeVar("AnyModule", bound=nn.Module)

KIND = "posterior"
PARTS: tuple[Kind, ...] = ("family", "likelihood", "prior")
FIELDS = {
    "kind", *PARTS, "forward", "random", "hash", "model", "modes", "calibration", "chosen_on", "fit_status", "variance",
    "ood",
}  # fmt: skip
#: tensors of no part: θ₀, and scores of conformal sets
LINEARISED, SCORES = "linearised", "calibration.scores"
#: at most 512 hashes of held-out rows, see `predict/calibration.py`
FINGERPRINT = re.compile(r"([0-9a-f]{8}(,[0-9a-f]{8}){0,511})?")
#: lines of differences in a message
LINES = 20


def save(posterior: "Posterior", path: str | os.PathLike[str], network: Literal["store", "hash"] = "store") -> None:
    """Write a posterior to one file, see `Posterior.save`."""
    posterior.check_whole()
    check_one_of("network", network, ("store", "hash"))
    model, calibration, learned = posterior.model, posterior.calibration, posterior.learned_variance
    with alone_with(model.net):  # no call has drawn weights in it
        random, held = _tensors_of(model.net, model.net_space.names)
    parts = {"family": posterior.family, "likelihood": model.likelihood, "prior": model.prior}
    tensors: dict[str, Tensor] = {}
    for part, module in parts.items():
        own = _state(module)
        if not all(map(all_finite, own.values())):
            raise ValueError(f"the {part} has values that are not finite: save a posterior whose fit has not failed")
        tensors |= _prefixed(part, own)
    tensors |= _prefixed("network", held) if network == "store" else {}
    if model.linearised_at is not None:
        tensors[LINEARISED] = model.linearised_at
    tensors |= _prefixed("variance", _state(learned)) | _prefixed("ood", _state(posterior.ood))
    if calibration is not None and calibration.conformal is not None:
        tensors[SCORES] = calibration.conformal.values
    options = {
        "num_data": model.known_num_data, "keys": model.keys, "evaluation": model.evaluation.mode,
        "chunk": model.evaluation.chunk, "checkpoint_activations": model.checkpoint_activations,
        "linearise": model.linearised_at is not None,
    }  # fmt: skip
    description = {
        "kind": KIND,
        **{part: describe_part(value) for part, value in {**parts, "forward": model.user_forward}.items()},
        "random": [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in random.items()],
        "hash": digest(held) if network == "hash" else None,
        "model": encode(options),
        "modes": encode({"dropout": posterior.dropout, "batch_norm": posterior.batch_norm}),
        "calibration": None if calibration is None else calibration.described(),
        "chosen_on": posterior.chosen_on,
        "variance": None if learned is None else [learned.layer, *learned.slope.shape],
        "ood": None if posterior.ood is None else [posterior.ood.layer, *posterior.ood.means.shape],
        "fit_status": None if posterior.fit_status is None else str(posterior.fit_status),
    }
    for part in PARTS:  # what `load` would refuse
        if "value" in description[part]:
            decode(description[part]["value"], part, _patterns(random))
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
) -> AnyPosterior:
    """Return the posterior of a file, see `structvi.load`; `kind` is the class, made of a model and a family."""
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
            needed = [f"the {part} ({brief(own, 200)})" for part in given if (own := _own(saved[part], given[part]))]
            there = {str(name): (tuple(shape), str(dtype)) for name, shape, dtype in saved["random"]}
        if needed:
            asked = ", ".join(f"{one.split(' ')[1]}=…" for one in needed)
            raise ValueError(
                f"{path}: what you wrote yourself is not in the file, {', '.join(needed)}; give it again: "
                f"load(path, net, {asked})"
            )
        random, held = _tensors_of(net, there)
        here = table(held)
        inside = under("network", stored.table) if saved["hash"] is None else here
        if different := differences({**there, **inside}, {**table(random), **here}):
            raise ValueError(f"{path} was saved with another network. Its tensors are\n" + "\n".join(different))
        if saved["hash"] not in (None, digest(held)):
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
            options = decode(saved["model"]) | ({} if forward is None else {"keys": None, "forward": forward})
            model = BayesianModel(net, parts["likelihood"], parts["prior"], parameters=space, **options)
            decode(saved["forward"].get("value"))
            status = None if saved["fit_status"] is None else Status(saved["fit_status"])
            chosen_on = saved["chosen_on"]
            if chosen_on is not None and not (isinstance(chosen_on, str) and FINGERPRINT.fullmatch(chosen_on)):
                raise ValueError(f"expected null or the fingerprint of held-out data, got {brief(chosen_on)}")
            expected = _expected(saved["calibration"], parts, model, stored.table)
            learned = _without_numbers(LearnedVariance, saved["variance"], space)
            ood = _without_numbers(OutOfDistribution, saved["ood"], space)
            expected |= _prefixed("variance", table(_state(learned))) | _prefixed("ood", table(_state(ood)))
        expected |= {} if saved["hash"] is not None else _prefixed("network", here)
        if different := differences(stored.table, expected):
            ours = all(value is None for value in given.values())
            text = f"{path} holds other tensors than these parts have. They are\n" + "\n".join(different)
            raise (CheckpointError if ours else ValueError)(text)
        tensors = stored.tensors()
    for name, tensor in tensors.items():
        part = name.split(".")[0]
        if part != "network" and given.get(part) is None and not all_finite(tensor):
            raise CheckpointError(f"{path} has values that are not finite in {brief(name)}")
    with refusing(path):
        calibration = loaded_calibration(saved["calibration"], tensors.get(SCORES), model.likelihood)
        if not parts["family"].is_bound:
            parts["family"] = parts["family"].bind(model.space, torch.Generator().manual_seed(0))
        for part, module in parts.items():
            if isinstance(module, nn.Module):
                module.load_state_dict(under(part, tensors), assign=True)  # with the dtypes of the file
                module.to(space.device)
        posterior = kind(model, parts["family"], **decode(saved["modes"]))
    posterior.calibration, posterior.chosen_on, posterior.fit_status = calibration, chosen_on, status
    for part, module in {"variance": learned, "ood": ood}.items():
        if module is not None:
            module.load_state_dict(under(part, tensors), assign=True)
            module.to(space.device)
    posterior.learned_variance, posterior.ood = learned, ood
    if model.linearised_at is not None:
        model.linearised_at = tensors[LINEARISED].to(model.linearised_at)
    with torch.no_grad():
        for name, tensor in under("network", tensors).items():
            held[name].copy_(tensor)
    return posterior


def _without_numbers(kind: Callable[..., AnyModule], description: Any, space: Parameters) -> AnyModule | None:
    """Return what was learned from a layer's features, of the shapes in a file and without numbers."""
    if description is None:
        return None
    layer, *sizes = description
    if not isinstance(layer, str) or len(sizes) != 2 or not all(is_integer(size) and size < 2**24 for size in sizes):
        raise ValueError(f"expected the name of a layer and two sizes, got {brief(description)}")
    with torch.device("meta"):
        return kind(layer, *sizes).to(space.dtype)


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
        a, b = (brief(" ".join(map(str, one.get(name, ("no such tensor",)))), 200)[1:-1] for one in (saved, here))
        if a != b:
            lines.append(f"  {brief(name, 200)}: {a} in the file, {b} here")
    return lines if len(lines) <= LINES else [*lines[:LINES], f"  … and {len(lines) - LINES} more"]


def loaded_calibration(described: Any, scores: Tensor | None, likelihood: Any) -> Calibration | None:
    """Return a file's calibration; raise ValueError if it cannot be one of the likelihood's targets."""
    if (described is not None and described["conformal"] is not None) != (scores is not None):
        raise ValueError("conformal scores and their description go together")
    if described is None:
        return None
    found = Calibration.of(described, scores)
    one, two, labels = found.adjustment, found.conformal, isinstance(likelihood, Categorical | Bernoulli)
    if labels or isinstance(likelihood, Gaussian | Poisson | StudentT):
        if one is not None and (one.kind == "temperature") != labels:
            raise ValueError(f"{type(likelihood).__name__} has no {one.kind}")
        if two is not None and (two.form == "number") == labels:
            raise ValueError(f"conformal scores of a {two.form} are not those of {type(likelihood).__name__}")
    return found


def _expected(calibration: Any, parts: Mapping[Kind, Any], model: BayesianModel, found: Table) -> Table:
    """Return the tensors that a file must have beside the network's."""
    family, expected = parts["family"], Table()
    for part in ("likelihood", "prior"):
        for name, (shape, dtype) in _prefixed(part, table(_state(parts[part]))).items():
            # learned numbers may be of another precision than a new one has
            _, other = found.get(name, (shape, dtype))
            expected[name] = shape, other if "float" in dtype and "float" in other else dtype
    own = table(family.state_dict()) if family.is_bound else shapes_of(family, model.space)
    expected |= _prefixed("family", own)
    if model.linearised_at is not None:
        expected |= table({LINEARISED: model.linearised_at})
    if calibration is not None and calibration["conformal"] is not None:
        expected[SCORES] = (Conformal.size(*calibration["conformal"]),), str(torch.float64)
    return expected


def _own(described: Any, given: Any) -> str | None:
    """Return the name of a part that the user has to give."""
    ((form, value),) = described.items()
    if form not in ("own", "value"):
        raise ValueError(f"expected a value or a name, got {brief(form)}")
    return str(value) if form == "own" and given is None else None


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


def _state(part: Any) -> dict[str, Tensor]:
    return part.state_dict() if isinstance(part, nn.Module) else {}


def _prefixed(part: str, named: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{part}.{name}": value for name, value in named.items()}


def _patterns(random: Mapping[str, Tensor]) -> int:
    """Return the most patterns with a tensor of their own: the network's, and a few that a likelihood adds."""
    return len(random) + 100
