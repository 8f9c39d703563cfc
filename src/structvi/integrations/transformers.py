"""Hugging Face models: a `Trainer` that fits a posterior, causal language models, and LoRA adapters in one folder."""

import os
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..loading import load
from ..objective import Estimator
from ..posterior import Posterior

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer
else:
    try:
        from transformers import Trainer
    except ImportError:
        raise ImportError(
            'structvi.integrations.transformers needs transformers: pip install "structvi[transformers]"'
        ) from None

__all__ = ["PosteriorTrainer", "causal_lm", "load_adapter", "save_adapter"]

#: the posterior's file beside the adapter's own, or in a checkpoint of the Trainer
POSTERIOR = "posterior.safetensors"


def causal_lm(net: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the logits [B, V, T − 1] of the next tokens, and those tokens [B, T − 1]: give it as `forward=`.

    Labels of −100 do not count if the likelihood is `Categorical(ignore_index=-100)`. Without labels in the batch
    the target is None.

    Example:
        >>> class Net(nn.Module):
        ...     def forward(self, input_ids):
        ...         return {"logits": torch.zeros(*input_ids.shape, 7)}
        >>> logits, target = causal_lm(Net(), {"input_ids": torch.ones(2, 5, dtype=torch.long)})
        >>> logits.shape, target
        (torch.Size([2, 7, 4]), None)
    """
    labels = batch.get("labels")
    logits = net(**{name: value for name, value in batch.items() if name != "labels"})["logits"]
    return logits[:, :-1].movedim(-1, 1), None if labels is None else labels[:, 1:]


class PosteriorTrainer(Trainer):
    """A `transformers.Trainer` of a posterior: it minimises −(E log lik − λ KL[q‖prior])/N in nats per row.

    Evaluation reports the negative log predictive density as `eval_loss`; the predictions that `compute_metrics` gets
    are log probabilities. A checkpoint has the posterior in `posterior.safetensors`, without the held base, and
    `resume_from_checkpoint` reads it. `bayes.fit` does more: it averages the last steps and checks convergence.

    Args:
        posterior: what `variationalize` returns; N is the length of the training data set unless it has one.
        args: `TrainingArguments`; `weight_decay` must be 0, for the prior is that already.
        kl_weight: λ.
        estimator: of the ELBO, as in `bayes.fit`.
        **others: arguments of `Trainer`, such as `train_dataset`, `eval_dataset` and `data_collator`.
    """

    def __init__(
        self,
        posterior: Posterior,
        args: Any = None,
        *,
        kl_weight: float = 1.0,
        estimator: Estimator = Estimator(),
        **others: Any,
    ):
        if args is not None and args.weight_decay:
            raise ValueError(
                f"weight_decay={args.weight_decay} would change the posterior: the prior is the weight decay of a "
                "posterior. Give TrainingArguments(weight_decay=0.0)"
            )
        data = others.get("train_dataset")
        if posterior.model.known_num_data is None and data is not None:
            posterior.model.num_data, posterior.model.num_data_of_loader = len(data), True
        super().__init__(model=posterior, args=args, **others)
        self.posterior, self.kl_weight, self.estimator = posterior, kl_weight, estimator
        self.model_accepts_loss_kwargs = False  # the loss is a mean: Trainer divides it by the accumulated batches
        self.can_return_loss = False
        if self.args.label_names is None:
            self.label_names = ["labels"]

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if not return_outputs:
            return self.posterior.loss(inputs, estimator=self.estimator, kl_weight=self.kl_weight)
        predictive = self.posterior.predict({name: x for name, x in inputs.items() if name not in self.label_names})
        loss = -predictive.log_prob(inputs[self.label_names[0]]).mean()
        return loss, {"loss": loss, "logits": predictive.mean.clamp(min=torch.finfo(loss.dtype).tiny).log()}

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:  # columns of the data that the network does not take are left out
            net: Any = self.posterior.net
            base = net.get_base_model() if hasattr(net, "get_base_model") else net
            self._signature_columns = [*signature(base.forward).parameters, "label", "label_ids", *self.label_names]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        self.posterior.save(folder / POSTERIOR, network="hash")
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        own = self.posterior
        given = {"forward": own.model.user_forward} if own.model.user_forward is not None else {}
        saved = load(Path(resume_from_checkpoint) / POSTERIOR, own.net, device=own.device, **given).learned()
        with torch.no_grad():
            for name, tensor in own.learned().items():
                tensor.copy_(saved[name])


def save_adapter(posterior: Posterior, folder: str | os.PathLike[str]) -> None:
    """Write a LoRA adapter at the posterior's mean, which `peft` loads, and the posterior beside it.

    Args:
        posterior: over tensors of a `PeftModel`.
        folder: of both; files that are there are replaced.
    """
    net: Any = posterior.net
    if not hasattr(net, "peft_config"):
        raise TypeError(
            f"save_adapter is for a PeftModel, and this network is a {type(net).__name__}: use posterior.save(path)"
        )
    net.save_pretrained(folder, state_dict=posterior.mean_network().state_dict())
    posterior.save(Path(folder) / POSTERIOR, network="hash")


def load_adapter(folder: str | os.PathLike[str], base: "PreTrainedModel", **given: Any) -> Posterior:
    """Return the posterior that `save_adapter` wrote, around a base model with the folder's adapter.

    Args:
        folder: of the adapter and its posterior.
        base: the model that the adapter was made for.
        **given: what `load` needs of yours, such as `forward=`.
    """
    from peft import PeftModel

    net: PeftModel = PeftModel.from_pretrained(base, folder, is_trainable=True)
    return load(Path(folder) / POSTERIOR, net, **given)
