"""A Hugging Face model and LoRA adapters: the example says what they cost."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    out = tmp_path / "adapter.safetensors"
    monkeypatch.setattr("sys.argv", ["transformer.py", "--smoke", "--out", str(out)])
    runpy.run_path(str(ROOT / "examples" / "transformer.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "2178 of the network's 77124 weights are random" in printed
    assert "times as much" in printed
    assert out.stat().st_size < 200_000  # P(2 + K) numbers of 4 bytes, 87 kB, and no base of 300 kB
