"""The house: rooms import only rooms below them, and families are not told apart outside their room."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import structvi
from structvi import families

SRC = Path(structvi.__file__).parent

#: From the ground up. A room imports itself and the rooms before it at run time; the package's `__init__` is the roof.
ROOMS = (
    "util", "constraints", "parameters", "couplings", "families", "networks", "models", "objective", "result",
    "files", "distributed", "predict", "optim", "density", "train", "laplace", "head",
    "imaging", "plots", "diagnostics", "posterior", "ensemble", "loading", "testing", "integrations", "cli", "",
)  # fmt: skip
#: What is no concrete family: protocols that any family, ours or a user's, has.
PROTOCOLS = {"Density", "DistributionDensity", "Draws", "Family", "Gaussian", "Shard", "NormalForm"}
#: The forms of a normal's root: values, not families.
FORMS = {"Diagonal", "LowRank", "Triangle"}


def modules() -> dict[str, Path]:
    found = {}
    for path in SRC.rglob("*.py"):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def room(module: str) -> str:
    return module.split(".")[0]


def at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from at_run_time(node)


def imports(module: str) -> Iterator[tuple[int, str]]:
    """Line and module of everything imported from the package, at any level of its file."""
    is_package = MODULES[module].name == "__init__.py"
    package = module.split(".") if is_package and module else module.split(".")[:-1]
    for node in at_run_time(tree_of(module)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "structvi"]
            yield from ((node.lineno, name.removeprefix("structvi").lstrip(".")) for name in names)
        if not isinstance(node, ast.ImportFrom):
            continue
        written = node.module.split(".") if node.module else []
        if node.level == 0:
            if written[:1] != ["structvi"]:
                continue
            base = written[1:]
        else:
            base = package[: len(package) - node.level + 1] + written
        for alias in node.names:
            whole = ".".join([*base, alias.name])
            yield node.lineno, whole if whole in MODULES else ".".join(base)


def test_every_module_has_a_room():
    assert {room(module) for module in MODULES} <= set(ROOMS)


def test_a_room_imports_only_rooms_below_it():
    above = [
        f"{module}, line {line}: {other or 'structvi itself'}"
        for module in MODULES
        for line, other in imports(module)
        if ROOMS.index(room(other)) > ROOMS.index(room(module))
    ]
    assert above == []


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


def type_tests(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names in the second argument of isinstance and issubclass, in `type(x) is …` and in `match` classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            where: list[ast.AST] = [node.args[1]]
        elif isinstance(node, ast.Compare) and "type(" in ast.unparse(node):
            where = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchClass):
            where = [node.cls]
        else:
            continue
        for part in (part for side in where for part in ast.walk(side)):
            if isinstance(part, ast.Name | ast.Attribute):
                yield node.lineno, part.id if isinstance(part, ast.Name) else part.attr  # pyright: ignore


def test_type_tests_are_seen():
    """The walker finds every form, so that the test below can fail."""
    source = "isinstance(q, MeanField | Mixture)\ntype(q) is FullNormal\nmatch q:\n    case PointMass(): pass\n"
    assert {name for _, name in type_tests(ast.parse(source))} >= {"MeanField", "Mixture", "FullNormal", "PointMass"}


def test_no_type_test_on_a_concrete_family_outside_their_room():
    concrete = {
        node.name
        for module in MODULES
        if module.startswith("families.") and module not in ("families.numerics", "families.triton_kernels")
        for node in tree_of(module).body
        if isinstance(node, ast.ClassDef)
    }
    concrete -= PROTOCOLS | FORMS
    assert {"MeanField", "LowRankFamily", "MixtureDensity", "PointMass", "FullNormal"} <= concrete
    found = []
    for module in (module for module in MODULES if room(module) != "families"):
        tree = tree_of(module)
        # likelihoods have a Gaussian too: of names imported from elsewhere only those of families count
        elsewhere = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and "families" not in (node.module or "")
            for alias in node.names
        }
        found += [f"{module}, line {line}: {name}" for line, name in type_tests(tree) if name in concrete - elsewhere]
    assert found == []


def test_no_private_name_is_imported_from_another_module():
    private = [
        f"{module}, line {node.lineno}: {alias.name}"
        for module in MODULES
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("structvi"))
        for alias in node.names
        if alias.name.startswith("_") and alias.name != "__version__"
    ]
    assert private == []


def test_import_loads_neither_triton_nor_extras():
    extras = (
        "triton", "matplotlib", "arviz_stats", "arviz_base", "pandas", "sklearn", "lightning", "torchmetrics", "nibabel", "jinja2",
        "structvi_paper", "structvi_check", "structvi_tables",
    )  # fmt: skip
    code = f"import sys, structvi; print([m for m in sys.modules if m.split('.')[0] in {extras}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_core_does_not_import_the_packages_beside_it():
    """Only the command line finds them, when a command asks for one."""
    found = [
        f"{module}, line {node.lineno}"
        for module in MODULES
        if room(module) not in ("cli", "integrations")
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        if name.startswith("structvi_")
    ]
    assert found == []


def test_public_names():
    for name in structvi.__all__:
        assert getattr(structvi, name) is not None
    for name in families.__all__:
        assert getattr(families, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = structvi.nothing
