"""The house: rooms import only rooms below them, families are not told apart outside their room, files stay short."""

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import structvi
from structvi import families

SRC = Path(structvi.__file__).parent

#: From the ground up. A room imports itself and the rooms before it; the package's own `__init__` is the roof.
ROOMS = (
    "basics",
    "constraints",
    "parameters",
    "couplings",
    "families",
    "networks",
    "models",
    "objective",
    "result",
    "posterior",
    "storing",
    "distributed",
    "predicting",
    "correcting",
    "searching",
    "training",
    "imaging",
    "plots",
    "diagnostics",
    "front_door",
    "network_mixture",
    "testing",
    "tables",
    "integrations",
    "studies",
    "cli",
    "",
)
#: What is no concrete family: protocols that any family, ours or a user's, has.
PROTOCOLS = {"Density", "DistributionDensity", "Draws", "Family", "Gaussian", "Shard"}


def modules() -> dict[str, Path]:
    found = {}
    for path in SRC.rglob("*.py"):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(module: str) -> Iterator[tuple[int, str]]:
    """Line and module of everything imported from the package, at any level and under TYPE_CHECKING too."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" and module else module.split(".")[:-1]
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "structvi":
                    yield node.lineno, alias.name.removeprefix("structvi").lstrip(".")
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level == 0:
            if (node.module or "").split(".")[0] != "structvi":
                continue
            base = (node.module or "").split(".")[1:]
        else:
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
        for alias in node.names:
            whole = ".".join([*base, alias.name])
            yield node.lineno, whole if whole in MODULES else ".".join(base)


def room(module: str) -> str:
    return module.split(".")[0]


def test_every_module_has_a_room():
    assert {room(module) for module in MODULES} == set(ROOMS)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_room_imports_only_rooms_below_it(module):
    above = [
        f"line {line}: {other or 'structvi itself'}"
        for line, other in imports(module)
        if ROOMS.index(room(other)) > ROOMS.index(room(module))
        and not (other == "" and room(module) in ("studies", "cli"))
    ]
    assert not above, f"{module} imports what is above it: {above}"


def test_modules_import_each_other_in_one_direction():
    graph = {module: {other for _, other in imports(module) if other != module} for module in MODULES}
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, f"a cycle: {' → '.join([*way[way.index(module) :], module])}"
        if module in done:
            return
        for other in graph[module]:
            # a package that is asked for a name of its own is no cycle of the modules it is made of
            if other and not module.startswith(f"{other}."):
                visit(other, (*way, module))
        done.add(module)

    for module in graph:
        visit(module, ())


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@cache
def concrete_families() -> set[str]:
    """All classes of the families' room but the protocols."""
    names = set()
    for module in [m for m in MODULES if m.startswith("families.") and ".numerics" not in m]:
        tree = tree_of(module)
        names |= {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert {"MeanField", "LowRankFamily", "MixtureDensity", "PointMass", "FullNormal"} <= names
    return names - PROTOCOLS


def type_tests(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names in the second argument of isinstance and issubclass, in `type(x) is …` and in `match` classes."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            for part in ast.walk(node.args[1]):
                if isinstance(part, ast.Name | ast.Attribute):
                    yield node.lineno, part.id if isinstance(part, ast.Name) else part.attr
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(s, ast.Call) and isinstance(s.func, ast.Name) and s.func.id == "type" for s in sides):
                for part in (part for side in sides for part in ast.walk(side)):
                    if isinstance(part, ast.Name | ast.Attribute):
                        yield node.lineno, part.id if isinstance(part, ast.Name) else part.attr
        if isinstance(node, ast.MatchClass):
            yield node.lineno, node.cls.id if isinstance(node.cls, ast.Name) else ast.unparse(node.cls)


def test_type_tests_are_seen():
    """The walker finds every form, so that the test below can fail."""
    source = "isinstance(q, MeanField | Mixture)\ntype(q) is FullNormal\nmatch q:\n    case PointMass(): pass\n"
    assert {name for _, name in type_tests(ast.parse(source))} >= {"MeanField", "Mixture", "FullNormal", "PointMass"}


@pytest.mark.parametrize("module", sorted(m for m in MODULES if room(m) not in ("families", "studies")))
def test_no_type_test_on_a_concrete_family_outside_their_room(module):
    tree = tree_of(module)
    # likelihoods have a Gaussian too: of names imported from elsewhere only those of families count
    elsewhere = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and "families" not in (node.module or "")
        for alias in node.names
    }
    found = [f"line {line}: {name}" for line, name in type_tests(tree) if name in concrete_families() - elsewhere]
    assert not found, f"{module} tells concrete families apart: {found}"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_files_and_functions_are_short(module):
    text = MODULES[module].read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            assert lines <= 60, f"{node.name} has {lines} lines without its docstring"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_private_name_is_imported_from_another_module(module):
    private = [
        f"line {node.lineno}: {alias.name}"
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("structvi"))
        for alias in node.names
        if alias.name.startswith("_") and alias.name != "__version__"
    ]
    assert not private


@pytest.mark.parametrize("module", sorted(m for m in MODULES if m not in ("cli",)))
def test_no_attribute_of_another_rooms_objects_is_guessed(module):
    """No `hasattr`, and `getattr` with a default only on what is not ours: user's objects, torch's and errors."""
    allowed = {"models.bayesian_model", "basics.initialisers", "training.batches", "training.options", "training.loop",
               "families.density", "families.low_rank", "storing.describe", "distributed.sharding",
               "training.fingerprint", "training.samplers",
               "studies.is_it_bayesian.adapters", "studies.is_it_bayesian.suite"}  # fmt: skip
    calls = [
        node for node in ast.walk(tree_of(module)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    if room(module) != "studies":
        assert not [node.lineno for node in calls if node.func.id == "hasattr"]
    if module not in allowed:
        assert not [node.lineno for node in calls if node.func.id == "getattr" and len(node.args) == 3]


def packages() -> list[str]:
    found = pkgutil.walk_packages([str(SRC)], "structvi.")
    return ["structvi", *(info.name for info in found if info.ispkg)]


@pytest.mark.parametrize("name", packages())
def test_no_function_shadows_a_module(name):
    package = importlib.import_module(name)
    for info in pkgutil.iter_modules(package.__path__):
        value = vars(package).get(info.name)
        assert value is None or inspect.ismodule(value), f"{name}.{info.name} is a module and {value!r}"


def test_import_loads_neither_studies_nor_triton_nor_extras():
    code = (
        "import sys, structvi; "
        "print([m for m in sys.modules if m.startswith('structvi.studies') or m.split('.')[0] in "
        "('triton', 'matplotlib', 'arviz', 'pandas', 'sklearn', 'lightning', 'typer', 'torchmetrics', 'nibabel')]); "
        "print(structvi.check.__name__)"
    )
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines == ["[]", "structvi.studies.is_it_bayesian"]


def test_public_names():
    for name in structvi.__all__:
        assert getattr(structvi, name) is not None
    for name in families.__all__:
        assert getattr(families, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'chek'"):
        _ = structvi.chek
