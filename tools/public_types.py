"""Every public symbol has a known type, by pyright: `make lint` runs it.

    python tools/public_types.py [arguments of pyright]

What others leave without types is named below, and nothing else may be.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

#: scikit-learn has no types, so that its subclasses have unknown bases; Triton compiles its kernels from their source
OTHERS = r"structvi\.(integrations\.sklearn\.(_Estimator|Bayesian\w+)|families\.triton_kernels\.\w+)"


def unknown(found: dict) -> list[str]:
    """The names without a known type, but for `OTHERS`.

    Example:
        >>> one = {"name": "structvi.a", "isTypeKnown": False, "isTypeAmbiguous": False}
        >>> unknown({"typeCompleteness": {"symbols": [one, one | {"isTypeKnown": True}]}})
        ['structvi.a']
    """
    return [
        symbol["name"]
        for symbol in found["typeCompleteness"]["symbols"]
        if not symbol["isTypeKnown"] and not symbol.get("isTypeAmbiguous") and not re.fullmatch(OTHERS, symbol["name"])
    ]


def main(arguments: list[str]) -> str | None:
    command = [sys.executable, "-m", "pyright", "--verifytypes", "structvi", "--ignoreexternal", "--outputjson"]
    # pyright asks the first python on the path what there is to import
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    there = {**os.environ, "PATH": path, "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, env=there)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        return f"pyright said nothing that can be read: {(done.stderr or done.stdout)[-500:]}"
    symbols = found["typeCompleteness"]["symbols"]
    if not symbols:
        return f"pyright found no structvi: {found['generalDiagnostics']}"
    names = unknown(found)
    inferred = sum(bool(symbol.get("isTypeAmbiguous")) for symbol in symbols)
    print(f"{len(symbols)} symbols: {inferred} with a type that is inferred, {len(names)} without a known type")
    return "write their types: " + ", ".join(names[:30]) if names else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
