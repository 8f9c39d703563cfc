"""Named draws as arviz `InferenceData`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from arviz import InferenceData

Named = Mapping[str, Tensor]


def inference_data(posterior: Named, *, observed: Named | None = None, **groups: Named) -> "InferenceData":
    """Draws [S, ..] by name as one chain, [1, S, ..].

    Args:
        posterior: the draws.
        observed: the data, without an axis of draws.
        groups: other groups of arviz with a value at each draw: `log_likelihood`, `posterior_predictive`.

    Example:
        >>> import torch
        >>> inference_data({"z": torch.zeros(50, 3)}).posterior["z"].shape
        (1, 50, 3)
    """
    try:
        import arviz
    except ImportError:
        raise ImportError('to_arviz needs arviz: pip install "structvi[diagnostics]"') from None
    chains: dict[str, Any] = {
        group: {name: draws.detach().cpu().unsqueeze(0).numpy() for name, draws in named.items()}
        for group, named in {"posterior": posterior, **groups}.items()
    }
    if observed is not None:
        chains["observed_data"] = {name: values.detach().cpu().numpy() for name, values in observed.items()}
    return arviz.from_dict(**chains)
