"""Other ways to the twelve posteriors, on one footing: errors of mean and standard deviation, evaluations and seconds.

An evaluation is a log density with its gradient at one point, counted where the peer asks for it. Pyro's guides by Adam
have the evaluations of our fit of the same shape; all others have their own defaults, and what they take is
reported. A peer that is not installed is named and left out.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import installed
from benchmarks.posteriordb_models import Posterior

#: of the low-rank guide
RANK = 5
#: of Adam: Pyro has each of them with the whole budget, and keeps the better by ELBO
RATES = (0.01, 0.1)
#: Pyro makes no more steps than this, and averages more draws a step instead
STEPS = 5000
#: steps of Newton's method at the mode, at most
NEWTON = 20
#: draws that Pathfinder and DADVI hand back
DRAWS = 4000
#: of NUTS: chains, draws of each, and draws of its warm-up
CHAINS, KEPT, WARM_UP = 2, 500, 500
#: with more seconds than this for an evaluation NUTS is left out
SLOW = 1e-2

#: the mean and covariance of a normal, or draws [n, P]; evaluations, and seconds
Found = dict[str, Any]


class Counted:
    """log p and its gradient at one point, as arrays, and how often either was asked for."""

    def __init__(self, posterior: Posterior):
        self.posterior, self.evaluations, self._last = posterior, 0, None

    def __call__(self, u) -> tuple[Any, Any]:
        """Value and gradient; the same point asked for again is one evaluation."""
        import numpy as np

        u = np.array(u, dtype=float)
        if self._last is None or not np.array_equal(self._last[0], u):
            theta = torch.from_numpy(u).reshape(1, -1).requires_grad_()
            value = self.posterior.log_density(theta)
            (gradient,) = torch.autograd.grad(value.sum(), theta)
            self.evaluations += 1
            self._last = u, value.detach().numpy()[0], gradient[0].numpy()
        return self._last[1:]


def laplace(posterior: Posterior, seed: int) -> Found:
    """The normal at the mode with the curvature there: L-BFGS of scipy from zeros, then Newton's steps.

    A Hessian counts as P evaluations. Where it is not negative definite there is no such normal.
    """
    from scipy.optimize import minimize

    target, began = Counted(posterior), time.perf_counter()
    start = posterior.space.initial.numpy()
    top = minimize(lambda u: tuple(-x for x in target(u)), start, jac=True, method="L-BFGS-B")
    u, covariance = torch.from_numpy(top.x), None
    for _ in range(NEWTON):
        hessian = torch.autograd.functional.hessian(lambda x: posterior.log_density(x.unsqueeze(0)).sum(), u)
        target.evaluations += posterior.P
        root, failed = torch.linalg.cholesky_ex(-torch.as_tensor(hessian))
        if failed.item() or not bool(root.isfinite().all()):
            return {"left out": "the Hessian at the mode is not negative definite", "evaluations": target.evaluations}
        covariance = torch.cholesky_inverse(root)
        gradient = torch.from_numpy(target(u.numpy())[1])
        if float(gradient @ covariance @ gradient) < 1e-8:
            break
        u = u + covariance @ gradient
    found = {"mean": u, "covariance": covariance, "evaluations": target.evaluations}
    return found | {"seconds": time.perf_counter() - began}


def pymc_model(posterior: Posterior) -> tuple[Any, Counted]:
    """A model of pymc with the log density called through operators."""
    import numpy as np
    import pymc
    import pytensor.tensor as pt
    from pytensor.graph.basic import Apply
    from pytensor.graph.op import Op

    target = Counted(posterior)

    class Gradient(Op):
        gufunc_signature = "(p)->(p)"

        def make_node(self, *inputs):
            return Apply(self, [pt.as_tensor_variable(inputs[0])], [pt.dvector()])

        def perform(self, node, inputs, output_storage):
            output_storage[0][0] = np.asarray(target(inputs[0])[1])

    class Value(Op):
        gufunc_signature = "(p)->()"

        def make_node(self, *inputs):
            return Apply(self, [pt.as_tensor_variable(inputs[0])], [pt.dscalar()])

        def perform(self, node, inputs, output_storage):
            output_storage[0][0] = np.asarray(target(inputs[0])[0])

        def grad(self, inputs, output_grads):
            return [output_grads[0] * Gradient()(inputs[0])]

    with pymc.Model() as model:
        u = pymc.Flat("u", shape=posterior.P, initval=np.zeros(posterior.P))
        pymc.Potential("log density", Value()(u))
    return model, target


def drawn(data: Any) -> Tensor:
    """[n, P] of an InferenceData's posterior."""
    values = data.posterior["u"].values
    return torch.tensor(values.reshape(-1, values.shape[-1]), dtype=torch.float64)


def pathfinder(posterior: Posterior, seed: int) -> Found:
    """pymc-extras: four paths from jittered points, importance resampling (its defaults), one process."""
    from pymc_extras import fit_pathfinder

    model, target = pymc_model(posterior)
    began = time.perf_counter()
    data = fit_pathfinder(
        model, num_draws=DRAWS, concurrent=None, random_seed=seed, progressbar=False, display_summary=False
    )
    return {"draws": drawn(data), "evaluations": target.evaluations, "seconds": time.perf_counter() - began}


def dadvi(posterior: Posterior, seed: int) -> Found:
    """pymc-extras: mean field on 30 fixed draws (its default), by L-BFGS, as log densities here have no Hessian."""
    from pymc_extras.inference.dadvi.dadvi import fit_dadvi

    model, target = pymc_model(posterior)
    began = time.perf_counter()
    data = fit_dadvi(
        model, n_draws=DRAWS, optimizer_method="L-BFGS-B", use_grad=True, use_hessp=False, use_hess=False,
        random_seed=seed, progressbar=False,
    )  # fmt: skip
    return {"draws": drawn(data), "evaluations": target.evaluations, "seconds": time.perf_counter() - began}


def nuts(posterior: Posterior, seed: int) -> Found:
    """PyMC's NUTS with its defaults but for shorter chains, one process: the price of the truth."""
    import pymc

    model, target = pymc_model(posterior)
    if (each := seconds_of_one(posterior)) > SLOW:
        return {"left out": f"one evaluation takes {1e3 * each:.0f} ms"}
    began = time.perf_counter()
    with model:
        data = pymc.sample(
            KEPT, tune=WARM_UP, chains=CHAINS, cores=1, random_seed=seed, progressbar=False,
            compute_convergence_checks=False,
        )  # fmt: skip
    return {"draws": drawn(data), "evaluations": target.evaluations, "seconds": time.perf_counter() - began}


def seconds_of_one(posterior: Posterior) -> float:
    """Of one evaluation, the least of ten."""
    target, taken = Counted(posterior), []
    for index in range(10):
        began = time.perf_counter()
        target(posterior.space.initial.numpy() + 1e-3 * index)
        taken.append(time.perf_counter() - began)
    return min(taken)


def advi(posterior: Posterior, seed: int, budget: int) -> Found:
    """PyMC's full-rank ADVI with its defaults."""
    import numpy as np
    import pymc

    model, _ = pymc_model(posterior)
    began = time.perf_counter()
    with model:
        try:
            fitted = pymc.fit(budget, method="fullrank_advi", random_seed=seed, progressbar=False)
        except FloatingPointError:  # its ELBO is nan
            return {"left out": "its ELBO is nan"}
    mean, covariance = (torch.tensor(np.asarray(x.eval())) for x in (fitted.mean, fitted.cov))
    return {"mean": mean, "covariance": covariance, "evaluations": budget, "seconds": time.perf_counter() - began}


def pyro_guide(posterior: Posterior, seed: int, budget: int, rate: float, low_rank: bool) -> Found:
    """AutoMultivariateNormal or AutoLowRankMultivariateNormal by Adam."""
    import pyro
    from pyro.distributions import ImproperUniform, constraints
    from pyro.infer import SVI, Trace_ELBO
    from pyro.infer.autoguide import AutoLowRankMultivariateNormal, AutoMultivariateNormal, init_to_value

    def model():
        u = pyro.sample("u", ImproperUniform(constraints.real_vector, (), (posterior.P,)))
        pyro.factor("log density", posterior.log_density(u.reshape(-1, posterior.P)).reshape(u.shape[:-1]))

    pyro.enable_validation(False)  # half of its time
    particles = -(-budget // STEPS)
    steps = -(-budget // particles)
    pyro.set_rng_seed(seed)
    pyro.clear_param_store()
    start = init_to_value(values={"u": posterior.space.initial})
    options = {"rank": min(RANK, posterior.P)} if low_rank else {}
    guide = (AutoLowRankMultivariateNormal if low_rank else AutoMultivariateNormal)(model, init_loc_fn=start, **options)
    objective = Trace_ELBO(num_particles=particles, vectorize_particles=particles > 1, max_plate_nesting=0)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": rate}), objective)  # pyright: ignore
    began = time.perf_counter()
    for _ in range(steps):
        svi.step()
    seconds, fitted = time.perf_counter() - began, guide.get_posterior()
    found = {"mean": fitted.mean.detach(), "covariance": fitted.covariance_matrix.detach()}
    return found | {"evaluations": steps * particles, "seconds": seconds, "rate": rate}


#: name → module that it needs, and the peer at its own defaults
OWN: dict[str, tuple[str, Callable[[Posterior, int], Found]]] = {
    "laplace": ("scipy", laplace),
    "pathfinder": ("pymc_extras", pathfinder),
    "dadvi": ("pymc_extras", dadvi),
    "nuts": ("pymc", nuts),
}
#: the same at the evaluations of our fit
BUDGETED = {"pyro": "pyro", "pymc": "pymc"}
#: packages of another name than their module
PACKAGES = {"pyro": "pyro-ppl", "pymc_extras": "pymc-extras"}


def available(chosen: list[str]) -> list[str]:
    """Of these peers those that are installed; says which are not."""
    needs = {name: module for name, (module, _) in OWN.items()} | BUDGETED
    for name in chosen:
        if not installed(needs[name]):
            package = PACKAGES.get(needs[name], needs[name])
            print(f"{name}: left out, {needs[name]} is not installed: pip install {package}")
    return [name for name in chosen if installed(needs[name])]
