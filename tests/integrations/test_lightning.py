"""A real Trainer: what it maximises is the ELBO, on the schedule of `fit`, and what it leaves is a posterior."""

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi
from structvi.integrations.lightning import BayesianModule
from structvi.train.fit import rate_factor

pytestmark = [  # Lightning's own
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]

N = 40


def regression():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 3, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True) + 0.1 * torch.randn(N, 1, generator=generator))


def classes():
    x, t = regression().tensors
    return TensorDataset(x, (t > 0).long().squeeze(1))


def posterior(family=None, likelihood=None, outputs=1, **options):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, outputs))
    likelihood = likelihood or vi.likelihoods.Gaussian("point")
    return vi.variationalize(net, likelihood, family or vi.LowRankNormal(rank=2), **options)


def trainer(tmp_path, **options):
    settings = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    settings |= {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": tmp_path}
    return Trainer(**settings | options)


def loader(data, **options):
    return DataLoader(data, batch_size=8, **options)


class Recording(BayesianModule):
    """Keeps what every step saw."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.seen = []

    def training_step(self, batch, batch_idx=0):
        state = torch.get_rng_state()
        before = {name: p.detach().clone() for name, p in self.posterior.named_parameters()}
        out = super().training_step(batch, batch_idx)
        self.seen.append((state, before, batch, self.kl_weight, self.trainer.optimizers[0].param_groups[0]["lr"]))
        return out

    def on_before_optimizer_step(self, optimizer):
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in self.posterior.named_parameters()}
        self.seen[-1] += (gradients,)


def test_the_gradient_is_that_of_the_elbo(tmp_path):
    module = Recording(posterior(), schedule=vi.Schedule(kl_warmup=0.5), estimator=vi.Estimator(groups=2))
    weights = [p.detach().clone() for p in module.posterior.net.parameters()]
    trainer(tmp_path).fit(module, loader(regression()))
    assert module.posterior.model.num_data == N
    assert len(module.seen) == 5
    lambdas = [seen[3] for seen in module.seen]
    assert lambdas == pytest.approx([1 / 3.5, 2 / 3.5, 3 / 3.5, 1.0, 1.0])
    twin = posterior(num_data=N)
    for state, before, batch, temperature, _, gradients in module.seen:
        for name, parameter in twin.named_parameters():
            parameter.data.copy_(before[name])
            parameter.grad = None
        torch.set_rng_state(state)
        twin.loss(batch, estimator=vi.Estimator(groups=2), kl_weight=temperature).backward()
        for name, parameter in twin.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, msg=name)
    for before, now in zip(weights, module.posterior.net.parameters(), strict=True):
        assert torch.equal(before, now)  # the network is read, never changed


def test_optimizer_and_schedule_are_those_of_fit(tmp_path):
    module = Recording(posterior(), lr=0.1, schedule=vi.Schedule(warmup=0.4))
    trainer(tmp_path, max_epochs=2).fit(module, loader(regression()))
    assert [seen[4] for seen in module.seen] == pytest.approx([0.1 * rate_factor(step, 10, 0.4) for step in range(10)])
    factor = module.optimizers().optimizer.param_groups[1]  # has a rate of its own
    assert factor["params"] == [module.posterior.family.factor]
    assert factor["initial_lr"] == pytest.approx(0.1 * 2.5 / module.posterior.space.size**0.5)


def test_a_fit_finds_the_posterior(tmp_path):
    """Bayesian linear regression in closed form; the rate falls to zero, and the mean ends within 0.2 of its spread."""
    x, t = regression().tensors
    bayes = vi.variationalize(nn.Linear(3, 1), vi.likelihoods.Gaussian(noise=0.5), vi.FullNormal())
    fitted = trainer(tmp_path, max_epochs=200, gradient_clip_val=10.0)
    fitted.fit(BayesianModule(bayes, lr=0.05), DataLoader(regression(), batch_size=N))
    design = torch.cat([x, torch.ones(N, 1)], 1).double()
    covariance = torch.linalg.inv(design.mT @ design / 0.25 + torch.eye(4))
    mean, q = (covariance @ design.mT @ t.double() / 0.25).squeeze(), bayes.family()
    spread = covariance.diagonal().sqrt()
    assert ((q.mean - mean).abs() < 0.2 * spread).all()
    torch.testing.assert_close(q.variance.double().sqrt(), spread, rtol=0.1, atol=0.0)


def test_validation_and_test_are_those_of_evaluate(tmp_path):
    """The weighted mean over batches of 7 is the mean over all data, at common draws."""
    given = {"draws": 8, "generator": torch.Generator().manual_seed(0)}
    bayes = posterior(vi.MeanField(), vi.likelihoods.Categorical(), outputs=2, num_data=N)
    (logged,) = trainer(tmp_path).validate(BayesianModule(bayes, draws=8), DataLoader(classes(), 7), verbose=False)
    expected = bayes.evaluate(loader(classes()), **given)
    assert set(logged) == {"val_nlpd", "val_accuracy", "val_brier"}
    for name in ("nlpd", "accuracy", "brier"):
        assert logged[f"val_{name}"] == pytest.approx(expected[name], rel=1e-5)
    bayes = posterior(vi.MeanField(), num_data=N)
    (logged,) = trainer(tmp_path).test(BayesianModule(bayes, draws=8), DataLoader(regression(), 7), verbose=False)
    expected = bayes.evaluate(loader(regression()), **given | {"generator": torch.Generator().manual_seed(0)})
    assert logged["test_mse"] == pytest.approx(expected.rmse**2, rel=1e-5)
    assert logged["test_crps"] == pytest.approx(expected.crps, rel=1e-5)


def test_a_checkpoint_of_the_trainer_brings_all_back(tmp_path):
    module = BayesianModule(posterior())
    fitted = trainer(tmp_path)
    fitted.fit(module, loader(regression()))
    fitted.save_checkpoint(tmp_path / "last.ckpt")
    again = BayesianModule(posterior())
    trainer(tmp_path, max_epochs=2).fit(
        again, loader(regression()), ckpt_path=tmp_path / "last.ckpt", weights_only=False
    )
    assert again.global_step == 10
    fresh = BayesianModule(posterior())
    fresh.load_state_dict(torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"])
    for name, tensor in module.posterior.state_dict().items():
        assert torch.equal(tensor, fresh.posterior.state_dict()[name])


def test_mixed_precision_is_for_the_network_alone(tmp_path):
    seen = []

    class Net(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            seen.append(out.dtype)
            return out

    class Likelihood(vi.likelihoods.Gaussian):
        def log_prob(self, output, target):
            assert not torch.is_autocast_enabled("cpu")
            assert output.dtype == torch.float32
            return super().log_prob(output, target)

    bayes = vi.variationalize(Net(3, 1), Likelihood("point"), vi.MeanField(), evaluation="loop")
    trainer(tmp_path, precision="bf16-mixed").fit(BayesianModule(bayes), loader(regression()))
    assert set(seen) == {torch.bfloat16}
    assert bayes.model.precision is None
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match="bf16-mixed"):
        BayesianModule(bayes).training_step((torch.zeros(2, 3), torch.zeros(2, 1)))
