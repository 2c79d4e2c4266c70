"""Pieces: their documents tokenised, divided into training and validation, and written as litdata chunks.

Each is written whole or not at all, on this process or on several, of which an interruption ends all.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from litdata import TokensLoader
from litdata.streaming import Cache
from torch import Tensor

from lightning_asyncpp.data.errors import DataError
from lightning_asyncpp.data.hub import HubError
from lightning_asyncpp.data.replica import replica_environment
from lightning_asyncpp.data.source import load_tokenizer
from lightning_asyncpp.data.token_dataset import CHUNK_BYTES, smallest_dtype
from lightning_asyncpp.data.tokenizer import Tokenizer
from lightning_asyncpp.storage.durable import checksum, replace_durably
from lightning_asyncpp.tools.prepare.source_files import Documents, read_documents
from lightning_asyncpp.tools.prepare.work_plan import Plan, read_plan

PIECES = "pieces"
VALIDATION = "val.bin"
_RECORD = "record.json"
_ATTEMPTS = 5  # at a piece from the hub, in six minutes: it counts requests over five


@dataclass
class Record:
    """What became of a piece, or of its documents so far."""

    size: int = 0
    """Bytes of the source that were read."""
    documents: int = 0
    """Documents with text."""
    val_documents: int = 0
    """Those of them that are kept for validation."""
    empty: int = 0
    """Documents without text, which were left out."""
    text_bytes: int = 0
    """Length of the text in UTF-8."""
    train_tokens: int = 0
    """Tokens to train on, ends of documents included."""
    val_tokens: int = 0
    """Tokens to validate on."""
    checksums: dict[str, str] = field(default_factory=dict)
    """CRC-32 of the chunks by their names."""


@dataclass(frozen=True)
class Work:
    """A preparation that has begun, as every process sees it."""

    folder: Path
    plan: Plan
    tokenizer: Tokenizer

    @classmethod
    def open(cls, folder: Path) -> Work:
        """Read plan and tokenizer from the folder of the work."""
        plan = read_plan(folder)
        byte = plan.request["tokenizer"] == "byte"
        return cls(folder, plan, load_tokenizer("byte" if byte else str(folder), plan.request["end_of_text"]))

    @property
    def dtype(self) -> torch.dtype:
        """Integer type of the stored tokens."""
        return smallest_dtype(self.tokenizer.vocab_size)

    def piece_folder(self, index: int) -> Path:
        """Return the folder of a piece, which exists when the piece is done."""
        return self.folder / PIECES / f"{index:06d}"

    def record(self, index: int) -> Record | None:
        """Read what became of a piece; ``None`` if it is not done.

        Raises:
            DataError: what says so is damaged.
        """
        path = self.piece_folder(index) / _RECORD
        try:
            return Record(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise DataError(f"{path} is damaged ({error}); delete {path.parent}, and run the command again") from error


class Stopped(Exception):  # noqa: N818  (no error: somebody asked for it)
    """The work was interrupted."""


def is_validation(text: str, val_fraction: float) -> bool:
    """Whether a document is kept for validation: decided by a hash of its text alone.

    So a document is on the same side in any file, format and order, and copies of it never on both.
    """
    if not val_fraction:
        return False
    draw = hashlib.blake2b(text.encode(), digest_size=6, person=b"asyncpp split").digest()
    return int.from_bytes(draw, "big") / 2**48 < val_fraction


def write_piece(work: Work, index: int, report: Callable[[Record], None]) -> Record:
    """Tokenise a piece and put its folder in place, whole or not at all.

    Args:
        work: the preparation.
        index: of the piece.
        report: is told what was done so far; may raise :class:`Stopped`.
    """
    attempt = 1
    while True:
        temporary = Path(tempfile.mkdtemp(prefix=f".{index:06d}-", dir=work.folder / PIECES))
        try:
            record = _write(work, index, temporary, report)
            _publish(temporary, work.piece_folder(index))
            return record
        except HubError as error:
            if attempt == _ATTEMPTS:
                raise DataError(f"{error}; it was tried {_ATTEMPTS} times, and goes on where it was") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        _wait(4**attempt, report)
        attempt += 1


def _wait(seconds: int, report: Callable[[Record], None]) -> None:
    for _ in range(seconds):
        report(Record())  # nothing of the piece is done; and an interruption is heard
        time.sleep(1.0)


def _write(work: Work, index: int, folder: Path, report: Callable[[Record], None]) -> Record:
    record = Record()
    # The rank is part of the names of chunks and index, and so pieces can be put side by side.
    with replica_environment(num_replicas=index + 1, rank=index):
        cache = Cache(str(folder), chunk_bytes=CHUNK_BYTES, item_loader=TokensLoader())
        items = 0
        with (folder / VALIDATION).open("wb") as validation:
            for file, span in ((work.plan.files[span.file], span) for span in work.plan.pieces[index]):
                for documents in read_documents(file, span, work.plan.request["text_key"]):
                    tokens = _tokenise(work, documents, validation, record, file.url)
                    if tokens is not None:
                        cache[items] = tokens
                        items += 1
                    report(record)
        if items:
            cache.done()
    record.checksums = {path.name: checksum(path) for path in sorted(folder.glob("chunk-*"))}
    (folder / _RECORD).write_text(json.dumps(asdict(record)))
    return record


def _tokenise(work: Work, documents: Documents, validation: BinaryIO, record: Record, place: str) -> Tensor | None:
    """Write the validation tokens of ``documents``; return those to train on, (length,), or None if there are none."""
    end = work.tokenizer.end_of_document
    assert end is not None
    ending = torch.tensor([end], dtype=work.dtype)
    train: list[Tensor] = []
    kept: list[Tensor] = []
    for text, tokens in zip(documents.texts, work.tokenizer.encode_batch(documents.texts)):
        if work.plan.request["tokenizer"] == "byte" and "\0" in text:
            raise DataError(f"{place}: a document holds byte 0, which ends documents; choose another --tokenizer")
        validates = is_validation(text, work.plan.request["val_fraction"])
        (kept if validates else train).extend((tokens.to(work.dtype), ending))
        record.val_documents += validates
        record.text_bytes += len(text.encode())
    if kept:
        validation.write(torch.cat(kept).numpy().tobytes())
    record.size += documents.size
    record.documents += len(documents.texts)
    record.empty += documents.empty
    record.train_tokens += sum(part.numel() for part in train)
    record.val_tokens += sum(part.numel() for part in kept)
    return torch.cat(train) if train else None


def _publish(temporary: Path, folder: Path) -> None:
    temporary.chmod(0o755)  # mkdtemp keeps other users out, who may share the folder
    try:
        replace_durably(temporary, folder)
    except OSError:
        if not (folder / _RECORD).is_file():  # else a process that outlived its run was faster: it wrote the same
            raise


_SECONDS = 0.2  # between two looks at what was reported

Report = Callable[[int, Record], None]


def write_pieces(work: Work, indices: Sequence[int], num_workers: int, report: Report) -> None:
    """Write pieces.

    Args:
        work: the preparation.
        indices: the pieces.
        num_workers: processes; 0: this one.
        report: is told the index of a piece and what was done of it so far.

    Raises:
        DataError: the first problem of any process; pieces that the others had begun are finished before.
    """
    if num_workers == 0:
        for index in indices:
            report(index, write_piece(work, index, lambda record, index=index: report(index, record)))  # type: ignore[misc]
    elif indices:
        _on_processes(work, indices, min(num_workers, len(indices)), report)


def _on_processes(work: Work, indices: Sequence[int], num_workers: int, report: Report) -> None:
    # Not forked from here: tokenizers and the hub's client have threads, which a fork would leave in any state.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # what takes seconds is imported once
    reports, stop = context.SimpleQueue(), context.Event()
    executor = ProcessPoolExecutor(
        num_workers, mp_context=context, initializer=_begin, initargs=(str(work.folder), reports, stop)
    )
    waiting: set[Future] = set()
    try:
        waiting |= {executor.submit(_piece, index) for index in indices}
        while waiting:
            done, waiting = wait(waiting, timeout=_SECONDS, return_when=FIRST_COMPLETED)
            _hand_on(reports, report)
            for future in done:
                future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a process that tokenised ended at once, maybe for want of memory; lower --num-workers, and run again"
        ) from error
    except BaseException as error:
        if not isinstance(error, Exception):
            stop.set()
        raise
    finally:
        # A pipe that nobody reads blocks who writes: it is emptied until the pieces that were begun have ended.
        waiting = {future for future in waiting if not future.cancel()}
        while waiting:
            waiting = wait(waiting, timeout=_SECONDS).not_done
            _hand_on(reports, report)
        executor.shutdown()


def _hand_on(reports: Any, report: Report) -> None:
    while not reports.empty():
        report(*reports.get())


_work: Work
_reports: Any
_stop: Any


def _begin(folder: str, reports: Any, stop: Any) -> None:
    global _work, _reports, _stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and says when to stop
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core per process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _work, _reports, _stop = Work.open(Path(folder)), reports, stop


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _piece(index: int) -> None:
    def report(record: Record) -> None:
        _reports.put((index, record))
        if _stop.is_set():
            raise Stopped

    write_piece(_work, index, report)
