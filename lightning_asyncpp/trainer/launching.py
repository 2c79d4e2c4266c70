"""How a Trainer strategy starts its processes, and what it can say in the process that started them."""

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
    """Starts processes, and knows what to say in the one that started them.

    Attributes:
        start_method: how processes are started.
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
        """The whole module's ``state_dict`` on rank 0, this stage's part on others; a collective that drains first.

        In the process that forked or spawned the ranks it is the module's own, which took up what they trained.
        """
        return dict(self._module.state_dict()) if self._started_others else super().full_state_dict()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._started_others:
            raise ConfigurationError(
                f"start_method={self.start_method!r}: this process started those that train and has their weights, but"
                " neither optimizer nor progress; let a ModelCheckpoint save during the training, and to keep the"
                " weights alone, torch.save(module.state_dict(), path)"
            )
        return super().lightning_module_state_dict()

    @property
    def _started_others(self) -> bool:
        """Whether this process is no rank, but forks or spawns those that are."""
        return self.session.mesh is None and self.start_method != "popen"


def _launch(
    strategy: Launching, launch: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a function in forked or spawned processes, whose model the module of this process takes up afterwards."""
    trainer: L.Trainer | None = kwargs.get("trainer")
    if trainer is not None:
        if trainer.state.fn == TrainerFn.FITTING:
            trainer.lightning_module.configure_model()  # whole, of memory of its own
        function = functools.partial(_run_in_child, strategy, trainer, function)
    return launch(function, *args, **kwargs)


def _run_in_child(
    strategy: Launching, trainer: L.Trainer, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run on every rank; Lightning tells a strategy of errors only where no launcher is in between."""
    try:
        results = function(*args, **kwargs)
        if trainer.state.fn == TrainerFn.FITTING:
            state = map_tensors(lambda tensor: tensor.detach().cpu(), strategy.full_state_dict())
            # What Lightning asks for next, and sends to the process that started this one.
            trainer.lightning_module.state_dict = lambda *_, **__: state  # type: ignore[method-assign]
    except BaseException as error:
        strategy.on_exception(error)
        raise
    return results
