"""Seconds and Monte Carlo error of predictions in function space, beside 64 draws of weights.

    python -m benchmarks.function_space [--quick]

Networks with random weights, a normal of rank 32 around each, linearised. Processor seconds of `predict`, the best of
three, on one thread; and the error of predicted probabilities (of a regression, of log density at the mean plus one
standard deviation), root mean square over inputs, against 4,096 evenly spread points, of a regression in closed form.
"""

import argparse
from collections.abc import Sequence
from time import process_time

import torch
from torch import Tensor, nn

import structvi as vi
from structvi.predicting.function_space import evenly_spread, normal_outputs
from structvi.predicting.predictive import Predictive

TRUTH = 4096


def perceptron(inputs: int, width: int, outputs: int) -> nn.Module:
    layers = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)]
    return nn.Sequential(*layers)


def convolutions(outputs: int) -> nn.Module:
    layers, channels = [], 1
    for width in (16, 32, 32):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(288, outputs))


CASES = {
    "perceptron 8-64-64-1": (lambda: perceptron(8, 64, 1), (8,), 1),
    "perceptron 64-64-64-10 (digits)": (lambda: perceptron(64, 64, 10), (64,), 10),
    "perceptron 64-590-590-10": (lambda: perceptron(64, 590, 10), (64,), 10),
    "BatchNorm CNN, 28 × 28, 2 classes": (lambda: convolutions(2), (1, 28, 28), 2),
    "BatchNorm CNN, 28 × 28, 10 classes": (lambda: convolutions(10), (1, 28, 28), 10),
    "BatchNorm CNN, 28 × 28, 32 classes": (lambda: convolutions(32), (1, 28, 28), 32),
}


def posterior(net: nn.Module, outputs: int) -> vi.Posterior:
    likelihood = vi.likelihoods.Categorical() if outputs > 1 else vi.likelihoods.Gaussian(0.1)
    bayes = vi.variationalize(net.eval(), likelihood, vi.StructuredPrecision(32), linearise=True, num_data=100)
    with torch.no_grad():
        for name, parameter in bayes.family.named_parameters():
            if "log_scale" in name:
                parameter.fill_(-3.0)
    return bayes


def told(predictive: Predictive, t: Tensor | None) -> Tensor:
    """Probabilities, or log densities."""
    return predictive.mean if t is None else predictive.log_prob(t)


def row(name: str, inputs: int) -> str:
    torch.manual_seed(0)
    make, shape, outputs = CASES[name]
    bayes, x = posterior(make(), outputs), torch.randn(inputs, *shape)
    moments, model = bayes.output_moments(x), bayes.model
    noise = evenly_spread(TRUTH, outputs, 0)
    weights = torch.full((TRUTH,), 1 / TRUTH)
    t = None if outputs > 1 else moments.mean + moments.covariance[:, 0].sqrt()
    variance = moments.covariance.diagonal(dim1=1, dim2=2).reshape(moments.mean.shape)
    drawn = normal_outputs(*moments, noise)
    truth = told(
        Predictive(
            drawn, weights, model.likelihood, moments=(weights[:1] / weights[:1], moments.mean[None], variance[None])
        ),
        t,
    )
    cells = []
    for draws in (64, None):
        seconds, error = [], 0.0
        for seed in range(3):
            started = process_time()
            predictive = bayes.predict(x, draws, generator=torch.Generator().manual_seed(seed))
            seconds.append(process_time() - started)
            error += float((told(predictive, t) - truth).square().mean()) / 3
        cells.append((min(seconds), error**0.5))
    (drawn, drawn_error), (exact, exact_error) = cells
    return (
        f"| {name} | {bayes.space.size} | {inputs} | {1e3 * drawn:.0f} ms | {1e3 * exact:.0f} ms | {exact / drawn:.2f} "
        f"| {drawn_error:.4f} | {exact_error:.4f} |"
    )


def main(arguments: Sequence[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one network, few inputs")
    quick = parser.parse_args(arguments).quick
    torch.set_num_threads(1)
    lines = ["| network | weights | inputs | 64 draws | function space | ratio | error of draws | of function space |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    print("\n".join(lines))
    for name in list(CASES)[: 1 if quick else None]:
        for inputs in (1, 128) if not quick else (2,):
            lines.append(row(name, inputs))
            print(lines[-1], flush=True)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
