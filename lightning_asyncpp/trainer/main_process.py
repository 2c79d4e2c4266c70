"""Gives the model that forked or spawned processes trained to the process that started them, as a notebook expects.

Lightning hands over what rank 0's module holds, which in a pipeline is one stage. The processes end with the training,
so they bring the whole model together before, and the module that was never cut takes it up.

Imported where such processes are started: the launcher is derived from a private class of Lightning's, without which
all else still works.
"""

from __future__ import annotations

import pickle
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_asyncpp.core.cut.materialize import materialize
from lightning_asyncpp.core.cut.network import network_in
from lightning_asyncpp.core.cut.units import pipeline_units
from lightning_asyncpp.core.randomness import preserved_generators
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.trainer import private
from lightning_asyncpp.trainer.module_facts import allow_state_dict, last_saved

if TYPE_CHECKING:
    from lightning_asyncpp.trainer.launching import Launching

_WHOLE = "asyncpp_whole_model"
_HOST = torch.device("cpu")
NOT_PICKLED = (
    "start_method='spawn' sends the module, its data and the callbacks to new processes by pickle, and one of them"
    " cannot be pickled ({}): define what it holds at the top level of a file, without lambdas, or use"
    " start_method='popen' or 'fork'"
)
_Launcher: Any = private.multiprocessing_launcher()


class MainProcessLauncher(_Launcher):
    """Lightning's launcher of forked and spawned processes, which brings back all stages.

    Attributes:
        has_whole_model: whether the module of this process has taken up what others trained.
    """

    _strategy: Launching  # Lightning's name
    has_whole_model = False

    def launch(self, function: Callable, *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        """Run a function in the processes.

        Raises:
            ConfigurationError: the whole model could not be given to this process afterwards, or what spawned processes
                need not to them.
        """
        if trainer is not None:
            if trainer.state.fn == TrainerFn.FITTING:
                _check(trainer, self._strategy)
            elif trainer.state.fn == TrainerFn.PREDICTING:
                _warn_of_lost_predictions(trainer, self._strategy)
            function = partial(_run_in_child, trainer, self._strategy, function)
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if not _happened_in(error, "multiprocessing.reduction"):
                raise
            raise ConfigurationError(NOT_PICKLED.format(error)) from None

    def get_extra_results(self, trainer: L.Trainer) -> dict[str, Any]:
        """On rank 0, what the starting process needs of it."""
        extra: dict[str, Any] = super().get_extra_results(trainer)
        whole, self._strategy.whole_model_state = self._strategy.whole_model_state, None
        if whole is not None:
            path = Path(tempfile.mkdtemp()) / "model.ckpt"  # it does not fit through the queue
            torch.save(whole, path)
            extra[_WHOLE] = str(path)
        return extra

    def update_main_process_results(self, trainer: L.Trainer, extra: dict[str, Any]) -> None:
        """In the starting process, take up what rank 0 sent."""
        super().update_main_process_results(trainer, extra)
        self._strategy.last_saved = last_saved(trainer)
        if (path := extra.get(_WHOLE)) is None:
            return
        try:
            state = torch.load(path, map_location=_HOST, weights_only=True)
        finally:
            shutil.rmtree(Path(path).parent, ignore_errors=True)
        module = trainer.lightning_module
        _build(module, trainer)
        _load(module, state)
        self.has_whole_model = True


def _happened_in(error: BaseException, module: str) -> bool:
    return any(frame.f_globals.get("__name__") == module for frame, _ in traceback.walk_tb(error.__traceback__))


def _run_in_child(trainer: L.Trainer, strategy: Launching, function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run on every rank; Lightning tells a strategy of errors only where no launcher is in between."""
    try:
        results = function(*args, **kwargs)
        if trainer.state.fn == TrainerFn.FITTING:
            strategy.gather_whole_model()
        if trainer is not None:
            allow_state_dict(trainer.lightning_module)  # Lightning takes it on its way to the process that started this
    except BaseException as error:
        strategy.on_exception(error)
        raise
    return results


def _check(trainer: L.Trainer, strategy: Launching) -> None:
    """Refuse what would end with a part of the model, before anything is trained."""
    problems = []
    chosen, module = f"start_method={private.start_method(strategy)!r}", trainer.lightning_module
    if (nodes := trainer.num_nodes) > 1:
        problems.append(
            f"{chosen} with num_nodes={nodes}: the process that starts the ranks of a node gets the trained model from"
            " them, but only rank 0 has all of it; use start_method='popen'"
        )
    if network_in(module) is None and not is_overridden("configure_model", module):
        problems.append(
            f"{chosen}: {type(module).__name__} has no self.model in this process, which takes up the trained weights:"
            " assign the network to it in __init__ or configure_model, or use start_method='popen'"
        )
    main = sys.modules["__main__"]
    is_in_no_file = type(module).__module__ == "__main__" and getattr(main, "__file__", None) is None
    if is_in_no_file and main.__spec__ is None and private.start_method(strategy) == "spawn":
        problems.append(
            f"{chosen}: {type(module).__name__} is defined at a prompt or in a notebook, where spawned processes cannot"
            " import it from; put it into a file, or use start_method='fork'"
        )
    if problems:
        raise ConfigurationError.from_problems(problems)


def _warn_of_lost_predictions(trainer: L.Trainer, strategy: Launching) -> None:
    """Say what Lightning leaves unsaid unless it is asked for ``return_predictions=True``, which it refuses."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if not any(isinstance(callback, BasePredictionWriter) for callback in callbacks):
        rank_zero_warn(
            f"start_method={private.start_method(strategy)!r}: trainer.predict returns None here, as the predictions"
            " are made in other processes; give the Trainer a callback derived from BasePredictionWriter, which writes"
            " them where they are made"
        )


def _build(module: LightningModule, trainer: L.Trainer) -> None:
    """Make the network where only the ranks have made it; its values are overwritten, or stand in no state_dict."""
    with preserved_generators(_HOST), trainer.precision_plugin.module_init_context():
        module.configure_model()
    network = network_in(module)
    if network is not None and any(p.is_meta for p in network.parameters()):
        units = pipeline_units(network)
        materialize(units, range(len(units)), seed=0, device=_HOST)


def _load(module: LightningModule, state: dict[str, Any]) -> None:
    missing, unexpected = module.load_state_dict(state, strict=False)
    if not module.strict_loading:
        return
    for names, problem in ((missing, "was not in the trained model"), (unexpected, "is only in the trained model")):
        if names:
            rank_zero_warn(
                f"{', '.join(names[:5])}{' and others' * (len(names) > 5)} {problem}: the module of this process has"
                " other entries than the one that was trained; build it as a whole in __init__ or configure_model, or"
                " load the checkpoint"
            )
