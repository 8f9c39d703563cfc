"""The best normal over the last layer of a network, without a step size."""
