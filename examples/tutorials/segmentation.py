"""Segmentation.

One minute on two cores. A small convolutional network finds blobs with ambiguous borders. Two maps show its
uncertainty: noise, which more data do not remove, and ignorance, which they do. [Medical imaging](../imaging.md) has a
U-Net and real images.
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
# The pictures show discs in noise. Their blurred border is a matter of opinion: an annotator's radius differs by up to
# 1.5 pixels from ours.


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
# The likelihood is per pixel. Pixels of one picture are not independent: 1024 pixels say less than 1024 pictures. So
# the posterior is too narrow. `kl_weight` above one would widen it ([gotchas](../gotchas.md)); here it stays at one.

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
# The first row shows a picture like the training pictures. The second has blobs three times as bright, which the network
# has never seen. Entropy is all uncertainty; the mutual information is the epistemic part.

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

# The bright blobs come out too large. The network is less confident of their border (mind the scales), and confident
# inside: a posterior over the weights of one architecture does not see every shift.
#
# ## Numbers
#
# Evaluate all pixels of new pictures: likelihood, calibration, and the area under the risk–coverage curve. That area is
# small if the wrong pixels are the uncertain ones.

test = DataLoader(TensorDataset(*blobs(IMAGES // 2, seed=1)), batch_size=10)
metrics = bayes.evaluate(test, draws=32, generator=torch.Generator().manual_seed(0))
print(metrics)

# The curve shows the error among the remaining pixels when the most uncertain pixels go to a person.

axes = plt.figure(figsize=(5, 3.2), layout="constrained").gca()
vi.plots.risk_coverage(metrics, ax=axes)
plt.show()
