"""Every law of every family, where the kernels run."""

import pytest
import torch

from structvi.testing import LAWS, check_family
from tests.families.test_laws import FAMILIES, NOT_APPLICABLE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_law(name, law, dtype, device):
    verdict = check_family(FAMILIES[name], laws=[law], device=device, dtype=dtype)[law]
    expected = "not applicable: " if law in NOT_APPLICABLE.get(name, ()) else "held"
    assert verdict.startswith(expected)
