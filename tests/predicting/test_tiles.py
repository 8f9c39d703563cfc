"""Tiles against the whole volume in one pass."""

import numpy as np
import pytest
import torch
from torch import nn

import structvi as vi
from structvi.predicting.tiles import predict_tiles


def network() -> nn.Module:
    """It sees 3 voxels to each side."""
    return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv3d(4, 2, 5, padding=2)).double()


def posterior(net: nn.Module) -> vi.Posterior:
    return vi.variationalize(net, vi.likelihoods.Categorical(), vi.MeanField(), num_data=10)


def assembled(volume, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Class probabilities of all tiles, and how often each voxel was predicted."""
    mean, times = torch.zeros(2, *volume.shape[1:], dtype=torch.float64), torch.zeros(volume.shape[1:])
    for where, pred in options.pop("tiles")(volume, **options):
        mean[(slice(None), *where)] = pred.mean[0]
        times[where] += 1
    return mean, times


@pytest.fixture
def setting():
    torch.manual_seed(0)
    bayes = posterior(network())
    volume = torch.randn(1, 17, 12, 6, dtype=torch.float64)

    def tiles(volume, **options):
        return predict_tiles(bayes, volume, draws=6, generator=torch.Generator().manual_seed(1), **options)

    return bayes, volume, tiles


@pytest.mark.parametrize("tile", [(8, 9, 7), (17, 12, 7), (20, 7, 8)])
def test_tiles_with_the_margin_of_what_the_network_sees_are_the_whole(setting, tile):
    bayes, volume, tiles = setting
    mean, times = assembled(volume, tiles=tiles, tile=tile, margin=3)
    assert (times == 1).all()
    seed = int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(1)))
    whole = bayes.predict(volume.unsqueeze(0), draws=6, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(mean, whole.mean[0], rtol=1e-12, atol=1e-12)


def test_a_smaller_margin_differs_at_the_cuts_only(setting):
    _, volume, tiles = setting
    enough, _ = assembled(volume, tiles=tiles, tile=(11, 12, 7), margin=3)
    none, times = assembled(volume, tiles=tiles, tile=(11, 12, 7), margin=0)
    assert (times == 1).all()
    differs = (enough - none).abs().amax((0, 2, 3)) > 1e-12
    # the only cut is at 11; the tile behind it was moved back to end with the axis, and starts at 6
    assert differs.nonzero().flatten().tolist() == [8, 9, 10]


def test_arrays_are_read_tile_by_tile(setting, tmp_path):
    _, volume, tiles = setting
    path = tmp_path / "volume.npy"
    np.save(path, volume.numpy())
    mapped, _ = assembled(np.load(path, mmap_mode="r"), tiles=tiles, tile=(8, 9, 7), margin=3)
    torch.testing.assert_close(mapped, assembled(volume, tiles=tiles, tile=(8, 9, 7), margin=3)[0], rtol=0, atol=0)


def test_strided_networks_with_multiples_of_their_strides():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 2, stride=2), nn.Tanh(), nn.ConvTranspose2d(3, 2, 2, stride=2)).double()
    bayes, image = posterior(net), torch.randn(1, 20, 16, dtype=torch.float64)
    mean = torch.zeros(2, 20, 16, dtype=torch.float64)
    for where, pred in predict_tiles(bayes, image, (8, 8), 2, draws=3, generator=torch.Generator().manual_seed(1)):
        mean[(slice(None), *where)] = pred.mean[0]
    seed = int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(1)))
    whole = bayes.predict(image.unsqueeze(0), draws=3, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(mean, whole.mean[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("tile", "margin", "message"),
    [
        ((8, 8), 1, "each of its spatial axes"),
        ((8, 8, 8), (1, 1), "each of its spatial axes"),
        ((8, 8, 8), 4, "longer than its two margins"),
        ((8, 8, 8), -1, "must be ≥ 0"),
    ],
)
def test_wrong_tiles_are_refused_at_once(setting, tile, margin, message):
    _, volume, tiles = setting
    with pytest.raises(ValueError, match=message):
        tiles(volume, tile=tile, margin=margin)


def test_networks_that_shrink_are_refused():
    bayes = posterior(nn.Conv2d(1, 2, 3).double())
    with pytest.raises(ValueError, match="input's spatial shape"):
        next(predict_tiles(bayes, torch.zeros(1, 9, 9, dtype=torch.float64), (5, 5), 1, draws=2))
