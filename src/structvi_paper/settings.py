"""Every number of `structvi reproduce` that is chosen rather than computed."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

#: the content of settings.toml
TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("settings.toml").read_text("utf-8"))


@dataclass(frozen=True)
class Settings:
    """Sizes and optimizer settings, the same for all targets and methods.

    Args:
        seed: of everything random.
        targets: random Gaussians of table 1 and data sets of table 2.
        optimum_starts: of the deterministic search for the best of each family.
        tolerance: of table 1's fits on fixed draws, in nats.
        steps, learning_rate: of Adam in table 1's stochastic fits; rates decay to zero along a half cosine.
        regression_steps, regression_rate: of Adam everywhere else.
        evaluations: of the log density in one step, divided into as many groups as the coupling allows.
        kl_draws: from the exact posterior, where KL[p‖q] has no closed form.
        coupling_targets, coupling_repeats, coupling_steps: sizes of the comparison of couplings.
    """

    seed: int = 0
    targets: int = 10
    optimum_starts: int = 32
    tolerance: float = 1e-6
    steps: int = 500
    regression_steps: int = 300
    regression_rate: float = 0.1
    evaluations: int = 64
    learning_rate: float = 0.3
    betas: tuple[float, float] = (0.8, 0.95)
    kl_draws: int = 65536
    coupling_targets: int = 5
    coupling_repeats: int = 200
    coupling_steps: int = 400

    def generator(self, *labels: object) -> torch.Generator:
        """Return a stream of its own for every labelled piece of work, whatever the order in which they run."""
        return torch.Generator().manual_seed(crc32(repr((self.seed, *labels)).encode()))


def quick(seed: int = 0) -> Settings:
    """Return settings with three targets instead of ten; the fits are the same."""
    return Settings(seed=seed, targets=3, coupling_targets=2, coupling_repeats=40, coupling_steps=150)
