"""A message over gloo that can be asked whether it is done.

``isend`` and ``irecv`` of gloo say so only to whoever waits for them: ``is_completed()`` of theirs stays false until
then. Who polled them would keep what was sent for ever, and never take up what has arrived. So a thread waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist

from lightning_asyncpp.pipeline.failures import background


class HostWork:
    """Stands for the ``Work`` of a send or a receive of host data.

    Args:
        work: of gloo, which nobody else waits for; or what begins it, to be called in the thread.
    """

    def __init__(self, work: dist.Work | Callable[[], dist.Work]) -> None:
        self._error: BaseException | None = None
        self._done = threading.Event()
        # The thread alone keeps gloo's object, which keeps the tensor: both go when it is done.
        background.run(lambda: self._wait(work), "host-work")

    def is_completed(self) -> bool:
        """Whether it is done, or failed."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until it is done.

        Raises:
            RuntimeError: it failed.
        """
        self._done.wait()
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error

    def _wait(self, work: dist.Work | Callable[[], dist.Work]) -> None:
        try:
            (work() if callable(work) else work).wait()
        except BaseException as error:  # raised again for whoever waits
            self._error = error
        self._done.set()
