"""The arithmetic of the families: sums over weights, K×K algebra, fused passes, GPU kernels."""
