"""Each extra by itself: `python tools/try_extras.py BARE [--only sklearn table] [--constraints FILE]`.

BARE is an environment with the wheel and nothing but its requirements, as `make dist` leaves it in build/bare. For each
extra a new environment is made on top of it, so that torch is not installed again; what the extra asks for is
installed there, `pip check` has nothing to say, and a few lines that need the extra run.
"""

import argparse
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FITTED = """
import torch, structvi as vi
x = torch.randn(24, 2)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=12)
bayes = vi.variationalize(torch.nn.Linear(2, 1), vi.likelihoods.Gaussian(0.1))
bayes.fit(data, epochs=2, progress=False)
"""
PICTURES = "import matplotlib\nmatplotlib.use('agg')\n"
#: what an extra is for, in a few lines
TRIED = {
    "reproduce": "import subprocess, sys\n"
    "from pathlib import Path\n"
    "structvi = Path(sys.executable).with_name('structvi')\n"
    "subprocess.run([structvi, 'reproduce', 'figure1', '--quick', '--out', 'report'], check=True)\n"
    "assert Path('report/report.html').exists()",
    "plots": PICTURES + FITTED + "vi.plots.predictive_band(x[:, 0], bayes.predict(x))",
    "metrics": FITTED + "print(vi.metrics.ood_auroc(bayes, data, data, score='variance'))",
    "diagnostics": FITTED + "print(bayes.diagnose(data, gradients=False))\nbayes.to_arviz(data, draws=50)",
    "lightning": "from structvi.integrations.lightning import BayesianModule\nprint(BayesianModule)",
    "sklearn": "import numpy as np\n"
    "from structvi.integrations.sklearn import BayesianRegressor\n"
    "X = np.random.default_rng(0).normal(size=(40, 2))\n"
    "print(BayesianRegressor((4,), epochs=2, random_state=0).fit(X, X.sum(1)).predict(X[:2], return_std=True))",
    "botorch": "import torch, structvi as vi\n"
    "from structvi.integrations.botorch import PosteriorModel\n"
    "net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))\n"
    "bayes = vi.variationalize_head(net, vi.likelihoods.Gaussian('point'))\n"
    "bayes.fit_head([(torch.rand(20, 2), torch.rand(20, 1))], progress=False)\n"
    "print(PosteriorModel(bayes).posterior(torch.rand(5, 3, 2)).mean.shape)",
    "table": "import subprocess, sys\n"
    "from pathlib import Path\n"
    "lines = [f'{i % 7},{i % 3},{i % 7 + 0.1 * (i % 5)}' for i in range(60)]\n"
    "Path('table.csv').write_text('a,b,y\\n' + '\\n'.join(lines) + '\\n')\n"
    "structvi = Path(sys.executable).with_name('structvi')\n"
    "subprocess.run([structvi, 'fit', 'table.csv', '--target', 'y', '--out', 'fitted'], check=True)\n"
    "subprocess.run([structvi, 'predict', 'fitted', 'table.csv'], check=True)",
    "transformers": "import peft, transformers\nimport structvi",
    "imaging": "import monai\n" + PICTURES + FITTED,
    "volumes": "import nibabel\n" + PICTURES + FITTED,
}


def run(*command: str | Path, cwd: Path | None = None) -> None:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))[:200]}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def try_extra(extra: str, bare: Path, folder: Path, constraints: Path) -> None:
    """A new environment on top of the bare one, with the extra, and its few lines."""
    home = folder / extra
    run(bare / "bin" / "python", "-m", "venv", home)
    python = home / "bin" / "python"
    (below,) = bare.glob("lib/python3*/site-packages")
    (own,) = home.glob("lib/python3*/site-packages")
    (own / "bare.pth").write_text(f"{below}\n")
    run(python, "-m", "pip", "install", "--quiet", "-c", constraints, f"structvi[{extra}]")
    run(python, "-m", "pip", "check")
    script = own.parents[2] / "bin" / "structvi"  # the bare environment's belongs to its own Python
    script.write_text(f"#!{python}\nfrom structvi.cli import main\nif __name__ == '__main__':\n    main()\n")
    script.chmod(0o755)
    run(python, "-c", TRIED[extra], cwd=home)
    print(f"structvi[{extra}]: installed, checked and tried", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bare", type=Path)
    parser.add_argument("--only", nargs="*", choices=sorted(TRIED))
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    options = parser.parse_args()
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    missing = set(declared) - set(TRIED) - {"dev", "docs", "bench"}  # for work on structvi itself
    if missing:
        sys.exit(f"nothing is tried of the extras {sorted(missing)}: add them to TRIED")
    with tempfile.TemporaryDirectory() as folder:
        for extra in options.only or [name for name in declared if name in TRIED]:
            try_extra(extra, options.bare.resolve(), Path(folder), options.constraints.resolve())


if __name__ == "__main__":
    main()
