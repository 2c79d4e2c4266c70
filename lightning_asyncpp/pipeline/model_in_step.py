"""What a user's step does to the model: on stages that do not run the step, or not to its end, none of it happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import Any

import torch
from torch import nn

from lightning_asyncpp.pipeline.elsewhere import OtherStage
from lightning_asyncpp.pipeline.stage import Stage

_PLAIN = (bool, int, float, str, type(None))
_LOOKED_AT, _SAMPLED = 2, 64  # parameters, and values of each


class ModelInStep:
    """Notices what was changed in the model since :meth:`begin`.

    Args:
        stage: this rank's.
        name: how the user calls the model.
    """

    def __init__(self, stage: Stage, name: str) -> None:
        self._stage, self._name = stage, name
        self._modules = list(stage.model.modules())
        self._others = [module for module in self._modules if isinstance(module, OtherStage)]
        self._units = [stage.model, *(unit.module for unit in stage.units), *self._others]
        self._middle = range(1, stage.num_stages - 1)
        # What the step does after its call, only the last stage does.
        self._unseen = [module for module in self._others if stage.is_last or module.stage in self._middle]
        self._batches: Counter[str] = Counter()

    def begin(self, purpose: str) -> None:
        """Remember how everything is, before a batch.

        Args:
            purpose: ``"train"``, or what is evaluated.
        """
        self._modes, self._unit_modes = _modes(self._modules), _modes(self._units)
        self._attributes = [(module, dict(vars(module))) for module in self._unseen]
        self._parameters = list(self._stage.parameters.values()) if purpose == "train" else []
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        self._batches[purpose] += 1
        # What leaves no other trace than the values costs too much for every batch.
        self._closely = self._batches[purpose].bit_count() == 1
        self._weights = self._read_weights()

    def changed(self) -> str | None:
        """What was, as far as it can be told at next to no cost."""
        return None if _modes(self._units) == self._unit_modes else self._mode_refusal()

    def changed_anywhere(self) -> str | None:
        """What was; it takes longer."""
        if _modes(self._modules) != self._modes:
            return self._mode_refusal()
        if [parameter.requires_grad for parameter in self._parameters] != self._trained:
            return (
                f"requires_grad_() on parameters of {self._name} in the step: the stages that do not run the step would"
                " go on as before; freeze and unfreeze before the training, or between two trainings"
            )
        if self._read_weights() != self._weights or any(True for module in self._others for _ in module.parameters()):
            return (
                f"other weights in {self._name} while the step calls it (torch.func.functional_call, weights of an"
                " averaged model swapped in): only the stages that run the step would have them, and training runs on"
                " weight versions of its own; swap weights in hooks that run on every stage (on_validation_start and"
                " on_validation_end), or compute this in a single process (delayed_gradient)"
            )
        return self.attribute_set(self._middle)

    def attribute_set(self, stages: Container[int] | None = None) -> str | None:
        """What was set in layers of other stages.

        Args:
            stages: which; None: all that do not run the step to its end.
        """
        for module, before in self._attributes:
            for key, value in vars(module).items() if stages is None or module.stage in stages else ():
                if key != "training" and not _same(value, before.get(key, _PLAIN)):
                    return (
                        f"{self._name}.{module.name}.{key} was set in the step: its layer lives on a stage that does"
                        " not run the step to its end; set it in a hook that runs on every stage, such as"
                        " on_train_batch_start"
                    )
        return None

    def _mode_refusal(self) -> str:
        return (
            f"train() or eval() on {self._name}, or on a part of it, in the step before the call: stages that do not"
            " run the step would stay in the other mode; call it in hooks that run on every stage, such as"
            " on_train_start, on_train_epoch_start or on_validation_start (with Fabric: before"
            " strategy.training_step or evaluation_step)"
        )

    def _read_weights(self) -> list[Any]:
        """Which tensors this stage's modules hold; in batches 1, 2, 4, 8, ... also whether something was written there.

        A copy into ``.data`` shows in the values alone, of which a few are read.
        """
        held = self._stage.held()
        kept: list[Any] = [id(tensor) for tensor in held]
        if self._closely:
            kept += [(tensor.data_ptr(), tensor._version) for tensor in held if not tensor.is_inference()]
            samples = [tensor.detach().reshape(-1)[:_SAMPLED] for tensor in held[:_LOOKED_AT]]
            kept += [sample.view(torch.uint8).tolist() for sample in samples]
        return kept


def _modes(modules: list[nn.Module]) -> list[bool]:
    return [module.training for module in modules]


def _same(value: Any, before: Any) -> bool:
    return value is before or (type(value) is type(before) and type(value) in _PLAIN and value == before)
