"""Images and volumes in the clinic: maps of uncertainty, NIfTI files, a page with a slider, results by structure."""

from .maps import Maps, predict_maps
from .nifti import Scan, predict_scan, read_nifti, write_maps, write_nifti
from .page import write_page
from .structures import Referral, StructureMetrics, by_structure, structures_of

__all__ = [
    "Maps",
    "Referral",
    "Scan",
    "StructureMetrics",
    "by_structure",
    "predict_maps",
    "predict_scan",
    "read_nifti",
    "structures_of",
    "write_maps",
    "write_nifti",
    "write_page",
]
