"""laplace-torch as a method of `benchmarks.networks`: imported only when it is asked for.

The predictive is linearised. The prior precision is the best of its marginal likelihood; or, `by_validation`, prior and
link function have the lowest validation NLL. The curvature is its default, the Gauss–Newton matrix of curvlinops: of a
last layer in full, of all weights as Kronecker factors.

Its last-layer form passes the data through the network once for every weight of that layer, and not on a GPU: here it
gets the last layer alone, of which all weights are, and the features as inputs, which is the same. Of normalisation
layers it has no Kronecker factors: their scales and shifts are held.
"""

import copy
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from .networks_measures import Predictor, remembered


class Way(NamedTuple):
    name: str
    part: str  # of the weights
    by_validation: bool


WAYS = (
    Way("laplace-torch, last layer", "last_layer", by_validation=False),
    Way("laplace-torch, last layer, tuned", "last_layer", by_validation=True),
    Way("laplace-torch, Kronecker", "all", by_validation=False),
    Way("laplace-torch, Kronecker, tuned", "all", by_validation=True),
)
STRUCTURE = {"last_layer": "full", "all": "kron"}
#: that are tried
PRIORS = {"last_layer": tuple(10 ** (k / 2) for k in range(-4, 11)), "all": (1.0, 10.0, 100.0, 1e3, 1e4)}
LINKS = ("probit", "mc")
#: without Kronecker factors
NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)
#: of outputs, for the link "mc"
DRAWS = 512


def fit(net: nn.Module, loader: DataLoader, part: str, device: torch.device) -> tuple["Fitted", float]:
    """A `Laplace` with its curvature, and the prior precision of the highest marginal likelihood."""
    if importlib.util.find_spec("laplace") is None:
        raise ImportError("laplace-torch is not installed: make .venv/.installed-bench, or pip install laplace-torch")
    from laplace import Laplace

    net, features = copy.deepcopy(net), nn.Identity()
    if part == "last_layer":
        assert isinstance(net, nn.Sequential)
        net, features = net[-1].cpu(), net[:-1]
        loader = _features(features, loader, device)
        device = torch.device("cpu")
    for module in net.modules():
        if isinstance(module, NORMS):
            module.requires_grad_(False)
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        laplace: Any = Laplace(net, "classification", subset_of_weights="all", hessian_structure=STRUCTURE[part])
        laplace.fit(_OnDevice(loader, device))
        laplace.optimize_prior_precision(method="marglik", pred_type="glm")
    return Fitted(laplace, remembered(features), device), float(torch.as_tensor(laplace.prior_precision).mean())


class Fitted(NamedTuple):
    """A `Laplace` of what comes after some features, and where it is."""

    laplace: Any
    features: Callable[[Tensor], Tensor]
    device: torch.device


@torch.no_grad()
def _features(net: nn.Module, loader: DataLoader, device: torch.device) -> DataLoader:
    found = [(net(x.to(device)).cpu(), t) for x, t in loader]
    return DataLoader(TensorDataset(*(torch.cat(part) for part in zip(*found, strict=True))), 1000)


def tuned(
    fitted: Fitted, part: str, seed: int, nll: Callable[[Predictor], float]
) -> tuple[float, str, dict[str, float]]:
    """Prior and then link of the lowest validation NLL, and the held-out densities of all that were tried."""
    densities = {}
    for prior in PRIORS[part]:
        try:
            densities[prior, "probit"] = -nll(predictor(fitted, prior, "probit", seed))
        except torch.linalg.LinAlgError:  # the wider the prior, the worse the matrix
            continue
    best = max(densities, key=lambda key: densities[key])[0]
    densities[best, "mc"] = -nll(predictor(fitted, best, "mc", seed))
    link = max(LINKS, key=lambda link: densities[best, link])
    return best, link, {f"precision {prior:.3g}, {link}": value for (prior, link), value in densities.items()}


class _OnDevice:
    """A loader's batches on a device; laplace-torch asks for its data set too."""

    def __init__(self, loader: DataLoader, device: torch.device):
        self.loader, self.device, self.dataset = loader, device, loader.dataset

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((x.to(self.device), t.to(self.device)) for x, t in self.loader)

    def __len__(self) -> int:
        return len(self.loader)


def predictor(fitted: Fitted, prior: float, link: str, seed: int) -> Predictor:
    laplace, features, device = fitted

    def predict(x: Tensor) -> Tensor:
        torch.manual_seed(seed)
        laplace.prior_precision = prior
        # Jacobians of all weights are held: fewer rows at a time
        size = 32 if sum(p.numel() for p in laplace.model.parameters()) > 4 * 10**4 else 250
        with torch.no_grad():
            inputs = features(x).to(device)
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            settings = {"pred_type": "glm", "link_approx": link, "n_samples": DRAWS}
            p = torch.cat([laplace(part, **settings).detach() for part in inputs.split(size)])
        return p.double().clamp(min=1e-38).log()

    return predict
