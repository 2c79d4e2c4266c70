"""Hooks of mkdocs: pages that are files of the repository's root, and the help of every command.

README.md links by absolute addresses, so that it works on GitHub and on PyPI; on the site they become relative links,
which ``mkdocs build --strict`` checks.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/lightning-asyncpp/lightning-asyncpp"
SITE = "https://lightning-asyncpp.github.io/lightning-asyncpp/"
RAW = "https://raw.githubusercontent.com/lightning-asyncpp/lightning-asyncpp/main/"
PAGES = {"index.md": "README.md", "project/contributing.md": "CONTRIBUTING.md", "project/changelog.md": "CHANGELOG.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    from mkdocs.structure.files import File

    for page, source in PAGES.items():
        text = relinked((ROOT / source).read_text(encoding="utf-8"), page)
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "reference/cli.md", content=command_line()))
    return files


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Roles of Sphinx in docstrings (``:class:`~package.Name` ``) become the name, as editors show them."""
    return re.sub(r":\w+:<code>(?:~[\w.]*?)?(\w[\w.]*)</code>", r"<code>\1</code>", html)


def relinked(text: str, page: str) -> str:
    """Links of a file at the root, as those of a page: to other pages, to pictures, and else to GitHub."""
    return re.sub(r"\]\(([^)\s]+)\)", lambda found: f"]({_target(found[1], os.path.dirname(page))})", text)


def _target(link: str, folder: str) -> str:
    path, separator, heading = link.partition("#")
    own = {source: name for name, source in PAGES.items()}
    if path.startswith(SITE):
        path = path.removeprefix(SITE).rstrip("/")
        path = os.path.join(path, "index.md") if (ROOT / "docs" / path).is_dir() else path + ".md"
    elif path.startswith(RAW + "docs/"):
        path = path.removeprefix(RAW + "docs/")
    elif not path or "://" in path:
        return link
    elif path.startswith("docs/"):
        path = path.removeprefix("docs/")
    elif path in own:
        path = own[path]
    else:
        return f"{REPOSITORY}/blob/main/{link}"
    return os.path.relpath(path, folder or ".") + separator + heading


def command_line() -> str:
    """A page with the help of ``asyncpp`` and of each of its tools, as they print it."""
    from lightning_asyncpp.cli import TOOLS

    text = (ROOT / "docs" / "reference" / "cli-introduction.txt").read_text(encoding="utf-8")
    for tool in sorted(TOOLS):
        text += f"\n## asyncpp {tool}\n\n```text\n{help_of(tool)}```\n"
    return text


def help_of(tool: str) -> str:
    """What ``asyncpp TOOL --help`` prints."""
    from lightning_asyncpp import cli

    printed = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS="84"), contextlib.redirect_stdout(printed):
        with contextlib.suppress(SystemExit):
            cli.main([tool, "--help"])
    return printed.getvalue()
