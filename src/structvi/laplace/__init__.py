"""Posteriors around a trained network, placed in closed form and selected on a validation set."""
