"""NIfTI files: voxels as they are, affine and header kept, and what is refused."""

import nibabel
import numpy as np
import pytest
import torch
from torch import nn

import structvi as vi
from structvi import imaging

AFFINE = np.array([[-1.5, 0.1, 0, 90], [0, 2.0, 0.2, -126], [0, -0.1, 3.0, -72], [0, 0, 0, 1]])


def scan_file(folder, name="scan.nii.gz", shape=(6, 7, 8), kind=nibabel.Nifti1Image, dtype=np.int16):
    """With all that a scanner writes: codes, units, scaling, an extension."""
    values = np.random.default_rng(0).integers(0, 1000, shape).astype(dtype)
    image = kind(values, AFFINE)
    image.set_sform(AFFINE, code="scanner")
    image.set_qform(AFFINE, code="scanner")
    image.header.set_xyzt_units("mm", "sec")
    image.header["cal_max"] = 900
    image.header["descrip"] = b"a scanner's words"
    image.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", b"kept"))
    nibabel.save(image, folder / name)
    return folder / name, values


@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
@pytest.mark.parametrize("name", ["scan.nii", "scan.nii.gz"])
def test_affine_header_and_extensions_are_kept(tmp_path, kind, name):
    path, values = scan_file(tmp_path, name, kind=kind)
    scan = imaging.read_nifti(path)
    np.testing.assert_array_equal(scan.values[0], values)
    assert scan.name == "scan"
    original = nibabel.load(path)
    np.testing.assert_allclose(scan.spacing, nibabel.affines.voxel_sizes(AFFINE), rtol=1e-6)
    written = nibabel.load(imaging.write_nifti(tmp_path / "new" / name, torch.rand(6, 7, 8), scan, "words"))
    np.testing.assert_array_equal(written.affine, original.affine)
    same = ("pixdim", "sform_code", "qform_code", "srow_x", "srow_y", "srow_z", "quatern_b", "qoffset_x", "xyzt_units")
    for field in same:
        np.testing.assert_array_equal(written.header[field], original.header[field], err_msg=field)
    assert [one.get_content() for one in written.header.extensions] == [
        one.get_content() for one in original.header.extensions
    ]
    assert type(written) is kind
    assert written.get_data_dtype() == np.float32
    assert bytes(written.header["descrip"]).rstrip(b"\0") == b"words"
    assert float(written.header["cal_max"]) == 0  # the scan's window is not that of a map


def test_from_a_file_to_maps_beside_it(tmp_path):
    path, _ = scan_file(tmp_path, "patient 7.nii.gz", shape=(10, 12, 9))
    torch.manual_seed(0)
    bayes = vi.variationalize(nn.Conv3d(1, 3, 3, padding=1), vi.likelihoods.Categorical(), vi.MeanField(), num_data=5)
    scan = imaging.read_nifti(path)
    volume = (scan.values - 500) / 300
    options = dict(tile=(8, 8, 8), margin=1, draws=4, generator=torch.Generator().manual_seed(1))
    maps = imaging.predict_maps(bayes, volume, **options)
    files = imaging.write_maps(maps, scan, tmp_path / "out")
    pred = bayes.predict(volume.unsqueeze(0), 4, generator=torch.Generator().manual_seed(1))
    assert files["label"].name == "patient 7_label.nii.gz"
    expected = {
        "label": pred.mean[0].argmax(0).unsqueeze(0).float(),
        "probability": pred.mean[0],
        "uncertainty": pred.entropy,
        "epistemic": pred.mutual_information,
        "aleatoric": pred.expected_entropy,
    }
    assert list(files) == list(expected)
    for name, value in expected.items():
        written = imaging.read_nifti(files[name])
        np.testing.assert_array_equal(written.affine, nibabel.load(path).affine)
        torch.testing.assert_close(written.values, value, rtol=1e-5, atol=1e-6)
        assert bytes(written.header["descrip"]).rstrip(b"\0").decode() == f"structvi: {name}"
    assert torch.equal(maps.label, imaging.read_nifti(files["label"]).labels)
    resampled = imaging.predict_maps(bayes, volume[:, ::2], draws=2)
    with pytest.raises(ValueError, match="was it resampled or cropped"):
        imaging.write_maps(resampled, scan, tmp_path)
