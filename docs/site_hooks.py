"""Hooks of mkdocs: pages that are files of the repository's root, and the help of every command.

Links are relative, so that they work in a clone. On the site those to files that it does not have lead to GitHub.
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
PAGES = {"index.md": "README.md", "project/contributing.md": "CONTRIBUTING.md", "project/changelog.md": "CHANGELOG.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    from mkdocs.structure.files import File

    for page, source in PAGES.items():
        text = relinked((ROOT / source).read_text(encoding="utf-8"), source, page)
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "reference/cli.md", content=command_line()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files outside of ``docs`` lead to GitHub."""
    name = page.file.src_uri
    return markdown if name in PAGES else relinked(markdown, f"docs/{name}", name)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep names and ranges in tables whole, and show roles of Sphinx (``:class:`~package.Name` ``) as the name."""
    html = re.sub(r":\w+:<code>(?:~[\w.]*?)?(\w[\w.]*)</code>", r"<code>\1</code>", html)
    return re.sub(r"(?s)<td.*?</td>", lambda cell: re.sub(r"<code>[^<]+</code>|\[[\d.-]+\]", _whole, cell[0]), html)


def _whole(text: re.Match[str]) -> str:
    """Return a text in which a browser breaks no line after a hyphen."""
    return re.sub(r"[^\s<>]*-[^\s<>]*", r'<span style="white-space: nowrap">\g<0></span>', text[0])


def relinked(text: str, source: str, page: str) -> str:
    """Links of a file of the repository, as those of the page made of it: to other pages, to pictures, or to GitHub."""
    folders = os.path.dirname(source), os.path.dirname(page)
    return re.sub(r"\]\(([^)\s]+)\)", lambda found: f"]({_target(found[1], *folders)})", text)


def _target(link: str, source: str, page: str) -> str:
    path, separator, heading = link.partition("#")
    file = os.path.normpath(os.path.join(source, path))
    if not path or not (ROOT / file).exists():  # an address, or code
        return link
    own = {source: name for name, source in PAGES.items()}
    if file not in own and not file.startswith("docs/"):
        return f"{REPOSITORY}/blob/main/{file}{separator}{heading}"
    return os.path.relpath(own.get(file, file.removeprefix("docs/")), page or ".") + separator + heading


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
