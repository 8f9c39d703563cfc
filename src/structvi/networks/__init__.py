"""Calls of a network with drawn weights: once, at S weights, linearised, in half precision."""
