"""The networks of `benchmarks.networks` and how each is trained: all settings are in `TASKS`."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import TensorDataset

from . import networks_data
from .networks_data import Data

#: row numbers of a batch → gradients in `.grad`
Step = Callable[[Tensor], None]


def norm(kind: str, channels: int) -> nn.Module:
    kinds = {
        "batch": lambda: nn.BatchNorm2d(channels),
        "group": lambda: nn.GroupNorm(min(8, channels), channels),
        "instance": lambda: nn.InstanceNorm2d(channels, affine=True),
    }
    return kinds[kind]()


def perceptron() -> nn.Module:
    """64 – 64 – 64 – 10, 9 thousand weights."""
    layers = [nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.0)]
    return nn.Sequential(*layers, nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.0), nn.Linear(64, 10))


def small_cnn() -> nn.Module:
    """Two convolutions and a hidden layer, 28×28, 52 thousand weights."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.0),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.0),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, 160), nn.ReLU(), nn.Dropout(0.0), nn.Linear(160, 10),
    )  # fmt: skip


def batch_norm_cnn() -> nn.Module:
    """Three convolutions with batch norm, 28×28, 18 thousand weights."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 28), (28, 52)):
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        layers += [convolution, norm("batch", outputs), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.0)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(52, 2))


class UNet(nn.Module):
    """Two levels down and up, with skips, 10 thousand weights: [B, 1, H, W] → [B, 2, H, W]."""

    def __init__(self, kind: str, width: int = 10):
        super().__init__()
        w = width
        self.first, self.down = self.double(1, w, kind), self.double(w, 2 * w, kind)
        self.up, self.head = self.double(3 * w, w, kind), nn.Conv2d(w, 2, 1)
        self.pool, self.grow = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)

    @staticmethod
    def double(inputs: int, outputs: int, kind: str) -> nn.Sequential:
        layers: list[nn.Module] = []
        for a in (inputs, outputs):
            layers += [nn.Conv2d(a, outputs, 3, padding=1, bias=False), norm(kind, outputs), nn.ReLU()]
        return nn.Sequential(*layers, nn.Dropout2d(0.0))

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        return self.head(self.up(torch.cat([self.grow(self.down(self.pool(a))), a], 1)))


class Residual(nn.Module):
    """x ↦ relu(short(x) + norm(conv(relu(norm(conv(x))))))."""

    def __init__(self, inputs: int, outputs: int, stride: int, kind: str):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), norm(kind, outputs), nn.ReLU(), nn.Dropout2d(0.0),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), norm(kind, outputs),
        )  # fmt: skip
        plain = inputs == outputs and stride == 1
        self.short = nn.Identity() if plain else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.short(x) + self.body(x)).relu()


def resnet20(kind: str) -> nn.Module:
    """Three stages of three blocks, 16, 32 and 64 channels: 270 thousand weights."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), norm(kind, 16), nn.ReLU()]
    inputs = 16
    for outputs in (16, 32, 64):
        for block in range(3):
            layers.append(Residual(inputs, outputs, 2 if block == 0 and outputs > 16 else 1, kind))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


@dataclass(frozen=True)
class Task:
    """A set, its network and its training."""

    name: str
    data: Callable[[Path | None], Data]
    net: Callable[[], nn.Module]
    epochs: int
    lr: float
    weight_decay: float
    batch: int = 64
    momentum: float | None = None  # SGD with it; None: AdamW
    augment: Callable[[Tensor], Tensor] | None = None
    seeds: int = 5
    draws: int = 64  # to predict
    #: of MC dropout, tuned on validation data: injected in the trained network, and trained with
    rates: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1, 0.2)
    trained_rates: tuple[float, ...] = (0.1, 0.25)


def flipped_and_cropped(x: Tensor) -> Tensor:
    """Each image mirrored or not, and shifted by up to four pixels."""
    B, _, H, W = x.shape
    flip = torch.rand(B, device=x.device) < 0.5
    x = torch.where(flip[:, None, None, None], x.flip(3), x)
    padded = pad(x, (4, 4, 4, 4))
    top, left = torch.randint(9, (2, B, 1, 1), device=x.device)
    rows = top + torch.arange(H, device=x.device).view(1, H, 1)
    columns = left + torch.arange(W, device=x.device).view(1, 1, W)
    return padded.movedim(1, -1)[torch.arange(B, device=x.device).view(B, 1, 1), rows, columns].movedim(-1, 1)


def _cifar(name: str, kind: str) -> Task:
    return Task(
        name, networks_data.cifar10, lambda: resnet20(kind), 25, 0.1, 5e-4, batch=100, momentum=0.9,
        augment=flipped_and_cropped, seeds=3, rates=(0.01, 0.02, 0.05, 0.1), trained_rates=(0.05,),
    )  # fmt: skip


def _nuclei(name: str, kind: str, side: int = 64) -> Task:
    return Task(
        name, partial(networks_data.nuclei, side=side), lambda: UNet(kind), 25, 5e-3, 1e-4, batch=16, seeds=3, draws=16,
        rates=(0.01, 0.02, 0.05, 0.1), trained_rates=(0.05,),
    )  # fmt: skip


TASKS = {
    task.name: task
    for task in (
        Task("digits", networks_data.digits, perceptron, 60, 3e-3, 1e-2),
        Task("mnist", networks_data.mnist, small_cnn, 15, 2e-3, 1e-2, batch=100),
        Task("breastmnist", networks_data.breastmnist, batch_norm_cnn, 40, 3e-3, 1e-2, seeds=10),
        _nuclei("nuclei", "batch"),
        _nuclei("nuclei-in", "instance"),
        _nuclei("nuclei256", "batch", 256),
        _cifar("cifar10-gn", "group"),
        _cifar("cifar10-bn", "batch"),
    )
}


def dropout_layers(net: nn.Module) -> list[nn.Dropout | nn.Dropout2d]:
    return [module for module in net.modules() if isinstance(module, nn.Dropout | nn.Dropout2d)]


def set_dropout(net: nn.Module, rate: float) -> None:
    for module in dropout_layers(net):
        module.p = rate


def train(
    task: Task, data: TensorDataset, seed: int, device: torch.device, rate: float = 0.0, steps: int = 0,
    bf16: bool = False,
):  # fmt: skip
    """A trained network in its evaluation mode; `steps` ends the training early, `bf16`: autocast to bfloat16."""
    torch.manual_seed(seed)
    net = task.net().to(device)
    set_dropout(net, rate)
    x, t = (tensor.to(device) for tensor in data.tensors)
    if task.momentum is None:
        optimizer = torch.optim.AdamW(net.parameters(), task.lr, weight_decay=task.weight_decay)
    else:
        optimizer = torch.optim.SGD(net.parameters(), task.lr, task.momentum, weight_decay=task.weight_decay)
    total = steps or task.epochs * math.ceil(len(x) / task.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.lr, total + 1, pct_start=0.1, cycle_momentum=False)
    net.train()

    def gradient(rows: Tensor) -> None:
        inputs = x[rows] if task.augment is None else task.augment(x[rows])
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = cross_entropy(net(inputs), t[rows])
        optimizer.zero_grad()
        loss.backward()

    step, done = gradient, 0
    if device.type == "cuda":
        try:
            step = captured(gradient, net, min(task.batch, len(x)), device)
        except RuntimeError as error:
            print(f"training is not captured: {error}", flush=True)
    while done < total:
        for rows in torch.randperm(len(x)).to(device).split(task.batch):
            if done == total:
                break
            step(rows)
            optimizer.step()
            schedule.step()
            done += 1
    return net.eval().requires_grad_(True)


def captured(gradient: Step, net: nn.Module, batch: int, device: torch.device) -> Step:
    """The same as a CUDA graph, several times as fast for small networks; batches of another size go the plain way."""
    rows, buffers = torch.arange(batch, device=device), copy.deepcopy(dict(net.named_buffers()))
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            gradient(rows)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        gradient(rows)
    with torch.no_grad():  # what was tried out has not been
        for name, value in net.named_buffers():
            value.copy_(buffers[name])
    of_graph = [p.grad for p in net.parameters()]

    def step(now: Tensor) -> None:
        if len(now) != batch:
            gradient(now)
            return
        rows.copy_(now)
        for p, grad in zip(net.parameters(), of_graph, strict=True):
            p.grad = grad
        graph.replay()

    return step
