"""What has to be known before a fit: N, batch norm that has seen no data, on which data choices are made."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..models.batch import batch_size
from ..networks.call import BATCH_NORMS
from ..networks.mixed_precision import check_precision
from ..predict.cases import fingerprint
from .batches import Batches
from .options import FitOptions
from .probing import check_held_out, probed
from .seen import warn_of_seen

if TYPE_CHECKING:
    from ..posterior import Posterior


def with_held_out(posterior: "Posterior", loader: Iterable[Any], options: FitOptions) -> None:
    """Check precision and held-out data; the posterior remembers these. On an error nothing has changed."""
    check_precision(options.computing.precision, posterior.net, posterior.space.dtype, posterior.device)
    if options.validation is not None:
        warn_of_seen(loader, options.validation)
    remember_choice(posterior, options.validation, options.seed)


def remember_choice(posterior: "Posterior", validation: Iterable[Any] | None, seed: int) -> None:
    """On which data choices are made; a calibration was that of another posterior."""
    posterior.calibration = None
    posterior.chosen_on = None
    if validation is not None:
        posterior.chosen_on = fingerprint(Batches(validation, seed).everything())


def notes_before(posterior: "Posterior", batches: Batches, options: FitOptions) -> list[str]:
    """Set N; return what there is to say of it and of the network, and warn of weights that cannot be learned."""
    check = options.computing.precision is None  # which casts inputs
    return notes_on_data(posterior, batches, options.validation if check else None, options.estimator.kind != "log_q")


def notes_on_data(
    posterior: "Posterior", batches: Batches, validation: Iterable[Any] | None, needs_gradients: bool = True
) -> list[str]:
    """Set N; return what there is to say of data and network."""
    notes = set_num_data(posterior, batches) + notes_on_network(posterior)
    if validation is not None:
        check_held_out(posterior, batches, Batches(validation))
    batches.told = posterior.model.num_data
    return notes + probed(posterior, batches, needs_gradients)


def set_num_data(posterior: "Posterior", batches: Batches) -> list[str]:
    """N of the loader, where the model was not told; what there is to say of it."""
    model = posterior.model
    if model.known_num_data is None or model.num_data_of_loader:
        question = batches.question or _question_of_rows(posterior, batches)
        if batches.num_data is None or question is not None:
            why = question or "this loader does not know it"
            raise ValueError(
                f"N, the number of observations, is needed to weigh a minibatch against the prior: {why}. Give "
                "num_data= to variationalize, or a DataLoader over a data set with a length"
            )
    if model.known_num_data is None:
        assert batches.num_data is not None
        model.num_data, model.num_data_of_loader = batches.num_data, True
    elif model.num_data_of_loader and batches.num_data not in (None, model.num_data):
        before, model.num_data = model.num_data, batches.num_data
        return [f"N = {model.num_data}, of this loader's data set; in the fit before it was {before}"]
    elif batches.num_data is not None and batches.num_data != model.num_data:
        return [
            f"N = {model.num_data} as the model was told; the loader's data set has {batches.num_data} observations"
        ]
    return []


def _question_of_rows(posterior: "Posterior", batches: Batches) -> str | None:
    """Where an item of the data set is not one row of a batch, the rows in all are not known."""
    if posterior.model.user_forward is not None or (probe := batches.probe()) is None:
        return None
    batch, items = probe
    try:
        found = batch_size(posterior.model.split(batch)[1])
    except (TypeError, ValueError):  # what is wrong with it the first step says, with the batch's number
        return None
    if found == items:
        return None
    words = f"a batch of {items} items of the data set has {found} rows, crops or slices of one item, perhaps"
    if batches.num_data is not None and found % items == 0:
        words += f", {found // items * batches.num_data} in all if each item has as many"
    return words


def notes_on_network(posterior: "Posterior") -> list[str]:
    """Batch norm that does not do what it does in training, and weights that are not those it is linearised at."""
    notes = []
    if posterior.batch_norm != "reestimated":
        layers = {name: one for name, one in posterior.net.named_modules() if isinstance(one, BATCH_NORMS)}
        without = [name for name, one in layers.items() if one.running_mean is None or one.running_var is None]
        unused = [name for name, one in layers.items() if name not in without and _has_seen_nothing(one)]
        if unused:
            notes.append(
                f"batch norm has seen no data in {', '.join(unused)}: frozen at mean 0 and variance 1 it does not "
                'normalise; train the network first, or variationalize with batch_norm="reestimated"'
            )
        if without:
            notes.append(
                f"batch norm keeps no running statistics in {', '.join(without)}: a row's output depends on its batch, "
                "in predictions too; train the network with track_running_stats=True, or with GroupNorm"
            )
    model = posterior.model
    if model.linearised_at is not None and "linearise" not in posterior.left_open:
        present = {name: p.detach() for name, p in posterior.net.named_parameters() if name in model.net_space}
        if not torch.equal(model.net_space.ravel(present), model.linearised_at):
            notes.append(
                "the posterior is linearised at other weights than the network has now, and those count: after more "
                "training variationalize the network again"
            )
    return notes


def _has_seen_nothing(layer: nn.Module) -> bool:
    return bool((layer.running_mean == 0).all() and (layer.running_var == 1).all())  # pyright: ignore
