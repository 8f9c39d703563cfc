"""What docs/tables.md shows runs as written, with fewer steps."""

import re
import shlex
import sys
from pathlib import Path

import pytest

pd = pytest.importorskip("pandas")

from structvi import cli  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "tables.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_ten_lines_and_the_two_commands(few_steps, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("python")
    assert len([line for line in block.splitlines() if line.strip()]) <= 10
    namespace: dict = {}
    exec(compile(block, "tables.md", "exec"), namespace)
    assert "epistemic_sd" in capsys.readouterr().out

    table = namespace["table"]
    table.to_csv("houses.csv", index=False)
    table.head(3).drop(columns="price").to_csv("new.csv", index=False)
    (commands,) = blocks("bash")
    for line in commands.splitlines():
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 0
    assert {"report.html", "predictions.csv", "model.json"} <= {path.name for path in Path("fitted").iterdir()}
    assert len(pd.read_csv("predictions.csv")) == 3
