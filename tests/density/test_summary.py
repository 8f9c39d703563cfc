"""The table of a fit: its numbers against direct formulas, its rows, and how it is printed."""

import pytest
import torch

import structvi as vi
from structvi.density.importance import psis


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape):
    return torch.randn(*shape, generator=seeded(), dtype=torch.float64)


def test_without_weights_the_numbers_are_those_of_torch():
    draws = {"a": normal(4001), "b": 3 + 2 * normal(4001, 2, 3)}
    summary = vi.Summary(draws)
    for name, x in draws.items():
        torch.testing.assert_close(summary.mean[name], x.mean(0))
        torch.testing.assert_close(summary.sd[name], x.std(0, correction=0))
        torch.testing.assert_close(summary.mcse[name], x.std(0, correction=0) / 4001**0.5)
        for p in (0.05, 0.5, 0.95):
            # both are between the same two order statistics or their neighbours, some 1/(4001 φ) ≈ 0.002 apart
            torch.testing.assert_close(summary.quantile(p)[name], x.quantile(p, 0), rtol=0, atol=0.02)
    low, high = summary.interval(0.9)
    torch.testing.assert_close(low["b"], summary.quantile(0.05)["b"])
    torch.testing.assert_close(high["b"], summary.quantile(0.95)["b"])


def test_weights_count_as_repetitions_do():
    x = normal(300)
    often = torch.randint(1, 5, (300,), generator=seeded())
    weighted = vi.Summary({"x": x}, often.double() / often.sum())
    repeated = vi.Summary({"x": x.repeat_interleave(often)})
    torch.testing.assert_close(weighted.mean["x"], repeated.mean["x"])
    torch.testing.assert_close(weighted.sd["x"], repeated.sd["x"])
    for p in (0.1, 0.5, 0.9):  # they interpolate otherwise, between neighbours of 300
        assert weighted.quantile(p)["x"].item() == pytest.approx(repeated.quantile(p)["x"].item(), abs=0.05)


def test_rows_and_columns():
    summary = vi.Summary({"mu": normal(100), "L": normal(100, 2, 2)})
    assert [row.name for row in summary.rows] == ["mu", "L[0, 0]", "L[0, 1]", "L[1, 0]", "L[1, 1]"]
    assert summary["L[1, 0]"].mean == summary.mean["L"][1, 0].item()
    with pytest.raises(KeyError, match="no row 'nu'"):
        _ = summary["nu"]


def test_numbers_are_printed_with_the_digits_that_matter():
    x = normal(1000)
    x = (x - x.mean()) / x.std(correction=0)
    draws = {"small": 1e-3 * x, "large": 5e4 + 1e3 * x, "tiny": 1e-9 * x, "constant": torch.ones(1000)}
    lines = {line.split()[0]: line.split()[1:] for line in str(vi.Summary(draws)).splitlines()[1:]}
    assert lines["small"][:2] == ["0.00000", "0.00100"]
    assert lines["large"][:2] == ["50000", "1000"]
    assert lines["tiny"][1] == "1e-09"
    assert lines["constant"] == ["1.00", "0.00", "1.00", "1.00", "1.00", "0.00"]
    long = str(vi.Summary({"z": normal(10, 200)})).splitlines()
    assert len(long) == 1 + 60 + 1
    assert ".. 140 more rows" in long[31]


def test_what_is_below_the_table():
    space = vi.Parameters({"a": torch.zeros(2, dtype=torch.float64)})
    target = vi.LogDensity(lambda p: -0.5 * p["a"].square().sum(), space)
    result = vi.fit_density(target, vi.FullNormal(), progress=False)
    of_q = result.summary(corrected=False, draws=500)
    assert str(of_q).endswith("Of q: 500 draws.")
    assert of_q.k is None
    weighted = result.summary()
    assert "Of the posterior: " in str(weighted)
    assert f"{result.correction().evaluations:,} evaluations. k̂ = " in str(weighted)
    assert weighted.rows == result.summary(corrected=True).rows
    bent = vi.LogDensity(lambda p: -0.5 * (p["a"][0] ** 2 + (10 * (p["a"][1] - p["a"][0] ** 2)) ** 2), space)
    short = vi.fit_density(bent, vi.FullNormal(), progress=False, max_evaluations=1300)
    assert not short.converged
    assert f"The fit: {short.verdict}" in str(short.summary())
    assert list(result.summary(select="a*").draws) == ["a"]


def test_the_table_as_a_frame():
    pytest.importorskip("pandas")
    draws = torch.randn(500, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    summary = vi.Summary({"a": draws[:, 0], "b": draws})
    frame = summary.to_dataframe()
    assert list(frame.index) == ["a", "b[0]", "b[1]"]
    assert list(frame.columns) == ["mean", "sd", "5%", "50%", "95%", "mcse"]
    assert frame.loc["b[1]", "mean"] == summary["b[1]"].mean


def test_a_table_names_the_numbers_that_it_may_have_wrong():
    """Two classes apart with Cauchy priors: sds of the posterior are infinite, and the table was off without a word."""
    x = torch.linspace(-2, 2, 20, dtype=torch.float64)

    def log_density(p):
        prior = -torch.log1p((p["a"] / 10).square()) - torch.log1p((p["b"] / 2.5).square()) - 0.5 * p["c"].square()
        return prior + torch.nn.functional.logsigmoid((x - 0.3).sign() * (p["a"] + p["b"] * x)).sum()

    names = dict.fromkeys("abc", torch.zeros((), dtype=torch.float64))
    result = vi.fit_density(vi.LogDensity(log_density, vi.Parameters(names)), vi.FullNormal(), progress=False)
    table = result.summary()
    assert table.k is not None
    assert table.k < 0.7
    assert "Mean, sd and quantiles may be off, too few draws are in the tails: a, b." in table.notes
    assert "may be off" not in str(result.summary(corrected=False, select="c"))


def test_impossible_draws_leave_k_as_it_is():
    """Weights of zero were taken for weights that are all equal, with k̂ = 0."""
    values = 3 * torch.randn(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = psis(values)[1]
    values[values.argmin()] = -torch.inf
    assert psis(values)[1] == pytest.approx(expected)
    assert expected > 0.7
