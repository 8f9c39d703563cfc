"""The costs that `structvi families` prints, against what the classes' own words say."""

import pytest

from structvi_paper.costs import SIZES, costs, formula, table


@pytest.fixture(scope="module")
def rows():
    return {cost.family: cost for cost in costs()}


@pytest.mark.parametrize(
    ("family", "parameters", "draws", "says"),
    [
        ("MAP", "P", "1 / 1 / 1", (False, False, False)),
        ("MCDropout", "P", "1 / 2 / 2", (False, True, False)),
        ("MeanField", "2P", "1 / 2 / 2", (True, False, False)),
        ("LowRankNormal(K)", "PK + 2P", "1 / 2 / 4K", (True, False, True)),
        ("LowRankPrecision(K)", "PK + 2P", "1 / 2 / 4K", (True, False, True)),
        ("FullNormal", "0.5P² + 1.5P", "1 / 2 / 2", (True, False, True)),
        ("Mixture, 2 × LowRankNormal(K)", "2PK + 4P + 2", "2 / 4 / 8K", (True, True, True)),
    ],
)
def test_costs(rows, family, parameters, draws, says):
    cost = rows[family]
    assert (cost.parameters, cost.draws) == (parameters, draws)
    assert (cost.density, cost.multimodal, cost.covariance) == says


def test_a_structured_draw_is_linear_in_the_weights(rows):
    # θ = Fz and Fᵀx: two products of P × K, two flops an element
    assert rows["LowRankNormal(K)"].flops == "4PK"


def test_a_count_that_is_no_polynomial_is_refused():
    with pytest.raises(ValueError, match="no polynomial"):
        formula({(P, K): P * P * K for P, K in SIZES})


def test_the_table_has_a_line_for_each(rows):
    lines = table().splitlines()
    assert all(any(line.startswith(name) for line in lines) for name in rows)
    assert max(map(len, lines)) <= 130
