"""Train a small GPT over pipeline stages with a hand-written Fabric loop.

    python examples/fabric_gpt.py --devices 2

The text is the source code of Python's standard library; a token is a byte.
"""

import argparse
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_asyncpp.fabric import AsyncPipelineStrategy
from lightning_asyncpp.models import GPT, GPTConfig

CONTEXT = 64


def read_bytes(sequences: int) -> Tensor:
    """Return (sequences, CONTEXT + 1) bytes of Python source as int64."""
    files = sorted(Path(argparse.__file__).parent.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[: sequences * (CONTEXT + 1)]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, CONTEXT + 1)


def main(devices: int, steps: int) -> None:
    """Train on ``devices`` pipeline stages for ``steps`` batches and validate."""
    # Every batch is cut into 8 microbatches; without a flush between batches, all stages stay busy.
    strategy = AsyncPipelineStrategy(microbatches=8)
    fabric = L.Fabric(accelerator="auto", strategy=strategy, devices=devices)
    fabric.launch()
    fabric.seed_everything(1)  # the same initial weights and the same data order for any number of devices

    # Built without memory; setup_module keeps this rank's layers and initialises them alone.
    with fabric.init_module(empty_init=True):
        model = GPT(GPTConfig(vocab_size=256, context_length=CONTEXT, num_layers=4, dim=64, num_heads=4))
    model = fabric.setup_module(model)
    # Made from the parameters of all stages, of which this rank's are here; it steps those.
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))

    data = read_bytes(16 * (steps + 1))
    train, validation = TensorDataset(data[16:]), TensorDataset(data[:16])
    loader = fabric.setup_dataloaders(DataLoader(train, batch_size=16, shuffle=True, drop_last=True))
    validation_loader = fabric.setup_dataloaders(DataLoader(validation, batch_size=16))

    def step_fn(microbatch: list[Tensor]) -> Tensor:
        """Next-token loss; the stages run only the call of the model, the last one runs everything."""
        (tokens,) = microbatch
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    for step, batch in enumerate(loader):
        loss = strategy.training_step(step_fn, batch)  # a tensor on the last stage, None elsewhere
        fabric.clip_gradients(model, optimizer, max_norm=1.0)  # applied with the update, one batch later
        optimizer.step()
        scheduler.step()
        if loss is not None and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    strategy.drain()  # the last gradients are still in flight
    model.eval()
    for batch in validation_loader:
        loss = strategy.evaluation_step(step_fn, batch)
        if loss is not None:
            print(f"validation loss {loss.item():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2, help="number of pipeline stages")
    parser.add_argument("--steps", type=int, default=41, help="number of batches")
    arguments = parser.parse_args()
    main(arguments.devices, arguments.steps)
