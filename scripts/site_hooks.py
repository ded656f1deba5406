"""Hooks of MkDocs for the documentation site (mkdocs.yml).

Pages are written so that they also read well as plain files of the repository. The hooks do the rest:

- Files outside ``docs/`` that pages link to (examples, recipes, CONTRIBUTING.md) become pages of the site.
- The theme's one script from another host is replaced by the copy in ``docs/assets/``.
- Formulas (``$...$``) become MathML, which browsers draw without scripts and fonts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LISTINGS = {"examples": ("*.py", "python"), "recipes": ("*.yaml", "yaml")}  # folder: pattern, language
UNSEARCHED = "---\nsearch: {exclude: true}\n---\n"
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
SHIM = "https://unpkg.com/iframe-worker/shim"  # of the theme's search, for pages opened from disk
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def listing_pages() -> dict[str, str]:
    """Return the pages made of files outside ``docs/``: path in the site -> Markdown."""
    pages = {"contributing.md": (ROOT / "CONTRIBUTING.md").read_text("utf-8")}
    for folder, (pattern, language) in LISTINGS.items():
        for file in sorted((ROOT / folder).glob(pattern)):
            name = file.relative_to(ROOT).as_posix()
            code = file.read_text("utf-8").rstrip()
            pages[f"{folder}/{file.stem}.md"] = f"{UNSEARCHED}# {name}\n\n```{language}\n{code}\n```\n"
    return pages


def site_target(target: str) -> str:
    """Return where a link of a page of ``docs/`` or of CONTRIBUTING.md leads in the site."""
    path, hash_sign, anchor = target.partition("#")
    path = path.removeprefix("../").removeprefix("docs/")
    if path == "recipes":
        path = "recipes.md"
    elif path == "CONTRIBUTING.md":
        path = "contributing.md"
    elif (folder := path.partition("/")[0]) in LISTINGS and folder != path:
        path = f"{folder}/{Path(path).stem}.md"
    return path + hash_sign + anchor


def mathml(formula: str, is_block: bool) -> str:
    """Return a LaTeX formula as MathML."""
    from latex2mathml.converter import convert

    return convert(formula, display="block" if is_block else "inline")


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the pages that are made of files outside ``docs/``."""
    from mkdocs.structure.files import File, InclusionLevel

    for path, text in listing_pages().items():
        files.append(File.generated(config, path, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at pages of the site, and drop words after a code block's language."""
    markdown = re.sub(r"^( *```\w+) [\w-]+$", r"\1", markdown, flags=re.MULTILINE)
    if page.file.src_uri.partition("/")[0] in LISTINGS:
        return markdown
    return LINK.sub(lambda link: link[1] + _outward(link[2]) + link[3], markdown)


def _outward(target: str) -> str:
    return site_target(target) if target.startswith(("../", "docs/", "CONTRIBUTING")) else target


def on_page_content(html: str, **_: Any) -> str:
    """Write formulas as MathML, and names of classes in docstrings without the role of Sphinx."""
    from html import unescape

    html = html.replace(":class:<code>", "<code>")
    return FORMULA.sub(lambda found: mathml(unescape(found[3]).strip(), found[2] == "["), html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Load the search's script from the site itself."""
    return output.replace(SHIM, "../" * page.url.count("/") + "assets/iframe-worker.js")


def on_post_template(output: str, **_: Any) -> str:
    """Do the same for pages that are not documents, such as 404.html."""
    return output.replace(SHIM, "assets/iframe-worker.js")
