"""A volume and its uncertainty as one page: three planes with sliders, nothing from the network."""

import json
import os
import zlib
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..util import __version__
from .maps import Maps, most_uncertain

#: voxels on a side that are shown; of longer ones every second, third, .. voxel
LONGEST = 192
#: darkest and lightest of the input: these quantiles
WINDOW = (0.005, 0.995)


def write_page(
    path: str | os.PathLike[str],
    volume: Tensor,
    maps: Maps,
    *,
    truth: Tensor | None = None,
    names: Sequence[str] | None = None,
    spacing: Sequence[float] = (1.0, 1.0, 1.0),
    title: str = "Uncertainty",
    channel: int = 0,
) -> Path:
    """Three planes of a volume, its label, epistemic or aleatoric uncertainty over them, and a slider for each plane.

    The page holds its data and its script, asks for nothing from the network and works on a phone. A click into a plane
    moves the other two there and shows the numbers of that voxel. Values are kept in 256 steps; sides of more than 192
    voxels are thinned out.

    Args:
        path: the file, .html.
        volume: what the network saw, [channels, x, y, z].
        maps: of `predict_maps`.
        truth: the annotation, [x, y, z] or [1, x, y, z], if there is one.
        names: of the classes, the background too.
        spacing: the size of a voxel on each axis.
        title: of the page.
        channel: of the volume, to be shown.

    Example:
        >>> import tempfile
        >>> maps = Maps(torch.rand(2, 6, 6, 6).softmax(0), torch.rand(6, 6, 6), torch.rand(6, 6, 6), "classes")
        >>> path = write_page(os.path.join(tempfile.mkdtemp(), "case.html"), torch.rand(1, 6, 6, 6), maps)
        >>> "<canvas" in path.read_text()
        True
    """
    path, shape = Path(path), maps.shape
    if truth is not None and truth.ndim == 4 and len(truth) == 1:  # as MONAI has it
        truth = truth[0]
    if len(shape) != 3 or tuple(volume.shape[1:]) != shape or (truth is not None and tuple(truth.shape) != shape):
        came = "" if truth is None else f" and a truth {tuple(truth.shape)}"
        raise ValueError(
            f"expected a volume [channels, x, y, z] with the maps' voxels {shape}, got {tuple(volume.shape)}{came}; "
            "for images: plots.uncertainty_map"
        )
    step = [-(-length // LONGEST) for length in shape]
    thin = tuple(slice(None, None, s) for s in step)
    layers = [_grey("input", volume[channel][thin])]
    if maps.kind == "classes":
        layers.append(_classes("label", maps.label[thin], names))
    elif maps.kind == "binary":
        layers.append(_layer("probability", "amount", maps.mean.amax(0)[thin], 0.0, 1.0))
    else:
        layers.append(_grey("mean", maps.mean[0][thin]))
    if truth is not None:
        layers.append(_classes("annotation", truth[thin], names))
    layers += [_amount(name, getattr(maps, name)[thin], maps.unit) for name in ("epistemic", "aleatoric")]
    size = maps.epistemic[thin].shape
    data = {
        "shape": list(size),
        "spacing": [float(a) * s for a, s in zip(spacing, step, strict=True)],
        "step": step,
        "start": most_uncertain(maps.epistemic[thin]),
        "layers": layers,
    }
    page, script = (files("structvi.imaging").joinpath(name).read_text("utf-8") for name in ("page.html", "slider.js"))
    note = f" Of the voxels {' × '.join(f'1/{s}' for s in step)} are shown." if max(step) > 1 else ""
    content = json.dumps(data).replace("<", "\\u003c")
    parts = {"title": escape(title), "version": __version__, "note": note, "data": content, "script": script}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page % parts, encoding="utf-8")
    return path


def _packed(values: Tensor) -> str:
    return b64encode(zlib.compress(values.to(torch.uint8).contiguous().numpy().tobytes(), 9)).decode()


def _layer(name: str, kind: str, values: Tensor, low: float, high: float, unit: str = "") -> dict[str, Any]:
    values = values.detach().cpu().float().nan_to_num(low)
    steps = ((values - low) / max(high - low, 1e-12) * 255).round().clamp(0, 255)
    return {"name": name, "kind": kind, "low": low, "high": high, "unit": unit, "data": _packed(steps)}


def _grey(name: str, values: Tensor) -> dict[str, Any]:
    """From the darkest to the lightest, but for a few voxels."""
    some = values.detach().cpu().float().flatten()
    some = some[some.isfinite()]
    some = some[:: max(1, some.numel() // 10**6)]
    low, high = (float(some.quantile(q)) for q in WINDOW) if some.numel() else (0.0, 1.0)
    return _layer(name, "grey", values, low, high)


def _amount(name: str, values: Tensor, unit: str) -> dict[str, Any]:
    """From 0 to the largest, which the legend says."""
    return _layer(name, "amount", values, 0.0, float(values.nan_to_num(0.0).max()), unit)


def _classes(name: str, labels: Tensor, names: Sequence[str] | None) -> dict[str, Any]:
    known = list(names or ())[: int(labels.max()) + 1]
    words = known + [f"class {c}" for c in range(len(known), min(int(labels.max()) + 1, 256))]
    return {"name": name, "kind": "class", "names": words, "data": _packed(labels.cpu().clamp(0, 255))}
