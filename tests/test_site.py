"""The documentation site builds strictly, loads nothing from other hosts, and draws every formula."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import site_hooks

ROOT = Path(__file__).parent.parent


class Page(HTMLParser):
    """Collects what a page loads, its formulas and its headings' anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.formulas = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.formulas += tag == "math"
        source = values.get("src")
        if tag == "link" and values.get("rel") != "canonical":
            source = values.get("href")
        if source:
            self.loaded.append(source)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = [path for path in folder.rglob("*.html") if path.parent.name != "assets"]  # without examples
    pages = {path.relative_to(folder).as_posix(): path for path in written}
    return {name: Page(path.read_text("utf-8")) for name, path in pages.items()}


def test_every_page_is_built(site: dict[str, Page]):
    written = {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")}
    listings = {name.replace(".md", ".html") for name in site_hooks.listing_pages()}
    assert {"examples/minimal_hacpo.html", "recipes/size.html", "contributing.html"} <= listings
    assert site.keys() == written | listings | {"404.html"}


def test_pages_load_nothing_from_other_hosts(site: dict[str, Page]):
    assert [
        (name, source)
        for name, page in site.items()
        for source in page.loaded
        if re.match(r"(\w+:)?//", source) and not source.startswith("data:")
    ] == []
    assert any("iframe-worker.js" in source for source in site["recipes/size.html"].loaded)


def test_formulas_are_drawn(site: dict[str, Page]):
    text = (ROOT / "docs" / "concepts.md").read_text("utf-8")
    blocks = len(re.findall(r"^\$\$$", text, re.MULTILINE)) // 2
    inline = len(re.findall(r"(?<!\$)\$[^$\n]+\$(?!\$)", text))
    assert blocks >= 5
    assert site["concepts.html"].formulas == blocks + inline


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("../examples/audit_step.py", "examples/audit_step.md"),
        ("../recipes/two_models.yaml", "recipes/two_models.md"),
        ("../recipes", "recipes.md"),
        ("../CONTRIBUTING.md#layers", "contributing.md#layers"),
        ("docs/architecture.md", "architecture.md"),
        ("results.md#time", "results.md#time"),
    ],
)
def test_links_out_of_the_folder_lead_to_pages(target: str, expected: str):
    assert site_hooks.site_target(target) == expected
