"""The command line: `structvi fit`, `predict`, `reproduce`, `check` and `families`."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from .util.version import __version__

MISSING = 'the command line needs the extra "reproduce": pip install "structvi[reproduce]"'


class Part(StrEnum):
    table1 = "table1"
    table2 = "table2"
    figure1 = "figure1"
    figure2 = "figure2"
    figure3 = "figure3"
    couplings = "couplings"
    all = "all"


def main() -> None:
    """The console script."""
    try:
        app = _app()
    except ModuleNotFoundError as error:
        sys.exit(f"structvi: {error.name} is not installed; {MISSING}")
    app()


def _app() -> Any:
    """The typer application; typer is an optional extra and imported here."""
    import matplotlib  # noqa: F401  (asked for now, rather than after minutes of computing)
    import rich  # noqa: F401
    import typer

    app = typer.Typer(
        help="Variational posteriors for any PyTorch module or log density.",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def version(asked: bool) -> None:
        if asked:
            print(f"structvi {__version__}")
            raise typer.Exit

    @app.callback(invoke_without_command=True)
    def root(
        context: typer.Context,
        _version: Annotated[
            bool, typer.Option("--version", callback=version, is_eager=True, help="Show the version and exit.")
        ] = False,
    ) -> None:
        if context.invoked_subcommand is None:
            print(context.get_help())

    _add_fit(app)
    _add_predict(app)
    _add_reproduce(app)
    _add_check(app)

    @app.command()
    def families() -> None:
        """What each family costs, for P weights and rank K, and what it can say."""
        from structvi_paper.costs import table

        print(table())

    return app


def _add_fit(app: Any) -> None:
    import typer

    @app.command()
    def fit(
        data: Annotated[Path, typer.Argument(help="A CSV or Parquet file, with a line of column names.")],
        target: Annotated[str, typer.Option(help="The column to predict.")],
        task: Annotated[str, typer.Option(help="auto, regression or classification.")] = "auto",
        out: Annotated[Path, typer.Option(help="Folder for report.html, predictions.csv and the model.")] = Path(
            "fitted"
        ),
        family: Annotated[
            str | None,
            typer.Option(help="Of a posterior over all weights: MeanField, LowRankPrecision, ..; slower."),
        ] = None,
        noise: Annotated[str, typer.Option(help="auto, Gaussian, heteroscedastic, Student-t, ..")] = "auto",
        category: Annotated[list[str] | None, typer.Option(help="A column that is a category; repeat it.")] = None,
        number: Annotated[list[str] | None, typer.Option(help="A column of numbers; repeat it.")] = None,
        without: Annotated[list[str] | None, typer.Option(help="A column to leave out; repeat it.")] = None,
        level: Annotated[float, typer.Option(help="Of the intervals.")] = 0.9,
        encoding: Annotated[str, typer.Option(help="Of a text file.")] = "utf-8",
        seed: Annotated[int, typer.Option(min=0, help="Of everything random.")] = 0,
    ) -> None:
        """Predict a column of a table from the others, with uncertainty."""
        from .util.folder_files import write_together
        from .util.folder_lock import folder_lock

        with _answers():
            from structvi_tables.command import REPORT, fit_file

            with _into(out), folder_lock(out, "structvi fit"):
                fitted = fit_file(
                    data, target, task=task, family=family, noise=noise, category=category or (), number=number or (),
                    without=without or (), encoding=encoding, level=level, seed=seed, say=print,
                )  # fmt: skip
                write_together(out, fitted.write)
        print(f"\n{fitted}\n\n{out / REPORT}")


def _add_predict(app: Any) -> None:
    import typer

    @app.command()
    def predict(
        folder: Annotated[Path, typer.Argument(help="What `structvi fit --out` wrote.")],
        data: Annotated[Path, typer.Argument(help="A file with the columns of the one that was fitted.")],
        out: Annotated[Path | None, typer.Option(help="A CSV file to write; else it is printed.")] = None,
        encoding: Annotated[str, typer.Option(help="Of a text file.")] = "utf-8",
    ) -> None:
        """Predictions for new rows: mean, sd, interval or class probabilities, with both parts of the uncertainty."""
        with _answers():
            from structvi_tables.command import predict_file

            text, notes = predict_file(folder, data, out, encoding)
        for note in notes:
            print(note, file=sys.stderr)
        print(text if out is None else out, end="" if out is None else "\n")


@contextmanager
def _answers() -> Iterator[None]:
    """What a user can mend is said in a line, with the exit code 2."""
    import typer

    from structvi_tables.reading import TableError

    from .files.header import CheckpointError

    try:
        yield
    except (TableError, FileNotFoundError, CheckpointError, ValueError) as error:
        print(f"structvi: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise _interrupted() from None


@contextmanager
def _into(out: Path) -> Iterator[None]:
    """A folder that can be written to; that it is in use is said of --out, and Ctrl-C in a line, with the code 130."""
    import typer

    from .util.folder_files import check_folder
    from .util.folder_lock import FolderInUse

    try:
        check_folder(out)
    except OSError as error:
        raise typer.BadParameter(f"cannot write to {out}: {error.strerror}", param_hint="--out") from None
    try:
        yield
    except FolderInUse as error:
        raise typer.BadParameter(str(error), param_hint="--out") from None
    except KeyboardInterrupt:
        raise _interrupted() from None


def _interrupted() -> Exception:
    import typer

    print("interrupted: nothing was written", file=sys.stderr)
    return typer.Exit(130)


def _add_reproduce(app: Any) -> None:
    import typer

    @app.command()
    def reproduce(
        part: Annotated[Part, typer.Argument(help="What to redo.")] = Part.all,
        out: Annotated[Path, typer.Option(help="Folder for report.html, results.json, pictures and tables.")] = Path(
            "report"
        ),
        seed: Annotated[int, typer.Option(min=0, help="Of everything random.")] = 0,
        quick: Annotated[bool, typer.Option("--quick", help="Three targets instead of ten.")] = False,
    ) -> None:
        """Redo the tables and figures of "Is MC Dropout Bayesian?"."""
        from structvi_paper.run import PARTS
        from structvi_paper.run import reproduce as run
        from structvi_paper.settings import Settings
        from structvi_paper.settings import quick as quick_settings

        settings = quick_settings(seed) if quick else Settings(seed)
        parts = list(PARTS) if part is Part.all else [part.value]
        with _into(out):
            run(parts, settings, out, workers=max(1, min(8, os.cpu_count() or 1)))
        print(f"{out / 'report.html'}")


def _add_check(app: Any) -> None:
    import typer

    @app.command()
    def check(
        methods: Annotated[str, typer.Option(help='Names with commas between, "ours", "peers" or "all".')] = "ours",
        problems: Annotated[str, typer.Option(help='Names with commas between, or "all".')] = "all",
        out: Annotated[Path, typer.Option(help="Folder for check.html, check.json and check.txt.")] = Path("report"),
        seed: Annotated[int, typer.Option(min=0, help="Of everything random.")] = 0,
        quick: Annotated[bool, typer.Option("--quick", help="Six of the problems, the small ones.")] = False,
        timeout: Annotated[
            float, typer.Option(min=0.001, help="Seconds for a method on a problem; then its process is killed.")
        ] = 600.0,
        at_scale: Annotated[
            bool, typer.Option("--at-scale", help="Instead, a network of many weights: bound, scales, coverage.")
        ] = False,
        width: Annotated[int, typer.Option(min=1, help="Of --at-scale: hidden units of each layer.")] = 24,
        teachers: Annotated[int, typer.Option(min=1, help="Of --at-scale: networks.")] = 1,
    ) -> None:
        """Is it Bayesian? Methods on problems whose posterior is known."""
        from structvi_check import suite

        from .util.folder_lock import folder_lock

        if at_scale:
            _check_at_scale(out, width, teachers, seed)
            return
        try:
            names = suite.method_names(methods), suite.problem_names(problems, quick)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        with _into(out), folder_lock(out, "structvi check"):
            report = suite.run_named(*names, seed, max(1, min(8, os.cpu_count() or 1)), timeout)
            report.write(out)
        print(report)
        print(f"\n{out / 'check.html'}")
        if all(row.failed for row in report.rows):
            raise typer.Exit(1)


def _check_at_scale(out: Path, width: int, teachers: int, seed: int) -> None:
    from structvi_check import at_scale

    from .util.folder_lock import folder_lock

    with _into(out), folder_lock(out, "structvi check"):
        report = at_scale.run(width=width, teachers=teachers, seed=seed)
        report.write(out)
    print(report)
    print(f"\n{out / 'at_scale.html'}")


if __name__ == "__main__":
    main()
