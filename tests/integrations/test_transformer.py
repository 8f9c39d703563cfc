"""A Hugging Face model and LoRA adapters: the adapters are random, the base is held, the example says what it costs."""

import runpy
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import structvi as vi

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(ROOT / "examples" / "transformer.py"))


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    out = tmp_path / "adapter.safetensors"
    monkeypatch.setattr("sys.argv", ["transformer.py", "--smoke", "--out", str(out)])
    runpy.run_path(str(ROOT / "examples" / "transformer.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "2178 of the network's 77124 weights are random" in printed
    assert "times as much" in printed
    assert out.stat().st_size < 200_000  # P(2 + K) numbers of 4 bytes, 87 kB, and no base of 300 kB


def test_adapters_are_random_and_the_base_is_held(example, tmp_path):
    """The memory is that of P(2 + K) numbers, four times: P counts adapters and classifier alone."""
    torch.manual_seed(0)
    base = example["bert"](hidden=16, layers=1)
    net = example["adapted"](base, rank=2)
    held = {name: p.detach().clone() for name, p in net.named_parameters() if not p.requires_grad}
    data = example["sequences"](24, 3, torch.Generator().manual_seed(0))
    bayes = example["posterior"](net, len(data), 3)
    assert all("lora_" in name or "classifier.modules_to_save" in name for name in bayes.space.names)
    # rank 2 in two projections of 16 × 16, twice (A and B), and the classifier of 2 × 16 + 2
    assert bayes.space.size == 2 * 2 * (2 * 16) + 34
    assert example["state_bytes"](bayes) == 4 * 4 * bayes.space.size * (2 + 3)

    start = bayes.family.mean.detach().clone()
    bayes.fit(DataLoader(data, batch_size=8, shuffle=True), steps=4, progress=False)
    assert not torch.equal(start, bayes.family.mean)
    assert all(torch.equal(held[name], p) for name, p in net.named_parameters() if not p.requires_grad)
    batch = next(iter(DataLoader(data, batch_size=24)))
    draw = torch.Generator().manual_seed
    pred = bayes.predict({"input_ids": batch["input_ids"]}, draws=4, generator=draw(0))
    torch.testing.assert_close(pred.mean.sum(1), torch.ones(24))

    # draws are what the network says with these adapters
    theta = bayes.family().draw(2, generator=draw(1)).theta
    with torch.no_grad(), bayes.network_mode():
        outputs = torch.stack([bayes.model.call(bayes.space.unravel(row), batch)[0] for row in theta])
        for row, output in zip(theta, outputs, strict=True):
            net.load_state_dict(bayes.space.unravel(row), strict=False)
            torch.testing.assert_close(net.eval()(input_ids=batch["input_ids"]).logits, output)

    bayes.save(tmp_path / "q", network="hash")
    torch.manual_seed(0)
    same = example["adapted"](example["bert"](hidden=16, layers=1), rank=2)
    loaded = vi.load(tmp_path / "q", same)
    again = loaded.predict({"input_ids": batch["input_ids"]}, draws=4, generator=draw(0))
    assert torch.equal(pred.mean, again.mean)
