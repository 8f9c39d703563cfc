"""Pictures of predictions and of how far they can be trusted; matplotlib is the extra "plots"."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributions import Bernoulli, Categorical

from .imaging.maps import AXES, PLANES, Maps, check_voxel, most_uncertain, planes
from .imaging.structures import By, StructureMetrics
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
    """The predictive of one number against one input: mean, interval of t, and ±2 standard deviations of y in it.

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
    x = _column("x", x, x.shape[0])
    mean, y, spread = (
        _column("the prediction", value, x.numel())
        for value in (predictive.mean, predictive.function_mean, predictive.function_variance.sqrt())
    )
    low, high = (_column("the interval", end, x.numel()) for end in predictive.interval(level))
    order = x.argsort()
    at, mean, y, spread, low, high = (value[order].numpy() for value in (x, mean, y, spread, low, high))
    ax.fill_between(at, low, high, color=BLUE, alpha=0.15, linewidth=0, label=f"{100 * level:g} % of observations")
    ax.fill_between(at, y - 2 * spread, y + 2 * spread, color=BLUE, alpha=0.35, linewidth=0, label="function, ±2 std")
    ax.plot(at, mean, color=BLUE, linewidth=1.8, label="mean")
    if data is not None:
        seen, t = (_column("data", value, data[0].shape[0]) for value in data)
        ax.scatter(seen.numpy(), t.numpy(), s=12, color="black", alpha=0.7, linewidth=0, zorder=3, label="data")
    ax.set_xlabel("x")
    ax.set_ylabel("t")
    ax.margins(x=0)
    return finish(ax, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, columnspacing=1.2, handlelength=1.4)


def reliability_diagram(metrics: Metrics | StructureMetrics, ax: "Axes | None" = None) -> "Axes":
    """How often labels are right against the confidence in them; the bars below show how many there are.

    Of results by structure (`imaging.by_structure`) a line for each: how often a voxel belongs to the structure,
    against the probability that it does.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(nn.Linear(3, 2), likelihoods.Categorical(), num_data=10)
        >>> metrics = bayes.evaluate([(torch.randn(9, 3), torch.zeros(9).long())])
        >>> reliability_diagram(metrics).get_xlabel()
        'confidence'
    """
    if not isinstance(metrics, StructureMetrics):
        _check_metrics("reliability_diagram", metrics)
        if metrics.reliability is None:
            raise ValueError("reliability is for class labels: these metrics are of numbers; look at their coverage")
    ax = axes_of(ax, square=True)
    ax.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--", label="calibrated")
    if isinstance(metrics, StructureMetrics):
        for k, (name, curve) in enumerate(zip(metrics.names, metrics.reliability, strict=True)):
            words = f"{name}, ECE {metrics.ece[k]:.3f}"
            ax.plot(curve.confidence, curve.accuracy, "o-", color=_colour(k), linewidth=1.5, markersize=4, label=words)
        ax.set_xlabel("probability of the structure")
        ax.set_ylabel("share of voxels that belong to it")
    else:
        _confidence(metrics, ax)
    ax.set_xlim(0, 1.02)
    ax.set_ylim(0, 1.02)
    ax.set_aspect("equal")
    return finish(ax, loc="upper left")


def _confidence(metrics: Metrics, ax: "Axes") -> None:
    assert metrics.reliability is not None
    count, confidence, accuracy = (
        values.numpy()
        for values in (metrics.reliability.count, metrics.reliability.confidence, metrics.reliability.accuracy)
    )
    share = 0.2 * count / count.max()
    ax.bar(confidence, share, width=0.035, color=GREY, alpha=0.3, linewidth=0, label="labels in the bin (scaled)")
    ax.vlines(confidence, confidence, accuracy, color=ORANGE, linewidth=2, alpha=0.6)
    ax.plot(confidence, accuracy, "o-", color=BLUE, linewidth=1.5, markersize=5, label=f"ECE {metrics.ece:.3f}")
    ax.set_xlabel("confidence")
    ax.set_ylabel("frequency of being right")


def referral_curve(
    metrics: Metrics | StructureMetrics, ax: "Axes | None" = None, *, by: By = "expected_dice"
) -> "Axes":
    """What is gained on the rest by handing the most uncertain cases to a human, against the share that is handed over.

    Args:
        metrics: of `evaluate`, with class labels: accuracy; or of `imaging.by_structure`: mean Dice of the cases.
        ax: where to draw; a new figure by default.
        by: of results by structure, which uncertainty ranks the cases.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from structvi import likelihoods, variationalize
        >>> bayes = variationalize(nn.Linear(3, 2), likelihoods.Categorical(), num_data=10)
        >>> referral_curve(bayes.evaluate([(torch.randn(9, 3), torch.zeros(9).long())])).get_ylabel()
        'accuracy on the rest'
    """
    if isinstance(metrics, StructureMetrics):
        found, what, words = metrics.referral(by), "mean Dice of the rest", f"by {by.replace('_', ' ')}"
        share, kept = found.share.numpy(), found.dice.numpy()
    else:
        _check_metrics("referral_curve", metrics)
        if metrics.risk_coverage is None or metrics.accuracy is None:
            raise ValueError("a referral curve is for class labels: for numbers look at risk_coverage(metrics)")
        found, what, words = None, "accuracy on the rest", "most uncertain first"
        curve = metrics.risk_coverage
        share, kept = 1 - curve.coverage.numpy(), 1 - curve.risk.numpy()
    ax = axes_of(ax)
    ax.plot(share, kept, color=BLUE, linewidth=1.8, label=words)
    if found is not None:
        ax.plot(share, found.ideal.numpy(), color=GREY, linewidth=1, linestyle=":", label="worst cases first")
    whole = kept[share.argmin()]
    ax.axhline(whole, color=GREY, linewidth=1, linestyle="--", label="random order")
    ax.set_xlabel("share referred to a human")
    ax.set_ylabel(what)
    ax.set_xlim(0, 1)
    return finish(ax, loc="best")


def dice_by_structure(metrics: StructureMetrics, ax: "Axes | None" = None) -> "Axes":
    """Dice of every case, structure by structure, beside what the posterior expected of it.

    Args:
        metrics: of `imaging.by_structure` or `imaging.structures_of`.
        ax: where to draw; a new figure by default.
    """
    if not isinstance(metrics, StructureMetrics):
        raise TypeError(f"dice_by_structure expects results of imaging.by_structure, got {type(metrics).__name__}")
    ax = axes_of(ax)
    for k in range(len(metrics.names)):
        for shift, values, colour in ((-0.15, metrics.dice, BLUE), (0.15, metrics.expected_dice, ORANGE)):
            own = values[:, k][~values[:, k].isnan()]
            ax.plot([k + shift] * len(own), own.numpy(), "o", color=colour, alpha=0.35, markersize=4)
            words = {BLUE: "Dice, mean", ORANGE: "expected, mean"}[colour] if k == 0 else None
            ax.plot([k + shift], [own.mean()] if len(own) else [], "_", color=colour, markersize=22, label=words)
    ax.set_xticks(range(len(metrics.names)), metrics.names)
    ax.set_xlim(-0.5, len(metrics.names) - 0.5)
    ax.set_ylim(0, 1.02)
    ax.set_ylabel("Dice")
    return finish(ax, loc="lower right")


def risk_coverage(metrics: Metrics, ax: "Axes | None" = None) -> "Axes":
    """The mean risk of the most certain observations against their fraction: rising where uncertainty is worth it.

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
    coverage, risk = metrics.risk_coverage.coverage.numpy(), metrics.risk_coverage.risk.numpy()
    ax.plot(coverage, risk, color=BLUE, linewidth=1.8, label=f"most certain first, area {metrics.aurc:.4g}")
    ax.axhline(risk[-1], color=GREY, linewidth=1, linestyle="--", label="random order")
    ax.set_xlabel("coverage: fraction kept")
    ax.set_ylabel("mean squared error" if metrics.accuracy is None else "error rate")
    ax.set_xlim(0, 1)
    ax.set_ylim(bottom=0)
    return finish(ax, loc="best")


def uncertainty_map(
    image: Tensor,
    predictive: Predictive | Maps,
    index: int = 0,
    ax: "Sequence[Axes] | None" = None,
    *,
    at: Sequence[int] | None = None,
) -> "Sequence[Axes]":
    """An image beside its epistemic and aleatoric uncertainty, pixel by pixel, each on a colour scale from 0.

    For labels these are mutual information and expected entropy in nats, for numbers standard deviations. Of a volume
    three planes through one voxel, a row for each; `imaging.write_page` makes a page with sliders.

    Args:
        image: the inputs, [B, H, W] or [B, channels, H, W]; of three or more channels the first three are colours. Of
            volumes [B, channels, x, y, z], the first channel is shown.
        predictive: of these inputs, per pixel; or the maps of one image [channels, ..], of `imaging.predict_maps`.
        index: which of the B.
        ax: three axes, of a volume nine; a new figure by default.
        at: the voxel (x, y, z) where a volume is cut; by default where it is most uncertain, epistemically.

    Example:
        >>> import torch
        >>> from structvi import likelihoods
        >>> pred = Predictive(torch.randn(8, 1, 3, 6, 6), torch.full((8,), 1 / 8), likelihoods.Categorical())
        >>> len(uncertainty_map(torch.rand(1, 1, 6, 6), pred))
        3
    """
    if isinstance(predictive, Maps):
        if len(predictive.shape) == 3:
            return _volume_map(image, predictive, at, ax)
        picture, labels, maps = image, predictive.unit == "nats", (predictive.epistemic, predictive.aleatoric)
    elif image.ndim == 5:
        return _volume_map(image[index], Maps.of(predictive, index), at, ax)
    else:
        picture, labels = image[index], isinstance(predictive.components, Categorical | Bernoulli)
        maps = (predictive.epistemic.sqrt(), predictive.aleatoric.sqrt())
        if labels:
            maps = (predictive.mutual_information, predictive.expected_entropy)
        maps = tuple(values[index] for values in maps)
    titles = ("epistemic: std", "aleatoric: std")
    if labels:
        titles = ("epistemic: mutual information", "aleatoric: expected entropy")
    epistemic, aleatoric = (_plane(values).numpy() for values in maps)
    if ax is None:
        _, axes = _pyplot().subplots(1, 3, figsize=(10, 3.4), layout="constrained")
        ax = list(axes)
    if len(ax) != 3:
        raise ValueError(f"uncertainty_map draws three pictures: give three axes, got {len(ax)}")
    picture = picture.detach().cpu().float()
    picture = picture.movedim(0, -1)[..., :3] if picture.ndim == 3 and picture.shape[0] >= 3 else _plane(picture)
    low, high = picture.min(), picture.max()
    ax[0].imshow(((picture - low) / (high - low).clamp(min=1e-12)).numpy(), cmap="gray", interpolation="nearest")
    ax[0].set_title("input", fontsize=10)
    for one, values, title in zip(ax[1:], (epistemic, aleatoric), titles, strict=True):
        shown = one.imshow(
            values, cmap="viridis", vmin=0, vmax=max(float(values.max()), 1e-12), interpolation="nearest"
        )
        one.figure.colorbar(shown, ax=one, shrink=0.8, pad=0.02)
        one.set_title(title, fontsize=10)
    for one in ax:
        one.set_xticks([])
        one.set_yticks([])
    return ax


def _volume_map(volume: Tensor, maps: Maps, at: Sequence[int] | None, ax: "Sequence[Axes] | None") -> "Sequence[Axes]":
    """Rows: cut at x, y and z; columns: the input, epistemic, aleatoric."""
    if volume.ndim != 4 or tuple(volume.shape[1:]) != maps.shape:
        raise ValueError(f"expected a volume [channels, x, y, z] of {maps.shape} voxels, got {tuple(volume.shape)}")
    at = most_uncertain(maps.epistemic) if at is None else at
    check_voxel(at, maps.shape)
    if ax is None:
        _, axes = _pyplot().subplots(3, 3, figsize=(9.5, 9), layout="constrained")
        ax = list(axes.flat)
    if len(ax) != 9:
        raise ValueError(f"uncertainty_map of a volume draws nine pictures: give nine axes, got {len(ax)}")
    picture = volume[0].detach().cpu().float()
    for column, (values, words) in enumerate(
        ((picture, "input"), (maps.epistemic, "epistemic"), (maps.aleatoric, "aleatoric"))
    ):
        low, high = (float(values.min()), float(values.max())) if column == 0 else (0.0, float(values.max()))
        for axis, plane in enumerate(planes(values, at)):
            one = ax[3 * axis + column]
            shown = one.imshow(
                plane.numpy(), cmap="viridis" if column else "gray", vmin=low, vmax=max(high, low + 1e-12),
                interpolation="nearest",
            )  # fmt: skip
            right, up = (AXES[i] for i in PLANES[axis])
            one.set(xticks=[], yticks=[], xlabel=f"{right} →", ylabel=f"{up} ↑")
            one.set_title(f"{words}, {AXES[axis]} = {at[axis]}", fontsize=10)
            if column and axis == 0:
                one.figure.colorbar(shown, ax=one, shrink=0.8, pad=0.02, label=maps.unit)
    return ax


def _colour(k: int) -> str:
    return COLOURS[k % len(COLOURS)]


def _check_metrics(name: str, metrics: Any) -> None:
    if not isinstance(metrics, Metrics):
        raise TypeError(
            f"{name} expects Metrics, got {type(metrics).__name__}; a posterior makes them of data with targets: "
            "posterior.evaluate(loader)"
        )


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


def _column(what: str, values: Tensor, count: int) -> Tensor:
    if values.numel() != count:
        raise ValueError(
            f"predictive_band shows one number against one input: {what} must have {count} elements, "
            f"got {tuple(values.shape)}"
        )
    return values.detach().cpu().double().reshape(-1)


def _plane(values: Tensor) -> Tensor:
    """[H, W], from [H, W] or [channels, H, W] by the mean over channels."""
    values = values.detach().cpu().float()
    if values.ndim not in (2, 3):
        raise ValueError(
            f"uncertainty_map needs one value per pixel, [H, W] or [channels, H, W], got {tuple(values.shape)}"
        )
    return values if values.ndim == 2 else values.mean(0)
