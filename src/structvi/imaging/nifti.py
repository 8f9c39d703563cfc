"""NIfTI files in and out: voxels as tensors, with affine and header kept; nibabel is the extra "volumes"."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .maps import Maps


@dataclass(frozen=True)
class Scan:
    """A NIfTI file: its voxels, and where they lie.

    Args:
        voxels: [channels, x, y, z] in the file's own precision, scaled by its header. A file with three axes has one
            channel; of a file with four the last axis is the channels.
        affine: [4, 4], from voxels to millimetres.
        header: nibabel's header of the file.
        path: the file.
    """

    voxels: np.ndarray
    affine: np.ndarray
    header: Any
    path: Path

    @property
    def values(self) -> Tensor:
        """The voxels in float32."""
        return torch.from_numpy(self.voxels.astype(np.float32))

    @property
    def spacing(self) -> tuple[float, float, float]:
        """The size of a voxel on each axis, in the header's unit, nearly always millimetres."""
        x, y, z = (float(size) for size in self.header.get_zooms()[:3])
        return x, y, z

    @property
    def labels(self) -> Tensor:
        """The voxels of one channel as class labels, [x, y, z] of integers."""
        whole = np.round(self.voxels)
        if len(whole) != 1 or not bool(np.abs(self.voxels - whole).max() <= 1e-3):  # NaN is no whole number
            raise ValueError(f"{self.path}: expected one channel of whole numbers; resample with the nearest neighbour")
        return torch.from_numpy(whole[0].astype(np.int64))

    @property
    def name(self) -> str:
        """The name of the file without its suffix."""
        return self.path.name.removesuffix(".gz").removesuffix(".nii")


def read_nifti(path: str | os.PathLike[str]) -> Scan:
    """Read a .nii or .nii.gz file: voxels scaled by its header, affine and header.

    Example:
        >>> import tempfile
        >>> import nibabel
        >>> path = os.path.join(tempfile.mkdtemp(), "scan.nii.gz")
        >>> nibabel.save(nibabel.Nifti1Image(np.ones((4, 5, 6), np.int16), np.diag([2.0, 2, 3, 1])), path)
        >>> scan = read_nifti(path)
        >>> scan.values.shape, scan.spacing
        (torch.Size([1, 4, 5, 6]), (2.0, 2.0, 3.0))
    """
    nibabel = _nibabel()
    image = nibabel.load(path)
    if not isinstance(image, nibabel.Nifti1Image):  # Nifti2Image is one
        raise TypeError(f"{path} is {type(image).__name__}, not NIfTI: convert it, with nibabel or dcm2niix")
    values = np.asarray(image.dataobj)
    if values.ndim not in (3, 4) or values.dtype.kind not in "fiu":
        raise ValueError(
            f"{path}: expected numbers [x, y, z] or [x, y, z, channels], got {values.dtype} {values.shape}"
        )
    voxels = np.moveaxis(values[..., None] if values.ndim == 3 else values, -1, 0)
    return Scan(voxels, np.array(image.affine), image.header.copy(), Path(path))


def write_nifti(path: str | os.PathLike[str], values: Tensor | np.ndarray, like: Scan, words: str = "") -> Path:
    """Write voxels with the affine and header of a scan: codes, units and extensions are kept.

    Args:
        path: ends in .nii or .nii.gz; an existing file is replaced.
        values: [x, y, z] or [channels, x, y, z] of the scan's shape. Labels are written in 8 or 32 bits, other
            numbers in float32.
        like: the scan that they are of.
        words: for the header's `descrip`, at most 79 bytes.
    """
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    spatial = like.voxels.shape[1:]
    if array.ndim not in (3, 4) or array.shape[-3:] != spatial:
        raise ValueError(f"expected the scan's {spatial} voxels, got {array.shape}; was it resampled or cropped?")
    kind = np.float32
    if array.dtype.kind in "biu":
        low, high = int(array.min()), int(array.max())
        kind = np.uint8 if low >= 0 and high <= 255 else np.int32
        if low < -(2**31) or high >= 2**31:
            raise ValueError(f"labels must fit into 32 bits, got values from {low} to {high}")
    array = array.astype(kind)
    header, nibabel = like.header.copy(), _nibabel()
    header.set_data_dtype(kind)
    header["descrip"] = words.encode()[:79]
    header["cal_min"] = header["cal_max"] = 0  # the window of a viewer is that of the scan, not of a map
    header.set_intent("none" if kind == np.float32 else "label")
    image = nibabel.Nifti2Image if isinstance(header, nibabel.Nifti2Header) else nibabel.Nifti1Image
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(image(np.moveaxis(array, 0, -1) if array.ndim == 4 else array, like.affine, header), path)
    return Path(path)


def write_maps(maps: Maps, like: Scan, folder: str | os.PathLike[str]) -> dict[str, Path]:
    """Write each map to NAME_label.nii.gz, NAME_probability.nii.gz, NAME_uncertainty.nii.gz, ..; return the paths.

    Args:
        maps: of `predict_maps`.
        like: the scan that they are of; NAME is the name of its file.
        folder: made where it is missing.
    """
    return {
        name: write_nifti(Path(folder) / f"{like.name}_{name}.nii.gz", values, like, f"structvi: {name}")
        for name, values in maps.named().items()
    }


def _nibabel() -> Any:
    try:
        import nibabel  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError('NIfTI files need nibabel: pip install "structvi[volumes]"') from None
    return nibabel
