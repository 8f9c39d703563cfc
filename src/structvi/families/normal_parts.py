"""Another name for `mixture.weighted_normals`, until no caller is left."""

from .mixture import weighted_normals

__all__ = ["weighted_normals"]
