"""benchmarks.networks: what it measures against what is known, its data, and that it runs and goes on."""

import io
import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, jvp, vmap

from benchmarks import networks, networks_data, networks_measures, networks_nets, networks_tables
from benchmarks.networks_measures import Meter, remembered


def test_measures_of_a_known_prediction():
    p = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.8, 0.2], [0.3, 0.7]], dtype=torch.float64)
    labels = torch.tensor([0, 1, 0, 1])
    found = networks_measures.measures(p.log(), labels)
    assert found["nll"] == pytest.approx(-np.log([0.9, 0.4, 0.8, 0.7]).mean())
    assert found["accuracy"] == 0.75
    assert found["ece"] == pytest.approx((0.1 + 0.6 + 0.2 + 0.3) / 4)  # each in a bin of its own
    assert found["aurc"] == pytest.approx(0.25 / 4)  # the one error comes last


def test_labels_of_pixels_are_averaged_over_an_image():
    log_p = torch.randn(3, 2, 4, 4, dtype=torch.float64).log_softmax(1)
    labels = torch.randint(2, (3, 4, 4))
    expected = nn.functional.nll_loss(log_p, labels, reduction="none").mean((1, 2))
    torch.testing.assert_close(networks_measures.cases(log_p, labels), expected)
    assert networks_measures.entropy(log_p).shape == (3,)


def test_referral_until_the_rest_is_sensitive_enough():
    """Sure of four positives and wrong on the fifth, which is the least sure but for two negatives."""
    p = torch.tensor([0.9, 0.9, 0.9, 0.9, 0.4, 0.45, 0.45], dtype=torch.float64)
    log_p, labels = torch.stack([1 - p, p], 1).log(), torch.tensor([1, 1, 1, 1, 1, 0, 0])
    assert networks_measures.referred(log_p, labels, 1) == pytest.approx(3 / 7)
    assert networks_measures.referred(log_p, labels, 0) == 0.0
    assert networks_measures.referred(log_p[:4], 1 - labels[:4], 0) == 1.0


def test_dice_is_the_mean_over_images_that_have_some():
    labels = torch.tensor([[[1, 1, 0, 0]], [[0, 0, 0, 0]], [[1, 0, 0, 0]]])
    found = torch.tensor([[[1, 0, 0, 1]], [[0, 0, 0, 0]], [[0, 0, 0, 0]]])
    log_p = torch.stack([0.8 - 0.6 * found, 0.2 + 0.6 * found], 1).log()
    assert networks_measures.dice(log_p, labels, 1) == pytest.approx((0.5 + 0.0) / 2)


def test_resampled_errors_of_calibration_and_risk_are_those_of_the_whole():
    torch.manual_seed(0)
    log_p, labels = torch.randn(2, 40, 3, dtype=torch.float64).log_softmax(-1), torch.randint(3, (2, 40))
    expected = [networks_measures.measures(a, b) for a, b in zip(log_p, labels, strict=True)]
    top, label = log_p.max(-1)
    given = top.exp().numpy(), (label == labels).double().numpy()
    found = networks_tables._calibration_error(*given), networks_tables._risk_area(*given)
    for values, name in zip(found, ("ece", "aurc"), strict=True):
        assert values == pytest.approx([one[name] for one in expected])


def test_auroc_with_ties():
    low, high = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([1.0, 2.0])
    assert networks_measures.auroc(low, high) == pytest.approx((1 + 0.5 + 0.5 + 3) / 6)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # by torch, on the first jvp
def test_meter_counts_rows_of_vmap_and_jvp():
    net = nn.Linear(3, 2)
    meter = Meter(torch.device("cpu"))
    meter.watch(net)
    x = torch.randn(5, 3)

    def counted(call):
        with meter.cost() as cost:
            call()
        return cost.forwards

    weights = {name: p.detach() for name, p in net.named_parameters()}
    four = {name: p.expand(4, *p.shape) for name, p in weights.items()}

    def at(weights):
        return functional_call(net, weights, (x,))

    with torch.no_grad():
        assert counted(lambda: net(x)) == 5
        assert counted(lambda: vmap(at)(four)) == 20
        assert counted(lambda: jvp(at, (weights,), (weights,))) == 10
        # the network once, its tangent four times
        assert counted(lambda: vmap(lambda v: jvp(at, (weights,), (v,))[1])(four)) == 25
    assert counted(lambda: net(x).sum().backward()) == 15


def test_shifts_keep_shape_and_scrambling_keeps_pixels():
    x = torch.randn(6, 1, 8, 8)
    shifts = networks_data.shifted(x, torch.arange(6))
    assert {name: tuple(one.tensors[0].shape) for name, one in shifts.items()} == dict.fromkeys(
        ("turned", "noisy", "contrast"), (6, 1, 8, 8)
    )
    other = networks_data.scrambled(2)(x)
    assert not torch.equal(other, x)
    assert torch.equal(other.flatten(1).sort().values, x.flatten(1).sort().values)
    masks = networks_data.shifted(x, torch.ones(6, 8, 8).long())
    assert (masks["turned"].tensors[1] == 1).all()


def test_cifar_is_decoded_once(tmp_path):
    image = pytest.importorskip("PIL.Image")
    parts = {}
    for split, count in (("train", 3), ("test", 2)):
        files = []
        for grey in range(count):
            file = io.BytesIO()
            image.new("RGB", (32, 32), (40 * grey,) * 3).save(file, "jpeg")
            files.append(file.getvalue())
        parts[f"{split}_jpeg"] = np.frombuffer(b"".join(files), np.uint8)
        parts[f"{split}_lengths"] = np.array([len(one) for one in files], np.int32)
        parts[f"{split}_labels"] = np.arange(count)
    path = tmp_path / "cifar10_15k.npz"
    np.savez(path, **parts)
    found = networks_data.decode(path, keep=True)
    assert found["train"].shape == (3, 32, 32, 3)
    assert found["test"][1, 0, 0].tolist() == [40, 40, 40]
    path.unlink()
    assert np.array_equal(networks_data.decode(path)["train"], found["train"])


def test_crops_are_parts_of_the_padded_image():
    torch.manual_seed(0)
    x = torch.ones(50, 3, 32, 32)
    found = networks_nets.flipped_and_cropped(x)
    assert found.shape == x.shape
    shares = found.mean((1, 2, 3))
    assert (shares >= (28 / 32) ** 2 - 1e-6).all()
    assert shares.min() < 1


@pytest.mark.parametrize("name", list(networks_nets.TASKS))
def test_networks_have_an_output_for_every_class(name):
    shape = {"digits": (1, 8, 8), "mnist": (1, 28, 28), "breastmnist": (1, 28, 28)}.get(name, (3, 32, 32))
    shape = (1, 16, 16) if name.startswith("nuclei") else shape
    net = networks_nets.TASKS[name].net().eval()
    classes = 2 if name == "breastmnist" or name.startswith("nuclei") else 10
    assert net(torch.zeros(2, *shape)).shape[:2] == (2, classes)
    assert networks_nets.dropout_layers(net)


def test_interval_of_a_constant_gain_and_of_noise():
    assert networks_tables.interval(np.full((3, 40), -0.5)) == pytest.approx((-0.5, -0.5, -0.5))
    noise = np.random.default_rng(0).normal(size=(1, 400))
    middle, low, high = networks_tables.interval(noise)
    assert low < middle < high
    assert high - low == pytest.approx(2 * 1.96 * noise.std() / 20, rel=0.1)


def test_runs_goes_on_and_prints_from_its_folder(tmp_path, capsys):
    arguments = ["--quick", "--out", str(tmp_path)]
    networks.main([*arguments, "--methods", "temperature"])
    path = tmp_path / "digits-0.json"
    assert list(json.loads(path.read_text())["methods"]) == ["network", "temperature scaling"]
    capsys.readouterr()
    networks.main([*arguments, "--methods", "temperature;ours, default"])
    said = capsys.readouterr().out
    assert "digits 0 ours, default call" in said
    assert "digits 0 network" not in said  # it was there
    row = json.loads(path.read_text())["methods"]["ours, default call"]
    assert len(row["cases"]) == networks.QUICK_CASES
    assert set(row["shifts"]) == {"turned", "noisy", "contrast"}
    assert row["held_out_network"] < 0
    assert row["passes"] > 0
    tables = networks.main(["--out", str(tmp_path), "--table"])
    for text in ("### digits", "NLL minus that of", "choices", "### Summary", "of 1 sets"):
        assert text in tables


def test_what_cannot_be_run_is_said(tmp_path):
    with pytest.raises(SystemExit):
        networks.main(["--sets", "imagenet"])
    with pytest.raises(SystemExit):
        networks.main(["--table"])
    with pytest.raises(ValueError, match="give --data DIR"):
        networks.main(["--sets", "breastmnist", "--quick"])


def test_what_is_remembered_is_of_the_same_images():
    """The same pixels in another order are other images."""
    calls = []

    def predictor(x):
        calls.append(x)
        return x.flatten(1)[:, :2]

    predict = remembered(predictor)
    x = torch.arange(24.0).reshape(2, 3, 2, 2)
    assert torch.equal(predict(x), predict(x.clone()))
    assert torch.equal(predict(x.flip(3)), x.flip(3).flatten(1)[:, :2])
    assert len(calls) == 2
