"""Candidates are compared by the objective that was maximised, and the result says what came out."""

import matplotlib
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi import likelihoods as lk
from structvi.objective import Estimate
from structvi.train.compare import Watched, trend
from structvi.train.result import COLUMNS, FitResult, History, Skipped

matplotlib.use("Agg")

N, P, LAM = 100, 20, 0.0001


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def batches():
    x = torch.randn(N, P, generator=generator(1)).double()
    return x, x.sum(1, keepdim=True) + torch.randn(N, 1, generator=generator(2)).double()


def loader():
    return DataLoader(TensorDataset(*batches()), batch_size=5, shuffle=True)


def narrow():
    """A linear model that begins at the least-squares weights, with scales far below the optimum's at any λ.

    Means jitter around the optimum, which an average mends; scales grow until the end, so that the average's are
    smaller than the last step's, 20 weights by a nat each. At λ = 1 that costs 20 nats, at λ = 0.0001 nothing: with
    each of the seeds 0 to 7 the average gains 0.2 to 1.9 nats there, and loses 17 to 20 at λ = 1.
    """
    x, t = batches()
    net = nn.Linear(P, 1, bias=False).double()
    net.weight.data.copy_(torch.linalg.lstsq(x, t).solution.T)
    family = vi.MeanField(initial_scale=1e-8)
    return vi.variationalize(net, lk.Gaussian(1.0), family, vi.priors.NormalPrior(1.0), num_data=N)


#: the rate rises to the end: the last iterates jitter, and scales grow by 0.05 a step there
GIVEN = {
    "steps": 300,
    "lr": 0.05,
    "schedule": vi.Schedule(warmup=0.999, kl_warmup=0.0, stop=False),
    "progress": False,
}


def exact(bayes, lam):
    """E log lik − λ KL of a normal with independent weights, in closed form."""
    x, t = batches()
    m, s = bayes.family.mean.detach(), bayes.family().variance.detach().sqrt()
    error = (t.squeeze(1) - x @ m).square().sum() + (x.square() @ s.square()).sum()
    fit = -0.5 * error - 0.5 * N * torch.tensor(2 * torch.pi).log()
    kl = 0.5 * (m.square() + s.square() - 1).sum() - s.log().sum()
    return float(fit - lam * kl)


def test_a_tempered_fit_keeps_what_its_own_objective_prefers():
    average, last = narrow(), narrow()

    def keep(history):
        last.family.load_state_dict(average.family.state_dict())

    result = average.fit(loader(), kl_weight=LAM, callback=keep, **GIVEN)
    assert result.kept == "average of the last 75"
    assert exact(average, LAM) > exact(last, LAM)
    assert exact(average, 1.0) < exact(last, 1.0) - 10
    # what is told: the ELBO at λ = 1 of both, and the number that decided. Antithetic draws are exact in the mean; of
    # log q = −Σ z²/2 + .. 16 draws of 20 weights leave √(10/16) = 0.8 nats, here within four of them
    for one, name in ((last, "last step"), (average, result.kept)):
        assert result.candidates[name].value == pytest.approx(exact(one, 1.0), abs=3.2)
        assert result.objectives[name].value == pytest.approx(exact(one, LAM), abs=0.01)
    assert result.elbo == result.candidates[result.kept]
    assert "compared on common draws by E log lik − λ KL at λ = 0.0001: last step" in result.details


# --- the best output that ignores the input


def searched(likelihood, target, shape, extra=()):
    """Maximise the log likelihood over one output for all rows, by L-BFGS in float64."""
    output = torch.zeros(1, *shape, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([output, *extra], max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe")
    B = (target[0] if isinstance(target, tuple) else target).shape[0]

    def loss():
        optimizer.zero_grad()
        value = -likelihood(output.expand(B, *shape), target).sum()
        value.backward()
        return value

    optimizer.step(loss)
    return -loss().item()


def part(target, start, count):
    return tuple(t[start : start + count] for t in target) if isinstance(target, tuple) else target[start:][:count]


T = 3 * torch.randn(40, 2, generator=generator(), dtype=torch.float64) + torch.tensor([5.0, -1.0])
MASK = torch.rand(40, 2, generator=generator(1)) > 0.3
LABELS = torch.randint(0, 3, (40,), generator=generator(2))
BITS = (torch.rand(40, 1, generator=generator(3)) > 0.8).double()
COUNTS = torch.poisson(torch.full((40, 1), 3.0), generator=generator(4))


@pytest.mark.parametrize(
    ("make", "target", "shape"),
    [
        (lambda: lk.Gaussian(0.7), T, (2,)),
        (lambda: lk.Gaussian(0.7), (T, MASK), (2,)),
        (lambda: lk.Gaussian("point").double(), T, (2,)),
        (lambda: lk.Gaussian("head"), T, (4,)),
        (lambda: lk.Categorical(), LABELS, (3,)),
        (lambda: lk.Categorical(ignore_index=2), LABELS, (3,)),
        (lambda: lk.Categorical(class_weights=(1.0, 3.0, 0.5)), LABELS, (3,)),
        (lambda: lk.Bernoulli(), BITS, (1,)),
        (lambda: lk.Poisson(), COUNTS, (1,)),
    ],
    ids=["known", "masked", "point", "head", "classes", "ignored", "weighted", "bits", "counts"],
)
def test_it_is_the_best_of_all_constants(make, target, shape):
    likelihood = make()
    model = vi.BayesianModel(nn.Linear(1, 1), likelihood, vi.priors.NormalPrior(1.0), num_data=40)
    watched = Watched([(torch.zeros(n, 1), part(target, start, n)) for start, n in ((0, 13), (13, 27))], model)
    assert len(list(watched)) == 2
    expected = searched(likelihood, target, shape, list(likelihood.parameters()))
    assert watched.log_likelihood == pytest.approx(expected, rel=1e-6)


def test_a_fit_that_is_worse_than_a_constant_says_so():
    """Far more weights than data: at λ = 1 the KL costs more than anything that can be learned."""
    x, t = torch.randn(40, 5, generator=generator(5)), torch.randn(40, 1, generator=generator(6))
    net = nn.Sequential(nn.Linear(5, 400), nn.ReLU(), nn.Linear(400, 1))
    bayes = vi.variationalize(net, lk.Gaussian(1.0), vi.MeanField(), vi.priors.NormalPrior(1.0))
    result = bayes.fit(DataLoader(TensorDataset(x, t), batch_size=40), steps=120, progress=False)
    assert result.elbo.value < result.constant
    assert any(note.startswith("worse than knowing nothing") for note in result.notes)
    x = torch.randn(200, 2, generator=generator(7))
    bayes = vi.variationalize(nn.Linear(2, 1), lk.Gaussian(0.5), vi.MeanField(), vi.priors.NormalPrior(1.0))
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=50, shuffle=True)
    result = bayes.fit(data, steps=300, progress=False)
    assert result.elbo.value > result.constant
    assert not any("knowing nothing" in note for note in result.notes)


# --- trend, history, result


def test_trend_and_its_noise():
    epoch = torch.arange(200) // 20
    noise = torch.randn(200, generator=generator(), dtype=torch.float64)
    full = torch.ones(200, dtype=torch.float64)
    # the same rise over half as much learning is twice the slope
    assert trend(0.1 * torch.arange(200).double(), epoch, full / 2)[0] == pytest.approx(0.2)
    slope, error = trend(noise + 0.1 * torch.arange(200), epoch, full)
    assert abs(slope - 0.1) < 4 * error
    assert slope > 10 * error
    flat, error = trend(noise, epoch, full)
    assert abs(flat) < 4 * error
    assert trend(torch.tensor([1.0, float("nan")]), torch.zeros(2), torch.ones(2)) == (0.0, float("inf"))


def history(steps=100):
    record = History()
    for step in range(steps):
        elbo = float("nan") if step == 7 else -100.0 / (step + 1)
        record.append(step=step, epoch=step // 10, elbo=elbo, standard_error=0.5, lr=0.01, stage=1, seconds=0.1)
    return record


def test_columns():
    record = history()
    assert record["epoch"].tolist() == [step // 10 for step in range(100)]
    assert record.recent("elbo", 2).tolist() == pytest.approx([-100 / 99, -1.0])
    again = History.from_tensor(record.to_tensor())
    assert torch.equal(again.to_tensor().nan_to_num(0), record.to_tensor().nan_to_num(0))
    assert History().to_tensor().shape == (0, len(COLUMNS))
    with pytest.raises(ValueError, match="a history holds"):
        record["loss"]
    with pytest.raises(ValueError, match="a history holds"):
        record.append(loss=1.0)


def test_dataframe_and_plot():
    frame = history().to_dataframe()
    assert list(frame.columns) == list(COLUMNS)
    assert frame["elbo"].isna().sum() == 1
    axes = history().plot()
    assert [line.get_label() for line in axes.get_lines()] == ["each step", "mean of 1 steps"]
    assert axes.get_ylim()[0] > -20  # the first steps do not flatten the rest
    assert history(3).plot(axes) is axes


def a_result(**changes):
    before, after = Estimate.of(torch.tensor([-3.0, -5.0])), Estimate.of(torch.tensor([-2.0, -3.0]))
    values = dict(
        status=vi.Status.CONVERGED, verdict="converged", elbo=after, kept="grown",
        candidates={"before": before, "grown": after}, comparison="2 groups of draws", history=history(), steps=100,
        epochs=10.0, kl_weight=1.0, bound=True, exact=True, skipped=[Skipped(0, 7, "x")], notes=["a note"],
    )  # fmt: skip
    return FitResult(**(values | changes))


@pytest.mark.parametrize("status", vi.Status)
@pytest.mark.parametrize("known", [{}, {"constant": -9.0, "held_out": {"grown": -0.4}, "notes": ["one", "two"]}])
def test_a_result_is_four_lines_and_the_last_says_what_to_do(status, known):
    result = a_result(status=status, **known)
    lines = str(result).splitlines()
    assert len(lines) == 4
    assert lines[0] == "converged, after 100 steps (10 epochs)"
    assert "ELBO: -2.50 ± 0.50 nats (2 groups of draws)" in lines[1]
    assert ("held-out log density: -0.4000" in lines[2]) == bool(known)
    assert "kept: grown; compared on common draws" in result.details
    assert lines[3].startswith(f"next: {result.next_step}")
    assert all(note in result.details for note in result.notes)


def test_what_to_do_follows_what_came_out():
    assert "fit longer" in a_result(status=vi.Status.IMPROVING).next_step
    assert "diagnose" in a_result(constant=-9.0).next_step
    assert "below a constant output" in a_result(constant=-1.0).next_step
    assert "constant" not in a_result(constant=-1.0, bound=False).next_step
