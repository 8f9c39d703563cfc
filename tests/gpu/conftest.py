"""The tests of a GPU: asked for by `-m gpu` (`make test-gpu`), skipped where there is none, with a table at their end.

The device is that of `gpu_device`. STRUCTVI_TEST_WORKS names a file for the table of architectures and families, which
`python -m tests.works` reads.
"""

import json
import os
import platform
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from gpu_device import DEVICE

import structvi

#: cuBLAS sums in the same order in every run only with a workspace of fixed size
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

HERE = Path(__file__).parent
MISSING = "no CUDA device here: these tests run on a GPU (make test-gpu)"


def is_there() -> bool:
    return DEVICE.type != "cuda" or torch.cuda.is_available()


def pytest_ignore_collect(collection_path, config):
    """`make test` does not even import them."""
    asked = "gpu" in (config.getoption("markexpr", "") or "")
    return True if collection_path.name.startswith("test_gpu") and not asked else None


def pytest_collection_modifyitems(items):
    if is_there():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(autouse=True)
def same_bits():
    """Convolutions by the same algorithm in every run; no TF32."""
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.fixture
def device():
    return DEVICE


@pytest.fixture
def gpu(device):
    """The device, for what only a GPU has."""
    if device.type != "cuda":
        pytest.skip("for a GPU alone")
    return device


# ------------------------------------------------------------------------------------------------------ the summary


def versions() -> str:
    named = {"torch": torch.__version__, "CUDA": torch.version.cuda, "Python": platform.python_version()}
    for package in ("triton", "numpy"):
        try:
            named[package] = version(package)
        except PackageNotFoundError:
            named[package] = "not installed"
    return f"structvi {structvi.__version__}; " + ", ".join(f"{name} {value}" for name, value in named.items())


def pytest_terminal_summary(terminalreporter, config):
    counts: Counter[tuple[str, str]] = Counter()
    cells: dict[str, dict[str, dict]] = {}
    seconds = 0.0
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            file = report.nodeid.split("::")[0].rsplit("/", 1)[-1]
            if not file.startswith("test_gpu"):
                continue
            counts[file.removeprefix("test_gpu_").removesuffix(".py"), outcome] += 1
            seconds += getattr(report, "duration", 0.0)
            for key, value in getattr(report, "user_properties", ()):
                if key == "works":
                    architecture, family, result = json.loads(value)
                    cells.setdefault(architecture, {})[family] = result
    if not counts or not is_there():
        return
    where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"{DEVICE} (a dry run)"
    write = terminalreporter.write_line
    terminalreporter.section("for docs/works.md")
    write(f"Run on: {where}; {versions()}; {seconds:.0f} seconds of tests.\n")
    write("| group | passed | failed | skipped |")
    write("| --- | ---: | ---: | ---: |")
    for group in sorted({group for group, _ in counts}):
        passed, failed, error, skipped = (counts[group, one] for one in ("passed", "failed", "error", "skipped"))
        write(f"| {group} | {passed} | {failed + error} | {skipped} |")
    if target := os.environ.get("STRUCTVI_TEST_WORKS"):
        Path(target).write_text(json.dumps({"device": where, "results": cells}, indent=1) + "\n")
