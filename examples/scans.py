"""Scans with two structures: a BatchNorm U-Net, a posterior around it, and maps beside the scans. Two minutes on a CPU.

python examples/scans.py [--out scans.png] [--folder maps]           # simulated scans, nothing to download
python examples/scans.py --data DIR [--names liver,tumour]           # DIR/images/*.nii.gz and DIR/labels/*.nii.gz

Needs the extra "volumes" (nibabel, matplotlib). Simulated scans are written and read as NIfTI files: an organ with a
lesion inside, some of them noisy or with hardly any contrast. Four of seven scans train a small 3-d U-Net on patches.
One of seven selects the posterior around it, by `bayes.laplace`. The rest are test scans: Dice and calibration of each
structure, referral, maps with each scan's own affine, and a page with sliders. Labels of real scans are 0 (background),
1, 2, .., and files of the same name belong together.

If the validation patches select the network itself, the epistemic map is nearly zero. The example then uses the default
prior for a map, and prints the cost in likelihood.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi import imaging

PATCH, TILE, MARGIN, DRAWS = 24, (36, 32, 24), 4, 8
POOLINGS = 2  # sides of patches and tiles are multiples of 2² = 4


class UNet(nn.Module):
    """Two poolings down and up with skips and batch norm: [B, 1, x, y, z] → logits [B, classes, x, y, z]."""

    def __init__(self, classes: int, width: int = 6):
        super().__init__()
        w = width
        self.first, self.second, self.bottom = self.double(1, w), self.double(w, 2 * w), self.double(2 * w, 4 * w)
        self.third, self.fourth = self.double(6 * w, 2 * w), self.double(3 * w, w)
        self.head = nn.Conv3d(w, classes, 1)
        self.down, self.up = nn.MaxPool3d(2), nn.Upsample(scale_factor=2)

    @staticmethod
    def double(inputs: int, outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for a in (inputs, outputs):
            layers += [nn.Conv3d(a, outputs, 3, padding=1, bias=False), nn.BatchNorm3d(outputs), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.second(self.down(a))
        c = self.bottom(self.down(b))
        b = self.third(torch.cat([self.up(c), b], 1))
        return self.head(self.fourth(torch.cat([self.up(b), a], 1)))


def simulate(folder: Path, scans: int, seed: int = 0) -> None:
    """An ellipsoid with a ball inside, in noise; noise and the ball's contrast differ from scan to scan."""
    import nibabel

    generator = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.rand(*shape, generator=generator)  # noqa: E731
    for part in ("images", "labels"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for i in range(scans):
        shape = (36, 32, 24 + 4 * int(rand(1) * 3))
        grid = torch.stack(torch.meshgrid(*(torch.arange(n, dtype=torch.float32) for n in shape), indexing="ij"))
        centre = torch.tensor([n / 2 for n in shape]) + 4 * (rand(3) - 0.5)
        radii = torch.tensor([n / 3.2 for n in shape]) * (0.85 + 0.3 * rand(3))
        organ = ((grid - centre[:, None, None, None]) / radii[:, None, None, None]).norm(dim=0)
        place, size = centre + 0.4 * radii * (2 * rand(3) - 1), 2.5 + 2.5 * rand(1)
        lesion = (grid - place[:, None, None, None]).norm(dim=0) - size
        noise, contrast = 0.15 + 0.5 * rand(1) ** 3, 0.15 + 0.5 * rand(1)
        image = torch.sigmoid((1 - organ) * 10) + contrast * torch.sigmoid(-1.5 * lesion)
        image = 400 * (image + noise * torch.randn(shape, generator=generator)) + 100
        label = (organ < 1).long()
        label[(lesion < 0) & (organ < 1)] = 2
        affine = np.diag([1.5, 1.5, 2.0, 1.0])
        for part, values in (("images", image.short()), ("labels", label.byte())):
            nibabel.save(nibabel.Nifti1Image(values.numpy(), affine), folder / part / f"case{i:02}.nii.gz")


def read(folder: Path) -> list[tuple[imaging.Scan, Tensor]]:
    """Scans with their labels [x, y, z], by file name."""
    paths = sorted((folder / "images").glob("*.nii*"))
    if len(paths) < 6:
        raise SystemExit(
            f"expected at least six scans {folder}/images/*.nii.gz, with labels of the same names in labels/"
        )
    return [(imaging.read_nifti(path), imaging.read_nifti(folder / "labels" / path.name).labels) for path in paths]


def prepare(volume: Tensor) -> Tensor:
    """Each scan in its own unit: mean 0, standard deviation 1."""
    return (volume - volume.mean()) / volume.std()


def patches(cases: list[tuple[imaging.Scan, Tensor]], each: int, seed: int) -> TensorDataset:
    """Return `each` patches of every scan, every second around a labelled voxel."""
    generator = torch.Generator().manual_seed(seed)
    images, labels = [], []
    for scan, label in cases:
        image = prepare(scan.values)
        short = [max(0, PATCH - n) for n in label.shape]
        room = [end for n in reversed(short) for end in (0, n)]  # scans that are shorter than a patch
        image, label = pad(image, room), pad(label, room)
        for k in range(each):
            corner = [int(torch.randint(n - PATCH + 1, (), generator=generator)) for n in label.shape]
            voxels = label.nonzero()
            if k % 2 and len(voxels):
                voxel = voxels[int(torch.randint(len(voxels), (), generator=generator))].tolist()
                corner = [min(max(0, v - PATCH // 2), n - PATCH) for v, n in zip(voxel, label.shape, strict=True)]
            where = tuple(slice(c, c + PATCH) for c in corner)
            images.append(image[(slice(None), *where)])
            labels.append(label[where])
    return TensorDataset(torch.stack(images), torch.stack(labels))


def train(net: nn.Module, data: TensorDataset, epochs: int) -> nn.Module:
    """The ordinary way."""
    loader = DataLoader(data, batch_size=4, shuffle=True)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, epochs * len(loader))
    net.train()
    for _ in range(epochs):
        for x, t in loader:
            optimizer.zero_grad()
            cross_entropy(net(x), t).backward()
            optimizer.step()
            schedule.step()
    return net.eval()  # batch norm's statistics are now those of the training data


def posterior(net: nn.Module, train: DataLoader, held_out: DataLoader) -> vi.Posterior:
    """Around the trained network, as wide as the held-out patches allow; where that is nothing, as by default."""
    bayes = vi.variationalize(net, vi.likelihoods.Categorical())
    result = bayes.laplace(train, validation=held_out, progress=False)
    print(result)
    if result.selected.startswith("the network"):
        wide = vi.variationalize(net, vi.likelihoods.Categorical())
        wide.laplace(train, progress=False)
        losses = [one.evaluate(held_out, draws=DRAWS).nlpd for one in (bayes, wide)]
        print("held-out NLL of the network {:.4f}, of the default prior, taken for its map, {:.4f}".format(*losses))
        return wide
    return bayes


def picture(cases: list[tuple[imaging.Scan, Tensor]], maps: list[imaging.Maps], found, path: str) -> int:
    """The planes of the most uncertain case, and what the cases come to; which case that is."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    worst = int(found.uncertainty.argmax())
    figure = plt.figure(figsize=(14, 8.5), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(2, 1))
    vi.plots.uncertainty_map(cases[worst][0].values, maps[worst], ax=list(left.subplots(3, 3).flat))
    dice, reliability, referral = right.subplots(3, 1)
    vi.plots.dice_by_structure(found, dice)
    vi.plots.reliability_diagram(found, reliability)
    vi.plots.referral_curve(found, referral)
    figure.savefig(path, dpi=70)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with images/ and labels/ of NIfTI files")
    parser.add_argument("--names", help="of the structures, with commas between them")
    parser.add_argument(
        "--folder", type=Path, help="where maps and page go; a temporary one, which is removed, if none"
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", default="scans.png")
    parser.add_argument("--smoke", action="store_true", help="six scans, one epoch: shows that it runs, no more")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    start = time.process_time()
    with tempfile.TemporaryDirectory() as temporary:
        source = options.data or Path(temporary)
        if options.data is None:
            simulate(source, 6 if options.smoke else 42)
        cases = read(source)
        one = max(1, len(cases) // 7)
        parts = cases[: -3 * one], cases[-3 * one : -2 * one], cases[-2 * one :]
        classes = 1 + max(int(label.max()) for _, label in cases)
        names = options.names.split(",") if options.names else ["organ", "lesion"] if options.data is None else None
        epochs, each, width, draws = (1, 1, 2, 2) if options.smoke else (options.epochs, 2, 6, DRAWS)
        fitted, held_out = (patches(part, each, seed) for seed, part in enumerate(parts[:2]))
        net = train(UNet(classes, width), fitted, epochs)
        print(f"trained on {len(fitted)} patches of {len(parts[0])} scans: {time.process_time() - start:.0f} s")

        bayes = posterior(net, DataLoader(fitted, 4), DataLoader(held_out, 4))
        print(f"fitted: {time.process_time() - start:.0f} s")

        folder = options.folder or Path(temporary) / "maps"
        maps = []
        for scan, label in parts[2]:
            volume = prepare(scan.values)
            own = imaging.predict_maps(bayes, volume, TILE, MARGIN, draws, generator=torch.Generator().manual_seed(0))
            imaging.write_maps(own, scan, folder)
            imaging.write_page(
                folder / f"{scan.name}.html", volume, own, truth=label, spacing=scan.spacing, title=scan.name,
                names=names and ["background", *names],
            )  # fmt: skip
            maps.append(own)
        found = imaging.by_structure([(own, label) for own, (_, label) in zip(maps, parts[2], strict=True)], names)
        print(found)
        curve = found.referral()
        for share in (0.0, 0.25, 0.5):
            at = int((curve.share - share).abs().argmin())
            words = f"{100 * curve.share[at]:.0f} % of the cases referred by expected Dice"
            print(f"{words}: mean Dice of the rest {curve.dice[at]:.3f} (worst first: {curve.ideal[at]:.3f})")
        worst = picture(parts[2], maps, found, options.out)
        print(f"most uncertain: {parts[2][worst][0].name}; wrote {options.out}", end="")
        print("" if options.folder is None else f", maps and pages in {folder}")
    print(f"{time.process_time() - start:.0f} s of processor time in all")


if __name__ == "__main__":
    main()
