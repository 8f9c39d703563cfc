"""Scaling out: larger networks, interrupted fits, several processes.

Half a minute on two cores. What costs grow with, and what to turn when they are too high.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structvi as vi

STEPS = 200  # quick: 6
WIDTH = 256  # quick: 16

# ## What is to be paid for
#
# For P weights, rank K and S draws: P(K + 2) learned numbers, three times that with Adam's moments, and a few times S·P
# at the height of a step. Nothing is of size P×P.

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(20, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
data = TensorDataset(torch.randn(600, 20), torch.randint(3, (600,)))
loader = DataLoader(data, batch_size=100, shuffle=True)
likelihood = vi.likelihoods.Categorical()

families = {
    "mean field": vi.MeanField(),
    "rank 4": vi.LowRankNormal(rank=4),
    "rank 16": vi.LowRankNormal(rank=16),
    "mixture of 3, rank 4": vi.Mixture(vi.LowRankNormal(rank=4), components=3),
    "last layer, rank 16": vi.PerLayer({"4.*": vi.LowRankNormal(rank=16), "*": vi.MAP()}),
}
sizes = {}
for name, family in families.items():
    bayes = vi.variationalize(net, likelihood, family, num_data=600)
    sizes[name] = sum(p.numel() for p in bayes.parameters())
    print(f"{name:>21}: {sizes[name]:>9} learned numbers, {16 * sizes[name] / 1e6:6.1f} MB with gradient and moments")

# The learned numbers of each, in millions. A Bayesian last layer on a learned backbone is hardly more than the network.

axes = plt.figure(figsize=(6.5, 2.4), layout="constrained").gca()
axes.barh(list(sizes), [size / 1e6 for size in sizes.values()], color="#2f6db5")
axes.set_xlabel("millions")
plt.show()

# ## Part of a network
#
# `PerLayer` with `MAP()` learns the backbone as a point: draws share its activations, so that a step costs about one
# pass of it. `select` holds the rest at the values it has.

head = vi.variationalize(net, likelihood, vi.LowRankNormal(rank=4), select="4.*")
print(head.extra_repr())

# ## Time and memory by option
#
# | too much | turn | it costs |
# | --- | --- | --- |
# | memory of activations, S draws at once | `evaluation="loop"` or `chunk=2` | time, for small networks |
# | memory of activations, one draw | `checkpoint_activations=True` | about a third more time |
# | memory of parameters | a lower rank; `PerLayer`; `structvi.distributed.shard` over processes | |
# | time of the network | `compute=vi.Compute(precision=torch.bfloat16, compile=True)` | |
# | time of Python, on a GPU | nothing: the step is one CUDA graph where the network allows | |
# | noise of gradients | `accumulate=4`, `vi.Estimator(groups=4)`, `vi.Compute(parallel="draws")` | time, or processes |

bayes = vi.variationalize(net, likelihood, vi.LowRankNormal(rank=4), checkpoint_activations=True)
result = bayes.fit(loader, steps=STEPS, compute=vi.Compute(precision=torch.bfloat16), accumulate=2, progress=False)
print(result.evaluation)

# ## A fit that is killed
#
# With `checkpoint=` all of a fit's state is written as it goes, and the same call with `resume=True` in it goes on. Here a fit is
# stopped half way, as Ctrl-C does, and resumed by a new posterior; the result is that of a fit that was never stopped,
# bit for bit.


def stop_half_way(history):
    if len(history) == STEPS // 2:
        raise KeyboardInterrupt


def posterior():
    return vi.variationalize(net, likelihood, vi.MeanField(), generator=torch.Generator().manual_seed(0))


options = {"steps": STEPS, "seed": 1, "progress": False}
whole, stopped, resumed = posterior(), posterior(), posterior()
whole.fit(loader, **options)
print(stopped.fit(loader, **options, checkpoint=vi.Checkpoint("fits"), callback=stop_half_way).verdict)
resumed.fit(loader, **options, checkpoint=vi.Checkpoint("fits", resume=True))
print("the same bits:", all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True)))

# ## Several processes
#
# `fit` works in parallel wherever there is a process group: no line of the above changes.
#
# ```py
# import torch.distributed as dist
#
# dist.init_process_group()
# bayes.fit(loader, epochs=20, checkpoint=vi.Checkpoint("fits", resume=True))  # or compute=vi.Compute(parallel="draws")
# ```
#
# ```bash
# torchrun --nproc-per-node 2 train.py
# ```
#
# Ranks stay equal bit for bit, a lost one is named, and a posterior larger than a device is split over them: [several
# processes](../distributed.md). What steps cost on a CPU and on an H200: performance.
