"""The report page: what it says, and that names cannot break it."""

import re

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from structvi_tables.command import fit_file  # noqa: E402

NASTY = "<script>alert('x')</script> & \"quoted\" " + "long" * 40


@pytest.fixture(scope="module", params=["amounts", "classes"])
def page(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2))
    y = x @ [2.0, 1.0] + 0.1 * rng.normal(size=60)
    target = y if request.param == "amounts" else np.where(y > 0, "<b>yes</b>", "no")
    pd.DataFrame({NASTY: x[:, 0], "b": x[:, 1], "y": target}).to_csv(folder / "a.csv", index=False)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("training.STEPS", 20),
            ("training.LOOK", 10),
            ("fitting.FOLDS", 2),
        ):
            patch.setattr(f"structvi_tables.{name}", value)
        patch.setattr("structvi_tables.choosing.WIDTH", 8)
        fitted = fit_file(folder / "a.csv", "y", noise="Gaussian")
    fitted.save(folder)
    return request.param, (folder / "report.html").read_text()


def test_it_says_what_there_is_to_know(page):
    kind, text = page
    for words in ("Log-likelihood of 12 test rows", "nats a row", "Which rows are uncertain", "small weights" if kind == "classes" else "additive model",
                  "How the table was read", "Models that were tried", "gradient boosting", "seed 0"):  # fmt: skip
        assert words in text
    assert ("ridge regression" in text) == (kind == "amounts")
    assert ("logistic regression" in text) == (kind == "classes")


def test_names_of_columns_are_text(page):
    _, text = page
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "<b>yes" not in text
    assert not re.search(r"(src|href)=.(?!data:)", text)
