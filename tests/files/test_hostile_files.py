"""Files that mean harm: each is refused with a message, in little memory, before anything large is built.

A file with the right SHA-256 may still have been made by anyone: a hash is no signature. All files are loaded in one
process whose memory is limited to 256 MiB more than it has after its first load, and that counts the families it makes.
"""

import copy
import json
import random
import sys
from collections import Counter
from importlib.metadata import version

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.files import file, fit_checkpoint
from tests.children import python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limits are those of Linux")

#: So many files are tried, and so many are refused: all of them, made from seeds.
TRIED = {"bytes": 120, "header": 150, "description": 250, "tensors": 150, "nested": 80}

#: Loads every file of a folder and prints the name, the error and its message, and how many families were made.
RUNNER = """
import json, resource, sys
from pathlib import Path
import torch
from torch import nn
import structvi as vi
from structvi.families.family import Family

torch.set_num_threads(1)
made, begin = 0, Family.__init__

def counted(self):
    global made
    made += 1
    begin(self)

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

folder, whole, again = map(Path, sys.argv[1:])
vi.load(whole, network())
Family.__init__ = counted
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + 2**28
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
resource.setrlimit(resource.RLIMIT_CPU, (300, 300))
for path in sorted(folder.iterdir()):
    made, error, text = 0, "", ""
    try:
        loaded = vi.load(path, network())
        loaded.save(again)
        vi.load(again, network())
    except BaseException as caught:
        error, text = type(caught).__name__, str(caught)
    print(json.dumps([path.name, error, text, made]), flush=True)
"""


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def outcomes(folder, whole):
    """Of each file in the folder: error, message, families made."""
    done = python(RUNNER, folder, whole, whole.with_name("again"), timeout=600)
    found = {name: rest for name, *rest in map(json.loads, done.stdout.splitlines())}
    left = sorted({path.name for path in folder.iterdir()} - found.keys())
    assert not left, f"the process ended at {left[0]} with {done.returncode}: {done.stderr[-2000:]}"
    return found


@pytest.fixture(scope="module")
def posteriors(tmp_path_factory):
    """Valid files: bytes, tensors and description of each."""
    folder = tmp_path_factory.mktemp("posteriors")
    likelihoods, td = vi.likelihoods, torch.distributions
    every = {
        "structured": (likelihoods.Gaussian("point"), vi.LowRankNormal(rank=2), vi.priors.NormalPrior(1.0, learn=True)),
        "mixture": (likelihoods.Categorical(class_weights=[1.0, 2.0]), vi.Mixture(vi.MeanField(), components=3), None),
        "blocks": (
            likelihoods.Gaussian("random", noise_prior=td.InverseGamma(2.0, 1.0)),
            vi.PerLayer({"0.*": vi.FullNormal(), "*": vi.LowRankPrecision(rank=1)}),
            vi.priors.NormalPrior(1.0) + vi.priors.LaplacePrior({"0.*": 0.5, "*": 1.0}),
        ),
        "dropout": (
            likelihoods.Bernoulli(),
            vi.MCDropout(per="input", exempt=["*bias"]),
            vi.priors.DistributionPrior({"*": td.Cauchy(0.0, 1.0), "0.bias": td.Normal(torch.zeros(4), 1.0)}),
        ),
    }
    found = {}
    for name, (likelihood, family, prior) in every.items():
        posterior = vi.variationalize(network(), likelihood, family, prior, num_data=12)
        posterior.predict(torch.randn(5, 3), draws=2)
        posterior.save(folder / name, network="hash" if name == "mixture" else "store")
        found[name] = ((folder / name).read_bytes(), *file.read(folder / name))
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The bytes of a valid checkpoint of a fit."""
    folder = tmp_path_factory.mktemp("checkpoint")
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(12, 3, generator=g), torch.randn(12, 2, generator=g))
    posterior = vi.variationalize(network(), vi.likelihoods.Gaussian(0.3), vi.MeanField(), num_data=12)
    posterior.fit(DataLoader(data, batch_size=6), epochs=1, checkpoint=vi.Checkpoint(folder), progress=False)
    (path, *_) = sorted(folder.glob("fit-*.safetensors"))
    return path.read_bytes()


def cut(data):
    """Header and payload."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def assemble(text, payload):
    text = text if isinstance(text, bytes) else text.encode()
    return len(text).to_bytes(8, "little") + text + payload


# The kinds of harm. Each generator of random ones goes on for ever.


def harmed_bytes(whole, generator):
    """Whole files with bytes cut off, changed, doubled or in another order: the hash no longer agrees."""
    while True:
        data = generator.choice(whole)
        a, b = sorted(generator.sample(range(len(data) + 1), 2))
        yield generator.choice(
            [
                data[:a],
                data[b:],
                data[:a] + generator.randbytes(b - a) + data[b:],
                data[:a] + data[b:],
                data[:b] + data[a:],
                data[b:] + data[:b],
                data + data[a:b],
                generator.getrandbits(64).to_bytes(8, "little") + data[8:],
                generator.choice([b"\x80\x04", b"PK\x03\x04", b"\xff\xfe", b""]) + data[a:b],
            ]
        )


def harmed_header(whole, generator):
    """What the header says of tensors, and its JSON."""
    while True:
        header, payload = cut(generator.choice(whole))
        names = [name for name in header if name != "__metadata__"]
        name, other = generator.sample(names, 2)
        entry, field = header[name], generator.choice(["dtype", "shape", "data_offsets"])
        size = len(payload)
        values = [None, True, -1, 10**400, "F32", "F128", [], {}, [0], [-1], [0, 2**63], [1.5], [[1]], [10**12], [0, 0]]
        values += [[size, 0], [0, size + 1], float("nan"), "C64", "BOOL", "I8", [2**62, 2**62], "\ud800", [True, 4]]
        value = generator.choice([v for v in values if v != entry[field]])
        text = json.dumps(header)
        once = json.dumps(name)
        changed = [
            json.dumps({**header, name: {**entry, field: value}}),
            json.dumps({**header, name: {**entry, field: value}}),
            json.dumps({**header, name: {**entry, "data_offsets": header[other]["data_offsets"]}}),
            json.dumps({**header, name: {k: v for k, v in entry.items() if k != field}}),
            json.dumps({**header, name: {**entry, generator.choice("abc"): value}}),
            json.dumps({**header, name: value}),
            json.dumps({key: v for key, v in header.items() if key != name}),
            json.dumps({generator.choice(["", "x" * 10**6, "a\nb", "\u202e", "\0"]) if key == name else key: v
                        for key, v in header.items()}),
            json.dumps({**header, "__metadata__": {**header["__metadata__"], "x": "y"}}),
            json.dumps({**header, "__metadata__": value}),
            text[:-1] + f", {once}: {json.dumps(entry)}" + "}",
            text[:-1] + f', "x": {generator.choice(["[" * 5000, "1" * 5000, "NaN", "{}" * 9, "tru"])}' + "}",
            text.replace(once, once[:-1], 1),
        ]  # fmt: skip
        yield assemble(generator.choice(changed), payload)


#: safetensors before 0.5 does not
WRITES_COMPLEX = tuple(map(int, version("safetensors").split(".")[:2])) >= (0, 5)


def forged(tensors, description):
    """A file with the right hash, whatever it says."""
    plain = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    description = json.loads(json.dumps(description))
    sha = file._digest(plain, description)
    text = json.dumps({"description": description, "format": 1, "sha256": sha}, sort_keys=True, separators=(",", ":"))
    return file.serialise(plain, metadata={"structvi": text})


NONSENSE = [
    -1, 1.5, True, 10**400, -(10**30), float("nan"), float("inf"), 2**63, "", "x", "\0", "*" * 10**6, "\u202e", [], [1],
    {}, {"a": 1, "b": 2}, {"list": 3}, {"list": [[]]}, {"dict": [1]}, {"dict": [[[], 1]]}, {"tensor": ["F32", 1]},
    {"tensor": ["torch.float32", {"list": ["x"]}]}, {"structvi": ["os.system", {}]}, {"structvi": 1}, {"structvi": []},
    {"structvi": ["Linear", {"in_features": 10**9}]}, {"distribution": ["Normal", {"loc": 0.0}]}, {"own": "x"},
    {"distribution": ["Chi2", {"df": 1.0}]}, {"eval": ["exit()", {}]}, {"frozenset": [{"list": []}]}, [[[[[[[[1]]]]]]]],
]  # fmt: skip
#: What is never a value, whatever the field or argument; but for those that take any.
NEVER = [value for value in NONSENSE if value is not True and value != 1.5]
FREE = {"ignore_index", "common_noise", "class_weights"}


def harmed_description(posteriors, generator):
    """Fields, parts and their arguments in place of each other, and nonsense in their place."""
    kinds = ("family", "likelihood", "prior")
    while True:
        _, tensors, description = generator.choice(list(posteriors.values()))
        description = copy.deepcopy(description)
        part, field = generator.choice(kinds), generator.choice(list(description))
        arguments = description[part]["value"]["structvi"][1]
        other = generator.choice([kind for kind in kinds if kind != part])
        nonsense = generator.choice(NEVER)
        evaluation = description["evaluation"]
        match generator.randrange(12):
            case 0:
                del description[field]
            case 1:
                description[generator.choice(["", "x", "Kind", "kind\0"])] = nonsense
            case 2 | 3:
                description[field] = nonsense
            case 4:
                description[part] = copy.deepcopy(description[other])
            case 5:
                description[part] = {"value": nonsense}
            case 6:
                description[part]["value"]["structvi"] = [nonsense, arguments]
            case 7:
                arguments[generator.choice(["self", "x", "__class__"])] = nonsense
            case 8:
                keys = [key for key in arguments if key not in FREE]
                if not keys:
                    continue
                arguments[generator.choice(keys)] = nonsense
            case 9:
                evaluation[generator.randrange(4)] = nonsense
            case 10:
                record = copy.deepcopy(evaluation[3])
                record["tuple"][generator.randrange(2)] = nonsense
                evaluation[3] = record
            case 11:
                table = generator.choice(["random", "held"])
                pairs = description[table]["dict"]
                if not pairs:
                    continue
                pair = generator.choice(pairs)
                pair[generator.randrange(2)] = nonsense
        yield forged(tensors, description)


def harmed_tensors(posteriors, generator):
    """Numbers that no fit ends with, in dtypes and shapes of their own, with the right hash."""
    while True:
        _, tensors, description = generator.choice(list(posteriors.values()))
        name = generator.choice([name for name in tensors if not name.startswith("network.")])
        tensor = tensors[name].clone()
        flat = tensor.view(-1)
        spot = generator.randrange(len(flat))
        rest = {key: value for key, value in tensors.items() if key != name}
        choice = generator.randrange(9)
        if choice == 0:
            flat[spot] = generator.choice([float("nan"), float("inf"), -float("inf")])
        elif choice == 1:
            dtypes = [torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int8, torch.bool, torch.uint8]
            tensor = tensor.to(generator.choice(dtypes))
            if tensor.is_complex() and not WRITES_COMPLEX:
                continue
        elif choice == 2:
            tensor = generator.choice([tensor.reshape(-1, 1), tensor[None], tensor.reshape(-1)[:0], flat.repeat(2)])
        elif choice == 3 and name.split(".")[-1] in ("unit", "log_scale", "log_diagonal", "log_noise"):
            flat[spot] = -1.0 if name.endswith("unit") else 1e30
        elif choice == 4:
            name = generator.choice(["", "x", "family.", "family.x", "prior.x", "network.x", f"{name}.", name.upper()])
        elif choice == 5:
            rest[generator.choice(["x", "family.more", "likelihood.more", "network.more"])] = torch.zeros(1)
        elif choice == 6:
            other = generator.choice(list(rest))
            if rest[other].shape == tensor.shape and rest[other].dtype == tensor.dtype:
                continue
            rest[other], tensor = tensor, rest[other]
        elif choice == 7:
            yield forged(rest, description)
            continue
        else:
            continue
        yield forged({**rest, name: tensor}, description)


def harmed_by_nesting():
    """Few bytes that ask for much, for the file `structured`: families in families, patterns, ranks, shapes."""
    leaf, prior = {"structvi": ["MeanField", {}]}, {"structvi": ["NormalPrior", {}]}

    def within(depth, outer, value):
        for _ in range(depth):
            value = outer(value)
        return value

    def mixture(components, part=leaf):
        return {"structvi": ["Mixture", {"part": part, "components": components}]}

    def blocks(pairs):
        return {"structvi": ["PerLayer", {"blocks": {"dict": pairs}}]}

    def rotated(part):
        return {"structvi": ["Rotated", {"part": part}]}

    def normal(loc, scale):
        arguments = {"loc": {"tensor": ["torch.float32", loc]}, "scale": {"tensor": ["torch.float32", scale]}}
        pairs = [["*", {"distribution": ["Normal", arguments]}]]
        return {"structvi": ["DistributionPrior", {"distributions": {"dict": pairs}}]}

    for depth in (2, 8, 9, 16, 20, 24):
        for components in (2, 3, 1000):
            yield "family", within(depth, lambda part, c=components: mixture(c, part), leaf)
        yield "family", within(depth, rotated, leaf)
        yield "family", within(depth, lambda part: blocks([["*", part]]), leaf)
        yield "family", within(depth, lambda part: mixture(2, rotated(part)), leaf)
        yield "prior", within(depth, lambda one: {"structvi": ["SumPrior", {"priors": {"list": [one]}}]}, prior)
    for components in (0, -1, 4, 4095, 4096, 10**6, 10**18, 10**400, 1.5, True, "2"):
        yield "family", mixture(components)
    for length in (0, 1, 4095, 4096, 30_000):
        yield "family", mixture(None, {"list": [leaf] * length})
        yield "family", blocks([[f"{n}*", leaf] for n in range(length)])
        yield "prior", {"structvi": ["NormalPrior", {"scale": {"dict": [[f"{n}*", 1.0] for n in range(length)]}}]}
    for rank in (3, 25, 26, 10**6, 2**62, 10**30, -1, 2.0):
        yield "family", {"structvi": ["LowRankNormal", {"rank": rank}]}
    yield "family", {"structvi": ["FullNormal", {}]}
    yield "family", {"structvi": ["MCDropout", {"exempt": {"list": ["*" * 10**6] * 2}}]}
    yield "family", blocks([["*a" * 300 + str(n), leaf] for n in range(2000)])
    # [n, 1] and [n] broadcast to [n, n]: 10 GB of flags to check, of 600 kB
    yield "prior", normal({"list": [{"list": [0.0]}] * 100_000}, {"list": [1.0] * 100_000})


def distinct(makers, whole, count):
    """So many files, none of which is one of the whole ones, nor there twice."""
    seen = set(whole)
    for data in makers:
        if data not in seen:
            seen.add(data)
            yield data
        if len(seen) == len(whole) + count:
            return


def hostile(posteriors, checkpoint):
    """All hostile files: kind → contents."""
    whole = [*(data for data, *_ in posteriors.values()), checkpoint]
    _, tensors, description = posteriors["structured"]
    return {
        "bytes": list(distinct(harmed_bytes(whole, random.Random(1)), whole, 120)),
        "header": list(distinct(harmed_header(whole, random.Random(2)), whole, 150)),
        "description": list(distinct(harmed_description(posteriors, random.Random(3)), whole, 250)),
        "tensors": list(distinct(harmed_tensors(posteriors, random.Random(4)), whole, 150)),
        "nested": [forged(tensors, {**description, field: {"value": value}})
                   for field, value in harmed_by_nesting()],
    }  # fmt: skip


def test_hostile_files_are_refused(posteriors, checkpoint, tmp_path):
    folder = tmp_path / "hostile"
    folder.mkdir()
    every = hostile(posteriors, checkpoint)
    for kind, contents in every.items():
        for n, data in enumerate(contents):
            (folder / f"{kind} {n}").write_bytes(data)
    whole = tmp_path / "whole"
    whole.write_bytes(posteriors["structured"][0])
    found = outcomes(folder, whole)
    held = Counter(name.split()[0] for name, (error, *_) in found.items() if error in ("CheckpointError", "ValueError"))
    print(f"hostile files refused: {sum(held.values())} of {len(found)}; {dict(held)}")
    others = {name: rest for name, rest in found.items() if rest[0] not in ("CheckpointError", "ValueError")}
    assert others == {}
    assert dict(held) == TRIED
    # a message names the file, is short, and can be printed
    for name, (_, text, _) in found.items():
        assert str(folder / name) in text, name
        assert len(text) < 4000, name
        text.encode()
    assert max(made for *_, made in found.values()) <= 10


def test_harmed_checkpoints_are_refused(checkpoint, tmp_path):
    makers = {
        "bytes": harmed_bytes([checkpoint], random.Random(6)),
        "header": harmed_header([checkpoint], random.Random(7)),
    }
    for kind, maker in makers.items():
        tried = 0
        for data in distinct(maker, [checkpoint], 100):
            tried += 1
            (tmp_path / "fit-0000000001.safetensors").write_bytes(data)
            with pytest.raises(vi.CheckpointError, match=r"no checkpoint in .* is whole"):
                fit_checkpoint.latest(tmp_path)
        assert tried == 100, kind


LENGTH = 30_000_000


def large(posteriors):
    """Start and size of files most of which is not there, and of long headers; each with what is said of it."""
    data, *_ = posteriors["structured"]
    header, payload = cut(data)
    start, stop = header["family.mean"]["data_offsets"]
    more = 200 * 10**9  # bytes, four for each number
    moved = {
        name: {**entry, "data_offsets": [x + more if x >= stop and name != "family.mean" else x
                                         for x in entry["data_offsets"]]}
        for name, entry in header.items() if name != "__metadata__"
    }  # fmt: skip
    moved["family.mean"] |= {"shape": [(stop - start + more) // 4], "data_offsets": [start, stop + more]}
    text = json.dumps({**header, **moved})
    described = json.loads(header["__metadata__"]["structvi"])
    described["description"]["random"]["dict"][0][1]["tuple"][0] = {"tuple": [more // 4]}
    changed = json.dumps(described, sort_keys=True, separators=(",", ":"))
    vast = json.dumps({**header, **moved, "__metadata__": {"structvi": changed}})
    size = len(payload) + more
    yield "a mean of 200 GB", assemble(text, b""), 8 + len(text) + size, "mean: [50000000034] in the file, [34] here"
    yield "a network of 200 GB", assemble(vast, b""), 8 + len(vast) + size, "was saved with another network"
    yield "200 GB behind it", data, more, "bytes of tensors, it has"
    yield "200 GB of nothing", b"", more, "its header does not fit"
    yield "a header of 200 GB", (more - 8).to_bytes(8, "little") + b"{", more, "at most 100000000 are read"
    whole = json.dumps(header)[:-1]
    for name, content, message in (
        ("brackets", "[" * LENGTH, "lists and objects in each other"),
        ("lists", "[" + "[]," * (LENGTH // 3), "lists and objects in each other, or 1000000 in all"),
        ("numbers", "[" + "1.5," * (LENGTH // 4) + "1]", "no memory|not JSON"),
        ("digits", "1" * LENGTH, "not JSON"),
        ("texts", "[" + '"ab",' * (LENGTH // 5) + "1]", "no memory|not JSON"),
        ("a text", '"' + "x" * LENGTH + '"', "no memory|not JSON|expected dtype"),
        ("spaces", " " * LENGTH + "1", "no memory|expected dtype"),
    ):
        start = assemble(f'{whole}, "x": {content}' + "}", payload)
        yield name, start, len(start), message


def test_large_files_are_refused_before_they_are_read(posteriors, tmp_path):
    folder, whole = tmp_path / "large", tmp_path / "whole"
    folder.mkdir()
    whole.write_bytes(posteriors["structured"][0])
    messages = {"an endless device": "it is a device, not a file"}
    (folder / "an endless device").symlink_to("/dev/zero")
    for name, start, size, message in large(posteriors):
        messages[name] = message
        with open(folder / name, "wb") as target:
            target.write(start)
            try:
                target.truncate(size)
            except OSError:
                pytest.skip("no files of this size here")
    found = outcomes(folder, whole)
    for path in folder.iterdir():
        path.unlink()
    for name, (error, text, made) in found.items():
        assert error in ("CheckpointError", "ValueError"), (name, error, text)
        assert any(one in text for one in messages[name].split("|")), (name, text)
        assert made == 0


def nodes(value, way=()):
    """The ways to all that is in a description."""
    yield way
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from nodes(item, (*way, key))


def at(value, way):
    for key in way:
        value = value[key]
    return value


def changed_somewhere(posteriors, generator):
    """One thing in a description gone, or replaced by nonsense or by another thing of it; the hash is right."""
    while True:
        _, tensors, description = generator.choice(list(posteriors.values()))
        description = copy.deepcopy(description)
        way, other = generator.sample([way for way in nodes(description) if way], 2)
        holder, key = at(description, way[:-1]), way[-1]
        match generator.randrange(4):
            case 0:
                del holder[key]
            case 1:
                holder[key] = copy.deepcopy(at(description, other))
            case 2 if isinstance(holder, list):
                holder.append(copy.deepcopy(holder[key]))
            case _:
                holder[key] = generator.choice(NONSENSE)
        yield forged(tensors, description)


def test_any_change_of_a_description_is_refused_or_loads_and_saves(posteriors, tmp_path):
    """Some changes are harmless, such as another label to ignore: what loads is a posterior that saves and loads."""
    folder = tmp_path / "changed"
    folder.mkdir()
    every = distinct(changed_somewhere(posteriors, random.Random(5)), [data for data, *_ in posteriors.values()], 400)
    for n, data in enumerate(every):
        (folder / str(n)).write_bytes(data)
    whole = tmp_path / "whole"
    whole.write_bytes(posteriors["structured"][0])
    found = outcomes(folder, whole)
    errors = Counter(error for error, *_ in found.values())
    print(f"changed descriptions: {errors}")
    assert errors.keys() <= {"CheckpointError", "ValueError", ""}
    assert len(found) == 400
    assert errors[""] <= 40
    assert max(made for *_, made in found.values()) <= 50
