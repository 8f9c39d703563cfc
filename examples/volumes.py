"""A volume that is never in memory, segmented tile by tile with its uncertainty. One minute on a CPU.

python examples/volumes.py [--size 64] [--out volumes.png]

A small 3-d network learns soft blobs in noise on 24³ patches. Its posterior then reads a volume of size³ from a file,
tile by tile. It writes the probability and the epistemic uncertainty of every voxel to files of the same size.
All tiles see the same draws of the weights, and the margin is as wide as what the network sees: there are no seams.
"""

import argparse
import resource
import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi import predict_tiles

PATCH, MARGIN = 24, 4  # the network sees 1 + 2 + 1 voxels to each side


def blobs(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return soft balls in noise and their masks, [size]³ each; about one ball for every 12³ voxels."""
    image = 0.4 * torch.randn(size, size, size, generator=generator)
    label = torch.zeros(size, size, size, dtype=torch.long)
    for _ in range(max(1, round((size / 12) ** 3))):
        centre, radius = torch.rand(3, generator=generator) * size, 2 + 3 * torch.rand(1, generator=generator).item()
        box = [slice(max(0, int(c) - 8), int(c) + 9) for c in centre]
        grid = torch.meshgrid(*(torch.arange(size)[part] for part in box), indexing="ij")
        distance = torch.stack([(g - c).square() for g, c in zip(grid, centre, strict=True)]).sum(0).sqrt()
        image[tuple(box)] += torch.sigmoid(radius - distance)
        label[tuple(box)][distance < radius] = 1
    return image, label


def fit(epochs: int) -> vi.Posterior:
    generator = torch.Generator().manual_seed(0)
    images, labels = zip(*(blobs(PATCH, generator) for _ in range(16)), strict=True)
    data = TensorDataset(torch.stack(images).unsqueeze(1), torch.stack(labels))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 8, 3, padding=2, dilation=2), nn.ReLU(),
        nn.Conv3d(8, 2, 3, padding=1),
    )  # fmt: skip
    together = (1 / 64, 1 / 64)  # neighbouring voxels are not independent: 4³ of them count as one observation
    bayes = vi.variationalize(net, vi.likelihoods.Categorical(class_weights=together), vi.LowRankPrecision(rank=4))
    print(bayes.fit(loader, epochs=epochs, progress=False))
    return bayes


def segment(bayes: vi.Posterior, folder: Path, tile: int) -> None:
    """From volume.npy to probability.npy and epistemic.npy: one tile of each is in memory."""
    volume = np.load(folder / "volume.npy", mmap_mode="r")
    results = {
        name: open_memmap(folder / f"{name}.npy", "w+", np.float32, volume.shape[1:])
        for name in ("probability", "epistemic")
    }
    generator = torch.Generator().manual_seed(0)
    for where, predictive in predict_tiles(bayes, volume, (tile,) * 3, MARGIN, draws=8, generator=generator):
        results["probability"][where] = predictive.mean[0, 1]
        results["epistemic"][where] = predictive.mutual_information[0]


def picture(folder: Path, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
    titles = ("middle slice of the volume", "probability of a blob", "epistemic: mutual information")
    for ax, name, title in zip(axes, ("volume", "probability", "epistemic"), titles, strict=True):
        values = np.load(folder / f"{name}.npy", mmap_mode="r")
        plane = values.reshape(values.shape[-3:])[values.shape[-1] // 2]
        ax.imshow(plane, cmap="gray" if name == "volume" else "viridis", interpolation="nearest")
        ax.set(xticks=[], yticks=[])
        ax.set_title(title, fontsize=10)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=64, help="of the volume on each axis")
    parser.add_argument("--tile", type=int, default=40, help="of a tile, with margins")
    parser.add_argument("--out", default="volumes.png")
    parser.add_argument("--smoke", action="store_true", help="a volume of 30³, one epoch: shows that it runs, no more")
    options = parser.parse_args()
    torch.set_num_threads(1)
    size, tile, epochs = (30, 20, 1) if options.smoke else (options.size, options.tile, 20)
    bayes = fit(epochs)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        image, label = blobs(size, torch.Generator().manual_seed(1))
        np.save(folder / "volume.npy", image.unsqueeze(0).numpy())
        segment(bayes, folder, tile)
        probability = torch.from_numpy(np.load(folder / "probability.npy"))
        wrong = (probability > 0.5) != (label == 1)
        epistemic = torch.from_numpy(np.load(folder / "epistemic.npy"))
        print(f"{size}³ voxels by tiles of {tile}³: {100 * wrong.float().mean():.1f} % wrong")
        print(f"epistemic, nats: wrong {epistemic[wrong].mean():.4f}, right {epistemic[~wrong].mean():.4f}")
        print(f"memory at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
        picture(folder, options.out)
        print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
