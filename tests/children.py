"""Code in a process of its own, forked from one that has imported structvi: an import of torch takes two seconds."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def python(code: str, *arguments: object, timeout: float = 120) -> subprocess.CompletedProcess:
    """As `subprocess.run([sys.executable, "-c", code, ..], capture_output=True, text=True)`, without the imports.

    The process is new, and its parent is not this one: limits, signals and what it breaks are its own.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["structvi", "structvi.files.file", "structvi.util.folder_files"])
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        process = context.Process(target=_run, args=(code, [str(one) for one in arguments], outputs))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(code, timeout)
        texts = [path.read_text() if path.exists() else "" for path in outputs]
        return subprocess.CompletedProcess(code, process.exitcode, *texts)


def _run(code: str, arguments: list[str], outputs: list[Path]) -> None:
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
