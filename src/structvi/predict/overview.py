"""A posterior on one page: what is random, how wide it is, and what the last fit came to."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..posterior import Posterior


@torch.no_grad()
def summary(posterior: "Posterior") -> str:
    """A line for each tensor: its shape, the root mean square of its mean, the median of its standard deviations, and
    the share of its weights that are more than two standard deviations from zero.

    Args:
        posterior: what `variationalize` returns.

    Example:
        >>> from torch import nn
        >>> from structvi import MeanField, likelihoods, variationalize
        >>> bayes = variationalize(nn.Linear(3, 2), likelihoods.Categorical(), MeanField(), num_data=100)
        >>> print(bayes.summary().splitlines()[0])
        MeanField over 8 numbers, likelihood Categorical, N = 100
    """
    posterior.check_whole()
    model, space, density = posterior.model, posterior.space, posterior.family()
    mean, sd = (space.unravel(x) for x in (density.mean, density.variance.clamp(min=0).sqrt()))
    known = model.known_num_data
    N = "not known yet" if known is None else known
    head = f"{type(posterior.family).__name__} over {space.size} numbers, likelihood {type(model.likelihood).__name__}"
    rows = [("tensor", "shape", "rms of mean", "median sd", "|mean| > 2 sd")]
    for name in space.names:
        m, s = mean[name].double(), sd[name].double()
        shape = " × ".join(map(str, m.shape)) or "1"
        clear = f"{100 * float((m.abs() > 2 * s).double().mean()):.0f} %"
        rows.append((name, shape, f"{float(m.square().mean().sqrt()):.3g}", f"{float(s.median()):.3g}", clear))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [f"{head}, N = {N}"]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells))
    held = [name for name, _ in posterior.net.named_parameters() if name not in space.names]
    if held:
        more = ", .." if len(held) > 4 else ""
        lines.append(f"held at the network's values: {len(held)} tensors ({', '.join(held[:4])}{more})")
    fitted = posterior.last_fit
    how = "not fitted in this session: bayes.fit(loader, ..)" if fitted is None else f"last fit: {fitted.verdict}"
    return "\n".join([*lines, how])
