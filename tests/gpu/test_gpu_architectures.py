"""Every architecture with every family the whole way, as in docs/works.md."""

import json

import pytest

from tests.works import ARCHITECTURES, FAMILIES, FEATURES, run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cell(architecture, family, device, record_property):
    result = run(architecture, family, str(device))
    record_property("works", json.dumps([architecture, family, result]))
    assert {feature: result[feature] for feature in FEATURES if result[feature]} == {}
