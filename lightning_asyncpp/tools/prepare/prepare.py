"""``asyncpp prepare SOURCE... --output FOLDER``: documents to shards of tokens that a training streams."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_asyncpp.data.errors import DataError
from lightning_asyncpp.data.token_dataset import PLAN, read_metadata, smallest_dtype, verify_checksums
from lightning_asyncpp.tools.parsers import prepare_parser
from lightning_asyncpp.tools.prepare.pieces import Record, Stopped
from lightning_asyncpp.tools.prepare.preparation import Estimate, estimate, prepare
from lightning_asyncpp.tools.prepare.work_plan import Request

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> None:
    """Prepare, or say what would be done; wrong arguments and failures end with code 2, an interruption with 130."""
    arguments = prepare_parser().parse_args(argv)
    request = _request(arguments)
    terminate = signal.signal(signal.SIGTERM, _interrupt)
    try:
        if arguments.dry_run:
            print(_described(request, estimate(request)))
            return
        start = time.monotonic()
        record = prepare(request)
        if arguments.verify:
            verify_checksums(request.output, read_metadata(request.output))
        print(
            _already(request, arguments.verify) if record is None else _done(request, record, time.monotonic() - start)
        )
    except (KeyboardInterrupt, Stopped):
        print(f"asyncpp prepare: interrupted. {_how_to_go_on(request)}", file=sys.stderr)
        raise SystemExit(_INTERRUPTED) from None
    except (DataError, ImportError, OSError) as error:
        problems = str(error).splitlines() or [repr(error)]
        told = problems[0] if len(problems) == 1 else "".join(f"\n  - {problem}" for problem in problems)
        print(f"asyncpp prepare: error: {told}", file=sys.stderr)
        if isinstance(error, OSError) and (request.partial / PLAN).exists():  # what is wrong with data says its mend
            print(_how_to_go_on(request), file=sys.stderr)
        raise SystemExit(2) from None
    finally:
        signal.signal(signal.SIGTERM, terminate)


def _request(arguments: Any) -> Request:
    return Request(
        sources=tuple(arguments.sources),
        output=Path(arguments.output).expanduser(),
        tokenizer=arguments.tokenizer,
        vocab_size=arguments.vocab_size,
        end_of_text=arguments.end_of_text,
        text_key=arguments.text_key,
        val_fraction=arguments.val_fraction,
        num_workers=arguments.num_workers,
        piece_mb=arguments.piece_mb,
        max_mb=arguments.max_mb,
    )


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _described(request: Request, judged: Estimate) -> str:
    plan, tokenizer, tokens = judged.plan, judged.tokenizer, judged.tokens
    width = smallest_dtype(tokenizer.vocab_size).itemsize
    free = next(path for path in (request.output, *request.output.absolute().parents) if path.exists())
    state = "begun: it would go on" if (request.partial / PLAN).exists() else "not begun"
    lines = (
        ("files", f"{len(plan.files)}, from {plan.files[0].url} to {plan.files[-1].url}"),
        ("source", f"{plan.size / 1e6:,.1f} MB in {len(plan.pieces)} pieces, {request.num_workers} processes"),
        ("tokenizer", f"{request.tokenizer}: {tokenizer.vocab_size} ids; {tokenizer.end_of_document} ends a document"),
        ("tokens", f"about {tokens:,.0f}, {tokens * request.val_fraction:,.0f} of them for validation"),
        ("disk", f"about {tokens * width / 1e9:,.3f} GB; {shutil.disk_usage(free).free / 1e9:,.0f} GB are free"),
        ("output", f"{request.output} ({'complete' if request.output.exists() else state})"),
    )
    return "\n".join(f"{name:<10} {value}" for name, value in lines)


def _done(request: Request, record: Record, seconds: float) -> str:
    vocab_size = read_metadata(request.output).vocab_size
    left_out = f" {record.empty} documents without text were left out." if record.empty else ""
    none = "" if record.val_tokens or not request.val_fraction else (
        " No document fell to validation: raise --val-fraction, or validate on other data."
    )  # fmt: skip
    documents = f"{record.documents:,} documents ({record.val_documents:,} for validation)"
    return (
        f"{request.output}: {record.train_tokens:,} tokens to train on, {record.val_tokens:,} to validate on, from "
        f"{documents} of {record.text_bytes / 1e6:,.1f} MB, in {seconds:,.0f} s.{left_out}{none}\nTrain on it: "
        f"--data lightning_asyncpp.data.TextDataModule --data.source {request.output}, with a model of "
        f"vocab_size={vocab_size} or more."
    )


def _already(request: Request, verified: bool) -> str:
    checked = " Its checksums are right." if verified else ""
    return f"{request.output} was prepared before, with the same arguments; nothing to do.{checked}"


def _how_to_go_on(request: Request) -> str:
    return f"What is done is kept in {request.partial}; the same command goes on from there."


if __name__ == "__main__":
    main()
