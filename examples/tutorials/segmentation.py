"""Segmentation: what the network does not know, pixel by pixel.

One minute on two cores. Blobs with ambiguous borders, a small convolutional network, and two maps: noise that more
data would not remove, and ignorance that they would. The whole story, with a U-Net, real nuclei and peers: [medical
imaging](../imaging.md).
"""

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

STEPS = 600  # quick: 4
IMAGES = 60  # quick: 8
SIZE = 32  # quick: 16

# ## Pictures
#
# Discs in noise. Where their blurred border lies is a matter of opinion: an annotator's radius differs by up to 1.5
# pixels from ours.


def blobs(count, seed, brightness=1.0):
    """Images and masks, [B, 1, H, W]."""
    g = torch.Generator().manual_seed(seed)
    row, column = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    image, mask = torch.zeros(count, SIZE, SIZE), torch.zeros(count, SIZE, SIZE)
    for index in range(count):
        for _ in range(2):
            y, x, radius = (torch.rand(3, generator=g) * torch.tensor([SIZE, SIZE, SIZE / 8])).tolist()
            distance = ((row - y) ** 2 + (column - x) ** 2).sqrt()
            image[index] += torch.sigmoid((radius + SIZE / 10 - distance) / 1.5)
            opinion = 3 * torch.rand(1, generator=g).item() - 1.5
            mask[index] = mask[index].maximum((distance < radius + SIZE / 10 + opinion).float())
    image = brightness * image + 0.3 * torch.randn(image.shape, generator=g)
    return image.unsqueeze(1), mask.unsqueeze(1)


train = DataLoader(TensorDataset(*blobs(IMAGES, seed=0)), batch_size=10, shuffle=True)

# ## A posterior over all weights
#
# The likelihood is per pixel. Pixels of one picture are not independent, so that a picture with 1024 of them does not
# say as much as 1024 pictures: the posterior is narrower than it should be. A temperature above one would widen it,
# below one make it narrower still ([gotchas](../gotchas.md)). We leave it at one and say so.

torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1)
)
bayes = vi.variationalize(
    net, vi.likelihoods.Bernoulli(), vi.LowRankPrecision(rank=4), vi.priors.NormalPrior.fan_in(2.0)
)
result = bayes.fit(train, steps=STEPS, progress=False)
print(bayes.extra_repr())
print(result.verdict)

# ## Maps
#
# Top: a picture like those of training. Bottom: one with blobs three times as bright, which the network has never seen.
# Entropy is all uncertainty; the mutual information is the part that is ignorance of the weights.

for row, brightness in enumerate((1.0, 3.0)):
    image, mask = blobs(1, seed=7, brightness=brightness)
    predictive = bayes.predict(image, draws=64, generator=torch.Generator().manual_seed(0))
    maps = {
        "image": image,
        "opinion of one": mask,
        "probability": predictive.mean,
        "entropy": predictive.entropy,
        "mutual information": predictive.mutual_information,
    }
    if row == 0:
        figure, panels = plt.subplots(2, len(maps), figsize=(9.5, 4), layout="constrained")
    for axes, (name, values) in zip(panels[row], maps.items(), strict=True):
        shown = axes.imshow(
            values.squeeze().numpy(), cmap="gray" if name in ("image", "opinion of one") else "magma", vmin=0
        )
        axes.set(xticks=[], yticks=[], title=name if row == 0 else "")
        figure.colorbar(shown, ax=axes, shrink=0.7)
plt.show()

# The bright blobs come out too large. The network is less sure where their border lies (mind the scales), and sure of
# what is inside: a posterior over the weights of one architecture does not see every shift.
#
# ## Numbers
#
# On new pictures, over all pixels: likelihood, calibration, and whether uncertain pixels are the wrong ones (the area
# under the risk–coverage curve, smaller is better).

test = DataLoader(TensorDataset(*blobs(IMAGES // 2, seed=1)), batch_size=10)
metrics = bayes.evaluate(test, draws=32, generator=torch.Generator().manual_seed(0))
print(metrics)

# The curve: the error among the pixels that are kept when the most uncertain ones are handed to a human.

axes = plt.figure(figsize=(5, 3.2), layout="constrained").gca()
vi.plots.risk_coverage(metrics, ax=axes)
plt.show()
