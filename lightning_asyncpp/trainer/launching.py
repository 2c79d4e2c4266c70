"""Base class of the Trainer strategies: the start of processes, and calls in the process that started them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_asyncpp.core.tree import map_tensors
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.trainer.checkpoint import PipelineCheckpoints


class Launching(PipelineCheckpoints):
    """Strategy that starts processes.

    Attributes:
        start_method: way in which processes are started.
    """

    start_method: str

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        launcher: Any = self.launcher
        if launcher is not None and self.start_method != "popen":
            launcher.launch = functools.partial(_launch, self, launcher.launch)

    @override
    def full_state_dict(self) -> dict[str, Any]:
        """Drain (apply all outstanding updates), and return a ``state_dict``; a collective call.

        On rank 0 the result covers the whole module; on other ranks, only their stage. In the process that forked or
        spawned the ranks, it covers the whole module, which has loaded the trained weights.
        """
        return dict(self._module.state_dict()) if self._started_others else super().full_state_dict()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._started_others:
            raise ConfigurationError(
                f"start_method={self.start_method!r}: this process only started the ranks. It has the trained weights,"
                " but neither optimizer nor progress. Let a ModelCheckpoint save during the training; to save only the"
                " weights, use torch.save(module.state_dict(), path)"
            )
        return super().lightning_module_state_dict()

    @property
    def _started_others(self) -> bool:
        """Whether this process is not a rank, but forks or spawns the ranks."""
        return self.session.mesh is None and self.start_method != "popen"


def _launch(
    strategy: Launching, launch: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a function in forked or spawned processes; after a fit, this process's module has the trained weights."""
    trainer: L.Trainer | None = kwargs.get("trainer")
    if trainer is not None:
        if trainer.state.fn == TrainerFn.FITTING:
            trainer.lightning_module.configure_model()  # the whole model, for this process only
        function = functools.partial(_run_in_child, strategy, trainer, function)
    return launch(function, *args, **kwargs)


def _run_in_child(
    strategy: Launching, trainer: L.Trainer, function: Callable[..., Any], *args: Any, **kwargs: Any
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
