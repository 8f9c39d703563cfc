"""Pages in a real browser: Debian's chromium, headless."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium")

#: what is sent to it becomes its title; in it the page has the width asked for, where a window has at least 500 pixels
FRAME = """<!doctype html><html><head><link rel="icon" href="data:,"><script>
window.addEventListener("message", event => { document.title = event.data; });
</script></head><body style="margin: 0">
<iframe src="page.html" width="%d" height="2000" style="border: 0"></iframe></body></html>"""


def browse(url: str, profile: Path, *options: str) -> Any:
    """What the page has put into its title, as JSON; its console has to be silent.

    Args:
        url: of the page.
        profile: a folder for the browser's own files.
        *options: more of the command line.
    """
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={profile}", "--window-size=1400,2200", "--enable-logging=stderr",
        "--virtual-time-budget=20000", "--dump-dom", *options, url,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    match = re.search(r"<title>([{\[].*?)</title>", done.stdout, re.DOTALL)
    assert match, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(html.unescape(match[1]))


def browse_text(page: str, width: int, folder: Path) -> Any:
    """What a page, in a frame of this width, sends with `parent.postMessage(JSON.stringify(..), "*")`."""
    (folder / "page.html").write_text(page)
    (folder / "frame.html").write_text(FRAME % width)
    return browse((folder / "frame.html").as_uri(), folder / "profile")
