"""NIfTI files in and out: voxels as tensors, with affine and header kept; nibabel is the extra "volumes"."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .maps import Maps, predict_maps

if TYPE_CHECKING:
    from ..ensemble.ensemble import Ensemble
    from ..posterior import Posterior

#: what a map's header says of it, in at most 79 bytes
WORDS = {
    "label": "structvi: most probable label",
    "probability": "structvi: probability of each class",
    "mean": "structvi: predictive mean",
    "epistemic": "structvi: epistemic uncertainty",
    "aleatoric": "structvi: aleatoric uncertainty",
}
SUFFIXES = (".nii.gz", ".nii")


@dataclass(frozen=True)
class Scan:
    """A NIfTI file: its voxels, and all that says where they lie.

    Args:
        values: [channels, x, y, z]; a file of three axes has one channel, of four its last axis.
        affine: [4, 4], from voxels to millimetres.
        header: nibabel's, as it was read.
        path: the file.
    """

    values: Tensor
    affine: np.ndarray
    header: Any
    path: Path

    @property
    def spacing(self) -> tuple[float, float, float]:
        """The size of a voxel on each axis, in the header's unit, nearly always millimetres."""
        x, y, z = (float(size) for size in self.header.get_zooms()[:3])
        return x, y, z

    @property
    def labels(self) -> Tensor:
        """The voxels of the file, of one channel, as class labels, [x, y, z] of integers: read again, exactly."""
        voxels, _ = _read(self.path)
        whole = np.round(voxels)
        if len(whole) != 1 or not bool(np.abs(voxels - whole).max() <= 1e-3):  # NaN is no whole number
            raise ValueError(
                f"{self.path}: expected one channel of whole numbers, got {len(whole)} channels with values from "
                f"{voxels.min():.4g} to {voxels.max():.4g}; resample labels with the nearest neighbour"
            )
        return torch.from_numpy(whole[0].astype(np.int64))

    @property
    def name(self) -> str:
        """That of the file, without its suffix."""
        return next(
            (self.path.name.removesuffix(end) for end in SUFFIXES if self.path.name.endswith(end)), self.path.stem
        )


def read_nifti(path: str | os.PathLike[str], dtype: torch.dtype = torch.float32) -> Scan:
    """The voxels of a .nii or .nii.gz file, scaled as its header says, with affine and header.

    Args:
        path: the file.
        dtype: of the values.

    Example:
        >>> import tempfile
        >>> import nibabel
        >>> path = os.path.join(tempfile.mkdtemp(), "scan.nii.gz")
        >>> nibabel.save(nibabel.Nifti1Image(np.ones((4, 5, 6), np.int16), np.diag([2.0, 2, 3, 1])), path)
        >>> scan = read_nifti(path)
        >>> scan.values.shape, scan.spacing
        (torch.Size([1, 4, 5, 6]), (2.0, 2.0, 3.0))
    """
    voxels, image = _read(path)
    tensor = torch.from_numpy(np.ascontiguousarray(voxels, dtype=np.float64)).to(dtype)
    return Scan(tensor, np.array(image.affine), image.header.copy(), Path(path))


def _read(path: str | os.PathLike[str]) -> tuple[np.ndarray, Any]:
    """The voxels [channels, x, y, z], and nibabel's image."""
    nibabel = _nibabel()
    try:
        image = nibabel.load(path)
    except nibabel.filebasedimages.ImageFileError as error:
        raise ValueError(f"{path} is no file that nibabel can read: {error}") from None
    if not isinstance(image, nibabel.Nifti1Image):  # Nifti2Image is one
        raise TypeError(f"{path} is {type(image).__name__}, not NIfTI: convert it, with nibabel or dcm2niix")
    values = np.asarray(image.dataobj)
    if values.ndim == 5 and values.shape[3] == 1:  # vectors stand on the fifth axis
        values = values[:, :, :, 0]
    if values.ndim not in (3, 4) or values.dtype.kind not in "fiu":
        raise ValueError(
            f"{path}: expected numbers [x, y, z] or [x, y, z, channels], got {values.dtype} {values.shape}"
        )
    return np.moveaxis(values[..., None] if values.ndim == 3 else values, -1, 0), image


def write_nifti(path: str | os.PathLike[str], values: Tensor | np.ndarray, like: Scan, words: str = "") -> Path:
    """Voxels into a file with the affine and header of a scan: codes, units and extensions are kept.

    Args:
        path: ends in .nii or .nii.gz; a file that is there is replaced.
        values: [x, y, z] or [channels, x, y, z] of the scan's shape. Integers are written as such, the smallest that
            hold them, other numbers in float32.
        like: the scan that they are of.
        words: what they are, for the header's `descrip`, at most 79 bytes.
    """
    nibabel = _nibabel()
    path = Path(path)
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"a NIfTI file ends in .nii or .nii.gz, got {path.name}")
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    spatial = tuple(like.values.shape[1:])
    if array.shape[-3:] != spatial or array.ndim not in (3, 4):
        raise ValueError(
            f"expected [x, y, z] or [channels, x, y, z] with the scan's {spatial} voxels ({like.path.name}), got "
            f"{array.shape}; was it resampled or cropped? Then its affine is another"
        )
    array = array.astype(np.uint8) if array.dtype == bool else array
    if array.dtype.kind in "iu":
        low, high = array.min(), array.max()
        limits = {kind: np.iinfo(kind) for kind in (np.uint8, np.int16, np.int32)}
        kinds = [kind for kind, limit in limits.items() if limit.min <= low and high <= limit.max]
        if not kinds:
            raise ValueError(f"labels must fit into 32 bits, got values from {low} to {high}")
        array = array.astype(kinds[0])
    else:
        array = array.astype(np.float32)
    header = like.header.copy()
    header.set_data_dtype(array.dtype)
    header["descrip"] = words.encode()[:79]
    header["cal_min"] = header["cal_max"] = 0  # the window of a viewer is that of the scan, not of a map
    header.set_intent("label" if array.dtype.kind in "iu" else "none")
    if array.ndim == 4:
        array = np.moveaxis(array, 0, -1)
    kind = nibabel.Nifti2Image if isinstance(header, nibabel.Nifti2Header) else nibabel.Nifti1Image
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(kind(array, like.affine, header), path)
    return path


def write_maps(maps: Maps, like: Scan, folder: str | os.PathLike[str]) -> dict[str, Path]:
    """Every map as a file beside the others: NAME_label.nii.gz, NAME_probability.nii.gz, NAME_epistemic.nii.gz, ..

    Args:
        maps: of `predict_maps`.
        like: the scan that they are of; NAME is that of its file.
        folder: where to.
    """
    where = Path(folder)
    return {
        name: write_nifti(where / f"{like.name}_{name}.nii.gz", values, like, WORDS[name])
        for name, values in maps.named().items()
    }


def predict_scan(
    posterior: "Posterior | Ensemble",
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    prepare: Callable[[Tensor], Tensor] | None = None,
    names: Sequence[str] | None = None,
    **options: Any,
) -> tuple[Maps, dict[str, Path]]:
    """From a NIfTI file to maps beside it with the same affine, and a page to look at them.

    Args:
        posterior: of a network from [B, channels, x, y, z] to outputs of the same voxels.
        path: the scan.
        folder: where NAME_label.nii.gz and the others go, and NAME.html.
        prepare: what was done to the training images, from [channels, x, y, z] to the same voxels: scaling, for one.
        names: of the classes, the background too, for the page.
        **options: of `predict_maps`: tile, margin, draws, ..
    """
    from .page import write_page

    scan = read_nifti(path)
    volume = scan.values if prepare is None else prepare(scan.values)
    if volume.shape[1:] != scan.values.shape[1:]:
        raise ValueError(
            f"prepare must keep the voxels, so that maps lie on the scan: got {tuple(volume.shape)} of "
            f"{tuple(scan.values.shape)}; resample before, or write the maps of the resampled scan"
        )
    maps = predict_maps(posterior, volume, **options)
    files = write_maps(maps, scan, folder)
    files["page"] = write_page(
        Path(folder) / f"{scan.name}.html", volume, maps, names=names, spacing=scan.spacing, title=scan.name
    )
    return maps, files


def _nibabel() -> Any:
    try:
        import nibabel  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError('NIfTI files need nibabel: pip install "structvi[volumes]"') from None
    return nibabel
