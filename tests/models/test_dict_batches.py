"""Dict batches with more in them than a network takes: paths, headers, and tensors that carry metadata."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import structvi as vi
from structvi import likelihoods as lk


class WithHeader(torch.Tensor):
    """As MONAI's MetaTensor: numbers with a header, which every operation hands on; it does not bear `vmap`."""

    header: dict

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if torch._C._functorch.maybe_get_level(args[0]) != -1 if args and isinstance(args[0], torch.Tensor) else False:
            raise RuntimeError("no header under vmap")
        result = super().__torch_function__(func, types, args, kwargs or {})
        headers = [arg.header for arg in args if isinstance(arg, WithHeader)]
        if isinstance(result, WithHeader) and headers:
            result.header = headers[0]
        return result


def dressed(x):
    result = x.as_subclass(WithHeader)
    result.header = {"affine": torch.eye(4), "filename": "scan.nii.gz", "space": ["RAS"]}
    return result


class Scans(Dataset):
    """Items as MONAI's transforms give them: an image and a label with a channel axis, in float, and much else."""

    def __init__(self, n=12, image="image", label="label"):
        x = torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        self.image, self.label, self.x, self.t = image, label, x, (x > 0).float()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {
            self.image: dressed(self.x[index]),
            self.label: dressed(self.t[index]),
            "image_meta_dict": {"filename_or_obj": f"scan{index}.nii.gz", "spacing": torch.ones(3)},
            "image_transforms": [{"class": "Orientationd"}],
            "foreground_start_coord": torch.zeros(3, dtype=torch.long),
            "case": f"patient {index}",
        }


def collate(items):
    """Tensors are stacked with their header, the rest is as it comes."""
    first = items[0]
    return {
        key: dressed(torch.stack([item[key].as_subclass(torch.Tensor) for item in items]))
        if isinstance(first[key], torch.Tensor)
        else [item[key] for item in items]
        for key in first
    }


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 1))


def loader(**names):
    return DataLoader(Scans(**names), batch_size=4, shuffle=True, collate_fn=collate)


def pairs():
    data = Scans()
    return DataLoader(torch.utils.data.TensorDataset(data.x, data.t.squeeze(1).long()), batch_size=4, shuffle=True)


@pytest.mark.parametrize("way", ["keys", "forward"])
def test_a_fit_to_dicts_with_more_in_them_is_that_to_pairs(way):
    """Bit for bit, and so are evaluation, calibration and held-out choice."""
    told = {"keys": ("image", "label")}
    if way == "forward":
        told = {"forward": lambda net, batch: (net(batch["image"]), batch["label"].squeeze(1).long())}
    found = []
    for options, data in ((told, loader()), ({}, pairs())):
        bayes = vi.variationalize(net(), lk.Categorical(), vi.MeanField(), **options)
        bayes.fit(data, steps=5, progress=False, seed=3)
        metrics = bayes.evaluate(data, draws=4, generator=torch.Generator().manual_seed(1))
        found.append((bayes.family.mean.detach(), metrics.accuracy))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0)
    assert found[0][1] == pytest.approx(found[1][1])  # batches come in another order


def test_other_names_are_told(tmp_path):
    bayes = vi.variationalize(net(), lk.Categorical(), vi.MeanField(), keys=("scan", "seg"))
    bayes.fit(loader(image="scan", label="seg"), steps=2, progress=False)
    bayes.save(tmp_path / "posterior.safetensors")
    again = vi.load(tmp_path / "posterior.safetensors", net())
    assert again.model.keys == ("scan", "seg")
    assert again.evaluate(loader(image="scan", label="seg"), draws=2).count == 12 * 64
    with pytest.raises(ValueError, match=r"no \['seg'\], which keys= names; it has \['case'"):
        bayes.evaluate(loader(image="scan"), draws=2)


def test_what_can_be_told_without_keys():
    image, t = torch.zeros(4, 1, 8, 8), torch.zeros(4, 8, 8).long()
    bayes = vi.variationalize(net(), lk.Categorical(), vi.MeanField(), num_data=4)
    batch = {"image": dressed(image), "label": t, "case": ["a", "b", "c", "d"], "meta": {"spacing": [1.0, 2.0]}}
    bayes.fit([batch], steps=1, progress=False)
    assert bayes.evaluate([batch], draws=2).count == t.numel()
    # a second tensor may be meant for the network: it is asked about
    with pytest.raises(ValueError, match=r"does not take \['image', 'age'\]: tell which.*keys="):
        bayes.fit([{"image": image, "age": torch.zeros(4), "label": t}], steps=1, progress=False)
