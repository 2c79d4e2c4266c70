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

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

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


def relinked(text: str, page: str) -> str:
    """Links of a file at the root, as those of a page: to other pages, to pictures, and else to GitHub."""

    def relative(path: str) -> str:
        return os.path.relpath(path, os.path.dirname(page))

    def site(found: re.Match[str]) -> str:
        path, separator, heading = found[1].partition("#")
        return "](" + relative(path.rstrip("/") + ".md") + separator + heading + ")"

    def local(found: re.Match[str]) -> str:
        path, separator, heading = found[1].partition("#")
        if path.startswith("docs/"):
            return f"]({relative(path.removeprefix('docs/'))}{separator}{heading})"
        own = {source: name for name, source in PAGES.items()}.get(path)
        return f"]({relative(own) if own else f'{REPOSITORY}/blob/main/{path}'}{separator}{heading})"

    text = re.sub(rf"\]\({re.escape(SITE)}([\w/#-]+)\)", site, text)
    text = text.replace(RAW + "docs/", "")
    return re.sub(r"\]\((?!\w+:|#)([^)\s]+)\)", local, text)


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
    previous = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            cli.main([tool, "--help"])
    finally:
        os.environ.pop("COLUMNS")
        if previous is not None:
            os.environ["COLUMNS"] = previous
    return printed.getvalue()

