"""log p(t | y): from a network's output y and the observed target t to log probabilities, one per observation.

Every likelihood is over outputs of any trailing shape: one number, a picture, a volume. If some elements
of the target were not observed, the target is a pair (t, mask) with a boolean mask of t's shape. An element whose mask
is False contributes exactly 0, whatever t holds there. A minibatch is scaled to the whole data set by N/B with B the
number of observations (rows of t), masked or not: N counts rows too.
"""

from .base import NO_VALUES, Likelihood, check_log_prob, split_mask
from .classes import Bernoulli, Categorical
from .gaussian import Gaussian
from .poisson import Poisson
from .student_t import StudentT

__all__ = [
    "NO_VALUES", "Bernoulli", "Categorical", "Gaussian", "Likelihood", "Poisson", "StudentT", "check_log_prob",
    "split_mask",
]  # fmt: skip
