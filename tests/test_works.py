"""Architectures with families the whole way, on a CPU; `make test-gpu` takes every pair on a GPU."""

import pytest

from tests.works import ARCHITECTURES, FAMILIES, run


@pytest.mark.slow
@pytest.mark.parametrize("family", ["LowRankNormal", "Mixture", "PerLayer"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_feature_holds(architecture, family):
    assert family in FAMILIES
    assert run(architecture, family) == {}
