"""Images and volumes in the clinic: maps of uncertainty, NIfTI files, a page with a slider, results by structure."""

from .maps import Maps, predict_maps
from .nifti import Scan, read_nifti, write_maps, write_nifti
from .page import write_page
from .structures import Referral, StructureMetrics, by_structure

__all__ = [
    "Maps",
    "Referral",
    "Scan",
    "StructureMetrics",
    "by_structure",
    "predict_maps",
    "read_nifti",
    "write_maps",
    "write_nifti",
    "write_page",
]
