"""Tiles against the whole volume in one pass."""

import pytest
import torch
from torch import nn

import structvi as vi
from structvi.predict.tiles import predict_tiles


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


@pytest.mark.parametrize("tile", [(8, 9, 7), (17, 12, 7), (20, 7, 8), 8])
def test_tiles_with_the_margin_of_what_the_network_sees_are_the_whole(setting, tile):
    bayes, volume, tiles = setting
    mean, times = assembled(volume, tiles=tiles, tile=tile, margin=3)
    assert (times == 1).all()
    whole = bayes.predict(volume.unsqueeze(0), draws=6, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(mean, whole.mean[0], rtol=1e-12, atol=1e-12)


def test_a_smaller_margin_differs_at_the_cuts_only(setting):
    _, volume, tiles = setting
    enough, _ = assembled(volume, tiles=tiles, tile=(11, 12, 7), margin=3)
    none, times = assembled(volume, tiles=tiles, tile=(11, 12, 7), margin=0)
    assert (times == 1).all()
    differs = (enough - none).abs().amax((0, 2, 3)) > 1e-12
    # the only cut is at 11; the tile behind it was moved back to end with the axis, and starts at 6
    assert differs.nonzero().flatten().tolist() == [8, 9, 10]


@pytest.mark.parametrize("stream", ["generator", "global"])
@pytest.mark.parametrize("dropout", ["off", "on"])
@pytest.mark.parametrize("draws", [6, 40])  # of chunks of 16
def test_one_tile_that_covers_the_volume_is_predict_bit_for_bit(stream, dropout, draws):
    net = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Dropout(0.5), nn.Conv2d(3, 2, 1)).double()
    bayes = vi.variationalize(
        net, vi.likelihoods.Categorical(), vi.MeanField(initial_scale=0.5), num_data=10, dropout=dropout
    )
    image = torch.randn(1, 9, 8, dtype=torch.float64)
    seen = []
    for tiles in (False, True):
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(1) if stream == "generator" else None
        if tiles:
            ((where, pred),) = predict_tiles(bayes, image, (9, 8), draws=draws, generator=generator)
            assert where == (slice(0, 9), slice(0, 8))
        else:
            pred = bayes.predict(image.unsqueeze(0), draws, generator=generator)
        left = torch.get_rng_state() if generator is None else generator.get_state()
        seen.append((pred.outputs, pred.weights, left))
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


class UNet(nn.Module):
    """Two halvings, with a skip connection at each."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)])
        self.bottom = nn.Conv2d(2, 2, 3, padding=1)
        self.up = nn.ModuleList([nn.ConvTranspose2d(2, 2, 2, stride=2), nn.ConvTranspose2d(4, 2, 2, stride=2)])
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        skips = []
        for layer in self.down:
            skips.append(layer(x))
            x = nn.functional.max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for layer in self.up:
            x = torch.cat([layer(x), skips.pop()], 1)
        return self.head(x)


def test_a_tile_that_the_strides_do_not_divide_is_refused():
    bayes, image = posterior(UNet().double()), torch.zeros(1, 40, 40, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"shape \(18, 12\) \(Sizes of tensors must match.*give tile= sides"):
        next(predict_tiles(bayes, image, (18, 12), 2, draws=2))
    assert len(list(predict_tiles(bayes, image, (20, 12), 2, draws=2))) == 15


def test_short_axes_are_filled_up_on_request():
    """With a margin beyond what the network sees nothing changes but where padding by values replaces that by zeros."""
    torch.manual_seed(0)
    bayes, image = posterior(UNet().double()), torch.randn(1, 30, 40, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"shape \(30, 16\).*pad=True"):
        next(predict_tiles(bayes, image, (32, 16), 2, draws=3))
    parts = predict_tiles(bayes, image, (32, 16), 2, draws=3, pad=True, generator=torch.Generator().manual_seed(1))
    filled = torch.cat([image, image[:, -1:], image[:, -1:]], 1)
    whole = predict_tiles(bayes, filled, (32, 16), 2, draws=3, generator=torch.Generator().manual_seed(1))
    for (where, own), (_, other) in zip(parts, whole, strict=True):
        assert where[0] == slice(0, 30)
        torch.testing.assert_close(own.outputs, other.outputs[..., :30, :], rtol=0, atol=0)
