"""The command line: what it says, and its exit codes."""

import json
import subprocess
import sys

import pytest

from structvi import __version__, cli
from structvi.util.folder_lock import folder_lock


def run(monkeypatch, capsys, *arguments):
    """Exit code, stdout and stderr of `structvi arguments`."""
    monkeypatch.setattr(sys, "argv", ["structvi", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help(monkeypatch, capsys, arguments):
    code, out, _ = run(monkeypatch, capsys, *arguments)
    assert code == 0
    assert "reproduce" in out
    assert "families" in out
    assert len(out.splitlines()) < 25


def test_version(monkeypatch, capsys):
    assert run(monkeypatch, capsys, "--version")[:2] == (0, f"structvi {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("bogus",), "bogus"),
        (("reproduce", "table9"), "table1"),
        (("reproduce", "--seed", "x"), "--seed"),
        (("reproduce", "--seed", "-1"), "--seed"),
        (("reproduce", "--fast"), "--fast"),
    ],
)
def test_wrong_arguments_are_named(monkeypatch, capsys, arguments, says):
    code, _, err = run(monkeypatch, capsys, *arguments)
    assert code == 2
    assert says in err
    assert len(err.splitlines()) < 10


#: commands that write into a folder, and what each computes
WRITERS = [
    (("reproduce", "table1"), "structvi_paper.run.compute"),
    (("check", "--quick"), "structvi_check.suite.run_named"),
    (("check", "--at-scale"), "structvi_check.at_scale.run"),
]


@pytest.mark.parametrize(("command", "computes"), WRITERS)
def test_a_folder_that_cannot_be_written_is_refused(monkeypatch, capsys, tmp_path, command, computes):
    monkeypatch.setattr(computes, lambda *_, **__: pytest.fail("computed before the folder was tried"))
    (tmp_path / "file").write_text("")
    code, _, err = run(monkeypatch, capsys, *command, "--out", str(tmp_path / "file"))
    assert code == 2
    assert "cannot write to" in " ".join(err.split())


@pytest.mark.parametrize(("command", "computes"), WRITERS)
def test_an_interrupt_is_no_traceback(monkeypatch, capsys, tmp_path, command, computes):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(computes, interrupted)
    code, _, err = run(monkeypatch, capsys, *command, "--out", str(tmp_path))
    assert code == 130
    assert "nothing was written" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("command", "computes"), WRITERS)
def test_a_folder_in_use_is_refused(monkeypatch, capsys, tmp_path, command, computes):
    monkeypatch.setattr(computes, lambda *_, **__: pytest.fail("computed"))
    with folder_lock(tmp_path, "structvi reproduce"):
        code, _, err = run(monkeypatch, capsys, *command, "--out", str(tmp_path))
    assert code == 2
    assert "in use by this process" in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def test_reproduce_writes_where_it_says(monkeypatch, capsys, tmp_path):
    code, out, _ = run(monkeypatch, capsys, "reproduce", "figure1", "--quick", "--seed", "3", "--out", str(tmp_path))
    assert code == 0
    assert out.strip() == str(tmp_path / "report.html")
    assert json.loads((tmp_path / "results.json").read_text())["seed"] == 3


def test_families(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "families")
    assert code == 0
    assert "LowRankNormal(K)" in out
    assert "PK + 2P" in out


@pytest.mark.parametrize("asked", ["--version", "--help"])
@pytest.mark.parametrize("missing", ["typer", "rich", "matplotlib"])
def test_a_missing_extra_is_named(monkeypatch, capsys, missing, asked):
    monkeypatch.setitem(sys.modules, missing, None)
    code, _, _ = run(monkeypatch, capsys, asked)
    assert code == f"structvi: {missing} is not installed; {cli.MISSING}"


def test_structvi_itself_needs_no_extra():
    code = (
        "import sys\n"
        "for name in ('typer', 'rich', 'matplotlib', 'pandas'): sys.modules[name] = None\n"
        "import structvi, structvi.cli, structvi_paper.run\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
