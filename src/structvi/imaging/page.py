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
from .maps import Maps
from .planes import most_uncertain

#: voxels on a side that are shown; of longer ones every second, third, .. voxel
LONGEST = 192
#: darkest and lightest of the input: these quantiles
WINDOW = (0.005, 0.995)

STYLE = """
:root { color-scheme: dark; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 80rem; padding: .8rem; font: 16px/1.45 system-ui, sans-serif; color: #e8e8e8;
  background: #16181b; overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; margin: .2rem 0; } p { margin: .4rem 0; max-width: 60rem; }
.planes { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 18rem), 1fr)); gap: 1rem; }
figure { margin: 0; min-width: 0; } figcaption { font-variant-numeric: tabular-nums; }
canvas { width: 100%; height: auto; object-fit: fill; image-rendering: pixelated; display: block; }
figure canvas { cursor: crosshair; }
input[type=range] { width: 100%; }
.controls { display: flex; flex-wrap: wrap; gap: .6rem 1.4rem; align-items: center; margin: .6rem 0; }
.controls label { display: flex; gap: .5rem; align-items: center; } .controls input { width: 9rem; }
select { font: inherit; max-width: 100%; } .bar { height: .7rem; width: 9rem; border: 1px solid #555; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .1rem .8rem .1rem 0; text-align: left; }
.muted { color: #9a9a9a; font-size: .9rem; }
""".strip()


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
        layers.append(_amount("probability", maps.mean.amax(0)[thin], "", 1.0))
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
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_html(title, data, step), encoding="utf-8")
    return path


def _packed(values: Tensor) -> str:
    return b64encode(zlib.compress(values.to(torch.uint8).contiguous().numpy().tobytes(), 9)).decode()


def _steps(values: Tensor, low: float, high: float) -> Tensor:
    return ((values.float().nan_to_num(low) - low) / max(high - low, 1e-12) * 255).round().clamp(0, 255)


def _grey(name: str, values: Tensor) -> dict[str, Any]:
    values = values.detach().cpu().float()
    some = values[values.isfinite()]
    some = some[:: max(1, some.numel() // 10**6)]
    low, high = (float(some.quantile(q)) for q in WINDOW) if some.numel() else (0.0, 1.0)
    return {
        "name": name,
        "kind": "grey",
        "low": low,
        "high": high,
        "unit": "",
        "data": _packed(_steps(values, low, high)),
    }


def _amount(name: str, values: Tensor, unit: str, high: float | None = None) -> dict[str, Any]:
    """From 0 to the largest, which the legend says."""
    top = float(values.nan_to_num(0.0).max()) if high is None else high
    return {
        "name": name,
        "kind": "amount",
        "low": 0.0,
        "high": top,
        "unit": unit,
        "data": _packed(_steps(values, 0, top)),
    }


def _classes(name: str, labels: Tensor, names: Sequence[str] | None) -> dict[str, Any]:
    count = int(labels.max()) + 1
    words = [names[c] if names is not None and c < len(names) else f"class {c}" for c in range(min(count, 256))]
    return {"name": name, "kind": "class", "names": words, "data": _packed(labels.cpu().clamp(0, 255))}


def _html(title: str, data: dict[str, Any], step: Sequence[int]) -> str:
    script = files("structvi.imaging").joinpath("slider.js").read_text(encoding="utf-8")
    thinned = max(step) > 1 and " × ".join(f"1/{s}" for s in step)
    note = f" Of the voxels {thinned} are shown." if thinned else ""
    content = json.dumps(data).replace("<", "\\u003c")
    planes = "\n".join(
        f'<figure><figcaption><span id="at{a}"></span></figcaption><canvas id="plane{a}"></canvas>'
        f'<input type="range" id="slide{a}" min="0" value="0" aria-label="{axis}"></figure>'
        for a, axis in enumerate("xyz")
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>{escape(title)}: structvi</title><style>{STYLE}</style></head>
<body>
<h1>{escape(title)}</h1>
<p>Epistemic uncertainty is what more training data would remove; aleatoric is what they would not: noise, and
borders that annotators draw in different ways. Click into a plane to move the others there.</p>
<div class="controls"><label>over the input <select id="layer"></select></label>
<label>opacity <input type="range" id="opacity" min="0" max="100" value="75"></label>
<label><span id="low"></span><canvas id="bar" class="bar" width="128" height="1"></canvas><span id="high"></span>
</label></div>
<div class="planes">
{planes}
</div>
<table id="values"></table>
<p class="muted">structvi {__version__}.{note} Values in 256 steps.</p>
<noscript><p>The planes are drawn by a script in this page, which is switched off here.</p></noscript>
<script type="application/json" id="data">{content}</script>
<script>
{script}</script>
</body></html>
"""
