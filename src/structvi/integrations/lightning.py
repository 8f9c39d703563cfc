"""A posterior in a Lightning `Trainer`: a module whose loss is −elbo/N, and a callback that records and saves it.

Lightning is two packages: this takes `lightning` if it is installed, else `pytorch_lightning`. Import your Trainer from
the same one, for neither knows the other's modules.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..models.bayesian_model import rows
from ..objective import Estimate, Estimator
from ..optim.adam import DEFAULT_LR, adam_groups
from ..posterior import Posterior
from ..train.data import Batches
from ..train.fit import KL_WARMUP, rate_factor
from ..train.result import History
from ..util.checks import check_fraction

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback, LightningModule, Trainer
    except ImportError:
        try:
            from pytorch_lightning import Callback, LightningModule, Trainer
        except ImportError:
            raise ImportError(
                'structvi.integrations.lightning needs Lightning: pip install "structvi[lightning]"'
            ) from None


__all__ = ["BayesianModule", "PosteriorCallback"]


class BayesianModule(LightningModule):
    """A posterior that a Trainer fits, `Trainer(max_epochs=20, gradient_clip_val=10.0).fit(module, loader)`.

    The loss is `posterior.loss`, −(E log lik − λ KL[q‖prior])/N. Optimizer and schedule are as in `posterior.fit`: Adam
    with a smaller rate for factors, a linear warm-up and a cosine decay. N is the length of the training data, unless
    the posterior has it. `posterior.fit` does more: it starts the factor late, averages the last steps, skips batches
    that are not finite and selects the best candidate. Use this if you need a Trainer.

    Validation and test log the predictive's `nlpd` (nats per observation) and, of labels, `accuracy` and `brier`, of
    numbers `mse` and `crps`, with "val_" and "test_" in front. `Trainer(precision="bf16-mixed")` runs the network, and
    nothing else, in bfloat16.

    Args:
        posterior: what `variationalize` returns.
        lr: the highest learning rate.
        warmup: the fraction of the steps in which it rises.
        kl_warmup: the fraction of the steps in which λ rises from zero.
        estimator: as in `elbo`.
        draws: of validation and test, the same for all batches.
        reference: for batch_norm="reestimated", as in `predict`.

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
        warmup: float = 0.05,
        kl_warmup: float = KL_WARMUP,
        estimator: Estimator = Estimator(),
        draws: int = 16,
        reference: Any = None,
    ):
        super().__init__()
        if not isinstance(posterior, Posterior):
            raise TypeError(f"BayesianModule expects what variationalize returns, got {type(posterior).__name__}")
        check_fraction("warmup", warmup)
        check_fraction("kl_warmup", kl_warmup)
        self.posterior = posterior
        self.lr, self.warmup, self.kl_warmup, self.estimator = lr, warmup, kl_warmup, estimator
        self.draws, self.reference = draws, reference
        self._rows, self._batches = 0, 0
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
        if model.known_num_data is None:
            assert loader is not None
            model.num_data = _num_data(loader)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(adam_groups(self.posterior, self.lr))
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: rate_factor(step, self._steps, self.warmup)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @property
    def _steps(self) -> int:
        return int(self.trainer.estimated_stepping_batches)

    @property
    def kl_weight(self) -> float:
        """λ at this step."""
        return min(1.0, (self.global_step + 1) / (self.kl_warmup * self._steps + 1))

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor | float]:
        with self._mixed_precision():
            terms = self.posterior.terms(batch, estimator=self.estimator)
        B = rows(batch)
        self._rows, self._batches = self._rows + B, self._batches + 1
        weight = B * self._batches / self._rows  # all observations count the same, those of a short last batch too
        loss = -weight * terms.objective(self.kl_weight).mean() / self.posterior.model.num_data
        lr = self.trainer.optimizers[0].param_groups[0]["lr"]
        elbo, kl = terms.objective().detach(), terms.complexity.detach().mean()
        return {"loss": loss, "elbo": elbo, "kl": kl, "kl_weight": self.kl_weight, "lr": lr}

    def validation_step(self, batch: Any, batch_idx: int = 0) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int = 0) -> None:
        self._evaluate(batch, "test")

    def _evaluate(self, batch: Any, name: str) -> None:
        generator = torch.Generator(self.device).manual_seed(0)
        with self._mixed_precision():
            metrics = self.posterior.evaluate([batch], self.draws, reference=self.reference, generator=generator)
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


class PosteriorCallback(Callback):
    """Logs `elbo` and `kl` of every step (nats, whole data set, λ = 1) and the held-out density, and saves the file.

    Args:
        save: a file to which `posterior.save` writes at the end of every epoch; None for none.

    Attributes:
        history: a `History` of the batches: `history.plot()`, `history.to_dataframe()`. With validation data
            its column `held_out`, logged under this name too, is their log density at the end of each epoch, −val_nlpd.

    Example:
        >>> callback = PosteriorCallback(save="posterior.safetensors")
        >>> len(callback.history)
        0
    """

    def __init__(self, save: str | os.PathLike[str] | None = None):
        super().__init__()
        self.save: str | os.PathLike[str] | None = save
        self.history = History()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, BayesianModule):
            raise TypeError(f"PosteriorCallback goes with a BayesianModule, got {type(pl_module).__name__}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        estimate = Estimate.of(outputs["elbo"])
        pl_module.log_dict({"elbo": estimate.value, "kl": outputs["kl"]})
        self.history.append(
            step=len(self.history), epoch=trainer.current_epoch, stage=0, elbo=estimate.value,
            standard_error=estimate.standard_error, kl_weight=outputs["kl_weight"], lr=outputs["lr"],
        )  # fmt: skip

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        measured = trainer.callback_metrics.get("val_nlpd")
        if measured is not None and not trainer.sanity_checking:
            self.history.set_last("held_out", -float(measured))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, BayesianModule)  # as on_train_start has it
        held_out = self.history.recent("held_out", 1)[-1]
        if bool(held_out.isfinite()):
            pl_module.log("held_out", held_out)
        if self.save is not None and trainer.is_global_zero:
            pl_module.posterior.save(self.save)


def _num_data(loader: Any) -> int:
    num_data = Batches(loader).num_data
    if num_data is None:
        raise ValueError(
            "N, the number of observations, is needed to weigh a minibatch against the prior, and this loader does not "
            "know it: give num_data= to variationalize, or a DataLoader over a data set with a length"
        )
    return num_data
