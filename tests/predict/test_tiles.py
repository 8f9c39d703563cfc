"""Tiles against the whole volume in one pass."""

import numpy as np
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
    whole = bayes.predict(image.unsqueeze(0), draws=3, generator=torch.Generator().manual_seed(1))
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
    with pytest.raises(
        ValueError, match=r"shape \(5, 5\) and gave \(2, 1, 2, 3, 3\).*nor does it keep the spatial shape"
    ):
        next(predict_tiles(bayes, torch.zeros(1, 9, 9, dtype=torch.float64), (5, 5), 1, draws=2))


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


def test_a_tile_that_the_strides_do_not_divide_is_refused_with_one_that_they_do():
    bayes, image = posterior(UNet().double()), torch.zeros(1, 40, 40, dtype=torch.float64)
    message = r"shape \(18, 12\) and raised: Sizes of tensors must match.*multiples of 4: choose tile=\(20, 12\)"
    with pytest.raises(ValueError, match=message):  # at once, not at the first tile
        predict_tiles(bayes, image, (18, 12), 2, draws=2, generator=torch.Generator().manual_seed(0))
    rounds = nn.Sequential(nn.Conv2d(1, 3, 2, stride=2), nn.ConvTranspose2d(3, 2, 2, stride=2)).double()
    with pytest.raises(ValueError, match=r"shape \(7, 8\) and gave \(2, 1, 2, 6, 8\).*of 2: choose tile=\(8, 8\)"):
        next(predict_tiles(posterior(rounds), image, (7, 8), 1, draws=2))
    assert len(list(predict_tiles(bayes, image, (20, 12), 2, draws=2))) == 15


def test_errors_of_another_cause_are_the_networks_own():
    bayes = posterior(UNet().double())
    with pytest.raises(RuntimeError, match="to have 1 channels, but got 3 channels"):
        next(predict_tiles(bayes, torch.zeros(3, 16, 16, dtype=torch.float64), (8, 8), 1, draws=2))


class Counting(nn.Module):
    """A U-Net that keeps the shapes it has seen."""

    def __init__(self):
        super().__init__()
        self.net, self.seen = UNet(), []

    def forward(self, x):
        self.seen.append(tuple(x.shape[2:]))
        return self.net(x)


def test_strides_are_tried_on_one_small_input():
    net = Counting().double()
    bayes, image = posterior(net), torch.zeros(1, 300, 300, dtype=torch.float64)
    tiles = predict_tiles(bayes, image, (132, 260), 2, draws=2)
    assert net.seen == [(36, 36)]  # the remainders by 32, and no tile yet
    with pytest.raises(ValueError, match=r"multiples of 4: choose tile=\(136, 260\), for example, of sides 4, 8, 12"):
        predict_tiles(bayes, image, (134, 260), 2, draws=2)
    next(tiles)
    assert (132, 260) in net.seen


class OneSize(nn.Module):
    """As with position embeddings: 96 pixels and no others."""

    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.zeros(2, 96, 96, dtype=torch.float64))

    def forward(self, x):
        return x + self.place


def test_a_network_for_one_size_is_tried_at_that_size():
    image = torch.zeros(1, 100, 96, dtype=torch.float64)
    assert len(list(predict_tiles(posterior(OneSize()), image, (96, 96), 2, draws=2))) == 2
    with pytest.raises(ValueError, match=r"shape \(90, 90\) and raised.*; it takes tile=\(96, 96\)"):
        predict_tiles(posterior(OneSize()), image, (90, 90), 2, draws=2)


def test_short_axes_are_filled_up_on_request():
    """With a margin beyond what the network sees nothing changes but where padding by values replaces that by zeros."""
    torch.manual_seed(0)
    bayes, image = posterior(UNet().double()), torch.randn(1, 30, 40, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"shape \(30, 16\) and raised.*pad the volume, or give pad=True"):
        predict_tiles(bayes, image, (32, 16), 2, draws=3)
    parts = predict_tiles(bayes, image, (32, 16), 2, draws=3, pad=True, generator=torch.Generator().manual_seed(1))
    filled = torch.cat([image, image[:, -1:], image[:, -1:]], 1)
    whole = predict_tiles(bayes, filled, (32, 16), 2, draws=3, generator=torch.Generator().manual_seed(1))
    for (where, own), (_, other) in zip(parts, whole, strict=True):
        assert where[0] == slice(0, 30)
        torch.testing.assert_close(own.outputs, other.outputs[..., :30, :], rtol=0, atol=0)
