"""Pictures of predictions and of how far they can be trusted; matplotlib is the extra "plots"."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .imaging.maps import Maps, most_uncertain
from .imaging.structures import StructureMetrics
from .predict.metrics import Metrics
from .predict.predictive import Predictive

if TYPE_CHECKING:
    from matplotlib.axes import Axes


BLUE, ORANGE, GREY = "#2f6db5", "#d9722e", "#6b6b6b"
#: of structures, beyond the first two
COLOURS = (BLUE, ORANGE, "#4b9b54", "#9457a3", "#b59a2f", "#4aa3a8", "#c2557a", "#6b6b6b")


def predictive_band(
    x: Tensor,
    predictive: Predictive,
    data: tuple[Tensor, Tensor] | None = None,
    level: float = 0.95,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw the predictive of one number against one input: mean, interval of t, and ±2 standard deviations of y.

    Args:
        x: the inputs of the prediction, [B] or [B, 1], in any order.
        predictive: outputs [S, B] or [S, B, 1].
        data: observations (x, t) to show as points.
        level: the probability of the interval of t.
        ax: where to draw; a new figure by default.

    Example:
        >>> import torch
        >>> from structvi import likelihoods
        >>> pred = Predictive(torch.zeros(1, 5, 1), torch.ones(1), likelihoods.Gaussian(0.1))
        >>> predictive_band(torch.arange(5.0), pred).get_ylabel()
        't'
    """
    ax = axes_of(ax)
    n, order = x.numel(), x.flatten().argsort()
    values = (x, predictive.mean, predictive.function_mean, predictive.function_variance.sqrt())
    at, mean, y, spread, low, high = (_column(value, n)[order] for value in (*values, *predictive.interval(level)))
    ax.fill_between(at, low, high, color=BLUE, alpha=0.15, linewidth=0, label=f"{100 * level:g} % of observations")
    ax.fill_between(at, y - 2 * spread, y + 2 * spread, color=BLUE, alpha=0.35, linewidth=0, label="function, ±2 std")
    ax.plot(at, mean, color=BLUE, linewidth=1.8, label="mean")
    if data is not None:
        ax.scatter(
            *(_column(value, len(data[0])) for value in data),
            s=12,
            color="black",
            alpha=0.7,
            linewidth=0,
            zorder=3,
            label="data",
        )
    ax.set(xlabel="x", ylabel="t")
    ax.margins(x=0)
    return finish(ax, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, columnspacing=1.2, handlelength=1.4)


def reliability_diagram(metrics: Metrics | StructureMetrics, ax: "Axes | None" = None) -> "Axes":
    """Draw the frequency of right labels against their confidence; the bars below show how many there are.

    Results by structure (`imaging.by_structure`) have a line each: the frequency with which a voxel belongs to the
    structure, against its probability.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(nn.Linear(3, 2), likelihoods.Categorical(), num_data=10)
        >>> metrics = bayes.evaluate([(torch.randn(9, 3), torch.zeros(9).long())])
        >>> reliability_diagram(metrics).get_xlabel()
        'confidence'
    """
    ax = axes_of(ax, square=True)
    ax.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--", label="calibrated")
    if isinstance(metrics, StructureMetrics):
        for k, (name, curve) in enumerate(zip(metrics.names, metrics.reliability, strict=True)):
            words, colour = f"{name}, ECE {metrics.ece[k]:.3f}", COLOURS[k % len(COLOURS)]
            ax.plot(curve.confidence, curve.accuracy, "o-", color=colour, linewidth=1.5, markersize=4, label=words)
        ax.set(xlabel="probability of the structure", ylabel="share of voxels that belong to it")
    else:
        _check_metrics("reliability_diagram", metrics)
        if metrics.reliability is None:
            raise ValueError("reliability is for class labels: these metrics are of numbers; look at their coverage")
        count, confidence, accuracy = (values.numpy() for values in metrics.reliability)
        share = 0.2 * count / count.max()
        ax.bar(confidence, share, width=0.035, color=GREY, alpha=0.3, linewidth=0, label="labels in the bin (scaled)")
        ax.vlines(confidence, confidence, accuracy, color=ORANGE, linewidth=2, alpha=0.6)
        ax.plot(confidence, accuracy, "o-", color=BLUE, linewidth=1.5, markersize=5, label=f"ECE {metrics.ece:.3f}")
        ax.set(xlabel="confidence", ylabel="frequency of being right")
    ax.set(xlim=(0, 1.02), ylim=(0, 1.02), aspect="equal")
    return finish(ax, loc="upper left")


def referral_curve(metrics: Metrics | StructureMetrics, ax: "Axes | None" = None) -> "Axes":
    """Draw the accuracy on the rest against the share of cases that a human takes, the most uncertain first.

    Args:
        metrics: of `evaluate`, with class labels: accuracy; or of `imaging.by_structure`: mean Dice of the cases.
        ax: where to draw; a new figure by default.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(nn.Linear(3, 2), likelihoods.Categorical(), num_data=10)
        >>> referral_curve(bayes.evaluate([(torch.randn(9, 3), torch.zeros(9).long())])).get_ylabel()
        'accuracy on the rest'
    """
    ax = axes_of(ax)
    if isinstance(metrics, StructureMetrics):
        found = metrics.referral()
        share, kept, words = found.share, found.dice, ("mean Dice of the rest", "lowest expected Dice first")
        ax.plot(share, found.ideal, color=GREY, linewidth=1, linestyle=":", label="worst cases first")
    else:
        _check_metrics("referral_curve", metrics)
        if metrics.risk_coverage is None or metrics.accuracy is None:
            raise ValueError("a referral curve is for class labels: for numbers look at risk_coverage(metrics)")
        curve, words = metrics.risk_coverage, ("accuracy on the rest", "most uncertain first")
        share, kept = 1 - curve.coverage, 1 - curve.risk
    ax.plot(share, kept, color=BLUE, linewidth=1.8, label=words[1])
    ax.axhline(float(kept[share.argmin()]), color=GREY, linewidth=1, linestyle="--", label="random order")
    ax.set(xlabel="share referred to a human", ylabel=words[0], xlim=(0, 1))
    return finish(ax, loc="best")


def dice_by_structure(metrics: StructureMetrics, ax: "Axes | None" = None) -> "Axes":
    """Draw the Dice of every case, structure by structure, beside the Dice that the posterior expected.

    Args:
        metrics: of `imaging.by_structure`.
        ax: where to draw; a new figure by default.
    """
    ax = axes_of(ax)
    for k in range(len(metrics.names)):
        for shift, values, colour in ((-0.15, metrics.dice, BLUE), (0.15, metrics.expected_dice, ORANGE)):
            own = values[:, k][~values[:, k].isnan()]
            ax.plot([k + shift] * len(own), own.numpy(), "o", color=colour, alpha=0.35, markersize=4)
            words = {BLUE: "Dice, mean", ORANGE: "expected, mean"}[colour] if k == 0 else None
            ax.plot([k + shift], [own.mean()] if len(own) else [], "_", color=colour, markersize=22, label=words)
    ax.set_xticks(range(len(metrics.names)), metrics.names)
    ax.set(xlim=(-0.5, len(metrics.names) - 0.5), ylim=(0, 1.02), ylabel="Dice")
    return finish(ax, loc="lower right")


def risk_coverage(metrics: Metrics, ax: "Axes | None" = None) -> "Axes":
    """Draw the mean risk of the most certain observations against their fraction: it rises if uncertainty is useful.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(nn.Linear(3, 1), likelihoods.Gaussian(0.5), num_data=10)
        >>> risk_coverage(bayes.evaluate([(torch.randn(9, 3), torch.zeros(9, 1))])).get_ylabel()
        'mean squared error'
    """
    _check_metrics("risk_coverage", metrics)
    if metrics.risk_coverage is None:
        raise ValueError("these metrics have no risk–coverage curve: the likelihood gave no uncertainty of t")
    ax = axes_of(ax)
    coverage, risk = metrics.risk_coverage
    ax.plot(coverage, risk, color=BLUE, linewidth=1.8, label=f"most certain first, area {metrics.aurc:.4g}")
    ax.axhline(float(risk[-1]), color=GREY, linewidth=1, linestyle="--", label="random order")
    what = "mean squared error" if metrics.accuracy is None else "error rate"
    ax.set(xlabel="coverage: fraction kept", ylabel=what, xlim=(0, 1), ylim=(0, None))
    return finish(ax, loc="best")


def uncertainty_map(
    image: Tensor,
    predictive: Predictive | Maps,
    index: int = 0,
    ax: "Sequence[Axes] | None" = None,
    *,
    at: Sequence[int] | None = None,
) -> "Sequence[Axes]":
    """Draw an image beside its uncertainty and the epistemic part, pixel by pixel, each on a colour scale from 0.

    For labels these are predictive entropy and mutual information in nats, for numbers standard deviations. The
    entropy finds wrong pixels best. A volume has three planes through one voxel, a row for each;
    `imaging.write_page` makes a page with sliders.

    Args:
        image: the inputs, [B, H, W] or [B, channels, H, W]; of three or more channels the first three are colours. For
            volumes [B, channels, x, y, z], the first channel is shown.
        predictive: of these inputs, per pixel; or the maps of one image [channels, ..], of `imaging.predict_maps`.
        index: which of the B.
        ax: three axes, of a volume nine; a new figure by default.
        at: the voxel (x, y, z) where a volume is cut; by default the most uncertain.

    Example:
        >>> import torch
        >>> from structvi import likelihoods
        >>> pred = Predictive(torch.randn(8, 1, 3, 6, 6), torch.full((8,), 1 / 8), likelihoods.Categorical())
        >>> len(uncertainty_map(torch.rand(1, 1, 6, 6), pred))
        3
    """
    if isinstance(predictive, Predictive):
        image, predictive = image[index], Maps.each(predictive)[index]
    words = ["input", "uncertainty: entropy", "epistemic: mutual information"]
    if predictive.unit == "std":
        words = ["input", "uncertainty: std", "epistemic: std"]
    shape = predictive.shape
    is_volume = len(shape) == 3
    if len(shape) not in (2, 3) or (is_volume and (image.ndim != 4 or tuple(image.shape[1:]) != shape)):
        raise ValueError(f"expected images or volumes: the maps have {shape} voxels, the image {tuple(image.shape)}")
    rows = 3 if is_volume else 1
    if ax is None:
        size = (9.5, 3.1 * rows)
        ax = list(_pyplot().subplots(rows, 3, figsize=size, layout="constrained", squeeze=False)[1].flat)
    if len(ax) != 3 * rows:
        raise ValueError(f"uncertainty_map draws {3 * rows} pictures here: give as many axes, got {len(ax)}")
    image = image.detach().cpu().float()
    if image.ndim > 2:  # [channels, ..]
        image = image[0] if is_volume else image.movedim(0, -1)[..., :3] if len(image) >= 3 else image.mean(0)
    image = (image - image.min()) / (image.max() - image.min()).clamp(min=1e-12)
    at = most_uncertain(predictive.uncertainty) if is_volume and at is None else at
    for column, (values, word) in enumerate(
        zip((image, predictive.uncertainty, predictive.epistemic), words, strict=True)
    ):
        colours: Any = {"cmap": "gray", "vmin": 0, "vmax": 1.0}
        if column:  # one scale for the three planes
            colours = {"cmap": "viridis", "vmin": 0, "vmax": max(float(values.max()), 1e-12)}
        for row, (cut, right, up) in enumerate(("xyz", "yxz", "zxy")[:rows]):
            one, plane = ax[3 * row + column], values
            one.set(xticks=[], yticks=[])
            one.set_title(word, fontsize=10)
            if is_volume and at is not None:
                plane = values.select(row, at[row]).T.flip(0)
                one.set(xlabel=f"{right} →", ylabel=f"{up} ↑")
                one.set_title(f"{word}, {cut} = {at[row]}", fontsize=10)
            shown = one.imshow(plane.numpy(), interpolation="nearest", **colours)
            if column and row == 0:
                one.figure.colorbar(shown, ax=one, shrink=0.8, pad=0.02)
    return ax


def _check_metrics(name: str, metrics: Any) -> None:
    if not isinstance(metrics, Metrics):
        raise TypeError(f"{name} expects Metrics, got {type(metrics).__name__}; write posterior.evaluate(loader)")


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ImportError('plots need matplotlib: pip install "structvi[plots]"') from None
    return plt


def axes_of(ax: "Axes | None", square: bool = False) -> "Axes":
    if ax is not None:
        return ax
    return _pyplot().subplots(figsize=(4.6, 4.6) if square else (6.4, 4), layout="constrained")[1]


def finish(ax: "Axes", **legend: Any) -> "Axes":
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=9, **legend)
    return ax


def _column(values: Tensor, count: int) -> Any:
    if values.numel() != count:
        raise ValueError(f"expected one number against one input, {count} elements, got {tuple(values.shape)}")
    return values.detach().cpu().double().reshape(-1).numpy()
