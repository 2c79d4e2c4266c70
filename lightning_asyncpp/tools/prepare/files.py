"""The files that a preparation reads: on this machine, or on the Hugging Face Hub at one commit."""

from __future__ import annotations

import glob
import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from lightning_asyncpp.data.errors import DataError
from lightning_asyncpp.data.hub import HUB, hub_endpoint, hub_errors, hub_package

PARQUET = (".parquet",)
LINES = (".jsonl", ".ndjson")
COMPRESSED_LINES = tuple(f"{ending}{packed}" for ending in (".jsonl", ".ndjson", ".json") for packed in (".gz", ".zst"))
ENDINGS = (*PARQUET, *LINES, *COMPRESSED_LINES)
_BLOCK_BYTES = 4 * 2**20  # read ahead of what is asked of the hub


@dataclass(frozen=True)
class SourceFile:
    """A file of documents."""

    url: str
    """Absolute path, or ``hf://`` URL with the commit."""
    size: int
    """Length in bytes."""
    stamp: int = 0
    """Time of the last change in nanoseconds; 0 on the hub, where the commit says it."""

    @property
    def on_hub(self) -> bool:
        """Whether the file is read over the network."""
        return self.url.startswith(HUB)

    @property
    def is_parquet(self) -> bool:
        """Whether the file is parquet; else it holds a JSON object per line."""
        return self.url.endswith(PARQUET)

    @property
    def is_compressed(self) -> bool:
        """Whether the file has to be read from its beginning."""
        return self.url.endswith(COMPRESSED_LINES)

    @property
    def damage(self) -> tuple[type[Exception], ...]:
        """What is raised where the content is damaged; of a file on the hub, an OSError may be the network's."""
        import pyarrow

        certain = (pyarrow.ArrowException, UnicodeDecodeError, zlib.error, gzip.BadGzipFile)
        return certain if self.on_hub else (*certain, EOFError, OSError)

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open the file for reading; ranges of a file on the hub are fetched as they are read.

        Raises:
            HubError: the network failed, here or while the file was read.
        """
        if not self.on_hub:
            with Path(self.url).open("rb") as opened:
                yield opened
            return
        with (
            hub_errors(self.url, "run the same command later"),
            _hub_file_system(hub_endpoint()).open(self.url, "rb", block_size=_BLOCK_BYTES) as opened,
        ):
            yield opened


def in_one_line(error: Exception) -> str:
    """What an exception says, without the line breaks of some libraries."""
    return " ".join(str(error).split())


def find_files(sources: Iterable[str]) -> list[SourceFile]:
    """List the files of all sources, in the order of the sources and by name in each; none comes twice.

    Raises:
        DataError: names every source that holds nothing to read, or the same documents in two formats.
    """
    found: dict[str, SourceFile] = {}
    problems: list[str] = []
    for source in sources:
        try:
            files = _hub_files(source) if source.startswith(HUB) else _local_files(source)
            _check(source, files)
        except DataError as error:
            problems.append(str(error))
            continue
        for file in files:
            found.setdefault(file.url, file)
    if problems:
        raise DataError("\n".join(problems))
    return list(found.values())


def changes(sources: Iterable[str], before: Iterable[SourceFile], times: bool = True) -> list[str]:
    """List the files of this machine that have changed, come or gone; those of the hub belong to a commit.

    Args:
        sources: what was asked for.
        before: the files that were found then.
        times: whether a file has changed if nothing but the time of its last change has.

    Raises:
        DataError: as :func:`find_files`.
    """
    now = find_files(source for source in sources if not source.startswith(HUB))
    was = (file for file in before if not file.on_hub)
    known = [{file if times else replace(file, stamp=0) for file in files} for files in (now, was)]
    return sorted({file.url for file in known[0] ^ known[1]})


def _check(source: str, files: Sequence[SourceFile]) -> None:
    if not files:
        raise DataError(f"{source}: holds no file that ends in {', '.join(ENDINGS)}; correct the path or the glob")
    kinds = {file.is_parquet for file in files}
    if len(kinds) > 1:
        raise DataError(
            f"{source}: holds parquet and JSON lines, maybe the same documents twice; "
            "give a glob for one of them, for instance *.parquet"
        )
    if empty := [file.url for file in files if file.size == 0]:
        raise DataError(f"{source}: {', '.join(empty)} has no content; copy it again, or remove it")


def _local_files(source: str) -> list[SourceFile]:
    path = Path(source).expanduser()
    if path.is_dir():
        inside = (file for file in path.rglob("*") if not any(p.startswith(".") for p in file.relative_to(path).parts))
        paths = [file for file in inside if file.name.endswith(ENDINGS) and file.is_file()]
    elif path.exists():
        paths = [path] if path.name.endswith(ENDINGS) else []
    else:
        matching = (Path(name) for name in glob.glob(str(path), recursive=True))
        paths = [file for file in matching if file.name.endswith(ENDINGS) and file.is_file()]
    return [_local(file.absolute()) for file in sorted(paths, key=str)]


def _local(path: Path) -> SourceFile:
    status = path.stat()
    return SourceFile(str(path), status.st_size, status.st_mtime_ns)


def _hub_files(source: str) -> list[SourceFile]:
    """List files of the hub at the commit that the revision has now, so that a resumed run reads the same."""
    offline = _how_to_copy(source)
    with hub_errors(source, offline):
        system = _hub_file_system(hub_endpoint())
        resolved = system.resolve_path(source)
        information = hub_package().HfApi(hub_endpoint()).repo_info(
            resolved.repo_id, repo_type=resolved.repo_type, revision=resolved.revision
        )  # fmt: skip
        pinned = f"{resolved.repo_type}s/{resolved.repo_id}@{information.sha}/{resolved.path_in_repo}".rstrip("/")
        patterned = bool(set("*?[") & set(resolved.path_in_repo))
        listed: dict[str, Any] = (system.glob if patterned else system.find)(pinned, detail=True)
        # Of a single file, huggingface_hub 1 says nothing here.
        listed = {name: entry or system.info(name) for name, entry in listed.items()}
    files = [
        SourceFile(f"{HUB}{name}", int(entry["size"]))
        for name, entry in listed.items()
        if entry["type"] == "file" and name.endswith(ENDINGS)
    ]
    return sorted(files, key=lambda file: file.url)


def _how_to_copy(source: str) -> str:
    """Say how files of the hub come to a machine without internet; ``source`` is ``hf://datasets/OWNER/NAME/...``."""
    owner, name, *inside = [*source.removeprefix(HUB).removeprefix("datasets/").split("/"), "", ""][:-1]
    pattern = "/".join(part for part in inside if part)
    if not pattern.endswith(ENDINGS):
        pattern = f"{pattern}/*" if pattern else "*"
    repository = f"{owner}/{name.partition('@')[0]}"
    return (
        f"without internet, run `hf download {repository} --repo-type dataset --include '{pattern}' --local-dir DIR` on"
        " a machine that has it, copy DIR here, and give it as the source"
    )


@lru_cache(maxsize=1)
def _hub_file_system(endpoint: str) -> Any:
    return hub_package().HfFileSystem(endpoint=endpoint)
