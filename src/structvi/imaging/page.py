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

import numpy as np
from torch import Tensor

from ..util import __version__
from .maps import Maps, most_uncertain

#: voxels on a side that are shown; of longer sides every second, third, .. voxel, which keeps pages below about 20 MB
LONGEST = 192
#: of the input's values this share is darker than the darkest grey, and lighter than the lightest
BEYOND = 0.005


def write_page(
    path: str | os.PathLike[str],
    volume: Tensor,
    maps: Maps,
    *,
    truth: Tensor | None = None,
    names: Sequence[str] | None = None,
    spacing: Sequence[float] = (1.0, 1.0, 1.0),
    title: str = "Uncertainty",
) -> Path:
    """Write a page with three planes of a volume, its maps over them, and a slider for each plane.

    The page holds its data and its script, asks for nothing from the network and works on a phone. A click into a plane
    moves the other two there and shows the numbers of that voxel. Values are kept in 256 steps; sides of more than 192
    voxels are thinned out.

    Args:
        path: the file, .html.
        volume: the network's input, [channels, x, y, z]; the first channel is shown.
        maps: of `predict_maps`.
        truth: the annotation, [x, y, z] or [1, x, y, z], if there is one.
        names: of the classes, the background too.
        spacing: the size of a voxel on each axis.
        title: of the page.

    Example:
        >>> import tempfile, torch
        >>> maps = Maps(torch.rand(2, 6, 6, 6).softmax(0), torch.rand(6, 6, 6), torch.rand(6, 6, 6), "classes")
        >>> path = write_page(os.path.join(tempfile.mkdtemp(), "case.html"), torch.rand(1, 6, 6, 6), maps)
        >>> "<canvas" in path.read_text()
        True
    """
    path, shape = Path(path), maps.shape
    came = [tuple(one.shape) for one in (volume, truth) if one is not None]
    if len(shape) != 3 or came[0][1:] != shape or came[-1][-3:] != shape:
        raise ValueError(f"expected a volume [channels, x, y, z] with the maps' voxels {shape}, got {came}")
    step = [-(-length // LONGEST) for length in shape]
    thin = (..., *(slice(None, None, s) for s in step))
    layers = [_grey("input", volume[0][thin])]
    if maps.kind == "classes":
        layers.append(_classes("label", maps.label[thin], names))
    elif maps.kind == "binary":
        layers.append(_layer("probability", "amount", maps.mean.amax(0)[thin], 0.0, 1.0))
    else:
        layers.append(_grey("mean", maps.mean[0][thin]))
    if truth is not None:
        layers.append(_classes("annotation", truth.reshape(shape)[thin], names))
    for name in ("uncertainty", "epistemic", "aleatoric"):  # each from 0 to its largest value, which the legend says
        values = getattr(maps, name)[thin].nan_to_num(0.0)
        layers.append(_layer(name, "amount", values, 0.0, float(values.max()), maps.unit))
    data = {
        "shape": list(maps.epistemic[thin].shape),
        "spacing": [float(a) * s for a, s in zip(spacing, step, strict=True)],
        "step": step,
        "start": most_uncertain(maps.uncertainty[thin]),
        "layers": layers,
    }
    page, script = (files("structvi.imaging").joinpath(name).read_text("utf-8") for name in ("page.html", "slider.js"))
    note = f" Of the voxels {' × '.join(f'1/{s}' for s in step)} are shown." if max(step) > 1 else ""
    content = json.dumps(data).replace("<", "\\u003c")
    parts = {"title": escape(title), "version": __version__, "note": note, "data": content, "script": script}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page % parts, encoding="utf-8")
    return path


def _packed(steps: np.ndarray) -> str:
    """Return whole numbers from 0 to 255, compressed."""
    return b64encode(zlib.compress(steps.clip(0, 255).astype(np.uint8).tobytes(), 9)).decode()


def _layer(name: str, kind: str, values: Tensor, low: float, high: float, unit: str = "") -> dict[str, Any]:
    steps = np.round((values.detach().cpu().nan_to_num(low).numpy() - low) / max(high - low, 1e-12) * 255)
    return {"name": name, "kind": kind, "low": low, "high": high, "unit": unit, "data": _packed(steps)}


def _grey(name: str, values: Tensor) -> dict[str, Any]:
    """Return a layer from the darkest to the lightest, but for a few voxels."""
    finite = values[values.isfinite()].detach().cpu().numpy()
    low, high = np.quantile(finite, (BEYOND, 1 - BEYOND)).tolist() if len(finite) else (0.0, 1.0)
    return _layer(name, "grey", values, low, high)


def _classes(name: str, labels: Tensor, names: Sequence[str] | None) -> dict[str, Any]:
    """Return a layer of labels; classes without a name have their number."""
    words = [f"class {c}" for c in range(min(int(labels.max()) + 1, 256))]
    given = list(names or ())[: len(words)]
    return {"name": name, "kind": "class", "names": given + words[len(given) :], "data": _packed(labels.cpu().numpy())}
