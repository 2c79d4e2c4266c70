"""Pieces on several processes: what they have done so far is told, and an interruption ends them all."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from lightning_asyncpp.data.errors import DataError
from lightning_asyncpp.tools.prepare.piece import Record, Stopped, Work, write_piece

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
