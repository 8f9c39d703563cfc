"""The versions that a run of the tests is of: Python, torch and what structvi needs or can use, if it is installed."""

import platform
from importlib.metadata import PackageNotFoundError, version

NAMES = "torch numpy safetensors tqdm scikit-learn pandas matplotlib arviz-stats lightning transformers monai"


def installed(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"no {name}"


print(f"Python {platform.python_version()}, " + ", ".join(map(installed, NAMES.split())))
