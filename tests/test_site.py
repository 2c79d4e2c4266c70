"""The site of the documents builds without a warning: no dead link, no dead anchor, no page that is in no menu."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.site_hooks import REPOSITORY, relinked
from tests.helpers import forked
from tests.test_documents import anchors

pytest.importorskip("mkdocs")

ROOT = Path(__file__).parents[1]
VARIABLES = {"NO_MKDOCS_2_WARNING": "1"}
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    build = ["-m", "mkdocs", "build", "--config-file", str(ROOT / "mkdocs.yml"), "--strict"]
    done = forked.run([*build, "--quiet", "--site-dir", str(tmp_path / "site")], tmp_path, seconds=280, **VARIABLES)
    assert done.returncode == 0, _warnings(tmp_path, build) or done.stderr[-2000:]
    assert (tmp_path / "site" / "start" / "quickstart" / "index.html").exists()


def _warnings(folder: Path, build: list[str]) -> str:
    """What ``--quiet`` hid, which is worth a second build when the first has failed."""
    said = forked.run([*build, "--site-dir", str(folder / "again")], folder, seconds=280, **VARIABLES).stderr
    return "\n".join(line for line in said.splitlines() if line.startswith(("WARNING", "ERROR")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_absolute_links_to_this_repository_lead_to_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    ours = re.findall(rf"{re.escape(REPOSITORY)}/(?:blob|tree)/main/([^)\s]+)", text)
    targets = [(ROOT / path, heading) for path, _, heading in (link.partition("#") for link in ours)]
    assert not [path for path, heading in targets if not path.exists() or (heading and heading not in anchors(path))]
    # Pages link to pages by relative links, whose headings are checked, too.
    assert page.parent == ROOT or not [path for path in ours if path.startswith("docs/") and path.endswith(".md")]


@pytest.mark.parametrize(
    ("link", "source", "page", "expected"),
    [
        ("docs/start/your-model.md", "README.md", "index.md", "start/your-model.md"),
        ("docs/research/performance.md#jitter", "README.md", "index.md", "research/performance.md#jitter"),
        ("docs/img/ideal.svg", "README.md", "index.md", "img/ideal.svg"),
        ("docs/project/internals.md#a", "CONTRIBUTING.md", "project/contributing.md", "internals.md#a"),
        ("CONTRIBUTING.md", "CHANGELOG.md", "project/changelog.md", "contributing.md"),
        ("LICENSE", "CHANGELOG.md", "project/changelog.md", f"{REPOSITORY}/blob/main/LICENSE"),
        ("../../LICENSE", "docs/start/install.md", "start/install.md", f"{REPOSITORY}/blob/main/LICENSE"),
        ("quickstart.md#a", "docs/start/install.md", "start/install.md", "quickstart.md#a"),
        ("https://example.com", "README.md", "index.md", "https://example.com"),
    ],
)
def test_links_of_files_become_those_of_pages(link: str, source: str, page: str, expected: str) -> None:
    assert relinked(f"[a]({link})", source, page) == f"[a]({expected})"
