"""The page with sliders: what is in it."""

import json
import re
import zlib
from base64 import b64decode

import numpy as np
import pytest
import torch

from structvi import imaging
from structvi.imaging.maps import Maps

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
