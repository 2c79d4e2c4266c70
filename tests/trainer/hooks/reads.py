"""Callbacks and modules that look at weights between two batches."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from lightning_asyncpp import after_own_update
from tests.trainer.runs import Net, Run


class Ema(L.Callback):
    """Averages the weights of its stage after every batch, and gives them to the checkpoint."""

    def __init__(self) -> None:
        self.mean: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.mean = {name: p.detach().clone() for name, p in module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for name, p in module.named_parameters():
            self.mean[name].lerp_(p.detach(), 0.5)


class UpdateNorms(L.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self.before = [p.detach().clone() for p in module.parameters()]


class States(L.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.state = module.state_dict()


class Vectors(L.Callback):
    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        torch.nn.utils.parameters_to_vector(module.parameters())


class Foreach(L.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        torch._foreach_norm(list(module.parameters()))


class Keywords(L.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for p in module.parameters():
            torch.mul(other=2.0, input=p)


class Copies(L.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        copy.deepcopy(module.model)


class Data(L.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for p in module.parameters():
            p.data  # noqa: B018


class TorchsAverage(L.Callback):
    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.average = AveragedModel(module.model)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.average.update_parameters(module.model)


READ = (Ema, UpdateNorms, States, Vectors, Foreach, Keywords, Copies, Data, TorchsAverage)


class ReadsAsModule(Net):
    """Averages after the optimizer's step, as the optimizer's wrapper of many a project does."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.norm = sum(p.detach().norm() for p in self.parameters())


FACTS = (None, True, True, torch.float32, "cpu")


class Facts(L.Callback):
    """Asks for everything but values of trained weights."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for p in module.parameters():
            torch.zeros_like(p).add_(p.numel() + p.ndim + len(p.shape) + p.element_size() + p.size(0))
            assert (p.grad, p.requires_grad, p.is_leaf, p.dtype, p.device.type) == FACTS
        self.doubled = float(outputs["loss"] * 2)


class AtEnds(L.Callback):
    """Reads where no update is outstanding."""

    def read(self, trainer: Any, module: Any, *_: Any) -> None:
        [p.detach().norm() for p in module.parameters()]

    on_train_start = on_train_epoch_start = on_validation_start = on_train_epoch_end = on_train_end = read
    on_before_optimizer_step = on_validation_batch_end = read


class SavesThenReads(callbacks.ModelCheckpoint):
    """Saves every second batch, and reads: the pipeline has drained."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, module, *args)
        if trainer.global_step % 2 == 0:
            [p.detach().norm() for p in module.parameters()]


class GathersThenReads(L.Callback):
    """Drains in its hook."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        trainer.strategy.full_state_dict()
        assert torch._C._len_torch_function_stack() == 0
        module.state_dict()


class ReadsAtOwnEnd(Net):
    def on_train_batch_end(self, *_: Any) -> None:
        self.norm = sum(p.detach().norm() for p in self.parameters())


class Fails(L.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            raise ArithmeticError("the user's own mistake")


def marked_ema() -> Ema:
    return after_own_update(Ema())


def reading(**more: Any) -> Run:
    """A run in which everything reads, in four batches between which nothing drains."""
    return Run(Net, callbacks=tuple((callback, {}) for callback in READ), samples=32, **more)
