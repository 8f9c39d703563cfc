"""Targets: a network with likelihood and prior, or any log density."""
