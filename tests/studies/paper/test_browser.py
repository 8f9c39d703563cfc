"""The report in a real browser: Debian's chromium, headless."""

import json
import re
import shutil
import subprocess

import pytest

CHROMIUM = shutil.which("chromium")
#: appended to a copy of the page: what a reader sees, as JSON in the title
PROBE = """
<script>
window.addEventListener("load", () => {
  const images = [...document.images].map(i => [i.complete, i.naturalWidth, i.getBoundingClientRect().width]);
  const tables = [...document.querySelectorAll(".scroll")].map(d => ({
    inside: d.getBoundingClientRect().right <= window.innerWidth + 1,
    reachable: d.scrollWidth <= d.clientWidth || getComputedStyle(d).overflowX === "auto",
    font: parseFloat(getComputedStyle(d.querySelector("td")).fontSize),
    clipped: [...d.querySelectorAll("td, th")].filter(c => c.scrollWidth > c.clientWidth + 1).length,
  }));
  document.title = JSON.stringify({images, tables, width: window.innerWidth, page: document.body.scrollWidth});
});
</script>
"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium")


@pytest.mark.parametrize("width", [1280, 400])
def test_pictures_load_tables_fit_and_the_console_is_silent(report, tmp_path, width):
    # a headless window is never narrower than 500 pixels: the page is put in a frame of the width that is asked for
    page = tmp_path / "page.html"
    page.write_text((report / "report.html").read_text().replace("</body>", PROBE + "</body>"))
    frame = tmp_path / "frame.html"
    frame.write_text(
        f"<iframe src='page.html' style='width:{width}px;height:2000px;border:0'></iframe><pre></pre><script>"
        "const frame = document.querySelector('iframe');"
        "const wait = setInterval(() => { const title = frame.contentDocument.title;"
        "if (title[0] === '{') { document.querySelector('pre').textContent = title; clearInterval(wait); } }, 20);"
        "</script>"
    )
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,2200",
        "--enable-logging=stderr", "--virtual-time-budget=20000", "--dump-dom", frame.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    match = re.search(r"<pre>(\{.*?\})</pre>", done.stdout)
    assert match, done.stdout[-2000:]
    seen = json.loads(match[1])
    assert "CONSOLE" not in done.stderr
    assert seen["width"] == width
    assert seen["page"] <= width  # the page itself never scrolls sideways
    assert len(seen["images"]) == 4
    assert all(complete and natural > 0 and shown <= width for complete, natural, shown in seen["images"])
    assert len(seen["tables"]) == 4
    for table in seen["tables"]:
        assert table["inside"]
        assert table["reachable"]
        assert table["clipped"] == 0
        assert table["font"] >= 12
