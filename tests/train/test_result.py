"""The record of a fit: columns, exports, plot and summary."""

import builtins

import matplotlib
import pytest
import torch

import structvi as vi
from structvi.objective import Estimate
from structvi.train.result import COLUMNS, FitResult, History, Skipped

matplotlib.use("Agg")


def history(steps=100):
    record = History()
    for step in range(steps):
        elbo = float("nan") if step == 7 else -100.0 / (step + 1)
        record.append(
            step=step, epoch=step // 10, elbo=elbo, standard_error=0.5, lr=0.01, gradient_norm=1.0, kl_weight=1.0,
            stage=1 if step < 40 else 2, seconds=0.1,
        )  # fmt: skip
    return record


def test_columns():
    record = history()
    assert len(record) == 100
    assert record["epoch"].tolist() == [step // 10 for step in range(100)]
    assert record.recent("elbo", 2).tolist() == pytest.approx([-100 / 99, -1.0])
    again = History.from_tensor(record.to_tensor())
    assert torch.equal(again.to_tensor().nan_to_num(0), record.to_tensor().nan_to_num(0))
    assert History().to_tensor().shape == (0, len(COLUMNS))
    assert len(History.from_tensor(History().to_tensor())) == 0
    with pytest.raises(ValueError, match="a history holds"):
        record["loss"]
    with pytest.raises(KeyError, match=r"^a history holds .*got 'loss'$"):
        record["loss"]
    with pytest.raises(ValueError, match="a history holds"):
        record.append(loss=1.0)


def test_dataframe():
    frame = history().to_dataframe()
    assert list(frame.columns) == list(COLUMNS)
    assert frame["step"].dtype.kind == "i"
    assert frame["elbo"].iloc[-1] == -1.0
    assert frame["elbo"].isna().sum() == 1


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    history().to_tensorboard(tmp_path)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = events.Scalars("fit/elbo")
    assert len(scalars) == 99  # not the step that was undone
    assert (scalars[-1].step, scalars[-1].value) == (99, -1.0)


def test_tensorboard_has_the_held_out_density(tmp_path):
    """Of every epoch, and of what was kept beside the network's, also where there was no step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record = history()
    record.set_last("held_out", -0.7)
    known = {"held_out": {"grown": -0.4}}
    for name, kept in {
        "steps": a_result(history=record, **known),
        "none": a_result(history=History(), **known),
    }.items():
        kept.to_tensorboard(tmp_path / name)
        files = list((tmp_path / name).iterdir())
        found = {}
        for file in files:
            events = EventAccumulator(str(file))
            events.Reload()
            found |= {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}
        assert found["fit/kept/held_out"] == pytest.approx(-0.4)
        assert found["fit/kept/elbo"] == pytest.approx(-2.5)
        assert ("fit/held_out" in found) == (name == "steps")


def test_plot():
    import matplotlib.pyplot as plt

    axes = history().plot()
    labels = [line.get_label() for line in axes.get_lines()]
    assert labels == ["each step", "mean of 1 steps", "factor starts"]
    assert axes.get_lines()[2].get_xdata()[0] == 40
    assert axes.get_ylabel() == "ELBO (nats)"
    assert axes.get_ylim()[0] > -20  # the first steps do not flatten the rest
    own = plt.figure().gca()
    assert history(3).plot(own) is own
    plt.close("all")


@pytest.mark.parametrize(
    ("method", "module", "extra"),
    [
        ("plot", "matplotlib", r"structvi\[plots\]"),
        ("to_dataframe", "pandas", "pip install pandas"),
        ("to_tensorboard", "torch.utils.tensorboard", "pip install tensorboard"),
    ],
)
def test_missing_extras_are_named(method, module, extra, monkeypatch, tmp_path):
    real = builtins.__import__

    def missing(name, *arguments, **keywords):
        if name.startswith(module):
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=extra):
        getattr(history(), method)(*([tmp_path] if method == "to_tensorboard" else []))


def a_result(**changes):
    before, after = Estimate.of(torch.tensor([-3.0, -5.0])), Estimate.of(torch.tensor([-2.0, -3.0]))
    values = dict(
        status=vi.Status.CONVERGED, verdict="converged", elbo=after, kept="grown",
        candidates={"before": before, "grown": after}, comparison="2 groups of draws", history=history(), steps=100,
        epochs=10.0, kl_weight=1.0, bound=True, exact=True, skipped=[Skipped(0, 7, "x")], notes=["a note"],
    )  # fmt: skip
    return FitResult(**(values | changes))


def test_details_say_all():
    text = a_result().details
    assert text.splitlines()[0] == "converged, after 100 steps (10 epochs)"
    assert "ELBO: -2.50 ± 0.50 nats (2 groups of draws)" in text
    assert "kept: grown; compared on common draws: before -4.00 ± 1.00 nats, grown -2.50 ± 0.50 nats" in text
    assert text.endswith("a note")
    assert Estimate.of(torch.tensor([1.0])).standard_error != Estimate.of(torch.tensor([1.0])).standard_error  # nan


@pytest.mark.parametrize("status", vi.Status)
def test_a_result_is_four_lines_and_the_last_says_what_to_do(status):
    """Whatever is known of the fit: the constant output, held-out data, notes."""
    for constant in (None, -9.0):
        for held_out in ({}, {"held_out": {"grown": -0.4}}):
            for notes in ([], ["one"], ["one", "two"]):
                result = a_result(status=status, constant=constant, notes=notes, **held_out)
                lines = str(result).splitlines()
                assert len(lines) == 4
                assert lines[0].startswith(result.verdict)
                assert any("ELBO: -2.50 ± 0.50 nats" in line for line in lines)
                assert any("held-out log density: -0.4000" in line for line in lines) == bool(held_out)
                assert lines[3].startswith(f"next: {result.next_step}")
                assert len(result.next_step) > 15
                assert (f"{len(notes)} notes: print" in lines[3] or "(a note: print" in lines[3]) == bool(notes)
                assert all(note in result.details for note in notes)


def test_what_to_do_follows_what_came_out():
    assert "fit longer" in a_result(status=vi.Status.IMPROVING).next_step
    assert "diagnose" in a_result(constant=-9.0).next_step
    for status in (vi.Status.CONVERGED, vi.Status.IMPROVING):
        assert (
            "below a constant output: are inputs and targets scaled" in a_result(status=status, constant=-1.0).next_step
        )
        assert "constant" not in a_result(status=status, constant=-1.0, bound=False).next_step
