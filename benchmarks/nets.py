"""The networks the benchmarks train: written here, so that every method sees the same ones and nothing is downloaded.

Each is a `backbone` and a linear `head`, and comes with a batch of random inputs and labels: `problem("mlp", 128)`.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

NAMES = ("mlp", "wide-mlp", "resnet18", "transformer", "unet", "transformer-100m")


@dataclass
class Problem:
    name: str
    net: nn.Module
    batch: tuple[Tensor, Tensor]  # inputs [B, ..], labels [B, ..]

    @property
    def size(self) -> int:
        """P"""
        return sum(p.numel() for p in self.net.parameters())


class Network(nn.Module):
    def __init__(self, backbone: nn.Module, head: nn.Module):
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def mlp(*widths: int) -> Network:
    """`mlp(784, 256, 256, 10)`: rectified hidden layers."""
    layers = [layer for a, b in pairwise(widths[:-1]) for layer in (nn.Linear(a, b), nn.ReLU())]
    return Network(nn.Sequential(*layers), nn.Linear(widths[-2], widths[-1]))


class Residual(nn.Module):
    """x ↦ relu(short(x) + conv(relu(conv(x)))), biases in the place of BatchNorm."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1)
        plain = inputs == outputs and stride == 1
        self.short = nn.Identity() if plain else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return (self.short(x) + self.second(self.first(x).relu())).relu()


def resnet18(width: int = 64, classes: int = 10) -> Network:
    """ResNet-18 for 32×32 images without BatchNorm: 11.2 M weights at width 64."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1), nn.ReLU()]
    inputs = width
    for stage in range(4):
        outputs = width * 2**stage
        layers += [Residual(inputs, outputs, 1 if stage == 0 else 2), Residual(outputs, outputs, 1)]
        inputs = outputs
    return Network(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Linear(inputs, classes))


class Block(nn.Module):
    """A pre-norm transformer block with causal attention: [B, T, D] → [B, T, D]."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))  # [B, T, 3, H, D/H]
        q, k, v = (part.transpose(-3, -2) for part in qkv.unbind(-3))  # [B, H, T, D/H]
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-3, -2).flatten(-2))
        return x + self.mlp(self.before_mlp(x))


class Embedding(nn.Module):
    """Tokens and positions: [B, T] → [B, T, D]."""

    def __init__(self, vocabulary: int, length: int, width: int):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.token(x) + self.position


class Tokens(Network):
    """Logits as a likelihood wants them, classes second: [B, T] → [B, C, T]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(-1, -2)


def transformer(width: int = 128, layers: int = 4, heads: int = 4, vocabulary: int = 256, length: int = 64) -> Network:
    """Next-token prediction."""
    blocks = [Block(width, heads) for _ in range(layers)]
    backbone = nn.Sequential(Embedding(vocabulary, length, width), *blocks, nn.LayerNorm(width))
    return Tokens(backbone, nn.Linear(width, vocabulary))


def double_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU()
    )


class UNet(nn.Module):
    """Three levels down and up, with skips: [B, 3, H, W] → [B, width, H, W]."""

    def __init__(self, width: int):
        super().__init__()
        w = width
        self.down = nn.ModuleList([double_conv(3, w), double_conv(w, 2 * w), double_conv(2 * w, 4 * w)])
        self.up = nn.ModuleList([double_conv(6 * w, 2 * w), double_conv(3 * w, w)])
        self.pool, self.grow = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down[0](x)
        b = self.down[1](self.pool(a))
        x = self.down[2](self.pool(b))
        x = self.up[0](torch.cat([self.grow(x), b], dim=1))
        return self.up[1](torch.cat([self.grow(x), a], dim=1))


def unet(width: int = 32, classes: int = 4) -> Network:
    """A class for every pixel."""
    return Network(UNet(width), nn.Conv2d(width, classes, 1))


def problem(name: str, batch: int = 128, device: torch.device | str = "cpu", seed: int = 0) -> Problem:
    """A fresh network and a batch, the same for the same seed.

    Example:
        >>> p = problem("mlp", batch=4)
        >>> p.size, loss(p).ndim
        (269322, 0)
    """
    torch.manual_seed(seed)
    tokens = {"transformer": (256, 64), "transformer-100m": (16384, 128)}
    if name == "mlp":
        net = mlp(784, 256, 256, 10)
    elif name == "wide-mlp":
        net = mlp(784, 1024, 1024, 10)
    elif name == "resnet18":
        net = resnet18()
    elif name == "transformer":
        net = transformer()
    elif name == "transformer-100m":
        net = transformer(768, layers=12, heads=12, vocabulary=16384, length=128)
    elif name == "unet":
        net = unet()
    else:
        raise ValueError(f"no network {name!r}: take one of {', '.join(NAMES)}")
    if name in tokens:
        vocabulary, length = tokens[name]
        text = torch.randint(vocabulary, (batch, length + 1))
        data = text[:, :-1], text[:, 1:].contiguous()
    elif name == "unet":
        data = torch.randn(batch, 3, 32, 32), torch.randint(4, (batch, 32, 32))
    else:
        shape = (3, 32, 32) if name == "resnet18" else (784,)
        data = torch.randn(batch, *shape), torch.randint(10, (batch,))
    return Problem(name, net.to(device), (data[0].to(device), data[1].to(device)))


def negative_log_likelihood(output: Tensor, labels: Tensor) -> Tensor:
    """In nats per observation: the sum over pixels or tokens, the mean over the batch."""
    return cross_entropy(output, labels, reduction="sum") / len(labels)


def loss(problem: Problem) -> Tensor:
    """That of a deterministic step."""
    x, t = problem.batch
    return negative_log_likelihood(problem.net(x), t)
