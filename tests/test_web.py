"""The committed page is what web/ builds, and its packages are named without download addresses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WEB = ROOT / "web"
PAGE = ROOT / "src" / "hacrl" / "report" / "page.html"


@pytest.mark.skipif(shutil.which("npx") is None, reason="needs Node (20 or newer)")
@pytest.mark.skipif(not (WEB / "node_modules").is_dir(), reason="needs the packages of web/: make test-web")
def test_the_committed_page_is_what_its_source_builds(tmp_path: Path):
    built = tmp_path / "page.html"
    subprocess.run(
        ["npx", "--no-install", "vite", "build", "--logLevel", "error"],
        cwd=WEB,
        env={**os.environ, "HACRL_PAGE": str(built)},
        check=True,
    )
    assert built.read_text("utf-8") == PAGE.read_text("utf-8"), "run `make web` and commit the page"


def test_packages_are_fixed_by_their_content():
    packages = json.loads((WEB / "package-lock.json").read_text("utf-8"))["packages"]
    assert len(packages) > 20
    assert [name for name, package in packages.items() if "resolved" in package] == []
    unchecked = [name for name, package in packages.items() if name and "integrity" not in package]
    # npm wants the linter's builds for all platforms in the file, also where a package index lacks them
    assert all(name.startswith("node_modules/@biomejs/cli-") for name in unchecked)
    assert not [name for name in unchecked if name.endswith(("linux-x64", "linux-arm64"))]
