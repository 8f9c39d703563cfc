"""The rules of `benchmarks.networks_widths`: the first is that of the library, and each does what its name says."""

import pytest
import torch

from benchmarks import networks_rules as rules
from structvi.training import candidates


def record(spread=(0.0, 0.3, 1.0), rows=400, seed=0, sure=2.0):
    """Labels of logits, which a network makes `sure` times as large; candidates are that divided by 1 + spread."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    held_out = {"network": (sure * logits).log_softmax(1)}
    held_out |= {f"all {one:g}": (sure * logits / (1 + one)).log_softmax(1) for one in spread}
    parts = ("held out", "test", "shift")
    return {"name": "made 0", "labels": dict.fromkeys(parts, labels), "log_p": dict.fromkeys(parts, held_out)}


def test_the_rule_of_the_library_is_among_them():
    widths = rules.NOW.groups([f"all {candidates.WIDTHS[-1] / candidates.RATIO**k:g}" for k in range(candidates.PARTS)])
    assert [float(name.split()[1]) for name in widths[-1]] == pytest.approx(
        [part.width for part in candidates.Candidate("", candidates.WIDTHS[-1], True, 1.0).parts(candidates.PARTS)]
    )


def test_a_mixture_is_that_of_probabilities():
    one = record()
    mixed = rules.gain(one, rules.Kept(("all 0", "all 1")), "test")
    labels = one["labels"]["test"].unsqueeze(1)
    p = [one["log_p"]["test"][name].gather(1, labels).exp() for name in ("all 0", "all 1", "network")]
    assert mixed == pytest.approx(float((((p[0] + p[1]) / 2).log() - p[2].log()).mean()), rel=1e-9)


def test_a_network_that_is_too_sure_gets_the_width_that_suits_it():
    # candidates are the network at temperatures 1, 1.3 and 2, of which 2 is the true one
    assert rules.ALIKE(record(), 400).group == ("all 1",)


def test_a_network_that_is_not_sure_enough_is_kept():
    assert rules.ALIKE(record(sure=0.5), 400).group == (rules.NETWORK,)


def test_the_librarys_rule_puts_a_temperature_on_top():
    """Candidates are as over-confident as the network: all have twice the true logits."""
    library = rules.OfLibrary("now", rules.alike)
    kept = library(record((0.0, 0.001), 2000), 2000)
    assert kept.temperature == pytest.approx(2.0, abs=0.2)
    assert rules.gain(record((0.0, 0.001), 2000), kept, "test") > 0.05
    assert library(record(), 400) == rules.Kept(("all 1",))


def test_few_rows_and_a_bound_keep_what_is_narrower():
    """Chance makes the best of few rows: without the bound never narrower than with it, somewhere wider."""
    widths = [rules.NETWORK, "all 0", "all 0.3", "all 1", "all 3"]
    kept = []
    for seed in range(20):
        one = record((0.0, 0.3, 1.0, 3.0), 400, seed, sure=1.5)
        kept.append([widths.index(rule(one, 20).group[0]) for rule in rules.RULES[:2]])
    assert all(bound <= free for bound, free in kept)
    assert any(bound < free for bound, free in kept)


def test_labels_are_those_of_the_temperature_that_they_say():
    one = record(rows=4000)
    network = one["log_p"]["held out"]["network"]
    p = rules.tempered(network, one["labels"]["held out"])
    true = (network / 2).softmax(1)
    # the 5 % quantile of T is below 2, with 4000 rows by less than a tenth
    assert float((p - true).abs().mean()) < 0.02
    assert float(p.max(1).values.mean()) > float(true.max(1).values.mean())


def test_the_table_has_all_rules():
    text = rules.compared([record()], 400, rules.RULES[:4])
    assert len(text.splitlines()) == 6
    assert "| all tensors alike (at first) | +" in text


def test_with_a_wider_last_layer_the_product_of_both_widths_counts():
    names = [
        "all 0.01",
        "all 1",
        *(f"rest {width:g}, last layer {last:g}" for width, all_ in rules.LAST for last in all_),
    ]
    found = [group[0] for group in rules.wider_last(names)]
    assert found[0] == "all 0.01"  # 0.0001
    assert found[-2:] == ["rest 0.1, last layer 4", "all 1"]  # 0.4 and 1
