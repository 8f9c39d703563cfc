"""What a Bayesian head costs: a step with MAP on the backbone, against all weights random and against no Bayes at all.

    python -m benchmarks.bayesian_head [--device cuda]

One step is the objective and its gradient for one batch. With `Blocks({"backbone.*": MAP(), "head.*":
StructuredNormal(8)})` the backbone's weights are the same in all S draws, so the network passes it once; with
StructuredNormal(8) over all weights it passes S times, by vmap or in a loop. Repeats are interleaved, so that whatever
else the machine does falls on all alike, and medians are compared. On a CPU one thread is used: several wait for each
other on a busy machine, and then the waiting is what is measured.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

import structvi as vi

DRAWS = 8
BATCH = 32
CLASSES = 10


class ConvNet(nn.Module):
    def __init__(self, width: int = 32):
        super().__init__()
        layers: list[nn.Module] = []
        for i, (inputs, outputs) in enumerate([(3, width), (width, width), (width, 2 * width), (2 * width, 2 * width)]):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1, stride=1 + i % 2), nn.ReLU()]
        self.backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


def steps(device: torch.device) -> tuple[dict[str, Callable[[], object]], vi.BayesianModel]:
    """The kinds of step, each giving all its gradients."""
    torch.manual_seed(0)
    net = ConvNet().to(device)
    data = (torch.randn(BATCH, 3, 32, 32, device=device), torch.randint(CLASSES, (BATCH,), device=device))
    parts = (net, vi.likelihoods.Categorical(), vi.NormalPrior(1.0), 50_000)
    vmap, loop = (vi.BayesianModel(*parts, evaluation=way) for way in ("vmap", "loop"))
    head = vi.Blocks({"backbone.*": vi.MAP(), "head.*": vi.StructuredNormal(8)}).bind(vmap.space)
    everything = vi.StructuredNormal(8).bind(vmap.space)
    generator = torch.Generator(device).manual_seed(0)

    def deterministic() -> object:
        return torch.autograd.grad(nn.functional.cross_entropy(net(data[0]), data[1]), list(net.parameters()))

    def variational(family: vi.Family, model: vi.BayesianModel) -> object:
        loss = -vi.elbo(family, model, data, groups=DRAWS, coupling=vi.naive, generator=generator) / model.num_data
        return torch.autograd.grad(loss, list(family.parameters()))

    return {
        "deterministic": deterministic,
        "Bayesian head": lambda: variational(head, vmap),
        "all weights, vmap": lambda: variational(everything, vmap),
        "all weights, loop": lambda: variational(everything, loop),
    }, vmap


def measure(kinds: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, float]:
    """Median seconds of a step of each kind, from interleaved repeats after two that warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for repeat in range(repeats + 2):
        for name, step in kinds.items():
            start = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if repeat >= 2:
                seconds[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.set_num_threads(1)
    kinds, model = steps(device)
    medians = measure(kinds, arguments.repeats, device)
    head = sum(p.numel() for p in model.net.get_submodule("head").parameters())
    print(f"{model.space.size} weights, {head} of them in the head; {DRAWS} draws, batch {BATCH}, {device}")
    for name, value in medians.items():
        print(f"{name:18} {1e3 * value:8.1f} ms   {value / medians['deterministic']:5.2f} × a deterministic step")
    best = min(medians["all weights, vmap"], medians["all weights, loop"])
    print(f"all weights (the faster way) / Bayesian head = {best / medians['Bayesian head']:.1f}")


if __name__ == "__main__":
    main()
