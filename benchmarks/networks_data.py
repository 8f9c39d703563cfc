"""The sets of `benchmarks.networks`: images and labels in four parts, shifted test images, unfamiliar images.

Splits are fixed, seeds change networks only. Nothing is downloaded: the digits come with scikit-learn, all else from a
folder, `--data`.
"""

import gzip
import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample
from torch.utils.data import TensorDataset

#: of the shifts: degrees, noise in standard deviations of a pixel, factor of the contrast
DEGREES, NOISE, CONTRAST = 20.0, 0.5, 0.5
#: at most so many cases of each shift and of unfamiliar inputs
SHIFTED = 2000


@dataclass
class Data:
    name: str
    train: TensorDataset
    validation: TensorDataset
    test: TensorDataset
    classes: int
    unfamiliar: Tensor
    unfamiliar_name: str
    shifts: dict[str, TensorDataset] = field(default_factory=dict)
    positive: int | None = None  # of two classes the one that must not be missed

    def smaller(self, cases: int) -> "Data":
        """The first cases of every part."""
        parts = {name: first(getattr(self, name), cases) for name in ("train", "validation", "test")}
        shifts = {name: first(one, cases) for name, one in self.shifts.items()}
        return replace(self, **parts, shifts=shifts, unfamiliar=self.unfamiliar[:cases])

    def tested_on(self, cases: int) -> "Data":
        """The first cases of test data, shifted and unfamiliar inputs; choices and fits see all of theirs."""
        shifts = {name: first(one, cases) for name, one in self.shifts.items()}
        return replace(self, test=first(self.test, cases), shifts=shifts, unfamiliar=self.unfamiliar[:cases])


def first(data: TensorDataset, cases: int) -> TensorDataset:
    return TensorDataset(*(tensor[:cases] for tensor in data.tensors))


def build(
    name: str,
    parts: list[tuple[Tensor, Tensor]],
    classes: int,
    unfamiliar: tuple[str, Tensor | Callable[[Tensor], Tensor]],
    most: int = SHIFTED,
) -> Data:
    """Standardised by the training images; parts are (images [N, C, H, W], labels): training, validation, test."""
    images = parts[0][0].float()
    centre, width = images.mean((0, 2, 3), keepdim=True), images.std((0, 2, 3), keepdim=True)

    def standard(images: Tensor) -> Tensor:
        return (images.float() - centre) / width

    train, validation, test = (TensorDataset(standard(x), t.long()) for x, t in parts)
    x, t = test.tensors[0][:most], test.tensors[1][:most]
    other = unfamiliar[1](x) if callable(unfamiliar[1]) else standard(unfamiliar[1][:most])
    return Data(name, train, validation, test, classes, other, unfamiliar[0], shifted(x, t))


def shifted(x: Tensor, t: Tensor) -> dict[str, TensorDataset]:
    """Turned (and labels of pixels with it), noisy, with less contrast: the labels stay true."""
    generator = torch.Generator().manual_seed(1)
    labels = t if t.ndim == 1 else turned(t.unsqueeze(1).float(), "nearest").squeeze(1).long()
    mean = x.mean((1, 2, 3), keepdim=True)
    return {
        "turned": TensorDataset(turned(x, "bilinear"), labels),
        "noisy": TensorDataset(x + NOISE * torch.randn(x.shape, generator=generator), t),
        "contrast": TensorDataset(mean + CONTRAST * (x - mean), t),
    }


def turned(x: Tensor, mode: str) -> Tensor:
    angle = math.radians(DEGREES)
    rotation = torch.tensor([[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]])
    grid = affine_grid(rotation.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return grid_sample(x, grid, mode, "border", align_corners=False)


def scrambled(side: int) -> Callable[[Tensor], Tensor]:
    """Images whose tiles of so many pixels a side are permuted, each image's in its own way."""

    def scramble(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(2)
        B, C, H, W = x.shape
        tiles = x.reshape(B, C, H // side, side, W // side, side).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
        order = torch.rand(tiles.shape[:2], generator=generator).argsort(1)
        tiles = tiles[torch.arange(B).unsqueeze(1), order].unflatten(1, (H // side, W // side))
        return tiles.permute(0, 3, 1, 4, 2, 5).reshape(x.shape)

    return scramble


def digits(folder: Path | None) -> Data:
    """scikit-learn's 8×8 digits: 1000 to train, 297 for validation, 500 to test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ImportError('the digits come with scikit-learn: pip install "structvi[bench]"') from None
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, t = torch.from_numpy(images)[order].reshape(-1, 1, 8, 8), torch.from_numpy(labels)[order]
    cuts = (slice(1000), slice(1000, 1297), slice(1297, None))
    return build("digits", [(x[cut], t[cut]) for cut in cuts], 10, ("scrambled pixels", scrambled(1)))


def mnist(folder: Path | None) -> Data:
    """The first 10,000 training images, the last 5,000 for validation, all 10,000 to test."""
    folder = needed(folder)

    def read(split: str) -> tuple[Tensor, Tensor]:
        images, labels = (
            read_idx(folder / f"mnist/{split}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1")
        )
        return images.unsqueeze(1), labels

    x, t = read("train")
    letters = read_idx(folder / "notmnist/t10k-images-idx3-ubyte.gz").unsqueeze(1)
    parts = [(x[:10_000], t[:10_000]), (x[-5000:], t[-5000:]), read("t10k")]
    return build("mnist", parts, 10, ("notMNIST", letters))


def breastmnist(folder: Path | None) -> Data:
    """Ultrasound images 28×28, benign or malignant: 546, 78, 156."""
    with np.load(needed(folder) / "breastmnist/breastmnist.npz") as file:
        parts = [
            (torch.from_numpy(file[f"{part}_images"]).unsqueeze(1), torch.from_numpy(file[f"{part}_labels"]).flatten())
            for part in ("train", "val", "test")
        ]
    return replace(build("breastmnist", parts, 2, ("scrambled tiles", scrambled(7))), positive=0)  # malignant


def nuclei(folder: Path | None, side: int = 64) -> Data:
    """Microscopy images of 256×256 at side×side, a label for every pixel: 240, 40, 54 of one shuffle."""
    with np.load(needed(folder) / "nuclei/nuclei256.npz") as file:
        images, labels = (torch.from_numpy(file[name]) for name in ("images", "labels"))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    shrink = images.shape[-1] // side
    x = avg_pool2d(images[order].unsqueeze(1).float(), shrink)
    t = avg_pool2d((labels[order] > 0).unsqueeze(1).float(), shrink).squeeze(1) >= 0.5
    cuts = (slice(240), slice(240, 280), slice(280, None))
    found = build("nuclei", [(x[cut], t[cut].long()) for cut in cuts], 2, ("inverted", lambda x: -x), 24)
    return replace(found, positive=1)


def cifar10(folder: Path | None) -> Data:
    """15,000 training images, the last 2,000 of them for validation; 5,000 to test."""
    path = needed(folder) / "cifar10/cifar10_15k.npz"
    images = decode(path)
    with np.load(path.with_name("cifar10_15k_decoded.npz") if not path.exists() else path) as file:
        labels = {split: torch.from_numpy(file[f"{split}_labels"]) for split in ("train", "test")}
    x = {split: torch.from_numpy(images[split]).movedim(-1, 1) for split in images}  # [N, 3, 32, 32]
    parts = [
        (x["train"][:13_000], labels["train"][:13_000]),
        (x["train"][13_000:], labels["train"][13_000:]),
        (x["test"], labels["test"]),
    ]
    return build("cifar10", parts, 10, ("scrambled tiles", scrambled(8)))


def decode(path: Path, keep: bool = False) -> dict[str, np.ndarray]:
    """Images [N, 32, 32, 3] of "train" and "test", from JPEG files by Pillow, or from what was decoded before.

    That is `cifar10_15k_decoded.npz` beside the file, which `keep` writes: for machines without Pillow.
    """
    before = path.with_name(f"{path.stem}_decoded.npz")
    if before.exists():
        with np.load(before) as file:
            return {split: file[split] for split in ("train", "test")}
    try:
        from PIL import Image
    except ImportError:
        raise ImportError(
            f"decoding {path.name} needs Pillow: pip install pillow, or write {before.name} on a machine that has it: "
            f'python -c "from pathlib import Path; from benchmarks.networks_data import decode; '
            f"decode(Path('{path}'), keep=True)\""
        ) from None
    images, labels = {}, {}
    with np.load(path) as file:
        for split in ("train", "test"):
            ends = np.cumsum(file[f"{split}_lengths"])
            content = file[f"{split}_jpeg"].tobytes()
            pieces = [content[end - n : end] for end, n in zip(ends, file[f"{split}_lengths"], strict=True)]
            images[split] = np.stack([np.asarray(Image.open(io.BytesIO(one)).convert("RGB")) for one in pieces])
            labels[f"{split}_labels"] = file[f"{split}_labels"]
    if keep:
        np.savez_compressed(before, **images, **labels)
    return images


def needed(folder: Path | None) -> Path:
    if folder is None:
        raise ValueError("this set is read from a folder: give --data DIR; only the digits need none")
    return folder


def read_idx(path: Path) -> Tensor:
    """An idx file of bytes: two zeros, 8, the number of axes, their lengths as big-endian int32, the bytes."""
    with gzip.open(path) as file:
        content = file.read()
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is no idx file of bytes: it starts with {content[:4]!r}")
    axes = content[3]
    shape = np.frombuffer(content, ">i4", axes, offset=4).tolist()
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * axes)
    if values.size != math.prod(shape):
        raise ValueError(f"{path} says {shape} and holds {values.size} bytes: it is damaged")
    return torch.from_numpy(values.reshape(shape).copy())
