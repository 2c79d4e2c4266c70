"""What the main process has after ``fit``, and after an evaluation: a script, run by the start method that it is given.

python -m tests.trainer.launching.after_fit METHOD DEVICES THEN,THEN,... FOLDER
"""

from __future__ import annotations

import copy
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_asyncpp import AsyncPipelineStrategy

WHOLE = "whole"


class Net(L.LightningModule):
    """A classifier of 8 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(x)
        return y

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        y: Tensor = self.model(batch[0])
        return y

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loader() -> DataLoader:
    return DataLoader(TensorDataset(torch.ones(16, 8), torch.zeros(16, dtype=torch.long)), batch_size=8)


def is_whole(state: dict[str, Any], saved: dict[str, Tensor], prefix: str = "") -> str:
    names = {prefix + name for name in state}
    same = names == set(saved) and all(torch.equal(state[name], saved[prefix + name]) for name in state)
    return WHOLE if same else f"something else: {sorted(names)}"


def attempts(trainer: L.Trainer, module: Net, saved: dict[str, Tensor], folder: Path) -> dict[str, Callable[[], str]]:
    """Every way to the trained model, and whether it leads there."""
    x, expected = torch.ones(2, 8), Net()
    expected.load_state_dict(saved)

    def pickled() -> str:
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        file.seek(0)
        return is_whole(torch.load(file), saved)

    def checkpoint() -> str:
        trainer.save_checkpoint(folder / "later.ckpt")
        content = torch.load(folder / "later.ckpt", weights_only=True) if trainer.is_global_zero else {}
        return is_whole(content.get("state_dict", saved), saved)

    def full() -> str:
        state = trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
        return is_whole(state if trainer.is_global_zero else saved, saved)

    def output(of: nn.Module) -> str:
        return WHOLE if torch.equal(of(x), expected(x)) else "something else"

    return {
        "module.state_dict()": lambda: is_whole(module.state_dict(), saved),
        "torch.save(module.state_dict())": pickled,
        "module.model.state_dict()": lambda: is_whole(module.model.state_dict(), saved, "model."),
        "deepcopy(module).state_dict()": lambda: is_whole(copy.deepcopy(module).state_dict(), saved),
        "module(x)": lambda: output(module),
        "module.model(x)": lambda: output(module.model),
        "strategy.full_state_dict()": full,
        "trainer.save_checkpoint(path)": checkpoint,
        "module.state_dict(), once more": lambda: is_whole(module.state_dict(), saved),
    }


def outcome(attempt: Callable[[], str]) -> str:
    try:
        return attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main(method: Any, devices: str, then: str, folder: str) -> None:
    """Train, and print what each attempt came to, after the training and after each evaluation."""
    L.seed_everything(1, verbose=False)
    module = Net()
    strategy = AsyncPipelineStrategy(micro_batches=2, start_method=method)
    trainer = L.Trainer(
        devices=int(devices), strategy=strategy, max_epochs=1, accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, loader())
    saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)["state_dict"]  # type: ignore[union-attr]
    for action in ("fit", *then.split(",")):
        if action != "fit":
            getattr(trainer, action)(module, loader())
        for name, attempt in attempts(trainer, module, saved, Path(folder)).items():
            said = outcome(attempt)
            if os.environ.get("LOCAL_RANK", "0") == "0":
                print(f"@{action}\t{name}\t{said}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
