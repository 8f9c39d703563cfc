"""The report in a real browser."""

import pytest

from tests.browser import browse_text, needs_browser

#: appended to a copy of the page: what a reader sees, sent to the page around it
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
  const page = document.body.scrollWidth;
  parent.postMessage(JSON.stringify({images, tables, page, width: window.innerWidth}), "*");
});
</script>
"""


@needs_browser
@pytest.mark.parametrize("width", [1280, 400])
def test_pictures_load_tables_fit_and_the_console_is_silent(report, tmp_path, width):
    page = (report / "report.html").read_text().replace("</body>", PROBE + "</body>")
    seen = browse_text(page, width, tmp_path)
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
