"""How often the default call ends worse than its network, by the number of held-out rows.

    python -m benchmarks.never_worse [--seeds 4] [--first 0] [--only regression] [--out FILE.json] [--quick]
    python -m benchmarks.never_worse --merge FILE.json ..

Eight simulated tables, four kinds of network (with batch norm and dropout, or plain; trained to the end, or stopped
early), three sizes of the held-out set. Each is placed with one call. Gains in log density are over the network, and
over the network with the temperature that suits the held-out rows, on 4,000 rows used for nothing. The noise of a
regression's network is the one that suits the held-out rows best, as for the posterior.
"""

import argparse
import copy
import json
from collections.abc import Sequence
from math import inf, log, pi
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.predict.calibration import each_temperature, fit_temperature

#: rows, inputs, classes, share of random labels, distance of the clusters
CLASSES = ((200, 13, 3, 0.0, 1.5), (300, 10, 2, 0.0, 1.0), (400, 30, 2, 0.02, 0.7), (1000, 20, 2, 0.1, 0.7),
           (600, 10, 3, 0.2, 1.5), (1500, 10, 5, 0.0, 1.2))  # fmt: skip
#: rows and noise of Friedman's first function
REGRESSIONS = ((300, 1.0), (1000, 3.0))
HELD_OUT, TEST, EPOCHS = (40, 100, 250), 4000, 40


def tables(seed: int):
    """Name, whether labels, inputs, targets, and the rows that are trained on."""
    more, generator = max(HELD_OUT) + TEST, torch.Generator().manual_seed(seed)
    for n, inputs, classes, noise, distance in CLASSES:
        # two clusters a class, each a normal of its own shape; half of the inputs say nothing
        told, rows = inputs // 2, n + more
        centres = distance * torch.randn(2 * classes, told, generator=generator)
        shapes = torch.randn(2 * classes, told, told, generator=generator) / told**0.5
        cluster = torch.randint(2 * classes, (rows,), generator=generator)
        x = torch.randn(rows, inputs, generator=generator)
        x[:, :told] = centres[cluster] + (shapes[cluster] @ x[:, :told, None]).squeeze(2)
        other = torch.randint(classes, (rows,), generator=generator)
        t = torch.where(torch.rand(rows, generator=generator) < noise, other, cluster % classes)
        yield f"{classes} classes, {n} rows", True, (x - x[:n].mean(0)) / x[:n].std(0), t, n
    for n, noise in REGRESSIONS:
        x = torch.rand(n + more, 8, generator=generator)
        t = 10 * torch.sin(pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5).square() + 10 * x[:, 3] + 5 * x[:, 4]
        t = (t + noise * torch.randn(n + more, generator=generator)).unsqueeze(1)
        yield f"regression, {n} rows", False, (x - 0.5) * 12**0.5, (t - t[:n].mean()) / t[:n].std(), n


def trained(x: Tensor, t: Tensor, is_labels: bool, with_norm: bool, stopped: bool, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    width, layers = x.shape[1], []
    for _ in range(2):
        layers += [nn.Linear(width, 64), *([nn.BatchNorm1d(64)] if with_norm else []), nn.ReLU()]
        layers += [nn.Dropout(0.1)] if with_norm else []
        width = 64
    net = nn.Sequential(*layers, nn.Linear(64, int(t.max()) + 1 if is_labels else 1))
    loss = nn.functional.cross_entropy if is_labels else nn.functional.mse_loss
    watched = len(x) // 5 if stopped else 0
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3, weight_decay=1e-2)
    best, state = inf, None
    for _ in range(EPOCHS):
        net.train()
        for inputs, target in DataLoader(TensorDataset(x[watched:], t[watched:]), 32, shuffle=True, drop_last=True):
            optimizer.zero_grad()
            loss(net(inputs), target).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            now = float(loss(net(x[:watched]), t[:watched])) if stopped else inf
        if now < best:
            best, state = now, copy.deepcopy(net.state_dict())
    if state is not None:
        net.load_state_dict(state)
    return net


@torch.no_grad()
def densities_of(net: nn.Module, is_labels: bool, test: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor]):
    """Return the network's log density of the test rows, and that with its own temperature."""
    if is_labels:
        losses = each_temperature(net(held_out[0]).log_softmax(1), held_out[1])
        T = fit_temperature(torch.stack(list(losses), -1))
        return [-float(nn.functional.cross_entropy(net(test[0]) / scale, test[1])) for scale in (1.0, T)]
    squares = [float((net(x) - t).square().mean()) for x, t in (test, held_out)]
    return [-0.5 * (squares[0] / squares[1] + log(2 * pi * squares[1]))] * 2


def gains(net: nn.Module, is_labels: bool, train, held_out, test) -> dict:
    """Return the gains of the default call over the network as it is, and tempered; and what was selected."""
    likelihood = vi.likelihoods.Categorical() if is_labels else vi.likelihoods.Gaussian("point")
    bayes = vi.variationalize(net, likelihood)
    loaders = [DataLoader(TensorDataset(*part), 50) for part in (train, held_out)]
    result = bayes.laplace(loaders[0], validation=loaders[1], progress=False)
    found = bayes.predict(test[0], generator=torch.Generator().manual_seed(0)).log_prob(test[1])
    plain, tempered = densities_of(net, is_labels, test, held_out)
    return {"gain": float(found.mean()) - plain, "tempered": float(found.mean()) - tempered, "kept": result.selected}


def runs(seeds: Sequence[int], quick: bool, out: Path | None, only: str = "") -> list[dict]:
    found = []
    for seed in seeds:
        for name, is_labels, x, t, n in tables(seed):
            if only not in name:
                continue
            for with_norm in (True, False):
                for stopped in (False, True):
                    net = trained(x[:n], t[:n], is_labels, with_norm, stopped, seed)
                    rest = n + max(HELD_OUT)
                    for rows in HELD_OUT[:1] if quick else HELD_OUT:
                        parts = [(x[a:b], t[a:b]) for a, b in ((0, n), (n, n + rows), (rest, None))]
                        one = {"table": name, "seed": seed, "norm": with_norm, "stopped": stopped, "rows": rows}
                        found.append(one | gains(net, is_labels, *parts))
                        print(json.dumps(found[-1]), flush=True)
                    if out is not None:
                        out.write_text(json.dumps(found))
            if quick:
                break
    return found


def table(found: list[dict]) -> str:
    lines = ["| held-out rows | networks | runs | more than 0.01 below the network | mean gain | worst |"]
    lines[0] += " more than 0.01 below the tempered network | mean gain | worst |"
    lines.append("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for rows in sorted({one["rows"] for one in found}):
        for stopped, kind in ((False, "trained to the end"), (True, "stopped early")):
            own = [one for one in found if (one["rows"], one["stopped"]) == (rows, stopped)]
            cells = [str(rows), kind, str(len(own))]
            for name in ("gain", "tempered"):
                values = torch.tensor([one[name] for one in own])
                share = 100 * (values < -0.01).double().mean()
                cells += [f"{share:.1f} %", f"{values.mean():+.4f}", f"{values.min():+.4f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--out", type=Path, help="a JSON file for the runs, written after each network")
    parser.add_argument("--merge", type=Path, nargs="+", help="print the table of files made before")
    parser.add_argument(
        "--only", default="", help='tables with this in their name: "classes", "regression", "300 rows"'
    )
    parser.add_argument("--quick", action="store_true", help="one table, one size")
    args = parser.parse_args(arguments)
    if args.merge:
        found = [one for file in args.merge for one in json.loads(file.read_text())]
    else:
        found = runs(range(args.first, args.first + args.seeds), args.quick, args.out, args.only)
    text = table(found)
    print(text)
    return text


if __name__ == "__main__":
    main()
