"""Train a ResNet of `torchvision` over pipeline stages with the Trainer.

    python examples/torchvision_resnet.py --devices 2

The model is torchvision's ResNet, with one method more. The images are made up: stripes, whose direction is the class.
"""

import argparse
import math
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.resnet import BasicBlock, ResNet

from lightning_asyncpp import AsyncPipelineStrategy

CLASSES = 4


class PipelineResNet(ResNet):
    """torchvision's ResNet, with the layers that a pipeline may cut between; its forward is what it was."""

    def pipeline_layers(self) -> list[Any]:
        """What ResNet.forward does, in its order: all is a layer but the flattening before the last one."""
        stem = [self.conv1, self.bn1, self.relu, self.maxpool]
        blocks = [*self.layer1, *self.layer2, *self.layer3, *self.layer4]
        return [*stem, *blocks, self.avgpool, (self.fc, lambda fc, x: fc(torch.flatten(x, 1)))]


class Classifier(L.LightningModule):
    """Classifies images, with BatchNorm: a microbatch is normalised by its own statistics."""

    def __init__(self, lr: float = 0.005) -> None:
        super().__init__()
        self.model = PipelineResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)
        self.lr = lr

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Mean loss of (batch, 3, height, width) images and (batch,) classes."""
        images, classes = batch
        loss = F.cross_entropy(self.model(images), classes)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the share of images that were told right, by the running statistics."""
        images, classes = batch
        self.log("accuracy", (self.model(images).argmax(dim=1) == classes).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, nesterov=True)


def striped_images(count: int, seed: int, size: int = 16) -> TensorDataset:
    """Noisy stripes: (count, 3, size, size) images and (count,) classes, of as many directions."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(0, CLASSES, (count,), generator=generator)
    angles = classes * (math.pi / CLASSES)
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    across = x * angles.cos().view(-1, 1, 1) + y * angles.sin().view(-1, 1, 1)  # (count, size, size)
    phase = 2 * math.pi * torch.rand(count, 1, 1, generator=generator)
    images = torch.sin(across * 1.5 + phase).unsqueeze(1).expand(-1, 3, -1, -1)
    return TensorDataset(images + 0.3 * torch.randn(images.shape, generator=generator), classes)


def loader(count: int, seed: int) -> DataLoader:
    """Batches of 16 images; the last one may be smaller."""
    return DataLoader(striped_images(count, seed), batch_size=16)


def main(devices: int = 2, steps: int = 60, accelerator: str = "auto") -> L.Trainer:
    """Train on ``devices`` stages for ``steps`` batches and validate."""
    L.seed_everything(1)
    # Few large microbatches suit BatchNorm: each is normalised by its own statistics.
    trainer = L.Trainer(
        strategy=AsyncPipelineStrategy(microbatches=devices), accelerator=accelerator, devices=devices,
        max_steps=steps, val_check_interval=min(steps, 20), use_distributed_sampler=False, logger=False,
        enable_checkpointing=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(Classifier(), loader(16 * steps, 0), loader(64, 1))
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--accelerator", default="auto")
    main(**vars(parser.parse_args()))
