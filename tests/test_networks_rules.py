"""The rules of `benchmarks.networks_widths`: the first is that of the library, and each does what its name says."""

import pytest
import torch

from benchmarks import networks_rules as rules
from structvi.training.held_out import HeldOut


def record(spread=(0.0, 0.3, 1.0), rows=400, seed=0, sure=2.0):
    """Labels of logits, which a network makes `sure` times as large; candidates are that divided by 1 + spread."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    held_out = {"network": (sure * logits).log_softmax(1)}
    held_out |= {f"all {one:g}": (sure * logits / (1 + one)).log_softmax(1) for one in spread}
    off = {name: float(-(log_p.exp() * log_p).sum(1).mean()) for name, log_p in held_out.items()}
    densities = {name: float(log_p.gather(1, labels.unsqueeze(1)).mean()) for name, log_p in held_out.items()}
    return {"name": "made 0", "labels": labels, "held out": held_out, "off": off,
            "densities": {"test": densities, "shift": densities}}  # fmt: skip


def test_the_bound_is_the_librarys():
    generator = torch.Generator().manual_seed(0)
    ones = torch.ones(50, dtype=torch.float64)
    one, two = (HeldOut(torch.randn(50, generator=generator, dtype=torch.float64), ones) for _ in range(2))
    assert rules.least_gain(one, two, 1.6449) == pytest.approx(one.least_gain_over(two), rel=1e-9)


def test_a_network_that_is_too_sure_gets_the_width_that_suits_it():
    # candidates are the network at temperatures 1, 1.3 and 2, of which 2 is the true one
    assert rules.ALIKE(record(), 400) == "all 1"


def test_a_network_that_is_not_sure_enough_is_kept():
    assert rules.ALIKE(record(sure=0.5), 400) == rules.NETWORK


def test_few_rows_and_a_bound_keep_what_is_narrower():
    """Chance makes the best of few rows: without the bound never narrower than with it, somewhere wider."""
    widths = [rules.NETWORK, "all 0", "all 0.3", "all 1", "all 3"]
    kept = []
    for seed in range(20):
        one = record((0.0, 0.3, 1.0, 3.0), 400, seed, sure=1.5)
        kept.append([widths.index(rule(one, 20)) for rule in rules.RULES[:2]])
    assert all(bound <= free for bound, free in kept)
    assert any(bound < free for bound, free in kept)


def test_labels_are_those_of_the_temperature_that_they_say():
    one = record(rows=4000)
    p = rules.tempered(one["held out"]["network"], one["labels"])
    true = (one["held out"]["network"] / 2).softmax(1)
    # the 5 % quantile of T is below 2, with 4000 rows by less than a tenth
    assert float((p - true).abs().mean()) < 0.02
    assert float(p.max(1).values.mean()) > float(true.max(1).values.mean())


def test_the_table_has_all_rules():
    text = rules.compared([record()], 400, rules.RULES[:4])
    assert len(text.splitlines()) == 6
    assert "| all tensors alike (before) | +" in text


def test_with_a_wider_last_layer_the_product_of_both_widths_counts():
    one = record((0.0, 1.0))
    for width, wider in rules.LAST:
        for last in wider:
            one["held out"][f"rest {width:g}, last layer {last:g}"] = one["held out"]["all 1"]
    assert rules.NOW.candidates(one)[-1] == "all 1"  # 1·1, the widest of the others is 0.1·4
    del one["held out"]["all 1"]
    assert rules.NOW(one, 400) == "rest 0.1, last layer 4"
