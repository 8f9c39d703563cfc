"""Writing a family.

Twenty seconds on two cores. A family is an `nn.Module` with variational parameters; calling it gives a density.
Return a distribution of torch, or write the density yourself and check it against the laws.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import structvi as vi
from structvi.families import Diagonal, NormalForm, check_draw
from structvi.testing import check_family

STEPS = 800  # quick: 8

# ## The short way: a torch distribution
#
# Return anything with `rsample` and `log_prob` over a vector of P numbers. Student-t tails take eight lines:


class StudentT(vi.Family):
    def __init__(self, df: float = 4.0):
        super().__init__()
        self.df = df  # configuration: kept as an attribute of the same name, so that save and load know it

    def initialise(self, parameters, generator):
        self.location = nn.Parameter(parameters.initial.clone())
        self.log_scale = nn.Parameter((0.1 * parameters.scale).log())

    def forward(self):
        marginals = torch.distributions.StudentT(self.df, self.location, self.log_scale.exp())
        return torch.distributions.Independent(marginals, 1)


laws = check_family(StudentT())
print({law: verdict.split(":")[0] for law, verdict in laws.items()})

# It fits, predicts, mixes (`vi.Mixture(StudentT(), components=2)`) and saves like the others. Its draws are always
# naive, because torch makes its own noise.
#
# ## The long way: a density of your own
#
# This family is bent: with ε ~ N(0, I), z = s∘ε, and θ = m + z + b·(z₁² − s₁²) in every coordinate but the first.
# The map has determinant ∏ s, so the density is exact:
#
#     log q(θ) = Σ log N(z_i; 0, s_i²),   z_1 = θ_1 − m_1,   z_i = θ_i − m_i − b_i (z_1² − s_1²)


class BentDensity(vi.Density):
    def __init__(self, location, scale, bend):  # [P] each; bend[0] is not used
        self.location, self.scale = location, scale
        self.bend = torch.cat([torch.zeros_like(bend[:1]), bend[1:]])

    @property
    def mean(self):
        return self.location

    @property
    def variance(self):  # Var z₁² = 2 s₁⁴, and z₁², z_i are uncorrelated
        return self.scale.square() + 2 * self.bend.square() * self.scale[0] ** 4

    def draw(self, groups=1, coupling=vi.couplings.naive, generator=None):
        check_draw(groups, generator)
        noise = coupling(groups, self.P, 0, generator, self.location.dtype, self.location.device).diagonal  # [S, P]
        z = self.scale * noise
        theta = self.location + z + self.bend * (z[:, :1] ** 2 - self.scale[0] ** 2)
        return vi.Draws(theta, theta.new_full((len(theta),), 1 / len(theta)))

    def log_prob(self, theta):  # [S, P] -> [S]
        x = theta - self.location
        z = x - self.bend * (x[:, :1] ** 2 - self.scale[0] ** 2)
        return torch.distributions.Normal(torch.zeros_like(self.scale), self.scale).log_prob(z).sum(-1)

    def entropy(self):
        return (self.scale.log() + 0.5 * torch.log(torch.tensor(2 * torch.pi * torch.e))).sum()


class Bent(vi.Family):
    def __init__(self, initial_scale: float = 0.3):
        super().__init__()
        self.initial_scale = initial_scale

    def initialise(self, parameters, generator):
        self.location = nn.Parameter(parameters.initial.clone())
        self.log_scale = nn.Parameter((self.initial_scale * parameters.scale).log())
        self.bend = nn.Parameter(torch.full_like(parameters.initial, 0.1))

    def forward(self):
        return BentDensity(self.location, self.log_scale.exp(), self.bend)


# A density needs `draw` and one of `log_prob` and `entropy`. The score comes by automatic differentiation unless you
# write it. Only the coupling makes noise, so antithetic pairs and your own couplings work at once.
#
# ## The laws
#
# `check_family` applies the laws of our own families. The density is normalised, and the score is its gradient. Every
# estimator's gradient is unbiased, and moments agree with the draws. A seed gives the same bits. The last law is for
# normal families, see below.

for law, verdict in check_family(Bent()).items():
    print(f"{law:>13}: {verdict}")

# A wrong sign in `log_prob` is found:


class Wrong(Bent):
    def forward(self):
        density = super().forward()
        density.log_prob = lambda theta: -BentDensity.log_prob(density, theta)
        return density


try:
    check_family(Wrong())
except AssertionError as error:
    print(str(error).splitlines()[0])

# ## Use it
#
# The target is a banana: x ~ N(0, 2²), y | x ~ N(x²/4 − 1, ½²). It is normalised, so the best ELBO is 0.

space = vi.Parameters({"xy": torch.zeros(2, dtype=torch.float64)})


def banana(p):
    x, y = p["xy"]
    return torch.distributions.Normal(0.0, 2.0).log_prob(x) + torch.distributions.Normal(x**2 / 4 - 1, 0.5).log_prob(y)


target = vi.LogDensity(banana, space)


def fit(recipe):
    generator = torch.Generator().manual_seed(0)
    q = recipe.bind(space, generator)
    optimizer = torch.optim.Adam(q.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (-vi.elbo(q, target, estimator=vi.Estimator(groups=8), generator=generator)).backward()
        optimizer.step()
        schedule.step()
    return q, vi.elbo(q, target, estimator=vi.Estimator(groups=4000), generator=generator).item()


# The picture shows a full normal, the Student-t and the bent family. Shades are the target, points are draws.

a, b = torch.meshgrid(torch.linspace(-6, 6, 120).double(), torch.linspace(-3.5, 7, 120).double(), indexing="xy")
shade = target.log_joint(torch.stack([a, b], -1).reshape(-1, 2)).exp().reshape(a.shape)
figure, panels = plt.subplots(1, 3, figsize=(9, 3.1), sharey=True, layout="constrained")
for axes, recipe in zip(panels, (vi.FullNormal(), StudentT(), Bent()), strict=True):
    q, elbo = fit(recipe)
    draws = q().draw(500, generator=torch.Generator().manual_seed(1)).theta.detach()
    axes.contourf(a, b, shade, levels=10, cmap="Blues")
    axes.plot(*draws.T, ".", ms=2, color="#b4572f", alpha=0.6)
    axes.set(title=f"{type(recipe).__name__}: {elbo:.2f} nats", xlim=(-6, 6), ylim=(-3.5, 7))
plt.show()

# ## A normal family
#
# Some calls need more than draws. `bayes.laplace` places a family around a trained network, `bayes.grow` gives it more
# columns or parts, `vi.fit_density` changes its coordinates. They use one value for a normal, `NormalForm`: a mean, and a
# root of the covariance or of the precision. If your family returns and accepts this value, all these calls work:


class Plain(vi.Family):
    def initialise(self, parameters, generator):
        self.location = nn.Parameter(parameters.initial.clone())
        self.log_scale = nn.Parameter((0.1 * parameters.scale).log())

    def forward(self):
        return torch.distributions.Independent(torch.distributions.Normal(self.location, self.log_scale.exp()), 1)

    @torch.no_grad()
    def normal(self):
        return NormalForm(self.location.clone(), Diagonal(self.log_scale.exp()))

    @torch.no_grad()
    def set_normal(self, form):
        self.location.copy_(form.mean)
        self.log_scale.copy_(form.diagonal().scale.log())


for recipe in (vi.MeanField(), Plain()):
    result = vi.fit_density(target, recipe, progress=False)
    print(f"{type(recipe).__name__}: {result.status}, ELBO {result.elbo}")

# | you ask for | a family with `normal` and `set_normal` | another family |
# | --- | --- | --- |
# | `bayes.laplace(loader)` | placed around the trained network | refused |
# | `bayes.grow(components=)` | copies of it, each moved to a draw | refused |
# | `bayes.grow(rank=)` | becomes a `LowRankNormal` | refused |
# | `vi.fit_density` | searched for as ours are | best of several starts |
#
# `form.diagonal()` and `form.low_rank(rank, of_precision)` are the nearest roots of your family's shape. The law
# "normal" of `check_family` compares `normal` and `set_normal` with the density.
#
# A Gaussian of a new shape derives from `structvi.families.gaussian.Gaussian`: `location` and three methods, and draws,
# score, entropy, covariances and `kl` follow. A flow from zuko is the short way again: `examples/flow.py`.
