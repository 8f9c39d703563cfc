"""Scales of linearised fits: with and without rounds towards their fixed point before the first step.

    python -m benchmarks.linearised_scales [--quick]

A perceptron trained on scikit-learn's digits, linearised at its weights; the objective E log lik − λ KL on the training
data, in nats, of 64 groups of draws, and the NLL on data used for nothing.
"""

import argparse
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.training import begin as training

N, PRIOR = 1200, 0.3


def problem() -> tuple[nn.Module, TensorDataset, TensorDataset]:
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    x, t = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    x = (x / 16).float()
    order = torch.randperm(len(x))
    x, t = x[order], t[order]
    net = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 10))
    train = TensorDataset(x[:N], t[:N])
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(40):
        for batch, label in DataLoader(train, 64, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(batch), label).backward()
            optimizer.step()
    return net, train, TensorDataset(x[N:], t[N:])


def one(net, train, test, family, temperature: float, mean: str, epochs: int, rounds: int) -> tuple[float, float]:
    """The objective and the test NLL of a fit."""
    training.ROUNDS = rounds
    torch.manual_seed(1)
    prior = vi.NormalPrior(PRIOR)
    bayes = vi.variationalize(net, vi.likelihoods.Categorical(), family, prior, num_data=N, linearise=True)
    bayes.fit(
        DataLoader(train, 64, shuffle=True), epochs=epochs, mean=mean, start="trained", temperature=temperature,
        progress=False, stop=False,
    )  # fmt: skip
    with torch.no_grad():
        terms = bayes.terms(train.tensors, groups=64, generator=torch.Generator().manual_seed(9))
    x, t = test.tensors
    drawn = bayes.predict(x, draws=200, generator=torch.Generator().manual_seed(9))
    return float((terms.fit - temperature * terms.complexity).mean()), -float(drawn.log_prob(t).mean())


def main(arguments: Sequence[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one epoch at one λ")
    options = parser.parse_args(arguments)
    net, train, test = problem()
    families = {"mean field": vi.MeanField(), "precision, rank 8": vi.StructuredPrecision(8)}
    fits = [("held", 10), ("learned", 10), ("learned", 40)] if not options.quick else [("held", 1)]
    before, rounds = training.ROUNDS, (0, training.ROUNDS)
    rows = [
        "| family | λ | mean | epochs | objective without; with rounds | test NLL |",
        "| --- | ---: | --- | ---: | ---: | ---: |",
    ]
    try:
        for name, family in families.items():
            for temperature in (1.0, 0.1, 0.01)[: 1 if options.quick else 3]:
                for mean, epochs in fits:
                    found = [one(net, train, test, family, temperature, mean, epochs, k) for k in rounds]
                    values, losses = zip(*found, strict=True)
                    text = "; ".join(f"{v:.1f}" for v in values), "; ".join(f"{v:.4f}" for v in losses)
                    rows.append(f"| {name} | {temperature:g} | {mean} | {epochs} | {text[0]} | {text[1]} |")
                    print(rows[-1], flush=True)
    finally:
        training.ROUNDS = before
    return "\n".join(rows)


if __name__ == "__main__":
    print(main())
