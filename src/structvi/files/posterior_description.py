"""The description of a saved posterior: of the right types and within bounds, before anything is made of it."""

import re
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Self

from ..models.batch import Keys, check_keys
from ..models.calibration import Calibration
from ..networks.modes import BATCH_NORM, DROPOUT
from ..networks.vmap_or_loop import Evaluation
from ..result import Status
from ..util.checks import is_integer
from .describe import Kind, check, decode
from .fit_checkpoint import KIND as FIT
from .header import CheckpointError, brief

KIND = "posterior"
#: of a fit of a log density, see `density/result_file.py`
DENSITY_FIT = "density fit"
PARTS: tuple[Kind, ...] = ("family", "likelihood", "prior")
_FIELDS = {
    "kind", *PARTS, "forward", "random", "held", "hashes", "num_data", "dropout", "batch_norm",
    "checkpoint_activations", "evaluation", "linearised", "calibration", "chosen_on", "keys",
    "fit_status",
}  # fmt: skip
#: what a file written before there was such a thing says of it
_BEFORE = {"linearised": False, "calibration": None, "chosen_on": None, "keys": None, "fit_status": None}
#: of the cases of held-out data, see `predict/cases.py`
_FINGERPRINT = re.compile(r"([0-9a-f]{8}(,[0-9a-f]{8}){0,511})?")

#: tensor names with their shape and dtype
Table = dict[str, tuple[tuple[int, ...], str]]


class Saved(NamedTuple):
    """A description, of the right types and within bounds; families, likelihoods and priors are not made yet."""

    parts: dict[str, Any]  # the descriptions of those that are not the user's own
    own: dict[str, str]  # part → the name of what the user has to give
    random: Table
    held: Table
    hashes: dict[str, str] | None
    num_data: int | None
    dropout: Literal["off", "on"]
    batch_norm: Literal["frozen", "deterministic", "reestimated"]
    evaluation: Evaluation
    checkpoint_activations: bool
    linearised: bool
    calibration: dict[str, Any] | None
    chosen_on: str | None
    keys: Keys | None
    fit_status: Status | None

    @classmethod
    def of(cls, description: Mapping[str, Any], path: Any) -> Self:
        kind = description.get("kind")
        if kind == FIT:
            raise CheckpointError(
                f"{path} is a checkpoint of a fit, not a posterior: go on with fit(resume=its folder) and save then"
            )
        if kind == DENSITY_FIT:
            raise CheckpointError(f"{path} is the fit of a log density: vi.load_fit(path, target) reads it")
        if kind != KIND:
            raise CheckpointError(f"{path} holds no posterior: its description is of kind {brief(kind)}")
        # a description with the right hash that `save` did not write: another version's, or made by hand
        with refusing(path):
            return cls._checked(description)

    @classmethod
    def _checked(cls, description: Mapping[str, Any]) -> Self:
        description = {**_BEFORE, **description}
        if description.keys() != _FIELDS:
            raise ValueError(f"expected the fields {sorted(_FIELDS)}, got {brief(sorted(description), 400)}")
        random, held = _read_table(description["random"]), _read_table(description["held"])
        if not random or random.keys() & held.keys():
            raise ValueError("expected random tensors, and others that are not random")
        own: dict[str, str] = {}
        for part in PARTS:
            ((form, value),) = description[part].items()
            if form == "own":
                own[part] = _name(value)
            elif form == "value":
                check(value, part, most_patterns(random))
            else:
                raise ValueError(f"expected a value or the name of your own, got {brief(description[part])}")
        for field in ("forward", "checkpoint_activations", "linearised"):
            if not isinstance(description[field], bool):
                raise ValueError(f"{field} must be true or false, got {brief(description[field])}")
        if description["forward"]:
            own["forward"] = "(net, batch) → (output, target)"
        N = description["num_data"]
        if N is not None and (not is_integer(N) or N >= 2**63):
            raise ValueError(f"num_data must be null or a number of observations, got {brief(N)}")
        if description["dropout"] not in DROPOUT or description["batch_norm"] not in BATCH_NORM:
            raise ValueError("unknown dropout or batch_norm")
        evaluation = _evaluation(*description["evaluation"])
        if description["checkpoint_activations"] and evaluation.mode == "vmap":
            raise ValueError("activations are checkpointed one draw at a time, not under vmap")
        return cls(
            {part: description[part]["value"] for part in PARTS if part not in own},
            own,
            random,
            held,
            _hashes(description["hashes"], held),
            N,
            description["dropout"],
            description["batch_norm"],
            evaluation,
            description["checkpoint_activations"],
            description["linearised"],
            _calibration(description["calibration"]),
            _chosen_on(description["chosen_on"]),
            _keys(description["keys"]),
            None if description["fit_status"] is None else Status(description["fit_status"]),
        )


def _keys(value: Any) -> Keys | None:
    """As `save` wrote them: a tuple is a list in a file."""
    if value is None:
        return None
    check_keys(value)
    inputs, target = value
    return (inputs if isinstance(inputs, str) else tuple(inputs)), target


@contextmanager
def refusing(path: Any) -> Iterator[None]:
    """Whatever goes wrong inside, the file is to blame."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        text = str(error)[:400]
        raise CheckpointError(f"{path} does not describe a posterior: {type(error).__name__} {text}") from None


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name.isprintable() or len(name) > 200:
        raise ValueError(f"expected the name of a part of your own, got {brief(name)}")
    return name


def _read_table(description: Any) -> Table:
    table = decode(description, "plain")
    if not isinstance(table, dict):
        raise ValueError(f"expected a table of tensors, got {brief(description)}")
    for name, entry in table.items():
        match name, entry:
            case str(), (tuple() as shape, str()) if all(is_integer(n, 0) for n in shape):
                continue
        raise ValueError(f"expected a tensor's shape and dtype, got {brief(name)}: {brief(entry)}")
    return table


def _hashes(hashes: Any, held: Table) -> dict[str, str] | None:
    if hashes is None:
        return None
    if not isinstance(hashes, dict) or hashes.keys() != held.keys():
        raise ValueError(f"expected null or a hash for each tensor that is not random, got {brief(hashes)}")
    if not all(isinstance(value, str) and len(value) == 64 for value in hashes.values()):
        raise ValueError(f"expected hashes of 64 digits, got {brief(hashes)}")
    return hashes


def _calibration(description: Any) -> dict[str, Any] | None:
    if description is not None:
        Calibration.of(description)
    return description


def _chosen_on(text: Any) -> str | None:
    if text is not None and (not isinstance(text, str) or len(text) > 5000 or not _FINGERPRINT.fullmatch(text)):
        raise ValueError(f"expected null or the fingerprint of held-out data, got {brief(text)}")
    return text


def _evaluation(mode: Any, chunk: Any) -> Evaluation:
    for setting in (mode, chunk):
        check(setting, "plain")
    return Evaluation(mode, chunk)


def most_patterns(random: Sized) -> int:
    """How many patterns can have a tensor of their own: one of the network's, or of the few that a likelihood adds."""
    return len(random) + 100
