"""Several readers of what one engine does: the first makes it record, the last lets it stop."""

from __future__ import annotations

from lightning_asyncpp.pipeline.engine import Engine
from lightning_asyncpp.pipeline.trace import Follower, Trace


def follow(engine: Engine) -> Follower:
    """Let an engine record from here on, if it does not do so yet, and read along.

    The engine stops to record when the last such reader is closed; a trace that somebody else put there stays.
    """
    runner = engine.runner
    trace = runner.trace
    if trace is None:
        trace = runner.trace = Trace(engine.mesh.stage, keep=False, clock=runner.clock)
    follower = trace.follow()

    def stop() -> None:
        if runner.trace is trace and not trace.keep and not trace.is_followed:
            runner.trace = None

    follower.on_close = stop
    return follower
