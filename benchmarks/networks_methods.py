"""The methods of `benchmarks.networks`: each makes a predictor of the same trained network, or of five of them.

What is chosen, a rate, a temperature, a prior, is chosen on validation data.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

from . import networks_laplace
from .networks_data import Data
from .networks_measures import Predictor, cases, log_probabilities
from .networks_nets import Task, dropout_layers, set_dropout, train

MEMBERS = 5
#: draws to tune dropout's rate
FEW_DRAWS = 16


@dataclass
class Answer:
    predictor: Predictor
    choice: str = ""
    details: dict[str, Any] = field(default_factory=dict)


class Workshop:
    """One set and seed: its trained networks, and what is made of them. Everything is made once."""

    def __init__(
        self, task: Task, data: Data, seed: int, device: torch.device, steps: int, folder: Path | None,
        bf16: bool = False,
    ):  # fmt: skip
        self.task, self.data, self.seed, self.device = task, data, seed, device
        self.steps, self.folder, self.bf16 = steps, folder, bf16
        self.draws = task.draws if steps == 0 else 4
        of_pixels = data.test.tensors[1].ndim > 1
        #: of weights, to predict with a posterior; None: as `predict` does it
        self.drawn: int | None = None if steps == 0 and not of_pixels else self.draws
        self.batch = 16 if of_pixels else 250
        self._made: dict[Any, Any] = {}

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` makes, now or before."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def loader(self, data: TensorDataset) -> DataLoader:
        return DataLoader(data, self.task.batch)

    def net(self, member: int = 0, rate: float = 0.0, share: int = 1) -> nn.Module:
        """A trained network, `share`: in so many times fewer epochs."""
        return self.once((member, rate, share), lambda: self._net(member, rate, share))

    def _net(self, member: int, rate: float, share: int) -> nn.Module:
        seed = 1000 * member + self.seed
        task = replace(self.task, epochs=self.task.epochs // share)
        path = None
        if self.folder is not None:
            path = self.folder / f"{task.name}-{seed}-{rate:g}{'' if share == 1 else f'-{task.epochs}'}.pt"
        if path is not None and path.exists():
            net = task.net().to(self.device).eval()
            net.load_state_dict(torch.load(path, map_location=self.device))
        else:
            net = train(task, self.data.train, seed, self.device, rate, self.steps, self.bf16)
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.save(net.state_dict(), path)
        set_dropout(net, rate)
        return net

    def validation(self, predictor: Predictor) -> Tensor:
        return log_probabilities(predictor, self.data.validation.tensors[0], self.batch, self.device)

    def validation_nll(self, predictor: Predictor) -> float:
        return float(cases(self.validation(predictor), self.data.validation.tensors[1]).mean())


def of_network(net: nn.Module) -> Predictor:
    return lambda x: net(x).double().log_softmax(1)


def network(shop: Workshop) -> Answer:
    return Answer(of_network(shop.net()))


def tempered(shop: Workshop, predictor: Predictor) -> Answer:
    """p^(1/T), T of the lowest validation NLL."""
    log_p, labels = shop.once(("validation", predictor), lambda: shop.validation(predictor)), shop.data.validation
    labels = labels.tensors[1]
    grid = torch.logspace(-1, 1, 401, dtype=torch.float64).tolist()
    if log_p.numel() > 10**5:  # pixels
        grid = grid[::8]
    T = min(grid, key=lambda T: float(cases((log_p / T).log_softmax(1), labels).mean()))
    return Answer(lambda x: (predictor(x) / T).log_softmax(1), f"T = {T:.2f}")


def temperature_scaling(shop: Workshop) -> Answer:
    return tempered(shop, of_network(shop.net()))


def of_dropout(net: nn.Module, draws: int, seed: int) -> Predictor:
    """The mean over passes with the dropout layers active."""

    def predict(x: Tensor) -> Tensor:
        torch.manual_seed(seed)
        for layer in dropout_layers(net):
            layer.train()
        log_p = [net(x).double().log_softmax(1) for _ in range(draws)]
        net.eval()
        return average(log_p)

    return predict


def average(log_p: list[Tensor]) -> Tensor:
    return torch.stack(log_p).logsumexp(0) - torch.tensor(float(len(log_p)), dtype=torch.float64).log()


def dropout_injected(shop: Workshop) -> Answer:
    """In the same network, which was trained without."""
    return _dropout(shop, {rate: shop.net() for rate in shop.task.rates})


def dropout_trained(shop: Workshop) -> Answer:
    """In networks trained with it, a training for each rate; the rate to predict is the rate of training."""
    return _dropout(shop, {rate: shop.net(rate=rate) for rate in shop.task.trained_rates})


def _dropout(shop: Workshop, nets: dict[float, nn.Module]) -> Answer:
    own = {}
    for rate, net in nets.items():
        own[rate] = copy.deepcopy(net)  # its hook counts here too
        set_dropout(own[rate], rate)

    def tune() -> dict[float, float]:
        few = min(FEW_DRAWS, shop.draws)
        return {rate: shop.validation_nll(of_dropout(net, few, shop.seed)) for rate, net in own.items()}

    found = shop.once(("dropout", *(id(net) for net in nets.values())), tune)
    rate = min(found, key=lambda rate: found[rate])
    details = {"held_out": {f"rate {rate:g}": -nll for rate, nll in found.items()}}
    return Answer(of_dropout(own[rate], shop.draws, shop.seed), f"rate {rate:g}", details)


def of_ensemble(shop: Workshop, share: int = 1) -> Predictor:
    predictors = [of_network(shop.net(member, share=share)) for member in range(MEMBERS)]
    return lambda x: average([predict(x) for predict in predictors])


def ensemble(shop: Workshop) -> Answer:
    return Answer(of_ensemble(shop))


def ensemble_of_one(shop: Workshop) -> Answer:
    """Of networks that are trained together as long as one."""
    return Answer(of_ensemble(shop, share=MEMBERS))


def ensemble_tempered(shop: Workshop) -> Answer:
    return tempered(shop, of_ensemble(shop))


def of_posterior(bayes: Any, draws: int | None, seed: int) -> Predictor:
    """log Σ_s w_s p(class | y_s), class by class: `log_prob` neither rounds to zero nor passes by a calibration.

    Without a number of draws as `predict` does it by itself: in function space where it can.
    """
    settings = {} if draws is None else {"draws": draws}

    def predict(x: Tensor) -> Tensor:
        found = bayes.predict(x, generator=torch.Generator().manual_seed(seed), **settings)
        shape = (len(x), *found.mean.shape[2:])
        labels = [torch.full(shape, c, device=x.device) for c in range(found.mean.shape[1])]
        return torch.stack([found.log_prob(label) for label in labels], 1)

    return predict


def placed(shop: Workshop, member: int = 0, validation: bool = True, **settings: Any) -> Answer:
    """`variationalize(net, likelihood, **settings)` and `fit`, around a trained network."""
    net = shop.net(member)

    def make() -> tuple[Any, Any]:
        bayes = vi.variationalize(net, vi.likelihoods.Categorical(), **settings)
        held_out = {"validation": shop.loader(shop.data.validation)} if validation else {}
        return bayes, bayes.laplace(shop.loader(shop.data.train), progress=False, **held_out)

    bayes, result = shop.once(("placed", member, validation, str(settings)), make)
    details = {"held_out": dict(result.candidates), "held_out_network": result.network, "kept": result.selected}
    details["bayes"] = bayes
    return Answer(of_posterior(bayes, shop.drawn, shop.seed), result.selected if validation else "", details)


def calibrated(shop: Workshop) -> Answer:
    """The default posterior and its `calibrate` on the same validation data."""
    bayes = copy.deepcopy(placed(shop).details["bayes"])
    found = shop.once("calibrate", lambda: bayes.calibrate(shop.loader(shop.data.validation)))
    return Answer(of_posterior(bayes, shop.drawn, shop.seed), " ".join(str(found).split())[:60])


def mixture(shop: Workshop) -> Answer:
    """`Ensemble.of(networks, likelihood)` and `fit`: as many draws in all as of one posterior."""
    nets = [shop.net(member) for member in range(MEMBERS)]
    draws = None if shop.drawn is None else MEMBERS * -(-shop.drawn // MEMBERS)

    def make() -> tuple[Any, Any]:
        bayes = vi.Ensemble.of(nets, vi.likelihoods.Categorical())
        held_out = shop.loader(shop.data.validation)
        return bayes, bayes.laplace(shop.loader(shop.data.train), validation=held_out, progress=False)

    bayes, result = shop.once("mixture", make)
    on_top = bayes.calibration and bayes.calibration.adjustment
    choice = result.members[0].selected + (f", temperature {on_top.value:.3g}" if on_top else "")
    return Answer(of_posterior(bayes, draws, shop.seed), choice, {"bayes": bayes, "draws": draws})


def mixture_calibrated(shop: Workshop) -> Answer:
    """And its `calibrate` on the same validation data, whose temperature may be below one."""
    answer = mixture(shop)
    bayes = copy.deepcopy(answer.details["bayes"])
    found = shop.once("mixture, calibrate", lambda: bayes.calibrate(shop.loader(shop.data.validation)))
    return Answer(of_posterior(bayes, answer.details["draws"], shop.seed), " ".join(str(found).split())[:60])


def head(shop: Workshop, exact: bool) -> Answer:
    """A Bayesian last layer: at the optimum of its bound, or around the network, its prior chosen on validation."""
    net, train = shop.net(), shop.loader(shop.data.train)

    def fit() -> tuple[Any, Any]:
        bayes = vi.variationalize_head(net, vi.likelihoods.Categorical())
        if exact:
            return bayes, bayes.fit_head(train, progress=False)
        return bayes, bayes.laplace(train, validation=shop.loader(shop.data.validation), progress=False)

    bayes, result = shop.once(("head", exact), fit)
    return Answer(of_posterior(bayes, shop.drawn, shop.seed), "" if exact else result.selected)


def _laplace(way: networks_laplace.Way) -> Callable[[Workshop], Answer]:
    def method(shop: Workshop) -> Answer:
        if shop.data.test.tensors[1].ndim > 1:
            raise NotImplementedError("laplace-torch has no labels of pixels")
        net, loader = shop.net(), shop.loader(shop.data.train)
        made = shop.once(("laplace", way.part), lambda: networks_laplace.fit(net, loader, way.part, shop.device))
        (fitted, prior), link, densities = made, "probit", {}
        if way.by_validation:
            arguments = fitted, way.part, shop.seed, shop.validation_nll
            prior, link, densities = shop.once(way, lambda: networks_laplace.tuned(*arguments))
        choice = f"precision {prior:.3g}, {link}"
        return Answer(networks_laplace.predictor(fitted, prior, link, shop.seed), choice, {"held_out": densities})

    return method


METHODS: dict[str, Callable[[Workshop], Answer]] = {
    "network": network,
    "temperature scaling": temperature_scaling,
    "MC dropout, injected": dropout_injected,
    "MC dropout, trained with": dropout_trained,
    "ensemble of 5": ensemble,
    "one training's ensemble of 5": ensemble_of_one,
    "ensemble of 5, tempered": ensemble_tempered,
    **{way.name: _laplace(way) for way in networks_laplace.WAYS},
    "ours, default call": placed,
    "ours, linearised, no validation": lambda shop: placed(shop, validation=False, linearise=True),
    "ours, drawn, no validation": lambda shop: placed(shop, validation=False, linearise=False),
    "ours, mean field": lambda shop: placed(shop, family=vi.MeanField()),
    "ours, low rank (8)": lambda shop: placed(shop, family=vi.LowRankPrecision(8)),
    "ours, last layer": lambda shop: head(shop, exact=False),
    "ours, exact last layer": lambda shop: head(shop, exact=True),
    "ours, calibrated": calibrated,
    "ours, mixture of 5": mixture,
    "ours, mixture of 5, calibrated": mixture_calibrated,
}
