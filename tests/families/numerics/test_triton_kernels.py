"""The Triton kernels, run by Triton's interpreter on the CPU, against the plain path and torch's Adam."""

import os
import subprocess
import sys

# the interpreter has to be asked for before Triton is imported
CHECK = """
import torch, structvi as vi
from structvi.families.numerics import triton_adam as kernels, triton_lanes as lanes
from structvi.families.numerics.triton_tiles import TUPLES
from structvi.families.numerics.fused import kernels_serve
from tests.families.numerics.test_fused import close, family, gradients, thin_gradient

for form in (vi.LowRankNormal, vi.LowRankPrecision):
    # the last takes its 40 draws in two parts
    for rank, groups in ((1, 1), (3, 3), (17, 1), (17, 4), (36, 1), (3, 20)):
        q = family(form(rank), torch.float32)
        assert kernels_serve(q.factor)
        # the test's function has derivatives of about a hundred: that many roundings of float32
        both = (gradients(q, fused, vi.couplings.paired, groups) for fused in (True, False))
        for got, expected in zip(*both, strict=True):
            close(got, expected, 1e-4)
    # a row of the factor in each thread, where it lies row by row as on a GPU
    for rank, groups in ((4, 1), (8, 2)):
        q = family(form(rank), torch.float32)
        q.factor.data = q.factor.data.contiguous()
        assert lanes.serve(2 * groups, q.factor) == TUPLES  # where not, other kernels take these too
        both = (gradients(q, fused, vi.couplings.paired, groups) for fused in (True, False))
        for got, expected in zip(*both, strict=True):
            close(got, expected, 1e-4)
        one = thin_gradient(q, vi.couplings.paired, groups)
        torch.testing.assert_close(one.square.float(), one.dense().square().sum(), rtol=1e-5, atol=0.0)
    q = family(form(3), torch.float32)
    gradient = thin_gradient(q, vi.couplings.paired, 2)
    dense = gradient.dense()
    torch.testing.assert_close(gradient.square.float(), dense.square().sum())
    many = thin_gradient(q, vi.couplings.paired, 20)
    assert many.square is None  # in parts nobody has summed it up
    torch.testing.assert_close(many.squared_norm().float(), many.dense().square().sum(), rtol=1e-4, atol=0.0)
    plain = torch.nn.Parameter(q.factor.detach().clone())
    adam = torch.optim.Adam([plain], lr=0.01)
    factor = q.factor.detach().clone()
    first, second = torch.zeros_like(factor), torch.zeros_like(factor)
    lr, clip = torch.tensor(0.01), torch.tensor(0.5)
    for step in (1.0, 2.0, 3.0):
        plain.grad = 0.5 * step * dense
        adam.step()
        kernels.adam(
            factor, first, second, step * gradient.A, gradient.Z, torch.tensor(step), lr, clip, torch.ones(()),
            (0.9, 0.999), 1e-8,
        )
    torch.testing.assert_close(factor, plain.detach(), rtol=1e-5, atol=1e-6)
    before = factor.clone()
    kernels.adam(
        factor, first, second, gradient.A, gradient.Z, torch.tensor(4.0), lr, clip, torch.zeros(()), (0.9, 0.999), 1e-8
    )
    assert torch.equal(factor, before)
# sums by products of warps: draws and columns that fill their tiles, and that do not
from structvi.families.numerics import fused, triton_mma as mma
for K, S, precision in ((16, 8, False), (12, 3, True)) if TUPLES else ():
    q = family(vi.LowRankNormal(K), torch.float32)
    given = q.log_scale.detach(), q.factor.detach().contiguous(), q.unit, precision, torch.randn(S, len(q.mean))
    assert mma.serve(S, given[1])
    for got, expected in zip(mma.sums(*given), fused._Slabs.sums(*given), strict=True):
        close(got, expected, 1e-6)
# rows of partial sums, of one and of several programs, columns that fill a tile and that do not
from structvi.families.numerics.triton_rows import fold_rows, sum_rows
for n, w in ((1, 5), (300, 3), (2700, 8), (3, 393)):
    partial = torch.randn(n, w)
    folded = fold_rows(partial)
    assert folded.dtype == torch.float64 and len(folded) <= min(n, 132) and (len(folded) > 1) == (n == 2700 or n == 300)
    close(folded.sum(0), partial.double().sum(0), 1e-14)
    close(sum_rows(partial), partial.double().sum(0), 1e-14)
# the numbers of draws around the network: groups of one, of many that fill no tile, numbers and tensors
from structvi.train import by_hand, triton_terms
for S, groups in ((1, 1), (8, 8), (12, 4), (7, 1)):
    weight, log_q = torch.rand(S), 100 * torch.randn(S)
    log_likelihood, log_prior = 100 * torch.randn(S), 1e5 * torch.randn(S, dtype=torch.float64)
    for slope in (None, -0.7):
        for kind in (float, lambda x: torch.tensor(x, dtype=torch.float64)):
            given = weight, kind(-0.123456789), kind(0.3), 390.6257, slope
            for got, expected in zip(triton_terms.shares(*given), by_hand._Terms.shares(*given), strict=True):
                assert (got is None and expected is None) or torch.equal(got, expected)
    given = log_likelihood, log_prior, log_q, weight, 50_000 / 128.3, groups
    close(triton_terms.told(*given), by_hand._Terms.told(*given), 1e-14)
# by how much a gradient is clipped, and whether the step is made
for elbo, norm, clip, make, expected in (
    ([-3.0, -4.0, 1.0], 20.0, 10.0, None, (0.5, 1.0)),
    ([-3.0], 2.0, 10.0, 1.0, (1.0, 1.0)),
    ([-3.0], 0.0, 10.0, 0.0, (1.0, 0.0)),
    ([-3.0, float("inf")], 20.0, 10.0, 1.0, (0.5, 0.0)),
    ([float("nan")] * 5, 1.0, 10.0, 1.0, (1.0, 0.0)),
    ([-3.0], float("nan"), 10.0, None, (1.0, 0.0)),
    ([-3.0], float("inf"), 10.0, None, (0.0, 0.0)),
):
    numbers = [torch.tensor(x, dtype=torch.float64) for x in (elbo, norm)]
    got = kernels.clipped(*numbers, clip, None if make is None else torch.tensor(make))
    assert tuple(x.item() for x in got) == expected, (elbo, norm, got)
# a factor with mean and scale beside it, in one launch: as torch's Adam on the clipped gradient; none where make is 0
from structvi.train.adam import Adam
for form in (vi.LowRankNormal, vi.LowRankPrecision):
    q = family(form(3), torch.float32)
    gradient = thin_gradient(q, vi.couplings.paired, 2)
    ours = Adam(q.parameters(), lr=0.01, factors=q.factors())
    rates = {id(p): group["lr"] for group in ours.param_groups for p in group["params"]}
    plain = {name: torch.nn.Parameter(p.detach().clone()) for name, p in q.named_parameters()}
    theirs = torch.optim.Adam([{"params": [plain[name]], "lr": rates[id(p)]} for name, p in q.named_parameters()])
    clip, make = torch.tensor(0.5), torch.ones(())
    for step in (1.0, 2.0, 3.0, 4.0):
        for name, p in q.named_parameters():
            dense = gradient.dense() if p is q.factor else torch.sin(step * torch.arange(float(len(p))))
            plain[name].grad = 0.5 * dense
            p.grad = None if p is q.factor else dense
        if step == 4.0:
            make = torch.zeros(())
        else:
            theirs.step()
        ours.step(thin={q.factor: gradient}, coefficient=clip, make=make)
    for name, p in q.named_parameters():
        torch.testing.assert_close(p.detach(), plain[name].detach(), rtol=1e-5, atol=1e-6)
        assert ours.state[p]["step"].item() == 3
# slope·θ is added to the gradient at the draws, θ·θ comes with them, and the norm of all three gradients
from structvi.train.adam import gradient_norm
for form in (vi.LowRankNormal, vi.LowRankPrecision):
    # one draw after the other, tiles, and a row in each thread
    for groups, rank in ((1, 3), (3, 3), (1, 4), (3, 4)):
        q = family(form(rank), torch.float32)
        if rank == 4:
            q.factor.data = q.factor.data.contiguous()
        detached = q().draw_detached(groups, vi.couplings.paired, torch.Generator().manual_seed(5))
        theta, S = detached.draws.theta.detach(), 2 * groups
        close(detached.squares, theta.double().square().sum(-1), 1e-6)
        g, g_q, slope = torch.randn(theta.shape), torch.randn(S), torch.randn(S)
        got = detached.pull(g, g_q, slope)
        expected = detached.pull(g + slope.unsqueeze(-1) * theta, g_q)
        for (_, one), (_, other) in zip(got[:2], expected[:2], strict=True):
            close(one, other, 1e-5)
        close(got[2][1].dense(), expected[2][1].dense(), 1e-5)
        for source, gradient in got[:2]:
            source.grad = gradient
        whole = torch.cat([q.mean.grad, q.log_scale.grad, got[2][1].dense().flatten()])
        close(gradient_norm(q.parameters(), {q.factor: got[2][1]}).float(), whole.norm(), 1e-5)
        q.mean.requires_grad_(False)  # held
        q.mean.grad = None
        without = whole[len(q.mean) :]
        close(gradient_norm(q.parameters(), {q.factor: got[2][1]}).float(), without.norm(), 1e-5)
# a factor whose gradient is whole, as that of a mixture's part: torch's own Adam
q = vi.Mixture(vi.LowRankNormal(3), 2).bind(vi.Parameters({"z": torch.randn(37)}), torch.Generator().manual_seed(0))
plain = [torch.nn.Parameter(p.detach().clone()) for p in q.parameters()]
ours = Adam(q.parameters(), lr=0.01, factors=q.factors())
assert len(ours.thin) == 2
rates = {id(p): group["lr"] for group in ours.param_groups for p in group["params"]}
theirs = torch.optim.Adam([{"params": [b], "lr": rates[id(a)]} for a, b in zip(q.parameters(), plain)])
for step in range(3):
    for a, b in zip(q.parameters(), plain):
        b.grad = torch.randn(a.shape)
        a.grad = torch.empty_like(a).copy_(b.grad)  # in the order of its memory, as autograd has it
    ours.step()
    theirs.step()
for a, b in zip(q.parameters(), plain):
    torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-5, atol=1e-6)
q = family(vi.MeanField(), torch.float32)
for groups in (2, 20):
    both = (gradients(q, fused, vi.couplings.paired, groups) for fused in (True, False))
    for got, expected in zip(*both, strict=True):
        close(got, expected, 1e-4)
# normal numbers of many generators: Philox as it is defined, whose words for zeros are known, and Box-Muller
from math import log, pi, sin, sqrt
from structvi.families.numerics.triton_normals import normals
def words(seed, counter, i):
    c, k = [counter % 2**32, counter >> 32, i, 0], [seed % 2**32, seed >> 32]
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(q >> 32) ^ c[1] ^ k[0], q % 2**32, (p >> 32) ^ c[3] ^ k[1], p % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c
assert words(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
seeds, offsets, G, P, K = [3, 2**40 + 5], [0, 4 * (2**33 + 3)], 2, 5, 3
for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
    diagonal, low_rank = normals(torch.tensor(seeds), torch.tensor(offsets), G, P, K, True, dtype)
    assert diagonal.shape == (2, 2 * G, P) and low_rank.shape == (2, 2 * G, K)
    for m in range(2):
        expected = []
        for a, b, c, d in (words(seeds[m], offsets[m] // 4, i) for i in range(G * (P + K))):
            u, v = (a + 0.5) / 2**32, (b + 0.5) / 2**31
            if dtype == torch.float64:
                u, v = ((a ^ b << 21) + 0.5) / 2**53, ((c ^ d << 21) + 0.5) / 2**52
            expected.append(sqrt(-2 * log(u)) * sin(pi * v))
        expected = torch.tensor(expected, dtype=dtype)
        for got, own in ((diagonal[m], expected[: G * P].view(G, P)), (low_rank[m], expected[G * P :].view(G, K))):
            torch.testing.assert_close(got, torch.stack([own, -own], 1).flatten(0, 1), rtol=0, atol=tolerance)
print("all right")
"""


def test_kernels_in_the_interpreter():
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHECK],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == "all right", run.stderr
