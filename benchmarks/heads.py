"""A posterior over a last layer of many numbers: seconds, memory and NLL, beside laplace-torch and VBLL in the same run.

    python -m benchmarks.heads [--sizes 384x150 768x1000 2048x1000] [--rows 20000] [--methods ours kron diag vbll] [--epochs 5]

Features lie around the means of their classes, with noise whose spectrum decays, and one label in twenty is random; the
head is trained with Adam. Each method runs in a process of its own. Seconds are of processor time, for the fit and for a
prediction of 1,000 rows; memory is what the process took at its height, more than before the fit. NLL is on test
rows, plain, and after a temperature that is fitted on validation rows. laplace-torch takes the prior precision of the highest marginal likelihood; where its Jacobians need more
than 2 GB it predicts with 32 drawn layers.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

VALIDATION, TEST = 2000, 1000
METHODS = ("network", "ours", "kron", "diag", "vbll")


def problem(width: int, classes: int, rows: int, epochs: int) -> tuple[nn.Module, dict[str, TensorDataset]]:
    """Return a trained head and its data."""
    torch.manual_seed(0)
    n = rows + VALIDATION + TEST
    means = torch.randn(classes, width) / width**0.5
    labels = torch.randint(classes, (n,))
    spectrum = torch.arange(1, width + 1).pow(-0.25)
    noise = torch.randn(n, width) * spectrum @ torch.linalg.qr(torch.randn(width, width))[0]
    x = 4 * means[labels] + 0.5 * noise
    labels = torch.where(torch.rand(n) < 0.05, torch.randint(classes, (n,)), labels)
    parts = TensorDataset(x, labels)
    cuts = dict(zip(("train", "validation", "test"), (rows, VALIDATION, TEST), strict=True))
    sets, start = {}, 0
    for name, size in cuts.items():
        sets[name], start = TensorDataset(*parts[start : start + size]), start + size
    net = nn.Sequential(nn.Identity(), nn.Linear(width, classes))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(epochs):
        for inputs, target in DataLoader(sets["train"], batch_size=250, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs), target).backward()
            optimizer.step()
    return net.eval().requires_grad_(True), sets


def ours(net: nn.Module, sets: dict[str, TensorDataset]) -> Callable[[Tensor], Tensor]:
    bayes = vi.variationalize_head(net, vi.likelihoods.Categorical())
    validation = DataLoader(sets["validation"], batch_size=500)
    bayes.fit_head(DataLoader(sets["train"], batch_size=500), validation=validation, progress=False)
    return lambda x: bayes.predict(x).probabilities


def laplace_torch(structure: str) -> Callable[[nn.Module, dict[str, TensorDataset]], Callable[[Tensor], Tensor]]:
    def fit(net: Any, sets: dict[str, TensorDataset]) -> Callable[[Tensor], Tensor]:
        from laplace import Laplace

        laplace: Any = Laplace(net, "classification", subset_of_weights="last_layer", hessian_structure=structure)
        D, C = sets["train"].tensors[0].shape[1], net[1].out_features
        size = max(1, 2**29 // (C * C * D))  # of a batch whose Jacobians [C, C·D] take 2 GB
        laplace.fit(DataLoader(sets["train"], batch_size=500 if structure == "kron" else size))
        laplace.optimize_prior_precision(method="marglik", pred_type="glm")
        rows = 2**29 // (C * C * D)
        settings = (
            {"pred_type": "glm", "link_approx": "probit"}
            if rows
            else {"pred_type": "nn", "n_samples": 32, "link_approx": "mc"}
        )
        return lambda x: torch.cat([laplace(part, **settings).detach() for part in x.split(min(32, rows) or 500)])

    return fit


def vbll(net: Any, sets: dict[str, TensorDataset]) -> Callable[[Tensor], Tensor]:
    """Train a variational last layer of the community's package on the same features, five epochs of Adam."""
    import vbll as package

    D, C, rows = sets["train"].tensors[0].shape[1], net[1].out_features, len(sets["train"])
    layer: Any = package.DiscClassification(D, C, 1 / rows, parameterization="diagonal")
    optimizer = torch.optim.Adam(layer.parameters(), lr=3e-3)
    for _ in range(5):
        for x, t in DataLoader(sets["train"], batch_size=250, shuffle=True):
            optimizer.zero_grad()
            layer(x).train_loss_fn(t).backward()
            optimizer.step()
    return lambda x: layer(x).predictive.probs.detach()


FITS: dict[str, Any] = {
    "network": lambda net, sets: lambda x: net(x).softmax(-1).detach(),
    "ours": ours,
    "kron": laplace_torch("kron"),
    "diag": laplace_torch("diag"),
    "vbll": vbll,
}


def nll(p: Tensor, labels: Tensor, temperature: float = 1.0) -> float:
    log_p = (p.clamp(min=1e-30).log() / temperature).log_softmax(-1)
    return float(nn.functional.nll_loss(log_p, labels))


def measure(width: int, classes: int, rows: int, epochs: int, method: str) -> dict[str, float]:
    """Return what one method costs and how well it predicts."""
    net, sets = problem(width, classes, rows, epochs)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    predict = FITS[method](net, sets)
    fitted = time.process_time()
    (x, t), (held, labels) = sets["test"].tensors, sets["validation"].tensors
    p = predict(x)
    predicted, height = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    few = held[:500] if method in ("kron", "diag") else held
    known = predict(few)
    grid = torch.linspace(-1.5, 1.5, 61).exp().tolist()
    best = min(grid, key=lambda T: nll(known, labels[: len(few)], T))
    return {
        "seconds": fitted - start, "predict": predicted - fitted, "MB": (height - before) / 1024,
        "NLL": nll(p, t), "tempered": nll(p, t, best), "temperature": best,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["384x150", "768x1000", "2048x1000"])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of one method")
    parser.add_argument("--one", action="store_true", help="one size and one method, in this process, as JSON")
    given = parser.parse_args()
    sizes = [tuple(map(int, size.split("x"))) for size in given.sizes]
    if given.one:
        print(json.dumps(measure(*sizes[0], given.rows, given.epochs, given.methods[0])))
        return
    print(
        f"{'head':>10} {'method':>8} {'fit s':>8} {'1,000 rows s':>13} {'MB':>7} {'NLL':>7} {'tempered':>9} {'T':>5}",
        flush=True,
    )
    for size in given.sizes:
        for method in given.methods:
            command = [sys.executable, "-m", "benchmarks.heads", "--one", "--sizes", size, "--methods", method]
            command += ["--rows", str(given.rows), "--epochs", str(given.epochs)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=given.timeout, check=False)
            except subprocess.TimeoutExpired:
                print(f"{size:>10} {method:>8} more than {given.timeout:.0f} s", flush=True)
                continue
            if done.returncode:
                print(
                    f"{size:>10} {method:>8} failed: {(done.stderr.strip().splitlines() or ['killed'])[-1][:120]}",
                    flush=True,
                )
                continue
            r = json.loads(done.stdout.strip().splitlines()[-1])
            print(
                f"{size:>10} {method:>8} {r['seconds']:8.2f} {r['predict']:13.2f} {r['MB']:7.0f} {r['NLL']:7.4f} "
                f"{r['tempered']:9.4f} {r['temperature']:5.2f}", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
