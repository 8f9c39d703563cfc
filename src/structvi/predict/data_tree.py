"""Named draws as the xarray `DataTree` that arviz reads."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from xarray import DataTree

Named = Mapping[str, Tensor]


def data_tree(posterior: Named, *, observed: Named | None = None, **groups: Named) -> "DataTree":
    """Return draws [S, ..] by name as one chain, [1, S, ..].

    Args:
        posterior: the draws.
        observed: the data, without an axis of draws.
        groups: other groups of arviz with a value at each draw: `log_likelihood`, `posterior_predictive`.

    Example:
        >>> import torch
        >>> data_tree({"z": torch.zeros(50, 3)}).posterior["z"].shape
        (1, 50, 3)
    """
    try:
        from arviz_base import from_dict
    except ImportError:
        raise ImportError('to_arviz needs arviz-base: pip install "structvi[diagnostics]"') from None
    chains: dict[str, Any] = {
        group: {name: draws.detach().cpu().unsqueeze(0).numpy() for name, draws in named.items()}
        for group, named in {"posterior": posterior, **groups}.items()
    }
    if observed is not None:
        chains["observed_data"] = {name: values.detach().cpu().numpy() for name, values in observed.items()}
    return from_dict(chains)
