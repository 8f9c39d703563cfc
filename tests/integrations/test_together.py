"""The page on integrations runs as written."""

import re
from pathlib import Path

import pytest


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_the_page_runs_as_written(tmp_path, monkeypatch):
    import matplotlib

    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    namespace: dict = {}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, "integrations.md", "exec"), namespace)
    assert {path.name for path in tmp_path.iterdir()} >= {"posterior.safetensors", "predictive.pt2"}
