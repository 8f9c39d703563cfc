"""A fit's state written to a directory, and put back into a fit that was freshly made."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ..distributed.sharding import whole_family
from ..files import fit_checkpoint
from ..files.describe import OfYourOwn, encode
from ..files.fit_checkpoint import Found
from ..util.checks import check_integer
from .checks import is_made_anew
from .result import History, Skipped

if TYPE_CHECKING:
    from .fit import Fit

#: attributes of a fit that are numbers, and those that are tensors by name
NUMBERS = ("step", "epoch", "index", "rows", "end", "cooling", "stage", "failures", "averaged")
NAMED = ("learned", "average")


@dataclass(frozen=True)
class Checkpoint:
    """A directory to which a fit writes its whole state, atomically, and from which it resumes.

    Args:
        directory: belongs to one fit; one that holds checkpoints is refused unless you resume.
        every: steps between checkpoints; an epoch by default. The end of the fit is always written.
        resume: go on from the newest checkpoint in the directory, with the same posterior, data and options; without
            one the fit begins. A finished fit is restored; call `fit` again, without the checkpoint, to go on from it.
    """

    directory: str | os.PathLike[str]
    every: int | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        os.fspath(self.directory)
        check_integer("every", self.every, optional=True)

    def found(self, rank: int = 0) -> Found | None:
        """Return the newest checkpoint that is whole, to resume; raise ValueError if the directory is another fit's."""
        there = [] if rank else fit_checkpoint.files(self.directory)  # the first rank looks for all
        if there and not self.resume:
            raise ValueError(
                f"the folder {self.directory} holds checkpoints of another fit, up to {there[0].name}: give another "
                "folder, go on with that fit (resume=True), or remove its files"
            )
        return fit_checkpoint.latest(self.directory) if self.resume else None


def copied(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the tensors."""
    return {name: tensor.detach().clone() for name, tensor in named.items()}


@torch.no_grad()
def assign(named: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values into the tensors of these names."""
    for name, tensor in named.items():
        tensor.copy_(values[name])


def save(fit: "Fit", directory: str | os.PathLike[str]) -> None:
    """Write the state to a folder; of several ranks the first one: all are in the same, or give it their rows."""
    factor, moments = fit.make_step.factor, optimizer_state(fit.optimizer, fit.named)
    tensors = {"history": fit.history.to_tensor(), "stream": fit.stream}
    tensors |= {f"{part}/{name}": x for part in NAMED for name, x in getattr(fit, part).items()}
    tensors |= {f"moments/{name}": x for name, x in moments.items() if isinstance(x, Tensor)}
    description = {
        "settings": fit.settings,
        "problem": fit.problem,
        "numbers": {name: getattr(fit, name) for name in NUMBERS},
        "skipped": [asdict(one) for one in fit.skipped],
        "moments": {name: x for name, x in moments.items() if not isinstance(x, Tensor)},
        "loss factor": [factor.value, factor.finite],
    }
    tensors = fit.ranks.whole(tensors)
    if fit.ranks.rank == 0:
        fit_checkpoint.write(directory, fit.step, tensors, description)


def restore(fit: "Fit", found: Found) -> list[str]:
    """Put a freshly made fit into the state of a checkpoint; return what there is to say."""
    tensors, saved = {path: fit.ranks.own(path, x) for path, x in found.tensors.items()}, found.description
    parts = {part: _under(f"{part}/", tensors) for part in (*NAMED, "moments")}
    _check_same(fit, saved, parts["learned"], found.path)
    device = fit.generator.device
    assign(fit.learned, parts["learned"])
    for name in NUMBERS:
        setattr(fit, name, saved["numbers"][name])
    fit.average = {name: x.to(device) for name, x in parts["average"].items()}
    # torch keeps step counts on the CPU but for fused optimizers; moments are where their parameter is
    fused = getattr(fit.optimizer, "_step_supports_amp_scaling", False)
    moments = {path: x.to(device) if fused or not path.endswith("/step") else x for path, x in parts["moments"].items()}
    set_optimizer_state(fit.optimizer, fit.named, moments | saved["moments"])
    fit.history, fit.skipped = History.from_tensor(tensors["history"]), [Skipped(**row) for row in saved["skipped"]]
    fit.make_step.factor.set(*saved["loss factor"])
    fit.stream = tensors["stream"]
    fit.generator.set_state(fit.stream)
    return [*found.damaged, f"resumed at step {fit.step} from {found.path.name}"]


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {path.removeprefix(prefix): x for path, x in tensors.items() if path.startswith(prefix)}


def _check_same(fit: "Fit", saved: dict[str, Any], learned: dict[str, Tensor], path: Any) -> None:
    """Refuse another posterior, another problem and other settings."""
    shapes, own = ({name: tuple(x.shape) for name, x in one.items()} for one in (learned, fit.learned))
    for what, then, now in (
        ("posterior", shapes, own),
        ("problem", saved["problem"], fit.problem),
        ("fit, with other settings", saved["settings"], fit.settings),
    ):
        differ = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
        if differ:
            both = "; ".join(f"{name} ({then.get(name)} then, {now.get(name)} now)" for name in differ)
            raise ValueError(
                f"{path}, at step {saved['numbers']['step']}, belongs to another {what}; these differ: {both}. Resume "
                "with what the fit was begun with; to train a finished fit further, call fit again without the "
                "checkpoint"
            )


def problem(fit: "Fit") -> dict[str, str]:
    """Return short texts on network, model and data that are equal in a resumed fit.

    The first two items stand for the data, unless each reading makes them anew. Code is not compared: functions
    and classes of the user's are known by name.
    """
    posterior, model, data = fit.posterior, fit.posterior.model, fit.data
    held = {**dict(posterior.net.named_parameters()), **dict(posterior.net.named_buffers())}
    items = None if is_made_anew(data) else data.first_items()
    described = {
        "the likelihood": model.likelihood, "the prior": model.prior, "the family": whole_family(posterior.family),
        "forward=": model.user_forward, "keys=": model.keys, "where the network is linearised": model.linearised_at,
    }  # fmt: skip
    return {
        **{name: _described(value) for name, value in described.items()},
        "dropout and batch_norm": f"{posterior.dropout}, {posterior.batch_norm}",
        "the network": _digest(repr(posterior.net)),
        "the network's held tensors": _digest([held[name] for name in sorted(held) if name not in model.net_space]),
        "N": str(model.num_data),
        "the batches": f"{type(getattr(data.loader, 'sampler', None)).__name__}, {data.length}",
        "the data": _digest(items),
    }


def _described(value: Any) -> str:
    try:
        return "none" if value is None else _digest(json.dumps(encode(value), sort_keys=True))
    except OfYourOwn:
        own = repr(value) if isinstance(value, nn.Module) else ""
        return f"{getattr(value, '__qualname__', type(value).__qualname__)} {_digest(own)}"


def _digest(value: Any) -> str:
    """Return a hash of texts, numbers and tensors, by their numbers in float64."""
    sha = hashlib.sha256()
    for leaf in tree_leaves(value):
        own = leaf.detach().cpu().double().contiguous().numpy().tobytes() if isinstance(leaf, Tensor) else None
        sha.update(str(leaf).encode() if own is None else own)
    return sha.hexdigest()[:12]


def optimizer_state(optimizer: Optimizer, named: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what the optimizer remembers of each parameter, flat: "name/key" → tensor or number, not copied."""
    return {
        f"{name}/{key}": value
        for name, parameter in named.items()
        if parameter in optimizer.state
        for key, value in optimizer.state[parameter].items()
        if value is not None
    }


def set_optimizer_state(optimizer: Optimizer, named: Mapping[str, Tensor], flat: Mapping[str, Any]) -> None:
    """Invert `optimizer_state`; what `flat` does not name is forgotten."""
    optimizer.state.clear()
    for path, value in flat.items():
        name, key = path.rsplit("/", 1)
        parameter = named[name]
        if isinstance(value, Tensor):  # moments are laid out in memory as their parameter is
            like = value if value.shape != parameter.shape else parameter
            value = torch.empty_like(like, dtype=value.dtype, device=value.device).copy_(value)
        optimizer.state[parameter][key] = value
