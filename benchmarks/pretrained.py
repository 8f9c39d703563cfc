"""A posterior around a network that others trained: a ResNet-20 for CIFAR-10, from a folder of data.

    python -m benchmarks.pretrained --data DIR [--validation 2000] [--test 3000] [--train 13000] [--device cuda]

DIR has `pretrained/resnet20.th` and `cifar10/`. The network has seen every training image: validation and test rows are
test images. It prints NLL, NLL under shift (the mean of turned, low contrast, noisy and blurred), seconds to fit, and
what a prediction costs in forward passes: of the network, with one temperature, of the default call, with exact
variances on a few rows, and of the last layer.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, pad
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

from .networks_data import decode, shifted

#: of the images the network was trained on
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: rows that are predicted with exact variances, and rows of a batch
EXACT, BATCH = 100, 250


class Block(nn.Module):
    """Two convolutions; a shortcut without weights takes every second pixel and adds channels of zeros."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.stride, self.more = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        short = pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.more, self.more))
        return (y + short).relu()


class ResNet20(nn.Module):
    """Three stages of three blocks, 270 thousand weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1, self.layer2, self.layer3 = self.stage(16, 16), self.stage(16, 32), self.stage(32, 64)
        self.linear = nn.Linear(64, 10)

    @staticmethod
    def stage(inputs: int, outputs: int) -> nn.Sequential:
        first = Block(inputs, outputs, 1 if inputs == outputs else 2)
        return nn.Sequential(first, Block(outputs, outputs, 1), Block(outputs, outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.bn1(self.conv1(x)).relu())))
        return self.linear(x.mean((2, 3)))


def network(folder: Path) -> nn.Module:
    """Return the trained network in its evaluation mode."""
    net = ResNet20()
    state = torch.load(folder / "pretrained/resnet20.th", map_location="cpu", weights_only=True)["state_dict"]
    net.load_state_dict({name.removeprefix("module."): tensor for name, tensor in state.items()})
    return net.eval()


def images(folder: Path) -> dict[str, TensorDataset]:
    """Return the images and labels of "train" and "test", as the network takes them."""
    path, parts = folder / "cifar10/cifar10_15k.npz", {}
    pixels = decode(path)
    mean, std = (torch.tensor(one).view(1, 3, 1, 1) for one in (MEAN, STD))
    with np.load(path if path.exists() else path.with_name("cifar10_15k_decoded.npz")) as file:
        for split, own in pixels.items():
            x = (torch.from_numpy(own).movedim(-1, 1).float() / 255 - mean) / std
            parts[split] = TensorDataset(x, torch.from_numpy(file[f"{split}_labels"]).long())
    return parts


def nll(log_p: Callable[[Tensor], Tensor], data: TensorDataset, device: torch.device) -> Tensor:
    """Return −log p of every label."""
    x, t = data.tensors
    found = [
        log_p(a.to(device)).gather(1, b.to(device).unsqueeze(1)).cpu()
        for a, b in zip(x.split(BATCH), t.split(BATCH), strict=True)
    ]
    return -torch.cat(found).squeeze(1)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the least seconds of some calls, of the process on a CPU."""
    clock, times = time.process_time if device.type == "cpu" else time.perf_counter, []
    for _ in range(5):
        start = clock()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(clock() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--train", type=int, default=13_000, help="rows of the training images")
    parser.add_argument("--validation", type=int, default=2000, help="rows of the test images")
    parser.add_argument("--test", type=int, default=3000, help="other rows of the test images")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    device, net, data = torch.device(options.device), network(options.data), images(options.data)
    net, (x, t) = net.to(device), data["test"].tensors
    cut = options.validation
    train = DataLoader(TensorDataset(*(one[: options.train] for one in data["train"].tensors)), 128, shuffle=True)
    held_out, test = TensorDataset(x[:cut], t[:cut]), TensorDataset(x[cut:][: options.test], t[cut:][: options.test])
    few = test.tensors[0][:2000], test.tensors[1][:2000]
    shifts = {**shifted(*few), "blurred": TensorDataset(avg_pool2d(few[0], 3, 1, 1), few[1])}

    with torch.no_grad():
        logits = torch.cat([net(one.to(device)).cpu() for one in held_out.tensors[0].split(BATCH)])
    T = min(torch.logspace(-1, 1, 201).tolist(), key=lambda T: float(cross_entropy(logits / T, held_out.tensors[1])))
    around, head = (make(net, vi.likelihoods.Categorical()) for make in (vi.variationalize, vi.variationalize_head))
    start = time.perf_counter()
    print(around.laplace(train, validation=DataLoader(held_out, BATCH), progress=False).details)
    placed, start = time.perf_counter() - start, time.perf_counter()
    print(head.fit_head(train, validation=DataLoader(held_out, BATCH), progress=False).details)
    fitted = time.perf_counter() - start

    def alone(x: Tensor) -> Tensor:
        with torch.no_grad():
            return net(x).log_softmax(1)

    def tempered(x: Tensor) -> Tensor:
        with torch.no_grad():
            return (net(x) / T).log_softmax(1)

    methods: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
        "network": (alone, 0.0),
        f"temperature {T:.2f}": (tempered, 0.0),
        "default call": (lambda x: around.predict(x).mean.log(), placed),
        "last layer": (lambda x: head.predict(x).mean.log(), fitted),
    }
    one, many = x[:1].to(device), x[:500].to(device)
    base = {len(part): seconds(lambda part=part: alone(part), device) for part in (one, many)}
    print("| method | NLL | NLL under shift | over temperature, test | s to fit | × a forward pass, 1 and 500 rows |")
    print("| --- | --- | --- | --- | --- | --- |")
    reference = nll(tempered, test, device)
    for name, (log_p, spent) in methods.items():
        own = nll(log_p, test, device)
        under = sum(float(nll(log_p, one, device).mean()) for one in shifts.values()) / len(shifts)
        gain = own - reference
        cost = [seconds(lambda part=part, log_p=log_p: log_p(part), device) / base[len(part)] for part in (one, many)]
        print(
            f"| {name} | {own.mean():.4f} | {under:.4f} | {gain.mean():+.4f} ± {gain.std() / len(gain) ** 0.5:.4f} "
            f"| {spent:.1f} | {cost[0]:.2f}, {cost[1]:.2f} |"
        )
    some = TensorDataset(*(part[:EXACT] for part in test.tensors))
    ways = {
        way: nll(lambda x, way=way: around.predict(x, variance=way).mean.log(), some, device).mean()
        for way in ("auto", "exact")
    }
    print(f"on {EXACT} rows: by default {ways['auto']:.4f}, with exact variances {ways['exact']:.4f}")


if __name__ == "__main__":
    main()
