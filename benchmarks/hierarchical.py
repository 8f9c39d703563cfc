"""Twenty hierarchical and awkward models, written as statisticians write them, against NUTS.

    python -m benchmarks.hierarchical [--only NAME ..] [--seeds 1] [--draws 2000] [--cache nuts.json]

Each model is fitted by `vi.fit_density(target, vi.FullNormal())` with its defaults. The table of `result.summary()` is
compared with the draws of Pyro's NUTS, four chains after as many steps of warm-up. Errors are those of the worst
number: of the mean in posterior standard deviations, of the standard deviation as |log ratio|. "warned" says that the
fit or the table says so, or names this number. NUTS itself is noisy: its own standard error is printed, and numbers
whose R̂ is 1.02 or more are left out. `--cache` keeps the moments of NUTS, which take most of the time.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Beta,
    Binomial,
    Cauchy,
    Gamma,
    HalfCauchy,
    HalfNormal,
    InverseGamma,
    LKJCholesky,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
    Poisson,
    StudentT,
    Weibull,
)  # fmt: skip

import structvi as vi
from structvi.constraints import cholesky_correlation, interval, ordered, positive, simplex

Model = tuple[dict, Callable[[dict[str, Tensor]], Tensor]]
F64 = torch.float64
#: limits for the errors of a table without a warning: of the mean in sd, of the sd as a part
LIMITS = 0.1, 0.15


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=random(seed), dtype=F64)


def uniform(seed: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=random(seed), dtype=F64)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=F64)


def varying_slopes() -> Model:
    """Ten groups with correlated intercepts and slopes under an LKJ prior."""
    group = torch.arange(80) % 10
    x, effects = noise(1, 80), torch.tensor([1.0, -0.5], dtype=F64) + noise(2, 10, 2) * torch.tensor([0.8, 0.4])
    y = effects[group, 0] + effects[group, 1] * x + 0.5 * noise(3, 80)

    def log_density(p):
        prior = Normal(0.0, 2.0).log_prob(p["mu"]).sum() + HalfNormal(1.0).log_prob(p["tau"]).sum()
        prior = prior + LKJCholesky(2, 2.0).log_prob(p["L"]) + HalfNormal(1.0).log_prob(p["sigma"])
        own = p["mu"] + p["z"] @ (p["tau"].unsqueeze(-1) * p["L"]).mT
        mean = own[group, 0] + own[group, 1] * x
        return prior + Normal(0.0, 1.0).log_prob(p["z"]).sum() + Normal(mean, p["sigma"]).log_prob(y).sum()

    space = {"mu": zeros(2), "tau": positive(0.5, shape=2), "L": cholesky_correlation(2), "z": zeros(10, 2)}
    return {**space, "sigma": positive(1.0)}, log_density


def negative_binomial() -> Model:
    x = noise(1, 60, 2)
    rate = (0.5 + x @ torch.tensor([0.7, -0.4], dtype=F64)).exp() * (0.6 * noise(2, 60)).exp()
    y = torch.poisson(rate, generator=random(3))

    def log_density(p):
        eta = p["a"] + x @ p["b"]
        counts = NegativeBinomial(p["phi"], logits=eta - p["phi"].log(), validate_args=False)
        prior = Normal(0.0, 2.0).log_prob(p["a"]) + Normal(0.0, 2.0).log_prob(p["b"]).sum()
        return prior + Gamma(2.0, 0.5).log_prob(p["phi"]) + counts.log_prob(y).sum()

    return {"a": zeros(), "b": zeros(2), "phi": positive(1.0)}, log_density


def censored_survival() -> Model:
    """Weibull times with a covariate, censored at one."""
    x = noise(1, 70)
    scale = (-0.2 + 0.5 * x).exp()
    time = scale * (-uniform(2, 70).log()) ** (1 / 1.5)
    seen, time = time < 1.0, time.clamp(max=1.0)

    def log_density(p):
        scale = (p["a"] + p["b"] * x).exp()
        dead, alive = Weibull(scale, p["k"]).log_prob(time), -((time / scale) ** p["k"])
        prior = Normal(0.0, 2.0).log_prob(p["a"]) + Normal(0.0, 2.0).log_prob(p["b"]) + Gamma(2.0, 1.0).log_prob(p["k"])
        return prior + torch.where(seen, dead, alive).sum()

    return {"a": zeros(), "b": zeros(), "k": positive(1.0)}, log_density


def zero_inflated() -> Model:
    y = torch.where(uniform(1, 80) < 0.35, 0.0, torch.poisson(torch.full((80,), 2.5, dtype=F64), generator=random(2)))

    def log_density(p):
        count = Poisson(p["rate"]).log_prob(y)
        zero = torch.logaddexp(p["share"].log(), (-p["share"]).log1p() + count)
        prior = Beta(1.0, 1.0).log_prob(p["share"]) + Gamma(2.0, 0.5).log_prob(p["rate"])
        return prior + torch.where(y == 0, zero, (-p["share"]).log1p() + count).sum()

    return {"share": interval(0, 1), "rate": positive(1.0)}, log_density


def ordinal() -> Model:
    x = noise(1, 90, 2)
    latent = x @ torch.tensor([1.0, -0.6], dtype=F64) + torch.logit(uniform(2, 90))
    y = torch.bucketize(latent, torch.tensor([-1.5, 0.0, 1.0], dtype=F64))

    def log_density(p):
        eta = (x @ p["b"]).unsqueeze(-1)
        below = torch.cat([zeros(90, 1), torch.sigmoid(p["cuts"] - eta), zeros(90, 1) + 1], 1)
        share = below.diff(dim=1).clamp(min=1e-300).gather(1, y.unsqueeze(1))
        return share.log().sum() + Normal(0.0, 2.0).log_prob(p["b"]).sum() + Normal(0.0, 3.0).log_prob(p["cuts"]).sum()

    return {"b": zeros(2), "cuts": ordered(3)}, log_density


def item_response() -> Model:
    """Two-parameter logistic: 25 persons, 8 items."""
    ability, ease, slope = noise(1, 25, 1), noise(2, 8), (0.3 * noise(3, 8)).exp()
    y = (uniform(4, 25, 8) < torch.sigmoid(slope * (ability - ease))).double()

    def log_density(p):
        logits = p["slope"] * (p["ability"].unsqueeze(-1) - p["ease"])
        prior = Normal(0.0, 1.0).log_prob(p["ability"]).sum() + Normal(0.0, 1.5).log_prob(p["ease"]).sum()
        prior = prior + Normal(0.0, 0.5).log_prob(p["slope"].log()).sum() - p["slope"].log().sum()
        return prior + Bernoulli(logits=logits).log_prob(y).sum()

    return {"ability": zeros(25), "ease": zeros(8), "slope": positive(1.0, shape=8)}, log_density


def latent_classes() -> Model:
    """Two classes of respondents to six questions; the first question's probabilities are in order."""
    kind = (uniform(1, 120) < 0.4).long()
    truth = torch.tensor([[0.2, 0.3, 0.2, 0.4, 0.3, 0.1], [0.8, 0.7, 0.9, 0.6, 0.8, 0.7]], dtype=F64)
    y = (uniform(2, 120, 6) < truth[kind]).double()

    def log_density(p):
        logits = torch.cat([p["first"].unsqueeze(-1), p["rest"]], 1)
        each = Bernoulli(logits=logits.unsqueeze(1)).log_prob(y).sum(-1)
        prior = Normal(0.0, 1.5).log_prob(logits).sum() + Beta(2.0, 2.0).log_prob(p["share"][0])
        return prior + torch.logsumexp(p["share"].log().unsqueeze(-1) + each, 0).sum()

    return {"share": simplex(2), "first": ordered(2), "rest": zeros(2, 5)}, log_density


def stochastic_volatility() -> Model:
    """Not centred: h = μ + σ of an autoregression of standard normals."""
    T, level = 60, zeros(60)
    steps = noise(1, 60)
    for t in range(T):
        level[t] = 0.9 * (level[t - 1] if t else 0.0) + 0.35 * steps[t]
    y = (0.5 * (level - 1)).exp() * noise(2, 60)
    lag = (torch.arange(T).unsqueeze(1) - torch.arange(T)).clamp(min=0).double()
    lower = torch.ones(T, T, dtype=F64).tril()

    def log_density(p):
        phi = p["phi"]
        start = torch.cat([(1 - phi.square()).rsqrt().unsqueeze(0), torch.ones(T - 1, dtype=F64)])
        h = p["mu"] + p["sigma"] * ((phi**lag) * lower) @ (start * p["z"])
        prior = Normal(0.0, 3.0).log_prob(p["mu"]) + Beta(20.0, 1.5).log_prob((phi + 1) / 2)
        prior = prior + HalfNormal(0.5).log_prob(p["sigma"]) + Normal(0.0, 1.0).log_prob(p["z"]).sum()
        return prior + Normal(0.0, (0.5 * h).exp()).log_prob(y).sum()

    space = {"mu": zeros(), "phi": interval(-1, 1, 0.8), "sigma": positive(0.3), "z": zeros(T)}
    return space, log_density


def gaussian_process_counts() -> Model:
    x = torch.linspace(0, 1, 25, dtype=F64)
    square = (x.unsqueeze(1) - x).square()
    y = torch.poisson((1 + 0.8 * torch.sin(6 * x)).exp(), generator=random(1))

    def log_density(p):
        kernel = p["height"].square() * torch.exp(-0.5 * square / p["length"].square())
        root = torch.linalg.cholesky(kernel + 1e-6 * torch.eye(25, dtype=F64))
        prior = InverseGamma(5.0, 1.5).log_prob(p["length"]) + HalfNormal(1.0).log_prob(p["height"])
        prior = prior + Normal(0.0, 1.0).log_prob(p["z"]).sum() + Normal(0.0, 2.0).log_prob(p["mean"])
        return prior + Poisson((p["mean"] + root @ p["z"]).exp()).log_prob(y).sum()

    return {"length": positive(0.3), "height": positive(1.0), "mean": zeros(), "z": zeros(25)}, log_density


def sparse_regression() -> tuple[Tensor, Tensor]:
    x = noise(1, 60, 10)
    return x, x @ torch.tensor([1.5, -1.0, *[0.0] * 8], dtype=F64) + 0.7 * noise(2, 60)


def horseshoe() -> Model:
    x, y = sparse_regression()

    def log_density(p):
        prior = HalfCauchy(1.0).log_prob(p["tau"]) + HalfCauchy(1.0).log_prob(p["local"]).sum()
        prior = prior + Normal(0.0, 1.0).log_prob(p["z"]).sum() + HalfNormal(1.0).log_prob(p["sigma"])
        return prior + Normal(x @ (p["tau"] * p["local"] * p["z"]), p["sigma"]).log_prob(y).sum()

    space = {"tau": positive(0.5), "local": positive(1.0, shape=10), "z": zeros(10), "sigma": positive(1.0)}
    return space, log_density


def regularised_horseshoe() -> Model:
    x, y = sparse_regression()

    def log_density(p):
        local = (p["slab"] * p["local"].square() / (p["slab"] + (p["tau"] * p["local"]).square())).sqrt()
        prior = HalfCauchy(0.2).log_prob(p["tau"]) + HalfCauchy(1.0).log_prob(p["local"]).sum()
        prior = prior + InverseGamma(2.0, 4.0).log_prob(p["slab"]) + HalfNormal(1.0).log_prob(p["sigma"])
        prior = prior + Normal(0.0, 1.0).log_prob(p["z"]).sum()
        return prior + Normal(x @ (p["tau"] * local * p["z"]), p["sigma"]).log_prob(y).sum()

    space = {"tau": positive(0.2), "local": positive(1.0, shape=10), "slab": positive(2.0), "z": zeros(10)}
    return {**space, "sigma": positive(1.0)}, log_density


def state_space() -> Model:
    """A local level: a random walk seen with noise."""
    y = (0.3 * noise(1, 50)).cumsum(0) + 0.6 * noise(2, 50)

    def log_density(p):
        prior = HalfNormal(1.0).log_prob(p["step"]) + HalfNormal(1.0).log_prob(p["sigma"])
        walk = Normal(0.0, 2.0).log_prob(p["level"][0]) + Normal(0.0, p["step"]).log_prob(p["level"].diff()).sum()
        return prior + walk + Normal(p["level"], p["sigma"]).log_prob(y).sum()

    return {"level": zeros(50), "step": positive(0.3), "sigma": positive(0.5)}, log_density


def missing_data() -> Model:
    """A regression in which a third of the inputs are missing, with a normal model of them."""
    x = 0.5 + noise(1, 60)
    y = 1.0 + 0.8 * x + 0.5 * noise(2, 60)
    gone = torch.arange(60) % 3 == 0

    def log_density(p):
        whole = torch.where(gone, zeros(60).masked_scatter(gone, p["x"]), x)
        prior = Normal(0.0, 2.0).log_prob(p["mu"]) + HalfNormal(2.0).log_prob(p["spread"])
        prior = prior + Normal(0.0, 2.0).log_prob(p["b"]).sum() + HalfNormal(1.0).log_prob(p["sigma"])
        inputs = Normal(p["mu"], p["spread"]).log_prob(whole).sum()
        return prior + inputs + Normal(p["b"][0] + p["b"][1] * whole, p["sigma"]).log_prob(y).sum()

    space = {"mu": zeros(), "spread": positive(1.0), "b": zeros(2), "sigma": positive(1.0)}
    return {**space, "x": zeros(int(gone.sum()))}, log_density


def centred_schools() -> Model:
    y = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12], dtype=F64)
    error = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18], dtype=F64)

    def log_density(p):
        prior = Normal(0.0, 5.0).log_prob(p["mu"]) + HalfCauchy(5.0).log_prob(p["tau"])
        return (
            prior + Normal(p["mu"], p["tau"]).log_prob(p["theta"]).sum() + Normal(p["theta"], error).log_prob(y).sum()
        )

    return {"mu": zeros(), "tau": positive(3.0), "theta": zeros(8)}, log_density


def robust_regression() -> Model:
    x = noise(1, 50)
    y = 1 + 0.7 * x + 0.4 * noise(2, 50)
    y[::10] += 4.0

    def log_density(p):
        prior = Normal(0.0, 3.0).log_prob(p["a"]) + Normal(0.0, 3.0).log_prob(p["b"])
        prior = prior + HalfNormal(1.0).log_prob(p["sigma"]) + Gamma(2.0, 0.1).log_prob(p["df"])
        return prior + StudentT(p["df"], p["a"] + p["b"] * x, p["sigma"]).log_prob(y).sum()

    return {"a": zeros(), "b": zeros(), "sigma": positive(1.0), "df": positive(5.0)}, log_density


def logistic_groups() -> Model:
    """A logistic regression with an intercept for each of twelve groups: few answers in each."""
    group, x = torch.arange(60) % 12, noise(1, 60)
    y = (uniform(2, 60) < torch.sigmoid(0.9 * noise(3, 12)[group] + 0.7 * x)).double()

    def log_density(p):
        logits = p["mu"] + p["tau"] * p["z"][group] + p["b"] * x
        prior = (
            Normal(0.0, 2.0).log_prob(p["mu"]) + Normal(0.0, 2.0).log_prob(p["b"]) + HalfCauchy(1.0).log_prob(p["tau"])
        )
        return prior + Normal(0.0, 1.0).log_prob(p["z"]).sum() + Bernoulli(logits=logits).log_prob(y).sum()

    return {"mu": zeros(), "b": zeros(), "tau": positive(1.0), "z": zeros(12)}, log_density


def gamma_regression() -> Model:
    x = noise(1, 60)
    mean = (0.3 + 0.6 * x).exp()
    y = mean * (noise(2, 60).square() + noise(3, 60).square() + noise(4, 60).square()) / 3

    def log_density(p):
        mean = (p["a"] + p["b"] * x).exp()
        prior = Normal(0.0, 2.0).log_prob(p["a"]) + Normal(0.0, 2.0).log_prob(p["b"]) + Gamma(2.0, 1.0).log_prob(p["k"])
        return prior + Gamma(p["k"], p["k"] / mean).log_prob(y).sum()

    return {"a": zeros(), "b": zeros(), "k": positive(1.0)}, log_density


def batting() -> Model:
    """Beta-binomial averages of 18 players; the concentration has a Pareto prior."""
    trials = torch.full((18,), 45.0, dtype=F64)
    hits = torch.tensor([18.0, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7], dtype=F64)

    def log_density(p):
        mean, size = p["mean"], p["size"]
        chances = Beta(mean * size, (1 - mean) * size, validate_args=False)
        prior = -1.5 * (1 + size).log() + chances.log_prob(p["chance"]).sum()
        return prior + Binomial(trials, p["chance"], validate_args=False).log_prob(hits).sum()

    space = {"mean": interval(0, 1, 0.3), "size": positive(50.0), "chance": interval(0, 1, 0.3, shape=18)}
    return space, log_density


def ordered_mixture() -> Model:
    y = torch.cat([-1 + 0.7 * noise(1, 40), 1.5 + 0.7 * noise(2, 25)])

    def log_density(p):
        each = Normal(p["means"].unsqueeze(-1), p["sigma"]).log_prob(y)
        prior = Normal(0.0, 2.0).log_prob(p["means"]).sum() + HalfNormal(1.0).log_prob(p["sigma"])
        prior = prior + Beta(2.0, 2.0).log_prob(p["share"][0])
        return prior + torch.logsumexp(p["share"].log().unsqueeze(-1) + each, 0).sum()

    return {"share": simplex(2), "means": ordered(2), "sigma": positive(1.0)}, log_density


def separable_cauchy() -> Model:
    """A logistic regression whose classes can be separated, with Cauchy priors."""
    x = noise(1, 40, 2)
    y = (x[:, 0] + 0.2 * x[:, 1] > 0).double()

    def log_density(p):
        prior = Cauchy(0.0, 2.5).log_prob(p["b"]).sum() + Cauchy(0.0, 10.0).log_prob(p["a"])
        return prior + Bernoulli(logits=p["a"] + x @ p["b"]).log_prob(y).sum()

    return {"a": zeros(), "b": zeros(2)}, log_density


def seemingly_unrelated() -> Model:
    """Two regressions whose noises are correlated."""
    x = noise(1, 50, 2)
    root = torch.tensor([[0.6, 0.0], [0.4, 0.5]], dtype=F64)
    y = x * torch.tensor([1.0, -0.5], dtype=F64) + noise(2, 50, 2) @ root.mT

    def log_density(p):
        prior = Normal(0.0, 2.0).log_prob(p["b"]).sum() + HalfNormal(1.0).log_prob(p["scale"]).sum()
        prior = prior + LKJCholesky(2, 1.0).log_prob(p["L"])
        joint = MultivariateNormal(x * p["b"], scale_tril=p["scale"].unsqueeze(-1) * p["L"])
        return prior + joint.log_prob(y).sum()

    return {"b": zeros(2), "scale": positive(1.0, shape=2), "L": cholesky_correlation(2)}, log_density


MODELS: dict[str, Callable[[], Model]] = {
    made.__name__.replace("_", " "): made
    for made in (
        varying_slopes, negative_binomial, censored_survival, zero_inflated, ordinal, item_response, latent_classes,
        stochastic_volatility, gaussian_process_counts, horseshoe, regularised_horseshoe, state_space, missing_data,
        centred_schools, robust_regression, logistic_groups, gamma_regression, batting, ordered_mixture,
        separable_cauchy, seemingly_unrelated,
    )
}  # fmt: skip


def target_of(name: str) -> vi.LogDensity:
    tensors, log_density = MODELS[name]()
    return vi.LogDensity(log_density, vi.Parameters(tensors))


def nuts(target: vi.LogDensity, draws: int) -> dict[str, dict[str, list[float]]]:
    """Return mean, sd, the mean's standard error and R̂ of every number, by Pyro's NUTS."""
    from pyro.infer import MCMC, NUTS
    from pyro.ops.stats import effective_sample_size, split_gelman_rubin

    start = target.space.initial.double()

    def potential(at: dict[str, Tensor]) -> Tensor:
        return -target.log_joint(at["theta"].unsqueeze(0)).squeeze(0)

    chains = []
    for seed in range(4):
        torch.manual_seed(seed)
        kernel = NUTS(potential_fn=potential, target_accept_prob=0.95)
        begin = {"theta": start + 0.1 * torch.randn(start.shape, dtype=F64)}
        run = MCMC(kernel, num_samples=draws, warmup_steps=draws, initial_params=begin, disable_progbar=True)
        run.run()
        chains.append(run.get_samples()["theta"])
    values = target.space.constrain(torch.cat(chains))
    found = {}
    for name, x in values.items():
        each = x.reshape(4, draws, -1)
        sd = x.flatten(1).std(0) if x.ndim > 1 else x.std().reshape(1)
        size = effective_sample_size(each, sample_dim=1, chain_dim=0)
        found[name] = {
            "mean": x.reshape(len(x), -1).mean(0).tolist(), "sd": sd.tolist(),
            "error": (sd / size.sqrt()).tolist(), "r_hat": split_gelman_rubin(each, 0, 1).tolist(),
        }  # fmt: skip
    return found


def compared(name: str, truth: dict, seed: int) -> dict:
    """Fit, and compare the table with NUTS."""
    start = perf_counter()
    result = vi.fit_density(target_of(name), vi.FullNormal(), seed=seed, progress=False)
    table = result.summary()
    seconds = perf_counter() - start
    notes = " ".join(table.notes)
    warned = not result.converged or "do not rely" in notes or "No k" in notes
    row = {
        "model": name, "seed": seed, "evaluations": result.evaluations, "seconds": seconds, "warned": warned,
        "verdict": result.verdict, "notes": notes, "mean": 0.0, "sd": 0.0, "unwarned": [],
    }  # fmt: skip
    for parameter, own in truth.items():
        mean, sd = (part[parameter].reshape(-1).tolist() for part in (table.mean, table.sd))
        for i, (m, s) in enumerate(zip(mean, sd, strict=True)):
            if not own["sd"][i] > 1e-9 or not own["r_hat"][i] < 1.02:  # a constant, or NUTS has not mixed
                continue
            off = abs(m - own["mean"][i]) / own["sd"][i]
            ratio = abs(math.log(s / own["sd"][i])) if s > 0 else math.inf
            row["mean"], row["sd"] = max(row["mean"], off), max(row["sd"], ratio)
            label = parameter if len(mean) == 1 and not table.mean[parameter].ndim else f"{parameter}["
            beyond = off > LIMITS[0] + 2 * own["error"][i] / own["sd"][i] or ratio > math.log(1 + LIMITS[1])
            if beyond and not warned and label not in notes:
                row["unwarned"].append(f"{parameter}.{i}: {off:.2f} sd, sd × {s / own['sd'][i]:.2f}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--cache", type=Path)
    given = parser.parse_args()
    known = json.loads(given.cache.read_text()) if given.cache is not None and given.cache.exists() else {}
    print(
        f"{'model':24}{'P':>4}{'evaluations':>12}{'seconds':>8}{'mean':>7}{'sd':>7}  warned  beyond the limits unwarned"
    )
    for name in given.only:
        if name not in known:
            known[name] = nuts(target_of(name), given.draws)
            if given.cache is not None:
                given.cache.write_text(json.dumps(known))
        for seed in range(given.seeds):
            row = compared(name, known[name], seed)
            print(
                f"{name:24}{target_of(name).space.size:4}{row['evaluations']:12,}{row['seconds']:8.1f}"
                f"{row['mean']:7.2f}{row['sd']:7.2f}  {'yes' if row['warned'] else 'no':6}  "
                f"{'; '.join(row['unwarned'][:3])}",
                flush=True,
            )


if __name__ == "__main__":
    main()
