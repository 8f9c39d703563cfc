"""Draws of q weighted towards the posterior: by how much it is denser there than q."""
