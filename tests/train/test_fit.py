"""The fit: it reaches the closed form, its options do what they say, and it ends cleanly whatever happens."""

import inspect
import signal
import threading
import tracemalloc

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import structvi as vi
from structvi.distributed.ranks import Ranks
from structvi.objective import full_terms
from structvi.train.data import Batches
from structvi.train.fit import Fit, Options, fit, rate_factor

N, D, NOISE = 60, 3, 0.5


def data(n=N, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D, generator=g, dtype=torch.float64)
    x[:, 1] += 0.8 * x[:, 0]  # correlated inputs: a correlated posterior
    t = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    return TensorDataset(x, t + NOISE * torch.randn(n, 1, generator=g, dtype=torch.float64))


def loader(batch_size=20, shuffle=True, **options):
    return DataLoader(data(), batch_size=batch_size, shuffle=shuffle, **options)


def linear(family=None, **options):
    net = nn.Linear(D, 1, bias=False, dtype=torch.float64)
    recipe = vi.MeanField() if family is None else family
    return vi.variationalize(net, vi.likelihoods.Gaussian(noise=NOISE), recipe, vi.priors.NormalPrior(1.0), **options)


def exact():
    """Mean, precision and log evidence of the conjugate posterior."""
    x, t = data().tensors
    precision = x.mT @ x / NOISE**2 + torch.eye(D, dtype=x.dtype)
    mean = torch.linalg.solve(precision, x.mT @ t / NOISE**2).squeeze(-1)
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(N, dtype=x.dtype), NOISE**2 * torch.eye(N, dtype=x.dtype) + x @ x.mT
    )
    return mean, precision, marginal.log_prob(t.squeeze(-1)).item()


def parameters(posterior):
    return {name: tensor.detach().clone() for name, tensor in posterior.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------------------------------------------- closed forms


def test_mean_field_reaches_the_closed_form():
    mean, precision, _ = exact()
    posterior = linear()
    posterior.fit(loader(), steps=400, lr=0.05, estimator=vi.Estimator(groups=4), progress=False)
    # minibatch noise leaves the last iterates a few hundredths of a standard deviation from the optimum
    deviation = precision.diagonal().rsqrt()
    q = posterior.family()
    assert ((q.mean - mean) / deviation).abs().max() < 0.1
    assert (q.variance.sqrt() / deviation - 1).abs().max() < 0.05


@pytest.mark.parametrize("family", [vi.FullNormal(), vi.LowRankNormal(3), vi.LowRankPrecision(3)])
def test_families_that_hold_the_posterior_reach_the_evidence(family):
    mean, precision, evidence = exact()
    posterior = linear(family)
    # full batches: with q = p the path estimator has no noise left, and the bound is tight
    result = posterior.fit(
        loader(batch_size=N),
        steps=600,
        lr=0.05,
        estimator=vi.Estimator(groups=4),
        schedule=vi.Schedule(stop=False),
        progress=False,
    )
    assert result.elbo.value == pytest.approx(evidence, abs=1e-3)
    assert result.bound
    torch.testing.assert_close(posterior.family().mean.detach(), mean, atol=2e-3, rtol=0)
    covariance = torch.linalg.inv(precision)
    torch.testing.assert_close(posterior.family().covariance().detach(), covariance, atol=1e-4, rtol=0.01)


def test_full_terms_are_unbiased_and_common_over_batches():
    posterior = linear(num_data=N)
    whole = [tuple(data().tensors)]
    g = lambda: torch.Generator().manual_seed(3)  # noqa: E731
    by_batches = full_terms(
        posterior.family, posterior.model, loader(shuffle=False), vi.Estimator(groups=8), g()
    ).estimate()
    at_once = full_terms(posterior.family, posterior.model, whole, vi.Estimator(groups=8), g()).estimate()
    torch.testing.assert_close(by_batches.per_group, at_once.per_group, atol=1e-9, rtol=0)
    terms = vi.objective.elbo_terms(
        posterior.family, posterior.model, whole[0], estimator=vi.Estimator("log_q", groups=8), generator=g()
    ).objective()
    torch.testing.assert_close(at_once.per_group, terms.detach(), atol=1e-9, rtol=0)
    assert at_once.standard_error == pytest.approx(at_once.per_group.std().item() / 8**0.5)
    assert posterior.elbo(loader(), groups=8, generator=g()).value == pytest.approx(at_once.value)
    with pytest.raises(ValueError, match="no batch"):
        full_terms(posterior.family, posterior.model, [])


# -------------------------------------------------------------------------------------------------------- the loop


def test_same_seed_same_bits_and_the_global_stream_is_left_alone():
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(5)
        posterior = linear()
        state = torch.get_rng_state()
        posterior.fit(loader(), epochs=5, seed=seed, progress=False)
        assert torch.equal(torch.get_rng_state(), state)
        results.append(parameters(posterior))
    assert same(results[0], results[1])
    assert not same(results[0], results[2])


def test_temperature_and_kl_warmup():
    posterior = linear(vi.FullNormal())
    result = posterior.fit(
        loader(N),
        steps=300,
        lr=0.05,
        kl_weight=0.25,
        schedule=vi.Schedule(kl_warmup=0.2),
        estimator=vi.Estimator("log_q", groups=4),
        progress=False,
    )
    # E log lik − λ KL is maximal at the posterior of the data counted 1/λ times
    x, _ = data().tensors
    cold = 4 * x.mT @ x / NOISE**2 + torch.eye(D, dtype=x.dtype)
    torch.testing.assert_close(posterior.family().covariance().detach(), torch.linalg.inv(cold), atol=2e-4, rtol=0.15)
    ladder = result.history["kl_weight"]
    assert ladder[0] < 0.01
    assert bool((ladder[:61].diff() > 0).all())
    assert bool((ladder[61:] == 0.25).all())
    assert any("not the posterior" in note for note in result.notes)
    assert result.kl_weight == 0.25
    # reported at λ = 1: below the evidence
    assert result.elbo.value < exact()[2]


def test_default_schedule_and_cooling():
    factors = [rate_factor(step, 100, 0.1) for step in range(100)]
    assert factors[:10] == pytest.approx([k / 10 for k in range(1, 11)])
    assert factors[55] == pytest.approx(0.5)
    defaults = {name: one.default for name, one in list(inspect.signature(fit).parameters.items())[2:]}
    options = Options(**defaults | {"steps": 100, "schedule": vi.Schedule(warmup=0.1), "progress": False})
    one = Fit(linear(), loader(), options, Ranks())
    one.cooling, one.end, found = 55, 75, {}
    for one.step in (54, 55, 65, 74, 75):
        found[one.step] = one.rate_factor
    assert found[54] == factors[54]
    assert found[55] == pytest.approx(0.5)
    assert found[65] == pytest.approx(0.25)
    assert found[74] < 0.01
    assert found[75] == 0


def test_the_rate_is_held_and_then_falls():
    factors = [rate_factor(step, 100, 0.1, 0.5) for step in range(100)]
    assert factors[:10] == pytest.approx([k / 10 for k in range(1, 11)])
    assert factors[10:51] == [1.0] * 41
    assert factors[75] == pytest.approx(0.5)
    assert factors[99] < 0.01
    late = [rate_factor(step, 100, 0.5, 0.1) for step in (49, 50, 75)]  # never before it has risen
    assert late == pytest.approx([1.0, 1.0, 0.5])


def test_clipping():
    posterior = linear()
    optimizer = torch.optim.SGD(posterior.parameters(), lr=1.0)
    before = parameters(posterior)
    result = posterior.fit(
        loader(), steps=1, optimizer=optimizer, clip=0.01, schedule=vi.Schedule(warmup=0), progress=False
    )
    after = parameters(posterior)
    moved = torch.cat([(after[k] - before[k]).reshape(-1) for k in before]).norm().item()
    assert moved == pytest.approx(0.01, rel=1e-3)
    assert result.history["gradient_norm"][0] > 0.01


# -------------------------------------------------------------------------------------------- stages and averaging


def regression_net(family):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    return vi.variationalize(net, vi.likelihoods.Gaussian(noise=NOISE), family)


def test_staged_fit():
    posterior = regression_net(vi.LowRankPrecision(3))
    factors = []
    result = posterior.fit(
        loader(), steps=100, progress=False,
        callback=lambda history: factors.append(
            (posterior.family.factor.abs().max().item(), posterior.family.factor.requires_grad)
        ),
    )  # fmt: skip
    assert all(factor == (0.0, False) for factor in factors[:39])
    assert all(size > 0 and learns for size, learns in factors[39:])
    assert result.history["stage"].tolist() == [1] * 40 + [2] * 60
    assert result.elbo.value == max(estimate.value for estimate in result.candidates.values())
    # what was learned is not thrown away by a second fit
    again = posterior.fit(loader(), steps=80, progress=False).history
    assert again["stage"].unique().tolist() == [2]
    assert again["kl_weight"].unique().tolist() == [1]


def test_parts_and_blocks_are_staged_and_mean_field_is_not():
    for family in (
        vi.Mixture(vi.LowRankNormal(2), 2),
        vi.PerLayer({"0.*": vi.MAP(), "2.*": vi.LowRankPrecision(2)}),
    ):
        staged = regression_net(family).fit(loader(), steps=20, schedule=vi.Schedule(staged=True), progress=False)
        assert staged.history["stage"].tolist() == [1] * 8 + [2] * 12
    assert linear().fit(loader(), steps=64, progress=False).history["stage"].unique().tolist() == [2]


#: the rate is held until the last step
CONSTANT = vi.Schedule(warmup=0.0, hold=0.999, stop=False)


def test_average_is_kept_only_where_it_is_not_lower():
    kept = set()
    for rate, steps in ((0.3, 200), (0.02, 40)):
        torch.manual_seed(0)
        posterior = linear()
        result = posterior.fit(
            loader(5), steps=steps, optimizer=lambda p, r=rate: torch.optim.Adam(p, r), schedule=CONSTANT,
            progress=False,
        )  # fmt: skip
        average = f"average of the last {steps // 4}"
        assert set(result.candidates) == {"last step", average}
        better = result.candidates[average].value >= result.candidates["last step"].value
        assert result.kept == (average if better else "last step")
        kept.add(result.kept.split()[0])
        g = torch.Generator().manual_seed(1)
        assert posterior.elbo(loader(), groups=8, generator=g).value == pytest.approx(result.elbo.value, abs=1e-8)
    # noise about the optimum is averaged away; on the way there the average lags behind
    assert kept == {"average", "last"}
    assert len(linear().fit(loader(), steps=5, progress=False).candidates) == 1


# ------------------------------------------------------------------------------------------------------- verdicts


def test_verdicts():
    assert linear().fit(loader(), steps=20, progress=False).verdict.startswith("too few steps")
    slow = linear().fit(loader(N), steps=120, lr=1e-3, progress=False)
    assert slow.verdict.startswith("still improving at ")
    assert slow.verdict.endswith(" nats per epoch")
    # too small a rate, which has fallen to nothing by the end: no longer rising is not converged
    fallen = linear().fit(loader(5), steps=240, lr=5e-3, progress=False)
    assert fallen.verdict.startswith("still improving at ")
    posterior = linear()
    done = posterior.fit(loader(N), steps=800, lr=0.05, progress=False)
    assert done.verdict == "converged"
    assert done.steps < 800  # stopped where the trend was gone, after a last quarter with a falling rate
    assert done.history["lr"][-1] < 1e-3
    assert "converged, after" in str(done)


def test_a_rate_of_zero_is_not_convergence():
    posterior = linear()
    frozen = torch.optim.SGD(posterior.parameters(), lr=0.0)
    result = posterior.fit(loader(), steps=100, optimizer=frozen, progress=False)
    assert result.steps == 100
    assert result.status is vi.Status.UNCLEAR
    assert "the learning rate was zero, and nothing moved" in result.verdict


def test_a_group_that_is_frozen_does_not_hide_what_the_others_learn():
    posterior = linear()
    family = posterior.family
    groups = [{"params": [family.log_scale], "lr": 0.0}, {"params": [family.mean], "lr": 1e-3}]
    result = posterior.fit(loader(N), steps=120, optimizer=torch.optim.Adam(groups), progress=False)
    assert result.status is vi.Status.IMPROVING
    assert result.history["lr"].max() == pytest.approx(1e-3)


def test_ctrl_c_ends_the_fit_with_what_there_is():
    def stop(history):
        if len(history) == 7:
            raise KeyboardInterrupt

    result = regression_net(vi.LowRankNormal(2)).fit(loader(), steps=50, progress=False, callback=stop)
    assert result.verdict == "stopped by you"
    assert result.steps == len(result.history) == 7
    assert result.candidates == {}


@pytest.fixture
def ctrl_c():
    """Ctrl-C as in a terminal: jobs in the background of a shell are started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_inside_the_optimizer_leaves_no_half_step():
    class Interrupted(torch.optim.Adam):
        count = 0

        def step(self, closure=None):
            self.count += 1
            if self.count == 6:
                signal.raise_signal(signal.SIGINT)
            return super().step(closure)

    def between_steps(history):
        if len(history) == 6:
            raise KeyboardInterrupt

    runs = []
    for optimizer, callback in ((torch.optim.Adam, between_steps), (Interrupted, None)):
        torch.manual_seed(0)
        posterior = linear()
        result = posterior.fit(
            loader(), steps=50, optimizer=lambda p, o=optimizer: o(p, 0.01), callback=callback, progress=False
        )
        assert result.steps == 6
        runs.append(parameters(posterior))
    assert result.verdict == "stopped by you"
    assert same(*runs)


# ----------------------------------------------------------------------------------------------------- not finite


def poisoned(bad):
    x, t = data().tensors
    t = t.clone()
    t[bad] = float("nan")
    return DataLoader(TensorDataset(x, t), batch_size=10, shuffle=False)


def test_a_step_that_is_not_finite_is_undone_and_its_batch_named():
    posterior = linear()
    states = []
    result = posterior.fit(
        poisoned(slice(20, 30)), steps=4, progress=False,
        callback=lambda history: states.append(parameters(posterior)),
    )  # fmt: skip
    (skipped,) = result.skipped
    assert (skipped.epoch, skipped.index) == (0, 2)
    assert "log likelihood is not finite" in skipped.reason
    assert result.history["elbo"].isnan().tolist() == [False, False, True, False]
    assert any("1 steps left out" in note and "batch 2 of epoch 0" in note for note in result.notes)
    assert any("over the full data is not finite" in note for note in result.notes)
    assert result.status is vi.Status.DIVERGED
    assert same(states[2], states[1])
    assert not same(states[1], states[0])
    assert not same(states[3], states[2])


def test_a_batch_with_an_error_is_named():
    labels = torch.zeros(60, dtype=torch.long)
    labels[50] = 2
    bayes = vi.variationalize(nn.Linear(3, 2), vi.likelihoods.Categorical(), vi.MeanField())
    with pytest.raises(ValueError, match="labels") as caught:
        bayes.fit(DataLoader(TensorDataset(torch.zeros(60, 3), labels), batch_size=20), epochs=1, progress=False)
    assert "in batch 2 of epoch 0, after step 2" in caught.value.__notes__


def test_five_in_a_row_stop_the_fit_at_the_last_good_state():
    posterior = linear()
    states = [parameters(posterior)]
    with pytest.raises(vi.NonFiniteError, match=r"5 batches in a row \(1 of epoch 0.*log likelihood is not finite"):
        posterior.fit(
            poisoned(slice(10, 60)), epochs=3, progress=False,
            callback=lambda history: states.append(parameters(posterior)),
        )  # fmt: skip
    assert same(parameters(posterior), states[1])


def test_a_gradient_that_is_not_finite_counts_too():
    class Root(vi.likelihoods.Gaussian):
        def log_prob(self, output, target):
            return super().log_prob(output, target) + 0 * (output - output.detach()).abs().sqrt()

    net = nn.Linear(D, 1, bias=False, dtype=torch.float64)
    posterior = vi.variationalize(net, Root(noise=NOISE), vi.MeanField())
    with pytest.raises(vi.NonFiniteError, match=r"gradient is not, in family\.mean"):
        posterior.fit(loader(), epochs=3, progress=False)


# -------------------------------------------------------------------------------------------------------- the data


def test_batches_own_the_order():
    batches = Batches(loader(), seed=3)
    first, again, other = (torch.cat([t for _, t in batches.epoch(e)]) for e in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(first.sort(0).values, data().tensors[1].sort(0).values)
    assert torch.equal(torch.cat([t for _, t in batches.epoch(0, skip=1)]), first[20:])
    every = torch.cat([t for _, t in Batches(loader(7, drop_last=True)).everything()])
    assert torch.equal(every.sort(0).values, data().tensors[1].sort(0).values)
    assert len(list(batches.everything(most=2))) == 2


def test_the_loaders_own_settings_are_kept():
    settings = {
        "num_workers": 2, "timeout": 30, "prefetch_factor": 3, "persistent_workers": True, "worker_init_fn": print,
        "multiprocessing_context": "spawn", "collate_fn": list, "pin_memory": False,
    }  # fmt: skip
    given = DataLoader(data(), batch_size=20, shuffle=True, **settings)
    made = Batches(given)._order.loader
    assert made.multiprocessing_context.get_start_method() == "spawn"
    for name in set(settings) - {"multiprocessing_context"}:
        assert getattr(made, name) == settings[name]
    assert made.dataset is given.dataset


def test_the_order_of_an_epoch_is_no_list_of_python_integers():
    """10⁶ of them take 40 MB, a tensor 8 MB."""

    class Many(torch.utils.data.Dataset):
        def __len__(self):
            return 10**6

        def __getitem__(self, index):
            return torch.zeros(1), torch.zeros(1)

    batches = Batches(DataLoader(Many(), batch_size=100, shuffle=True))
    tracemalloc.start()
    try:
        next(iter(batches.epoch(0)))
        next(iter(batches.everything(most=10)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4e6


def test_fits_in_threads_are_inside_their_networks_at_the_same_time():
    met, errors = threading.Barrier(2, timeout=60), []

    class Meeting(nn.Linear):
        step = 0

        def forward(self, x):
            if self.step == 2:
                met.wait()
                self.step = 3
            return super().forward(x)

    # made here: random numbers of the global stream, drawn in one thread, look like the network's own in the other
    nets = [Meeting(D, 1, dtype=torch.float64) for _ in range(2)]

    def fit(seed):
        net = nets[seed]
        try:
            posterior = vi.variationalize(net, vi.likelihoods.Gaussian(NOISE), vi.MeanField())
            posterior.fit(
                loader(),
                steps=6,
                progress=False,
                seed=seed,
                callback=lambda history: setattr(net, "step", len(history)),
            )
        except BaseException as error:  # a thread's own errors would be lost
            errors.append(error)

    threads = [threading.Thread(target=fit, args=(seed,)) for seed in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert errors == []


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())


def test_loaders_of_all_kinds():
    stream = DataLoader(Stream(), batch_size=20)
    with pytest.raises(ValueError, match="num_data= to variationalize"):
        linear().fit(stream, steps=5, progress=False)
    with pytest.raises(ValueError, match="give steps="):
        linear(num_data=N).fit(stream, epochs=5, progress=False)
    result = linear(num_data=N).fit(stream, steps=7, progress=False)
    assert (result.steps, result.epochs) == (7, 2)
    batches = [batch for batch in loader()]
    result = linear(num_data=N).fit(batches, epochs=2, progress=False)
    assert result.exact
    assert result.steps == 6
    with pytest.raises(TypeError, match="only once"):
        linear(num_data=N).fit(iter(batches), epochs=2, progress=False)
    with pytest.raises(TypeError, match="DataLoader"):
        linear().fit(3, epochs=1)
    with pytest.raises(ValueError, match="drop_last"):
        linear().fit(loader(100, drop_last=True), epochs=1)
    with pytest.warns(UserWarning, match="the last 4 of 60 observations are never seen"):
        linear().fit(loader(7, shuffle=False, drop_last=True), epochs=1, progress=False)
    assert linear().fit(loader(7, drop_last=True), epochs=1, progress=False).steps == 8
    told = linear(num_data=90).fit(loader(), epochs=1, progress=False)
    assert any("N = 90 as the model was told" in note for note in told.notes)


def test_another_fit_takes_the_length_of_its_own_data():
    part = DataLoader(torch.utils.data.Subset(data(), range(20)), batch_size=20)
    bayes = linear()
    assert bayes.fit(loader(), steps=2, progress=False).notes == []
    assert bayes.model.num_data == N
    result = bayes.fit(part, steps=2, progress=False)
    assert bayes.model.num_data == 20
    assert result.notes == [f"N = 20, of this loader's data set; in the fit before {N}"]
    told = linear(num_data=N)
    result = told.fit(part, steps=2, progress=False)
    assert told.model.num_data == N
    assert result.notes == [f"N = {N} as the model was told; the loader's data set has 20 observations"]


def test_batch_norm_that_has_seen_no_data_is_noted():
    net = nn.Sequential(nn.Linear(D, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)).double()

    def notes(**options):
        bayes = vi.variationalize(net, vi.likelihoods.Gaussian(NOISE), vi.MeanField(), **options)
        return bayes.fit(loader(), steps=2, progress=False).notes

    assert len(notes()) == 1
    assert notes()[0].startswith("batch norm has seen no data in 1: ")
    assert notes(batch_norm="reestimated") == []
    net(data().tensors[0])  # in training mode: the running statistics move
    assert notes() == []


# ------------------------------------------------------------------------------------------------------ bad inputs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 1, "steps": 1}, "a fit needs a length, got epochs=1 and steps=1"),
        ({}, r"fit\(loader, epochs=20\) trains .* laplace\(loader, validation=held_out\)"),
        ({"epochs": 0}, "epochs must be"),
        ({"steps": 1.5}, "steps must be"),
        ({"epochs": 1, "accumulate": 0}, "accumulate must be"),
        ({"epochs": 1, "kl_weight": 0}, "kl_weight must be a positive"),
        ({"epochs": 1, "clip": -1.0}, "clip must be a positive"),
        ({"epochs": 1, "compute": vi.Compute(precision=torch.float16)}, "the weights are torch.float64"),
        ({"epochs": 1, "optimizer": lambda p: torch.optim.Adam(p, weight_decay=0.1)}, "weight_decay=0.1.*prior"),
        ({"epochs": 1, "optimizer": lambda p: torch.optim.SGD([torch.zeros(1)], 0.1)}, "not posterior.parameters"),
        ({"epochs": 1, "optimizer": lambda p: torch.optim.Adam(p), "lr": 0.1}, "lr=0.1 belongs"),
    ],
)
def test_bad_values(options, message):
    with pytest.raises(ValueError, match=message):
        linear().fit(loader(), progress=False, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": lambda p: torch.optim.LBFGS(p)}, "LBFGS"),
        ({"optimizer": lambda p: 3}, "torch optimizer"),
        ({"optimizer": "adam"}, "torch optimizer or a function .* got .adam"),
        ({"schedule": 3}, r"vi.Schedule\(\.\.\)"),
        ({"estimator": "path"}, r"vi.Estimator\(\.\.\)"),
        ({"validation": 0.2}, "split the data"),
    ],
)
def test_bad_types(options, message):
    with pytest.raises(TypeError, match=message):
        linear().fit(loader(), epochs=1, progress=False, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: vi.Schedule(warmup=1.0), "warmup must be a fraction"),
        (lambda: vi.Schedule(staged="yes"), "staged must be"),
        (lambda: vi.Checkpoint("folder", every=0), "every must be"),
        (lambda: vi.Compute(precision=torch.float32), "torch.bfloat16 or torch.float16"),
    ],
)
def test_bad_values_of_frozen_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()
