"""A score of inputs that are unlike the data: features far from those of every class, and no large logit."""

import torch
from torch import Tensor, nn

from .learned_variance import OnePass

#: share of the validation inputs below the threshold
HELD = 0.95


class OutOfDistribution(nn.Module):
    """The score of an input: its distance from the nearest class, and minus its largest logit, each in a common unit.

    The distance is that of Mahalanobis, of the features that come to the last layer. Its classes are those that the
    network predicts. Each part is zero at the median of the validation inputs, and one at their 95 % quantile. Outputs
    that are no classes have one mean and the distance alone.

    It fails where features do not tell: inputs that the network maps to the features of a class, as parts of known
    images in another order, and inputs that differ in what the network has learned to ignore.

    Args:
        layer: the name of the layer whose inputs are the features.
        classes: C; one if outputs are no classes.
        width: D, the number of features.
    """

    means: Tensor  # [C, D]
    whiten: Tensor  # [D, D], lower triangular
    typical: Tensor  # [2, 2]: median and 95 % quantile of distance and minus the largest logit
    threshold: Tensor  # []

    def __init__(self, layer: str, classes: int, width: int):
        super().__init__()
        self.layer, self.classes = layer, classes
        self.register_buffer("means", torch.zeros(classes, width))
        self.register_buffer("whiten", torch.zeros(width, width))
        self.register_buffer("typical", torch.zeros(2, 2))
        self.register_buffer("threshold", torch.zeros(()))

    @classmethod
    def fitted(cls, layer: str, classes: int, train: list[OnePass], held_out: list[OnePass]) -> "OutOfDistribution":
        """Return the score with means and covariance of the training features, unit and threshold of held-out ones.

        The covariance is a mean over classes of those within a class, shrunk towards a multiple of the identity.
        """
        phi, logits = (torch.cat(part).double() for part in zip(*[one.pooled(classes) for one in train], strict=True))
        n, D = phi.shape
        label = logits.argmax(1) if classes > 1 else torch.zeros(n, dtype=torch.long, device=phi.device)
        count = torch.bincount(label, minlength=classes)
        means = phi.new_zeros(classes, D).index_add(0, label, phi) / count.clamp(min=1).unsqueeze(1)
        means[count == 0] = phi.mean(0)
        covariance, one_each = (phi - means[label]).mT @ (phi - means[label]) / n, torch.eye(D).to(phi)
        shrunk, size = D / (n + D), covariance.diagonal().mean().clamp(min=1e-12)
        root = torch.linalg.cholesky((1 - shrunk) * covariance + shrunk * size * one_each)
        found = cls(layer, classes, D).to(phi)
        found.means, found.whiten = means, torch.linalg.solve_triangular(root, one_each, upper=False)
        raw = torch.cat([found.parts(one).double() for one in held_out])
        middle, high = raw.median(0).values, raw.quantile(HELD, dim=0)
        found.typical = torch.stack([middle, high.maximum(middle + 1e-6 * (1 + middle.abs()))], 1)
        found.threshold = torch.cat([found(one) for one in held_out]).quantile(HELD)
        return found.to(train[0].features.dtype)

    def parts(self, one: OnePass) -> Tensor:
        """Return the distance from the nearest class, and minus the largest logit: [B, 2]."""
        phi, logits = one.pooled(self.classes)
        distance = torch.cdist(phi.to(self.whiten) @ self.whiten.mT, self.means @ self.whiten.mT).amin(1)
        return torch.stack([distance, -logits.amax(1).to(distance)], 1)

    def forward(self, one: OnePass) -> Tensor:
        """Return the score of every input, [B]; above `threshold` it is unlike 95 % of the validation inputs."""
        middle, high = self.typical.unbind(1)
        score = ((self.parts(one) - middle) / (high - middle)).clamp(min=-1.0)  # a huge logit far away proves nothing
        return score.sum(1) if self.classes > 1 else score[:, 0]
