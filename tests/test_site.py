"""The documentation as a site: built strictly, no link or picture missing, shown by a browser without complaint."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.browser import browse, needs_browser

ROOT = Path(__file__).parents[1]
#: put into a copy of a page: what a reader sees, as JSON in the title
PROBE = """<script>
window.addEventListener("load", () => {
  const images = [...document.querySelectorAll("article img")].map(i => [i.complete, i.naturalWidth]);
  const text = document.querySelector("article").innerText.length;
  const tables = [...document.querySelectorAll("article table")].filter(
    t => t.parentElement.scrollWidth > t.parentElement.clientWidth + 1).map(t => t.innerText.slice(0, 40));
  document.title = JSON.stringify({images, text, tables, page: document.body.scrollWidth, width: window.innerWidth});
});
</script></head>"""
#: pages and how many pictures each has at least
PAGES = {
    "": 1,
    "concepts/": 1,
    "comparison/": 0,
    "results/": 0,
    "reference/fits/": 0,
    "tutorials/choosing_a_family/": 2,
    "imaging/": 4,
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | quiet, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Seen(HTMLParser):
    """What a page points at, and what can be pointed at in it."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.images: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = {key: value for key, value in attrs if value}
        self.anchors |= {found[key] for key in ("id", "name") if key in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "img":
            self.images.append(found["src"])
            assert "alt" in found, f"a picture without a description: {found['src']}"


def test_every_page_is_in_the_navigation(site):
    listed = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}


def test_no_link_and_no_picture_is_missing(site):
    pages = {path: Seen(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) >= 15
    pictures = 0
    for page, seen in pages.items():
        for link in seen.links + seen.images:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = page if not parts.path else (page.parent / unquote(parts.path)).resolve()
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{page.relative_to(site)} → {link}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, f"{page.relative_to(site)} → {link}"
        pictures += len(seen.images)
    assert pictures >= 14


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


@contextmanager
def served(folder):
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def address(site, tmp_path_factory):
    """The site served from a copy whose pages tell what they show."""
    copy = tmp_path_factory.mktemp("served") / "site"
    shutil.copytree(site, copy)
    for page in copy.rglob("index.html"):
        page.write_text(page.read_text().replace("</head>", PROBE, 1))

    with served(copy) as where:
        yield where


@needs_browser
@pytest.mark.parametrize("page", PAGES)
def test_a_browser_shows_the_page_and_its_console_is_silent(address, tmp_path, page):
    seen = browse(address + page, tmp_path / "profile", "--window-size=1280,1600")
    assert len(seen["images"]) >= PAGES[page]
    assert all(complete and width > 0 for complete, width in seen["images"])
    assert seen["text"] > 1000
    assert seen["page"] <= seen["width"]  # tables scroll in themselves, the page does not
    assert seen["tables"] == []  # and at this width no table has to


def test_every_tutorial_is_also_a_notebook(site):
    names = {path.stem for path in (ROOT / "docs" / "tutorials").glob("*.md")}
    assert {path.stem for path in (site / "tutorials").glob("*.ipynb")} == names
    for name in names:
        assert f'href="../{name}.ipynb"' in (site / "tutorials" / name / "index.html").read_text()
        assert json.loads((site / "tutorials" / f"{name}.ipynb").read_text())["nbformat"] == 4


def test_what_the_first_page_shows_runs_as_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block.replace("epochs=100", "epochs=2"), "index.md", "exec"), namespace)
