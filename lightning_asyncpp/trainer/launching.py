"""How a Trainer strategy starts its processes, and what it can say in the process that started them."""

from __future__ import annotations

import sys
from typing import Any

from typing_extensions import override

from lightning_asyncpp.core.batches.tree import map_tensors
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.trainer import private
from lightning_asyncpp.trainer.checkpoint.pipeline_checkpoints import PipelineCheckpoints

NOT_IN_NOTEBOOKS = (
    "start_method={!r} runs a script again, and this session is interactive, a notebook or a prompt: give the Trainer"
    " strategy='async_pipeline_notebook' (or 'sync_pipeline_notebook', or start_method='fork'), or run it as a script"
)


class Launching(PipelineCheckpoints):
    """Starts processes, and knows what to say in the one that started them.

    Attributes:
        whole_model_state: on rank 0, once it has trained, for the process that forked or spawned it.
        last_saved: path of the checkpoint that a training left; empty if none is known.
    """

    whole_model_state: dict[str, Any] | None = None
    last_saved = ""

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self.launcher is not None and not self.launcher.is_interactive_compatible and _is_interactive():
            raise ConfigurationError(NOT_IN_NOTEBOOKS.format(private.start_method(self)))
        if (method := private.start_method(self)) != "popen":
            from lightning_asyncpp.trainer.main_process import MainProcessLauncher  # derived from a private class

            self._launcher = MainProcessLauncher(self, method)

    @override
    def setup_environment(self) -> None:
        private.check_launcher()
        super().setup_environment()

    def gather_whole_model(self) -> None:
        """Bring the trained model to rank 0; a collective call."""
        state = self.full_state_dict()
        if self.is_global_zero:
            self.whole_model_state = map_tensors(lambda tensor: tensor.detach().cpu(), state)

    @override
    def full_state_dict(self) -> dict[str, Any]:
        """The whole module's ``state_dict`` on rank 0, this stage's part elsewhere; a collective that drains first.

        In the process that forked or spawned the ranks it is the module's own, which took up what they trained.
        """
        if self._started_others:
            if not getattr(self.launcher, "has_whole_model", False):
                raise ConfigurationError(
                    f"start_method={private.start_method(self)!r}: no fit of this Trainer has come to its end, and this"
                    " process has no weights but those of its own module: module.state_dict()"
                )
            return dict(self._module.state_dict())
        return super().full_state_dict()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._started_others:
            raise ConfigurationError(
                f"start_method={private.start_method(self)!r}: this process started those that train and has their"
                " weights, but neither optimizer nor progress; let a ModelCheckpoint save during the training"
                f"{f' (it saved {self.last_saved})' if self.last_saved else ''}, and to keep the weights alone,"
                " torch.save(module.state_dict(), path)"
            )
        return super().lightning_module_state_dict()

    @property
    def _started_others(self) -> bool:
        """Whether this process is no rank, but forks or spawns those that are."""
        return self.session.mesh is None and private.start_method(self) != "popen"


def _is_interactive() -> bool:
    """Whether there is no script to run again: as Lightning asks, whose own refusal names other strategies."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)
