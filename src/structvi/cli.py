"""The command line: `structvi fit`, `predict`, `reproduce` and `check`."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from .util import __version__

MISSING = 'the command line needs the extra "reproduce": pip install "structvi[reproduce]"'


class Part(StrEnum):
    """The parts of `structvi reproduce`."""

    table1 = "table1"
    table2 = "table2"
    figure1 = "figure1"
    figure2 = "figure2"
    figure3 = "figure3"
    couplings = "couplings"
    all = "all"


def main() -> None:
    """Run the console script."""
    try:
        app = _app()
    except ModuleNotFoundError as error:
        sys.exit(f"structvi: {error.name} is not installed; {MISSING}")
    app()


def _app() -> Any:
    """Return the typer application; its extra is imported here."""
    import jinja2  # noqa: F401  (asked for now, rather than after minutes of computing)
    import matplotlib  # noqa: F401
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

    for add in (_add_fit, _add_predict, _add_reproduce, _add_check):
        add(app)
    return app


@contextmanager
def _into(out: Path | None = None) -> Iterator[None]:
    """Say the user's own errors in one line, with the exit code 2, and Ctrl-C with 130; all others have a traceback."""
    import typer

    from structvi_tables.reading import TableError

    from .files.file import CheckpointError
    from .util.folder_files import check_folder

    if out is not None:
        try:
            check_folder(out)
        except OSError as error:
            raise typer.BadParameter(f"cannot write to {out}: {error.strerror}", param_hint="--out") from None
    try:
        yield
    except (TableError, CheckpointError) as error:
        print(f"structvi: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        raise typer.Exit(130) from None


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
        noise: Annotated[str, typer.Option(help="auto, Gaussian, heteroscedastic, Student-t, ..")] = "auto",
        category: Annotated[list[str] | None, typer.Option(help="A column that is a category; repeat it.")] = None,
        number: Annotated[list[str] | None, typer.Option(help="A column of numbers; repeat it.")] = None,
        without: Annotated[list[str] | None, typer.Option(help="A column to leave out; repeat it.")] = None,
        level: Annotated[float, typer.Option(help="Of the intervals.")] = 0.9,
        encoding: Annotated[str, typer.Option(help="Of a text file.")] = "utf-8",
        seed: Annotated[int, typer.Option(min=0, help="Of everything random.")] = 0,
    ) -> None:
        """Predict a column of a table from the others, with uncertainty."""
        from structvi_tables.command import REPORT, fit_file

        kinds = dict.fromkeys(category or (), "category") | dict.fromkeys(number or (), "number")
        with _into(out):
            fitted = fit_file(
                data, target, encoding, task=task, noise=noise, kinds=kinds, without=without or (), level=level,
                seed=seed, say=print,
            )  # fmt: skip
            fitted.save(out)
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
        from structvi_tables.command import predict_file

        with _into():
            text, notes = predict_file(folder, data, out, encoding)
        for note in notes:
            print(note, file=sys.stderr)
        print(text if out is None else out, end="" if out is None else "\n")


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
        from structvi_paper.reproduce import PARTS
        from structvi_paper.reproduce import reproduce as run
        from structvi_paper.settings import Settings
        from structvi_paper.settings import quick as quick_settings

        settings = quick_settings(seed) if quick else Settings(seed)
        with _into(out):
            run(list(PARTS) if part is Part.all else [part.value], settings, out, _workers())
        print(out / "report.html")


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
            bool, typer.Option("--at-scale", help="Instead, a network of many weights: bound and coverage.")
        ] = False,
        width: Annotated[int, typer.Option(min=1, help="Of --at-scale: hidden units of each layer.")] = 24,
        teachers: Annotated[int, typer.Option(min=1, help="Of --at-scale: networks.")] = 1,
    ) -> None:
        """Is it Bayesian? Methods on problems whose posterior is known."""
        import structvi_check
        from structvi_check.suite import method_names, problem_names

        try:
            names = method_names(methods), problem_names(problems, quick)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        with _into(out):
            if at_scale:
                report = structvi_check.at_scale.run(width=width, teachers=teachers, seed=seed)
            else:
                report = structvi_check.run(*names, seed=seed, timeout=timeout, workers=_workers())
            *_, last = report.save(out)
        print(f"{report}\n\n{last.with_suffix('.txt' if at_scale else '.html')}")
        if all(getattr(row, "failed", False) for row in report.rows):
            raise typer.Exit(1)


def _workers() -> int:
    return max(1, min(8, os.cpu_count() or 1))


if __name__ == "__main__":
    main()
