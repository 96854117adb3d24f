"""Opens pages in a headless Chromium, as a reader would."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--virtual-time-budget=8000",
)


@dataclass
class Page:
    """What a browser made of a page.

    Attributes:
        html: Its elements after all scripts ran.
        log: What the browser wrote, errors of scripts and refused requests among it.
    """

    html: str
    log: str
    numbers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.numbers = dict(_numbers(self.html))

    @property
    def errors(self) -> list[str]:
        """Lines of the log that a page is to blame for."""
        return [line for line in self.log.splitlines() if "CONSOLE" in line]

    @property
    def num_charts(self) -> int:
        return self.html.count('class="chart"')

    @property
    def text(self) -> str:
        """All that a reader can read."""
        return _Text(self.html).text


def browser() -> str:
    """The browser's program; skips the test, and says so, where there is none."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("NOT TESTED: no chromium on this machine; apt install chromium")
    return found


def opened(page: Path | str, profile: Path) -> Page:
    """Open a page, by its file or its URL, and let its scripts run."""
    url = page if isinstance(page, str) else page.as_uri()
    done = _chromium(profile, "--enable-logging=stderr", "--dump-dom", url)
    return Page(done.stdout, done.stderr)


def faults_of_layout(pages: Mapping[str, str], widths: Sequence[int], profile: Path) -> list[str]:
    """What does not fit or lies on each other in pages by name, at widths of a window."""
    frames = [
        f'<iframe id="{name} {width}" width="{width}" srcdoc="{escape(html)}"></iframe>'
        for name, html in pages.items()
        for width in widths
    ]
    profile.mkdir(exist_ok=True)
    file = profile / "frames.html"
    file.write_text("<!doctype html>" + "".join(frames) + f"<pre></pre><script>{_FAULTS}</script>")
    found = re.search(r"<pre>(.*?)</pre>", opened(file, profile).html, re.DOTALL)
    assert found is not None and f"{len(frames)} pages" in found[1]
    return unescape(found[1]).splitlines()[1:]


_FAULTS = r"""
onload = () => {
  const found = [], frames = [...document.querySelectorAll("iframe")];
  const overlap = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
  for (const frame of frames) {
    const page = frame.contentDocument, tell = text => found.push(`${frame.id}: ${text}`);
    const all = page.documentElement.scrollWidth;
    if (all > frame.clientWidth) tell(`${all} pixels wide`);
    const asked = frame.contentWindow.performance.getEntriesByType("resource").length;
    if (asked) tell(`${asked} requests`);
    for (const chart of page.querySelectorAll(".chart")) {
      const box = chart.getBoundingClientRect();
      const texts = [...chart.querySelectorAll("*")].filter(x => x.tagName != "title"
        && x.tagName != "style" && [...x.childNodes].some(y => y.nodeType == 3 && y.data.trim()));
      const places = texts.map(x => [x.textContent.trim(), x.getBoundingClientRect()])
        .filter(([, place]) => place.width);
      places.forEach(([text, place], number) => {
        if (place.left < box.left - 1 || place.right > box.right + 1) tell(`cut: ${text}`);
        for (const [other, its] of places.slice(0, number))
          if (overlap(place, its)) tell(`overlap: ${other} and ${text}`);
      });
    }
  }
  document.querySelector("pre").textContent = [`${frames.length} pages`, ...found].join("\n");
}
"""


def screenshot(path: Path, image: Path, profile: Path, *, width: int, height: int) -> None:
    """Take a picture of a page."""
    _chromium(profile, f"--window-size={width},{height}", f"--screenshot={image}", path.as_uri())


def _chromium(profile: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [browser(), *_FLAGS, f"--user-data-dir={profile}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)


def _numbers(html: str) -> Iterator[tuple[str, str]]:
    yield from re.findall(r'<dd data-key="([^"]*)">([^<]*)</dd>', html)


def data_of(html: str) -> dict[str, float | str]:
    """The numbers that the page holds for programs."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert found is not None
    return json.loads(found[1])


class _Text(HTMLParser):
    """The text of a page without that of scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self._hidden = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text += data
