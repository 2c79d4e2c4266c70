"""A preparation from its arguments to the folder of shards: begun, or taken up where it was interrupted."""

from __future__ import annotations

import fcntl
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm.auto import tqdm

from lightning_asyncpp.data.errors import DataError
from lightning_asyncpp.data.source import load_tokenizer
from lightning_asyncpp.data.token_dataset import PLAN
from lightning_asyncpp.data.tokenizer import BPETokenizer, Tokenizer
from lightning_asyncpp.tools.prepare.assemble import READY, add_up, assemble, read_origin
from lightning_asyncpp.tools.prepare.pieces import PIECES, Record, Work, is_validation, write_pieces
from lightning_asyncpp.tools.prepare.source_files import changes, find_files, read_documents
from lightning_asyncpp.tools.prepare.work_plan import Plan, Request, make_plan, read_plan

_VOCABULARY_BYTES = 32 * 10**6  # of text that a vocabulary is trained on
_NAMED = 5  # files, of those that changed
_ESTIMATES = 8  # places of the source that an estimate is made of


@dataclass(frozen=True)
class Estimate:
    """What a preparation would make, judged from samples."""

    plan: Plan
    tokenizer: Tokenizer
    tokens: float
    """Tokens, ends of documents included."""


def prepare(request: Request) -> Record | None:
    """Write the shards.

    Args:
        request: what is to be done.

    Returns:
        What became of the documents; ``None`` if the same was prepared before.

    Raises:
        DataError: names everything that is wrong with the arguments, or the first problem of the work.
    """
    _refuse_problems(request)
    if _is_done(request):
        return None
    request.partial.mkdir(parents=True, exist_ok=True)
    with _alone(request.partial):
        if _is_done(request):  # by a run that has ended just now
            shutil.rmtree(request.partial, ignore_errors=True)
            return None
        work = _resumed(request) if _has_begun(request) else _begun(request)
        _write_missing(work, request.num_workers)
        return assemble(work, request.output)


def estimate(request: Request) -> Estimate:
    """Judge from some documents what a preparation would make; nothing is written.

    Raises:
        DataError: as :func:`prepare`.
    """
    _refuse_problems(request)
    goes_on = not _is_done(request) and _has_begun(request)
    plan = _begun_plan(request) if goes_on else make_plan(request, find_files(request.sources))
    tokenizer = _tokenizer(request, plan)
    step = max(1, len(plan.pieces) // _ESTIMATES)
    size = tokens = 0
    for piece in plan.pieces[::step]:
        documents = next(iter(read_documents(plan.files[piece[0].file], piece[0], request.text_key)))
        size += documents.size
        tokens += sum(encoded.numel() + 1 for encoded in tokenizer.encode_batch(documents.texts))
    return Estimate(plan, tokenizer, tokens / max(1, size) * plan.size)


def _refuse_problems(request: Request) -> None:
    if problems := request.problems():
        raise DataError("\n".join(problems))


def _is_done(request: Request) -> bool:
    """Whether the output is there; one that something else was made of is refused."""
    if not request.output.exists():
        return False
    origin = read_origin(request.output)
    mend = "delete it, or name another output"
    if origin is None:
        raise DataError(f"--output {request.output}: exists already; {mend}")
    if different := _differences(origin.request, request):
        raise DataError(f"--output {request.output}: was prepared with other arguments ({different}); {mend}")
    if changed := changes(request.sources, origin.files, times=False):
        raise DataError(
            f"--output {request.output}: these files changed, came or went since it was prepared: {_some(changed)}; "
            f"{mend}"
        )
    return True


def _has_begun(request: Request) -> bool:
    return (request.partial / PLAN).exists()


def _differences(before: dict[str, object], request: Request) -> str:
    now = request.content()
    names = [name for name in now if now[name] != before.get(name)]
    return ", ".join(f"{name}: {before.get(name)!r}, and now {now[name]!r}" for name in names)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let no other run write into the folder; the lock ends with this process, however it ends."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{folder}: another `asyncpp prepare` is at work there; wait for it, or end it") from error
        except OSError as error:
            raise DataError(f"{folder}: cannot be locked ({error}); name an --output on another disk") from error
        yield


def _begun(request: Request) -> Work:
    for left_over in (request.partial / PIECES, request.partial / READY):
        if left_over.exists():  # of a run that ended, and was killed while it tidied up
            shutil.rmtree(left_over)
    (request.partial / PIECES).mkdir()
    plan = make_plan(request, find_files(request.sources))
    _tokenizer(request, plan).save(request.partial)
    plan.write(request.partial)  # last: without a plan nothing has begun
    return Work.open(request.partial)


def _begun_plan(request: Request) -> Plan:
    """Read the plan of the work in progress; one of something else is refused."""
    plan = read_plan(request.partial)
    if different := _differences(plan.request, request):
        raise DataError(
            f"{request.partial}: was begun with other arguments ({different}); give the same to go on, or delete it"
        )
    if changed := changes(request.sources, plan.files):
        raise DataError(
            f"changed, new or gone since the work began: {_some(changed)}; make them what they were, or delete "
            f"{request.partial} to begin anew"
        )
    return plan


def _resumed(request: Request) -> Work:
    _begun_plan(request)
    for left_over in (request.partial / PIECES).glob(".*"):
        shutil.rmtree(left_over, ignore_errors=True)
    work = Work.open(request.partial)
    if not request.has_own_tokenizer and _tokenizer(request, work.plan).fingerprint != work.tokenizer.fingerprint:
        raise DataError(
            f"--tokenizer {request.tokenizer}: is not what it was when the work began; restore it, or delete "
            f"{request.partial} to begin anew"
        )
    return work


def _tokenizer(request: Request, plan: Plan) -> Tokenizer:
    if request.tokenizer == "bpe":
        assert request.vocab_size is not None
        tokenizer: Tokenizer = BPETokenizer.train(_training_texts(request, plan), request.vocab_size)
    else:
        tokenizer = load_tokenizer(request.tokenizer, request.end_of_text)
    if tokenizer.end_of_document is None:
        raise DataError(
            f"--tokenizer {request.tokenizer}: has no token {request.end_of_text or 'that usually ends a text'!r}; "
            "name the one that ends a document with --end-of-text"
        )
    return tokenizer


def _training_texts(request: Request, plan: Plan) -> Iterator[str]:
    """Yield the first documents that are not kept for validation."""
    size = 0
    for span in (span for piece in plan.pieces for span in piece):
        for documents in read_documents(plan.files[span.file], span, request.text_key):
            texts = [text for text in documents.texts if not is_validation(text, request.val_fraction)]
            yield from texts
            size += sum(len(text.encode()) for text in texts)
            if size >= _VOCABULARY_BYTES:
                return


def _write_missing(work: Work, num_workers: int) -> None:
    records = {index: record for index in range(len(work.plan.pieces)) if (record := work.record(index)) is not None}
    missing = [index for index in range(len(work.plan.pieces)) if index not in records]
    total = add_up(list(records.values()))
    seconds = 0.5 if sys.stderr.isatty() else 30.0  # a line each, where it goes to a file
    with tqdm(
        total=work.plan.size, initial=total.size, unit="B", unit_scale=True, desc="tokenising", mininterval=seconds
    ) as bar:

        def report(index: int, record: Record) -> None:
            before = records.get(index, Record())
            total.documents += record.documents - before.documents
            total.train_tokens += record.train_tokens - before.train_tokens
            total.val_tokens += record.val_tokens - before.val_tokens
            # A copy: in this process it is the record that is still counted in.
            records[index] = replace(record)
            counts = (tqdm.format_sizeof(n) for n in (total.documents, total.train_tokens + total.val_tokens))
            bar.set_postfix_str("{} documents, {} tokens".format(*counts), refresh=False)
            bar.update(record.size - before.size)

        write_pieces(work, missing, num_workers, report)
