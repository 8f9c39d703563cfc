"""The command line: what it says, and its exit codes."""

import json
import subprocess
import sys

import pytest

from structvi import __version__, cli


def run(monkeypatch, capsys, *arguments):
    """Exit code, stdout and stderr of `structvi arguments`."""
    monkeypatch.setattr(sys, "argv", ["structvi", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help(monkeypatch, capsys, arguments):
    code, out, _ = run(monkeypatch, capsys, *arguments)
    assert code == 0
    assert all(command in out for command in ("fit", "predict", "reproduce", "check"))
    assert len(out.splitlines()) < 25


def test_version(monkeypatch, capsys):
    assert run(monkeypatch, capsys, "--version")[:2] == (0, f"structvi {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("bogus",), "bogus"),
        (("reproduce", "table9"), "table1"),
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
    (("reproduce", "table1"), "structvi_paper.reproduce.compute"),
    (("check", "--quick"), "structvi_check.run"),
    (("check", "--at-scale"), "structvi_check.at_scale.run"),
    (("fit", "data.csv", "--target", "y"), "structvi_tables.command.fit_file"),
]


@pytest.mark.parametrize(("command", "computes"), WRITERS)
def test_a_folder_that_cannot_be_written_is_refused(monkeypatch, capsys, tmp_path, command, computes):
    monkeypatch.setattr(computes, lambda *_, **__: pytest.fail("computed before the folder was tried"))
    (tmp_path / "file").write_text("")
    code, _, err = run(monkeypatch, capsys, *command, "--out", tmp_path / "file")
    assert code == 2
    assert "cannot write to" in " ".join(err.split())


@pytest.mark.parametrize(("command", "computes"), WRITERS)
def test_an_interrupt_is_no_traceback(monkeypatch, capsys, tmp_path, command, computes):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(computes, interrupted)
    code, _, err = run(monkeypatch, capsys, *command, "--out", tmp_path)
    assert code == 130
    assert "nothing was written" in err
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_is_not_the_users_has_its_traceback(monkeypatch, tmp_path):
    for command, computes in WRITERS:
        monkeypatch.setattr(computes, lambda *_, **__: [].pop())
        monkeypatch.setattr(sys, "argv", ["structvi", *command, "--out", str(tmp_path)])
        with pytest.raises(IndexError):
            cli.main()


def test_reproduce_writes_where_it_says(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    code, out, _ = run(monkeypatch, capsys, "reproduce", "figure1", "--quick", "--seed", "3", "--out", tmp_path)
    assert code == 0
    assert out.strip() == str(tmp_path / "report.html")
    assert json.loads((tmp_path / "results.json").read_text())["seed"] == 3


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_a_missing_extra_is_named(monkeypatch, capsys, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    code, _, _ = run(monkeypatch, capsys, "reproduce")
    assert code == f"structvi: {missing} is not installed; {cli.MISSING}"


def test_structvi_itself_needs_no_extra():
    code = (
        "import sys\n"
        "for name in ('jinja2', 'matplotlib', 'pandas'): sys.modules[name] = None\n"
        "import structvi, structvi.cli, structvi_paper.reproduce, structvi_check\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
