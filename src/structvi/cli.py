"""The command line: `structvi fit`, `predict`, `reproduce` and `check`."""

import os
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path

from .util import __version__

MISSING = 'the command line needs the extra "reproduce": pip install "structvi[reproduce]"'
PARTS = ("table1", "table2", "figure1", "figure2", "figure3", "couplings", "all")


def main() -> None:
    """Run the console script: the user's own errors are one line and the exit code 2, Ctrl-C is 130."""
    parser = _parser()
    given = parser.parse_args()
    if given.run is None:
        parser.print_help()
        sys.exit(0)
    try:
        import jinja2  # noqa: F401  (asked for now, rather than after minutes of computing)
        import matplotlib  # noqa: F401

        from structvi_tables.reading import TableError
    except ModuleNotFoundError as error:
        sys.exit(f"structvi: {error.name} is not installed; {MISSING}")

    from .files.file import CheckpointError
    from .util.folder_files import check_folder

    if given.run is not predict:
        try:
            check_folder(given.out)
        except OSError as error:
            parser.error(f"cannot write to {given.out}: {error.strerror}")
    try:
        code = given.run(given) or 0
    except (TableError, CheckpointError) as error:
        print(f"structvi: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        code = 130
    sys.exit(code)


def _parser() -> ArgumentParser:
    parser = ArgumentParser("structvi", description="Variational posteriors for any PyTorch module or log density.")
    parser.add_argument("--version", action="version", version=f"structvi {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="command")

    def command(run: Callable[[Namespace], int | None]) -> Callable[..., object]:
        own = commands.add_parser(
            run.__name__, help=run.__doc__, description=run.__doc__, formatter_class=ArgumentDefaultsHelpFormatter
        )
        own.set_defaults(run=run)
        return lambda name, help, **options: own.add_argument(name, help=help, **options)

    add = command(fit)
    add("data", "a CSV or Parquet file, with a line of column names", type=Path)
    add("--target", "the column to predict", required=True)
    add("--task", "auto, regression or classification", default="auto")
    add("--out", "folder for report.html, predictions.csv and the model", type=Path, default=Path("fitted"))
    add("--noise", "auto, Gaussian, heteroscedastic, Student-t, ..", default="auto")
    add("--category", "a column that is a category; repeat it", action="append", default=[])
    add("--number", "a column of numbers; repeat it", action="append", default=[])
    add("--without", "a column to leave out; repeat it", action="append", default=[])
    add("--level", "of the intervals", type=float, default=0.9)
    add("--encoding", "of a text file", default="utf-8")
    add("--seed", "of everything random", type=_natural, default=0)

    add = command(predict)
    add("folder", "what `structvi fit --out` wrote", type=Path)
    add("data", "a file with the columns of the one that was fitted", type=Path)
    add("--out", "a CSV file to write; else it is printed", type=Path)
    add("--encoding", "of a text file", default="utf-8")

    add = command(reproduce)
    add("part", "what to redo", choices=PARTS, nargs="?", default="all")
    add("--out", "folder for report.html, results.json, pictures and tables", type=Path, default=Path("report"))
    add("--seed", "of everything random", type=_natural, default=0)
    add("--quick", "three targets instead of ten", action="store_true")

    add = command(check)
    add("--methods", 'names with commas between, "ours", "peers" or "all"', default="ours")
    add("--problems", 'names with commas between, or "all"', default="all")
    add("--out", "folder for check.html, check.json and check.txt", type=Path, default=Path("report"))
    add("--seed", "of everything random", type=_natural, default=0)
    add("--quick", "six of the problems, the small ones", action="store_true")
    add("--timeout", "seconds for a method on a problem; then its process is killed", type=_positive, default=600.0)
    add("--at-scale", "instead, a network of many weights: bound and coverage", action="store_true")
    add("--width", "of --at-scale: hidden units of each layer", type=_natural, default=24)
    add("--teachers", "of --at-scale: networks", type=_natural, default=1)
    return parser


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"expected a whole number ≥ 0, got {text!r}")
    return int(text)


def _positive(text: str) -> float:
    if not float(text) > 0:
        raise ArgumentTypeError(f"expected a number above zero, got {text!r}")
    return float(text)


def fit(given: Namespace) -> None:
    """Predict a column of a table from the others, with uncertainty."""
    from structvi_tables.command import REPORT, fit_file

    kinds = dict.fromkeys(given.category, "category") | dict.fromkeys(given.number, "number")
    fitted = fit_file(
        given.data, given.target, given.encoding, task=given.task, noise=given.noise, kinds=kinds,
        without=given.without, level=given.level, seed=given.seed, say=print,
    )  # fmt: skip
    fitted.save(given.out)
    print(f"\n{fitted}\n\n{given.out / REPORT}")


def predict(given: Namespace) -> None:
    """Predict new rows: mean, sd, interval or class probabilities, with both parts of the uncertainty."""
    from structvi_tables.command import predict_file

    text, notes = predict_file(given.folder, given.data, given.out, given.encoding)
    for note in notes:
        print(note, file=sys.stderr)
    print(text if given.out is None else given.out, end="" if given.out is None else "\n")


def reproduce(given: Namespace) -> None:
    """Redo the tables and figures of "Is MC Dropout Bayesian?"."""
    from structvi_paper.reproduce import reproduce as run
    from structvi_paper.settings import Settings, quick

    settings = quick(given.seed) if given.quick else Settings(given.seed)
    run([part for part in PARTS[:-1] if given.part in (part, "all")], settings, given.out, _workers())
    print(given.out / "report.html")


def check(given: Namespace) -> int:
    """Is it Bayesian? Compare methods on problems whose posterior is known."""
    import structvi_check
    from structvi_check.suite import method_names, problem_names

    try:
        names = method_names(given.methods), problem_names(given.problems, given.quick)
    except ValueError as error:
        print(f"structvi: {error}", file=sys.stderr)
        return 2
    if given.at_scale:
        report = structvi_check.at_scale.run(width=given.width, teachers=given.teachers, seed=given.seed)
    else:
        report = structvi_check.run(*names, seed=given.seed, timeout=given.timeout, workers=_workers())
    *_, last = report.save(given.out)
    print(f"{report}\n\n{last.with_suffix('.txt' if given.at_scale else '.html')}")
    return int(all(getattr(row, "failed", False) for row in report.rows))


def _workers() -> int:
    return max(1, min(8, os.cpu_count() or 1))


if __name__ == "__main__":
    main()
