"""The page with sliders: what is in it, and what a browser makes of it at two widths."""

import json
import re
import zlib
from base64 import b64decode

import numpy as np
import pytest
import torch

from structvi import imaging
from structvi.imaging.maps import Maps
from tests.browser import browse_text, needs_browser

#: put into a copy of the page: what a reader sees before and after moving a slider and clicking into a plane
PROBE = """<script>
{const get = id => document.getElementById(id), three = [0, 1, 2];
const look = () => ({planes: three.map(a => get("plane" + a).toDataURL()),
  at: three.map(a => get("at" + a).textContent), values: get("values").innerText});
const wait = setInterval(() => {
  if (document.body.dataset.ready !== "yes") return;
  clearInterval(wait);
  const sizes = three.map(a => { const c = get("plane" + a), b = c.getBoundingClientRect();
    return [c.width, c.height, b.width, b.height]; });
  const first = look(), slide = get("slide2");
  slide.value = 1; slide.dispatchEvent(new Event("input"));
  const second = look(), c = get("plane2"), b = c.getBoundingClientRect();
  const [clientX, clientY] = [b.left + 0.99 * b.width, b.top + 0.01 * b.height];
  c.dispatchEvent(new MouseEvent("click", {clientX, clientY, bubbles: true}));
  const third = look(), choice = get("layer");
  choice.value = [...choice.options].find(o => o.text === "label").value; choice.dispatchEvent(new Event("input"));
  parent.postMessage(JSON.stringify({sizes, first, second, third, fourth: look(), low: get("low").textContent,
    page: document.documentElement.scrollWidth, width: window.innerWidth}), "*");
}, 20);}
</script></body>"""
NASTY = "</script><script>alert('x')</script> & \"quoted\""


def case():
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(2, 20, 16, 12, generator=generator).mul(4).softmax(0)
    epistemic = torch.zeros(20, 16, 12)
    epistemic[4:7, 5:8, 6:9] = 0.25
    maps = Maps(p, epistemic, torch.rand(20, 16, 12, generator=generator), "classes")
    return torch.randn(1, 20, 16, 12, generator=generator), maps


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    volume, maps = case()
    path = tmp_path_factory.mktemp("page") / "case.html"
    names = ["nothing", NASTY]
    imaging.write_page(path, volume, maps, truth=maps.label.unsqueeze(0), names=names, spacing=(1, 1, 2.5), title=NASTY)
    return path.read_text()


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_it_holds_the_maps_in_256_steps(page):
    data, (_, maps) = data_of(page), case()
    layers = {layer["name"]: layer for layer in data["layers"]}
    assert list(layers) == ["input", "label", "annotation", "uncertainty", "epistemic", "aleatoric"]
    assert data["start"] == [5, 6, 7]  # the middle of what is uncertain
    for name in ("uncertainty", "epistemic", "aleatoric"):
        values = np.frombuffer(zlib.decompress(b64decode(layers[name]["data"])), np.uint8).reshape(maps.shape)
        expected = getattr(maps, name)
        np.testing.assert_allclose(values / 255 * layers[name]["high"], expected, atol=layers[name]["high"] / 500)
    labels = np.frombuffer(zlib.decompress(b64decode(layers["label"]["data"])), np.uint8).reshape(maps.shape)
    np.testing.assert_array_equal(labels, maps.label)


def test_nothing_is_asked_from_elsewhere_and_names_are_text(page):
    assert page.count("<script") == 2
    assert "alert('x')</script>" not in page
    assert not re.search(r"(src|href)=.(?!data:)", page)
    assert "http" not in page


def test_long_sides_are_thinned_out(tmp_path):
    maps = Maps(torch.ones(1, 400, 4, 200), torch.rand(400, 4, 200), torch.rand(400, 4, 200), "binary")
    text = imaging.write_page(tmp_path / "a.html", torch.rand(1, 400, 4, 200), maps).read_text()
    data = data_of(text)
    assert data["shape"] == [134, 4, 100]
    assert data["spacing"] == [3.0, 1.0, 2.0]
    assert "1/3 × 1/1 × 1/2 are shown" in text


@needs_browser
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_draws_the_planes_and_moves_them(page, width, tmp_path):
    seen = browse_text(page.replace("</body>", PROBE, 1), width, tmp_path)
    assert seen["width"] == width
    assert seen["page"] <= width
    for (w, h, shown, high), expected in zip(seen["sizes"], [(16, 12), (20, 12), (20, 16)], strict=True):
        assert (w, h) == expected
        assert 150 < shown < width
        depth = 2.5 if h == 12 else 1.0  # of a voxel: its third axis is longer
        assert high / shown == pytest.approx(h * depth / w, rel=0.01)
    first, second, third, fourth = (seen[name] for name in ("first", "second", "third", "fourth"))
    assert [one.split(" ·")[0] for one in first["at"]] == ["x = 5", "y = 6", "z = 7"]
    assert "0.25 nats" in first["values"]
    assert second["at"][2].startswith("z = 1 ")
    assert second["planes"][2] != first["planes"][2]
    assert [one.split(" ·")[0] for one in third["at"]] == ["x = 19", "y = 15", "z = 1"]  # the upper right corner
    assert "0 nats" in third["values"]
    assert fourth["planes"] != third["planes"]
    assert seen["low"] == NASTY  # as text
