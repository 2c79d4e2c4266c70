"""Modules that a pipeline cannot run, each with the mistake in its name."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from lightning_asyncpp import GPTModule, PipelineModule
from tests.helpers.cases import DIM
from tests.helpers.modules import small_gpt
from tests.helpers.trainer import Net, Run


class TwoOptimizers(Net):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.model.parameters(), 0.1), torch.optim.SGD(self.model.parameters(), 0.1)]


class OptimizerForEachStage(Net):
    def configure_optimizers(self) -> Any:
        first, *others = self.model.children()
        rest = [parameter for layer in others for parameter in layer.parameters()]
        return [torch.optim.SGD(first.parameters(), 0.1), torch.optim.SGD(rest, 0.1)]


class NoOptimizer(Net):
    def configure_optimizers(self) -> Any:
        return None


class NoOptimizerOnOneStage(Net):
    def configure_optimizers(self) -> Any:
        if self.trainer.global_rank == 0:
            raise LookupError("no learning rate is known for this stage")
        return super().configure_optimizers()


class Manual(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.automatic_optimization = False


class ParameterOutside(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.temperature = nn.Parameter(torch.ones(()))


class Synchronises(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = nn.Sequential(nn.Linear(DIM, DIM), nn.SyncBatchNorm(DIM), nn.Linear(DIM, 1))


class CallsTwice(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + super().training_step(batch, batch_idx)


class NeverCalls(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return batch["x"].sum()


class CallsALayer(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.model[0](batch["x"]).sum()  # type: ignore[index]


class Uncuttable(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = nn.Bilinear(DIM, DIM, 1)


class NoModel(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.first, self.rest = self.model[:1], self.model[1:]
        del self.model


class OtherOrder(Net):
    """Shuffles by a generator of the process's own."""

    def train_dataloader(self) -> Any:
        own = torch.Generator().manual_seed(self.global_rank)  # the mistake
        from tests.helpers.trainer import Samples

        return DataLoader(Samples(40), batch_size=8, shuffle=True, generator=own)


class OtherRate(Net):
    """Has a learning rate of the process's own."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1 * (1 + self.global_rank))


class OtherSize(Net):
    """Has a layer of another size in one process."""

    def configure_model(self) -> None:
        if self.global_rank == 1:
            self.model = nn.Sequential(*list(self.model)[:-1], nn.Linear(DIM, 2))


class Uninitialised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class NoInitialiser(PipelineModule):
    def __init__(self, run: Run) -> None:
        super().__init__()

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, DIM), Uninitialised(), nn.Linear(DIM, 1))

    training_step = Net.training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class TwoLayers(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1))


def tied_gpt(run: Run) -> GPTModule:
    return small_gpt(run, tie_embeddings=True)


class ReturnsNone(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class ReturnsNoLoss(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return {"value": super().training_step(batch, batch_idx)}


class ReturnsVector(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.model(batch["x"])


class Detached(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx).detach()


class NoTensors(Net):
    def train_dataloader(self) -> Any:
        return DataLoader([1, 2, 3, 4], batch_size=2, collate_fn=lambda items: [str(item) for item in items])


class Unequal(Net):
    def train_dataloader(self) -> Any:
        return DataLoader(
            ["a batch"], batch_size=None, collate_fn=lambda _: {"x": torch.zeros(8, DIM), "y": torch.zeros(4, 1)}
        )


class Named(NamedTuple):
    x: Tensor


class ReturnsNamedTuple(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return Named(super().forward(x))


class NamedTupleAtTheCut(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = nn.Sequential(ReturnsNamedTuple(DIM, DIM), nn.Linear(DIM, 1))


class ValidatesOnOneStage(Net):
    """Fails on the first stage alone, before the model is called."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        if self.trainer.global_rank == self.trainer.world_size - 1:
            raise LookupError("no such column" + " in the table" * 100)
        super().validation_step(batch, batch_idx, dataloader_idx)


class Lazy(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = nn.Sequential(nn.LazyLinear(DIM), nn.LazyLinear(1))


class CompiledInPlace(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model.compile(backend="eager")


class CompiledModel(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = torch.compile(self.model, backend="eager")  # type: ignore[assignment]


class MetricOfSeveralNumbers(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.accuracy = MulticlassAccuracy(3, average=None)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.accuracy(self.model(batch["x"]).repeat(1, 3), (batch["y"][:, 0] > 0).long())
        self.log("accuracy", self.accuracy)


class SumReduction(Net):
    loss_reduction = "median"
