"""What a user's step has set around ``self.model(...)``, or changed before it: noticed where every step is run first.

The first stage leaves the step at the call of the model and runs its layers outside, middle stages never run it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from lightning_asyncpp.core.batches.user_hooks import UserHooks
from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.core.step.ambient import GRADIENTS, REFUSED, REFUSED_ONCE, Setting, Travelling
from lightning_asyncpp.core.step.model_call import NOT_LOOKED_AT, differ, digest
from lightning_asyncpp.core.step.model_in_step import ModelInStep
from lightning_asyncpp.errors import ConfigurationError

_NOTHING = nullcontext()


class AroundCall:
    """Compares what is set when the step calls the model with what is set where the stages run by themselves.

    :meth:`begin` every batch; then for every micro-batch :meth:`before_step`, :meth:`look` at the call, and
    :meth:`judge` after the step.
    Where the step runs to its end, :meth:`check_model` at the call and :meth:`check_step` after it.

    Args:
        stage: this rank's.
        device: where its layers run.
        hooks: the user's side.
    """

    def __init__(self, stage: Stage, device: torch.device, hooks: UserHooks) -> None:
        self._hooks = hooks
        self._travelling = Travelling(device)
        self._readers = (*self._travelling.readers, *(setting.read for setting in (*REFUSED, *GRADIENTS)))
        self._count = len(self._travelling.readers)
        self._model = ModelInStep(stage, hooks.model_name)
        self._home: list[Any] = []
        self._outside: list[Any] = []
        self._once: list[Any] | None = None
        self._seen: list[Any] = []
        self._found: str | None = None
        self._is_first_step = True

    def begin(self, purpose: str) -> None:
        """Read what is set where the stages run by themselves, before a batch.

        Args:
            purpose: ``"train"``, or what is evaluated.
        """
        with self._hooks.forward_context():
            self._once = [setting.read() for setting in REFUSED_ONCE]
        self._look_outside()
        self._model.begin(purpose)
        self._is_first_step = True

    def before_step(self) -> None:
        """Layers may have changed what is set for the process; nothing of that was the step.

        torch does so on some GPUs: when attention is first computed, it puts cuDNN's backend in front.
        """
        if self._home and self._read() != self._outside:
            self._look_outside()

    def updated(self) -> None:
        """An update was applied between two micro-batches of the batch."""
        if self._home:
            self._model.remember()

    def look(self) -> None:
        """Read what is set now, at the call of the model, and what was changed; nothing raises within the step."""
        if not self._home:
            return  # nobody trains: only the arguments are wanted
        self._seen = self._read()
        self._found = self._changed()

    def judge(self, training: bool) -> int:
        """What travels with the micro-batch: 0 if the step set nothing around the model.

        Args:
            training: gradients are wanted.

        Raises:
            ConfigurationError: something was set or changed that cannot travel.
        """
        if self._found:
            raise ConfigurationError(self._found)
        seen = self._seen
        if not self._home or seen == self._home or (not self._hooks.context_around_step and seen == self._outside):
            return 0
        settings = (*REFUSED, *GRADIENTS) if training else REFUSED
        if refused := self._refusal(settings, seen[self._count :], self._home[self._count :]):
            raise ConfigurationError(refused)
        own = seen[: self._count]
        return 0 if own == self._home[: self._count] else self._number(own)

    @property
    def looks_closely(self) -> bool:
        """Whether what costs too much for every batch is looked at in this one."""
        return self._model.closely

    def check_call(self, there: int, args: tuple, kwargs: dict[str, Any]) -> None:
        """Compare the arguments of the call, on a stage that has no use for them, with those on the first stage.

        Args:
            there: their digest on the first stage, if it looked at them.
            args, kwargs: here.

        Raises:
            ConfigurationError: they differ.
        """
        if there != NOT_LOOKED_AT and differ(there, digest(args, kwargs)):
            model = self._hooks.model_name
            raise ConfigurationError(
                f"the step calls {model}(...) with other arguments on the last stage than on the first one, which are"
                " used. Both run the step up to its call, with the same micro-batch, and the first one leaves it there:"
                " so what is written after the call (an attribute or a buffer: a running mean, a counter) and read"
                " before the next one is not the same on both, nor are random numbers of Python or numpy. Write it"
                " before the call, or in a hook that runs on every stage, such as on_train_batch_end; draw from torch's"
                " generators"
            )

    def check_model(self) -> None:
        """Look at the model alone, at its call, on a stage that runs the whole step.

        Raises:
            ConfigurationError: it was changed in the step.
        """
        if self._home and (found := self._changed()):
            raise ConfigurationError(found)

    def check_step(self) -> None:
        """Look at what the step did after its call, in the first micro-batch.

        Raises:
            ConfigurationError: it changed layers of other stages.
        """
        if self._home and self._is_first_step and (found := self._model.set_after_call()):
            raise ConfigurationError(found)
        self._is_first_step = False

    def model_ran(self) -> None:
        """The model has run, where the step goes on after it."""
        if self._home and self._is_first_step:
            self._model.called()

    @contextmanager
    def watching_transfer(self) -> Iterator[None]:
        """Look at what hooks do while a batch is moved to the device.

        Raises:
            ConfigurationError: they changed the model.
        """
        self._model.begin_transfer()
        yield
        if found := self._model.set_with_batch():
            raise ConfigurationError(found)

    def set_as(self, number: int) -> AbstractContextManager[None]:
        """Have around this stage's layers what the step has around the model."""
        return self._travelling.set_as(number) if number else _NOTHING

    def _changed(self) -> str | None:
        if self._once is None:
            return self._model.changed()
        before, self._once = self._once, None
        once = [setting.read() for setting in REFUSED_ONCE]
        return self._refusal(REFUSED_ONCE, once, before) or self._model.changed_anywhere()

    def _number(self, own: list[Any]) -> int:
        if self._read()[: self._count] != self._outside[: self._count]:
            raise ConfigurationError(
                "autocast or the backends of attention (torch.backends.cuda.enable_..._sdp) were switched in the step"
                " and left so: the stages that do not run the step would never know; use a context (torch.autocast,"
                f" sdpa_kernel) around {self._hooks.model_name}(...), or switch them in on_train_start, on every stage"
            )
        try:
            return self._travelling.written(own)
        except ValueError:
            raise ConfigurationError(
                f"autocast around {self._hooks.model_name}(...) to another dtype than bfloat16, float16 and float32"
                " cannot be had on the other stages: use one of these, or autocast within the layers"
            ) from None

    def _look_outside(self) -> None:
        self._outside = self._read()
        with self._hooks.forward_context():
            self._home = self._read()

    def _read(self) -> list[Any]:
        return [read() for read in self._readers]

    def _refusal(self, settings: tuple[Setting, ...], seen: list[Any], home: list[Any]) -> str | None:
        for setting, now, before in zip(settings, seen, home):
            if now != before:
                return around_refusal(setting.what, self._hooks.model_name, setting.mend)
        return None


def around_refusal(what: str, model: str, mend: str) -> str:
    """What is said of something that would hold on the last stage alone."""
    return (
        f"{what}: the step sets it around {model}(...), where it would hold on the last stage of a pipeline alone: the"
        f" stages before it do not run the step; {mend}"
    )
