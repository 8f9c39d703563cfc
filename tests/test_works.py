"""The table of what works says what the code does: a fixed part of its cells is run again."""

import random

import pytest
from works import ARCHITECTURES, FAMILIES, FEATURES, NO_GPU, PAGE, cell, page, run, table

CELLS = [(architecture, family) for architecture in ARCHITECTURES for family in FAMILIES]


def written():
    """{architecture: {family: text}} of the page's table for a CPU."""
    text = PAGE.read_text().split("## On a CPU")[1].split("## On a GPU")[0]
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert rows[0][1:] == list(FAMILIES)
    return {name: dict(zip(FAMILIES, cells, strict=True)) for name, *cells in rows[2:]}


def test_the_page_has_every_cell_and_the_words_of_the_script():
    assert list(written()) == list(ARCHITECTURES)
    good = {"draws": "vmap", **dict.fromkeys(FEATURES, "")}
    results = {name: dict.fromkeys(FAMILIES, good) for name in ARCHITECTURES}
    assert PAGE.read_text().split("## On a CPU")[0] == page(results).split("## On a CPU")[0]


# eight of the 88, and the ones that do not hold
@pytest.mark.parametrize(("architecture", "family"), random.Random(0).sample(CELLS, 8))
def test_a_cell_is_what_the_code_does(architecture, family):
    result = run(architecture, family)
    assert written()[architecture][family] == cell(result), result


def test_what_does_not_hold_does_not():
    """A cell that has come to hold is one that the page does not yet know of."""
    for architecture, row in written().items():
        for family, text in row.items():
            if text not in ("vmap", "loop"):
                result = run(architecture, family)
                assert cell(result) == text
                for feature in FEATURES:
                    if result[feature]:
                        assert f"- {architecture}, {family}, {feature}: {result[feature]}" in PAGE.read_text()


def test_a_failure_is_named_with_its_reason():
    good = {"draws": "vmap", **dict.fromkeys(FEATURES, "")}
    results = {name: dict.fromkeys(FAMILIES, good) for name in ARCHITECTURES}
    results["LSTM"] = {**results["LSTM"], "MAP": {**good, "bfloat16": "no such kernel"}}
    results["GRU"] = {**results["GRU"], "MAP": {**good, "fit": "refused", "predict": "refused"}}
    text = table(results)
    assert "| LSTM | vmap, no bfloat16 | vmap |" in text
    assert "- LSTM, MAP, bfloat16: no such kernel" in text
    assert "| GRU | does not fit | vmap |" in text
    assert NO_GPU in page(results)
    assert "Run on: some GPU" in page(results, {"device": "some GPU", "results": results})
