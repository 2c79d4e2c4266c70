"""Start of ranks by fork or spawn; after a fit the process that started them has the trained weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from lightning_asyncpp.core.tree import map_tensors
from lightning_asyncpp.trainer.checkpoint import PipelineCheckpoints


def launch(
    strategy: PipelineCheckpoints, start: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a function in forked or spawned processes; after a fit, this process's module has the trained weights.

    Args:
        strategy: strategy whose launcher starts the processes.
        start: the launcher's own ``launch``.
        function: function to run; the other arguments are its arguments.
    """
    trainer: L.Trainer | None = kwargs.get("trainer")
    if trainer is not None:
        if trainer.state.fn == TrainerFn.FITTING:
            trainer.lightning_module.configure_model()  # the whole model, for this process only
        function = functools.partial(_run_in_child, strategy, trainer, function)
    return start(function, *args, **kwargs)


def _run_in_child(
    strategy: PipelineCheckpoints, trainer: L.Trainer, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a function on a rank and report errors to the strategy; Lightning does not report them under a launcher."""
    try:
        results = function(*args, **kwargs)
        if trainer.state.fn == TrainerFn.FITTING:
            state = map_tensors(lambda tensor: tensor.detach().cpu(), strategy.full_state_dict())
            # Lightning calls state_dict() next and sends the result to the process that started this one.
            trainer.lightning_module.state_dict = lambda *_, **__: state  # type: ignore[method-assign]
    except BaseException as error:
        strategy.on_exception(error)
        raise
    return results
