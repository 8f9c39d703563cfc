"""Fits of a posterior to minibatches: loop, step, schedule, data and checkpoints."""
