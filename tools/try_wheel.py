"""README's first example, with whatever structvi is installed: run it outside the checkout, in a bare environment."""

import re
import sys
from pathlib import Path

import structvi

readme = Path(sys.argv[1])
first = re.findall(r"```python\n(.*?)```", readme.read_text(), flags=re.DOTALL)[0]
where = Path(structvi.__file__).resolve()
if readme.resolve().parent in where.parents and "site-packages" not in where.parts:
    sys.exit(f"structvi comes from the checkout, {where}: this must be the wheel")
exec(compile(first, str(readme), "exec"), {})
print(f"structvi {structvi.__version__} from {where.parent}: README's first example ran")
