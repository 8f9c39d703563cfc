"""Mixtures against dense truth, quadrature and their own parts."""

import copy
from math import log

import pytest
import torch
from torch.distributions import MultivariateNormal

import structvi as vi
from structvi.families.mixture import LOGIT_UNIT, MixtureDensity
from structvi.objective import log_q_at
from structvi.testing import dense_moments


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def space(P=3, start=0.0):
    return vi.Parameters({"a": torch.full((1,), start).double(), "b": torch.full((P - 1,), start).double()})


def moved(family, seed=0, size=0.3):
    """Off the symmetric starting values."""
    g = generator(seed)
    with torch.no_grad():
        for parameter in family.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=g, dtype=parameter.dtype))
    return family


def mixed(P=3, size=0.3, initial_scale=0.3):
    """One part of every Gaussian shape, overlapping."""
    recipes = [
        vi.MeanField(initial_scale=initial_scale),
        vi.LowRankNormal(1, initial_scale=initial_scale),
        vi.LowRankPrecision(2, initial_scale=initial_scale),
        vi.FullNormal(initial_scale=initial_scale),
    ]
    return moved(vi.Mixture([r.bind(space(P), generator(1)) for r in recipes]), size=size)


def dense_parts(density):
    return [dense_moments(part) for part in density.parts]


class TestDensity:
    def test_log_prob_against_dense_normals(self):
        q = mixed()
        theta = 2 * torch.randn(50, 3, generator=generator(), dtype=torch.float64)
        parts = [MultivariateNormal(mean, covariance).log_prob(theta) for mean, covariance in dense_parts(q())]
        truth = (q.proportions.unsqueeze(-1) * torch.stack(parts).exp()).sum(0).log()
        torch.testing.assert_close(q().log_prob(theta), truth, rtol=1e-10, atol=0)

    def test_moments_by_the_law_of_total_variance(self):
        q = mixed(P=4)
        density, weights = q(), q.proportions.detach()
        moments = dense_parts(density)
        mean = sum(w * m for w, (m, _) in zip(weights, moments, strict=True))
        second = sum(w * (S + torch.outer(m, m)) for w, (m, S) in zip(weights, moments, strict=True))
        covariance = second - torch.outer(mean, mean)
        torch.testing.assert_close(density.mean.detach(), mean, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(density.covariance().detach(), covariance, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(density.variance.detach(), covariance.diagonal(), rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(density.covariance("a", "b").detach(), covariance[:1, 1:], rtol=1e-9, atol=1e-10)

    def test_far_variances_do_not_cancel(self):
        """Mean 1e4, scale 0.3 in float32: Σ π μ² − mean² would keep no digit."""
        start = vi.Parameters({"z": torch.full((2,), 1e4)})
        recipe = vi.MeanField(initial_scale=3e-5)
        density = vi.Mixture([recipe.bind(start), recipe.bind(start)])()
        torch.testing.assert_close(density.variance, torch.full((2,), 0.09), rtol=1e-4, atol=0)


class TestDraws:
    def test_common_noise_keeps_calls_of_one_part_apart(self):
        """A part that asks for noise twice gets two noises: its halves stay independent."""

        class Halves(vi.Density):
            mean = torch.zeros(4)

            def draw(self, groups=1, coupling=vi.couplings.naive, generator=None):
                halves = [coupling(groups, 2, 0, generator, torch.float32, None).diagonal for _ in range(2)]
                return vi.Draws(torch.cat(halves, dim=-1), torch.full((groups,), 1 / groups))

        density = MixtureDensity([Halves(), Halves()], torch.full((2,), 0.5).log())
        theta = density.draw(3, vi.couplings.naive, generator()).theta.reshape(3, 2, 4)
        assert not torch.equal(theta[..., :2], theta[..., 2:])
        assert torch.equal(theta[:, 0], theta[:, 1])


class TestOne:
    @pytest.mark.parametrize("recipe", [vi.MeanField(), vi.LowRankNormal(2), vi.MAP()], ids=repr)
    def test_a_mixture_of_one_is_its_part(self, recipe):
        part = recipe.bind(space(), generator(3))
        q = vi.Mixture(recipe, components=1).bind(space(), generator(3))
        one, other = (family().draw(4, vi.couplings.unscented, generator()) for family in (part, q))
        assert torch.equal(one.theta, other.theta)
        assert torch.equal(one.weight, other.weight)
        target = vi.LogDensity(lambda p: -p["b"].square().sum() - p["a"].sum(), space())
        values = [vi.elbo(family, target, None, vi.Estimator(groups=3), generator()) for family in (part, q)]
        torch.testing.assert_close(*values, rtol=1e-12, atol=0)  # the part's passes are fused: another order of sums
        gradients = [
            torch.autograd.grad(value, list(own.parameters()))
            for value, own in zip(values, (part, q.inner), strict=True)
        ]
        for mine, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
        if part().has_density:
            assert torch.equal(part().log_prob(one.theta), q().log_prob(one.theta))
            torch.testing.assert_close(part().score(one.theta), q().score(one.theta), rtol=1e-12, atol=0)


class TestGradients:
    """A one-dimensional mixture and target, where the ELBO and its gradients are quadratures."""

    @staticmethod
    def family():
        line = vi.Parameters({"z": torch.zeros(1, dtype=torch.float64)})
        q = vi.Mixture([vi.MeanField().bind(line) for _ in range(3)])
        with torch.no_grad():
            q.raw_logits.copy_(torch.tensor([0.3, -0.5, 0.1]) / LOGIT_UNIT)
            for part, mean, scale in zip(q.part, (-1.5, 0.2, 2.0), (0.7, 0.5, 1.2), strict=True):
                part.get_parameter("mean").fill_(mean)
                part.get_parameter("log_scale").fill_(log(scale))
        return q

    @staticmethod
    def log_p(z):
        return torch.logaddexp(-0.5 * (z - 1).square() + log(0.6), -0.5 * ((z + 2) / 0.8).square() - log(2.0))

    @pytest.mark.parametrize("estimator", ["path", "log_q"])
    def test_against_quadrature(self, estimator):
        """Means over 400 estimates of 64 groups, 5 standard errors; the quadrature's error is below 1e-9."""
        q = self.family()
        parameters = list(q.parameters())
        z = torch.linspace(-30, 30, 20001, dtype=torch.float64)
        log_q = q().log_prob(z.unsqueeze(-1))
        truth_value = (log_q.exp() * (self.log_p(z) - log_q)).sum() * (z[1] - z[0])
        truth = torch.cat([g.reshape(-1) for g in torch.autograd.grad(truth_value, parameters)])
        assert truth[:3].abs().min() > 0.01 * LOGIT_UNIT, "the proportions' gradients must not vanish"
        target = vi.LogDensity(lambda p: self.log_p(p["z"]).sum(), q.space, evaluation="vmap")
        g, samples, values = generator(2), [], []
        for _ in range(400):
            value = vi.elbo(q, target, None, vi.Estimator(estimator, 64, vi.couplings.naive), g)
            samples.append(torch.cat([x.reshape(-1) for x in torch.autograd.grad(value, parameters)]))
            values.append(value.detach())
        samples, values = torch.stack(samples), torch.stack(values)
        for got, expected in ((samples, truth), (values, truth_value.detach())):
            error = got.std(0) / len(got) ** 0.5
            assert bool(((got.mean(0) - expected).abs() < 5 * error).all())

    def test_path_is_zero_where_q_is_the_target(self):
        """For locations and scales draw by draw; for proportions summed over a group, as the target is log q + 7."""
        q = mixed()
        frozen = copy.deepcopy(q).requires_grad_(False)
        draws = q().draw(1, vi.couplings.naive, generator())
        value = frozen().log_prob(draws.theta) + 7 - log_q_at(q(), draws.theta, path=True)
        parts = [p for p in q.inner.parameters() if p.numel()]
        for weight, one in zip(draws.weight, value, strict=True):
            gradients = torch.autograd.grad(weight * one, [*parts, q.raw_logits], retain_graph=True, allow_unused=True)
            assert max(g.abs().max().item() for g in gradients[:-1] if g is not None) < 1e-12
            assert gradients[-1].abs().max().item() > 0.02
        (total,) = torch.autograd.grad((draws.weight * value).sum(), q.raw_logits)
        assert total.abs().max().item() < 1e-12


class TestBinding:
    def test_free_parts_start_at_mirrored_draws_of_the_scale(self):
        """1000 spaces of one number, scale 3: each start is N(0, 3²) to 5 standard errors, pairs are mirror images."""
        P = 1000
        free = vi.Parameters({"z": torch.zeros(P, dtype=torch.float64)})
        q = vi.Mixture(vi.MeanField(), components=3).bind(free, generator())
        starts = torch.stack([part().mean for part in q.part]).detach()
        assert torch.equal(starts[0], -starts[1])
        assert not torch.equal(starts[0], starts[2])
        for start in starts:
            assert start.mean().abs().item() < 5 * 3 / P**0.5
            assert abs(start.square().mean().item() / 9 - 1) < 5 * (2 / P) ** 0.5
        assert torch.equal(q.part[2]().variance, q.part[0]().variance)
        torch.testing.assert_close(q.part[0]().variance.sqrt(), torch.full_like(starts[0], 0.3))
