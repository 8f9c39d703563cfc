"""A posterior in a Lightning `Trainer`: a module whose loss is −elbo/N.

Lightning is two packages: this takes `lightning` if it is installed, else `pytorch_lightning`. Import your Trainer from
the same one, for neither knows the other's modules.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..models.bayesian_model import rows
from ..objective import Estimator
from ..optim.adam import DEFAULT_LR, adam_groups
from ..posterior import Posterior
from ..train.data import Batches
from ..train.fit import KL_WARMUP, Schedule, rate_factor

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule
else:
    try:
        from lightning.pytorch import LightningModule
    except ImportError:
        try:
            from pytorch_lightning import LightningModule
        except ImportError:
            raise ImportError(
                'structvi.integrations.lightning needs Lightning: pip install "structvi[lightning]"'
            ) from None


__all__ = ["BayesianModule"]


class BayesianModule(LightningModule):
    """A posterior that a Trainer fits, `Trainer(max_epochs=20, gradient_clip_val=10.0).fit(module, loader)`.

    The loss is `posterior.loss`, −(E log lik − λ KL[q‖prior])/N. Optimizer and schedule are as in `posterior.fit`: Adam
    with a smaller rate for factors, a linear warm-up and a cosine decay. N is the length of the training data, unless
    the posterior has it. `posterior.fit` does more: it starts the factor late, averages the last steps, skips batches
    that are not finite and selects the best candidate. Use this if you need a Trainer.

    Every step logs `elbo` and `kl` in nats for the whole data set, at λ = 1. Validation and test log `nlpd`, in nats
    per observation, and, of labels, `accuracy` and `brier`, of numbers `mse` and `crps`, with "val_" and "test_" in
    front. `Trainer(precision="bf16-mixed")` runs the network, and nothing else, in bfloat16.

    Args:
        posterior: what `variationalize` returns.
        lr: the highest learning rate.
        schedule: of learning rate and λ, as in `posterior.fit`; stages and early stops are for `fit` alone.
        estimator: as in `elbo`.
        draws: of validation and test, the same for all batches.

    Example:
        >>> from torch import nn
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> module = BayesianModule(variationalize(nn.Linear(3, 1), likelihoods.Gaussian(noise=1.0), MeanField()))
        >>> [name for name, _ in module.named_parameters()]
        ['posterior.family.mean', 'posterior.family.log_scale']
    """

    def __init__(
        self,
        posterior: Posterior,
        *,
        lr: float = DEFAULT_LR,
        schedule: Schedule | None = None,
        estimator: Estimator = Estimator(),
        draws: int = 16,
    ):
        super().__init__()
        self.posterior, self.lr, self.schedule, self.estimator = posterior, lr, schedule or Schedule(), estimator
        self.draws, self._rows, self._batches = draws, 0, 0
        # the network's own tensors get no gradient, and DistributedDataParallel would wait for one
        own = {**dict(posterior.net.named_parameters()), **dict(posterior.net.named_buffers())}
        self._ddp_params_and_buffers_to_ignore = [f"posterior.model.net.{name}" for name in own]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Yield the learned parameters: `posterior.named_parameters()`, without the network's own tensors."""
        prefix = f"{prefix}.posterior" if prefix else "posterior"
        return self.posterior.named_parameters(prefix, recurse, remove_duplicate)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return `posterior.predict`: a `Predictive`."""
        return self.posterior.predict(*inputs, **options)

    def on_train_start(self) -> None:
        model, loader = self.posterior.model, self.trainer.train_dataloader
        if model.known_num_data is None and loader is not None and (N := Batches(loader).num_data) is not None:
            model.num_data = N

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(adam_groups(self.posterior, self.lr))
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: rate_factor(step, self._steps, self.schedule.warmup, self.schedule.hold)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @property
    def _steps(self) -> int:
        return int(self.trainer.estimated_stepping_batches)

    @property
    def kl_weight(self) -> float:
        """λ at this step."""
        rise = KL_WARMUP if self.schedule.kl_warmup == "auto" else self.schedule.kl_warmup
        return min(1.0, (self.global_step + 1) / (rise * self._steps + 1))

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        with self._mixed_precision():
            terms = self.posterior.terms(batch, estimator=self.estimator)
        B = rows(batch)
        self._rows, self._batches = self._rows + B, self._batches + 1
        weight = B * self._batches / self._rows  # all observations count the same, those of a short last batch too
        loss = -weight * terms.objective(self.kl_weight).mean() / self.posterior.model.num_data
        self.log_dict({"elbo": terms.objective().detach().mean(), "kl": terms.complexity.detach().mean()})
        return loss

    def validation_step(self, batch: Any, batch_idx: int = 0) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int = 0) -> None:
        self._evaluate(batch, "test")

    def _evaluate(self, batch: Any, name: str) -> None:
        generator = torch.Generator(self.device).manual_seed(0)
        with self._mixed_precision():
            metrics = self.posterior.evaluate([batch], self.draws, generator=generator)
        means = {key: value for key, value in dict(metrics).items() if key in ("nlpd", "accuracy", "brier", "crps")}
        if metrics.rmse is not None:
            means["mse"] = metrics.rmse**2
        for key, value in means.items():
            self.log(f"{name}_{key}", value, prog_bar=key == "nlpd", batch_size=metrics.count, sync_dist=True)

    @contextmanager
    def _mixed_precision(self) -> Iterator[None]:
        """Inside, the Trainer's autocast is for the network alone: log densities in bfloat16 would be wrong."""
        kind, model = self.device.type, self.posterior.model
        if not torch.is_autocast_enabled(kind):
            yield
            return
        dtype = torch.get_autocast_dtype(kind)
        if dtype == torch.float16:
            raise ValueError('float16 needs scaled gradients inside the network: use "bf16-mixed", or posterior.fit')
        previous, model.precision = model.precision, dtype
        try:
            with torch.autocast(kind, enabled=False):
                yield
        finally:
            model.precision = previous
