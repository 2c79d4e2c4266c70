"""What layers counted in a mini-batch, summed over the processes, and the buffers that they change by it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_asyncpp.auxiliary import Collected, StatisticsLayer
from lightning_asyncpp.core.cut.units import Unit
from lightning_asyncpp.core.cut.whole_model import StatisticsLayout
from lightning_asyncpp.errors import ConfigurationError


class MiniBatchCounts:
    """Counts of the layers of a module that count.

    Args:
        module: whose parameters are trained.

    Attributes:
        counted: since the last update, in this process.
        buffer_names: buffer that layers change once per update -> its name in the module.
        metrics: numbers for the logger, of the last update.
    """

    def __init__(self, module: nn.Module) -> None:
        units = [Unit(name, child) for name, child in module.named_children()]
        if isinstance(module, StatisticsLayer):
            units = [Unit("", module)]
        self.layout = StatisticsLayout(units)
        self._module = module
        self._layers = {layer.name: module.get_submodule(layer.name) for layer in self.layout.layers}
        self._buffers = {
            buffer: (layer, key)
            for layer in self._layers.values()
            if isinstance(layer, StatisticsLayer)
            for key, buffer in ((key, getattr(layer, key)) for key in layer.versioned_buffers)
        }
        names = {id(buffer): name for name, buffer in module.named_buffers()}
        self.buffer_names: dict[Tensor, str] = {buffer: names[id(buffer)] for buffer in self._buffers}
        self.counted = Collected()
        self.metrics: dict[str, float] = {}

    def buffers_with(self, numbers: Mapping[Tensor, int]) -> dict[Tensor, int]:
        """Buffer -> the number of the parameters of its layer, or of the nearest layer around it with some.

        Args:
            numbers: parameter -> its delay, say.
        """
        of_layer = {id(layer): self._number_around(name, numbers) for name, layer in self._layers.items()}
        return {buffer: of_layer[id(layer)] for buffer, (layer, _) in self._buffers.items()}

    def _number_around(self, name: str, numbers: Mapping[Tensor, int]) -> int:
        while True:
            around = self._module.get_submodule(name)
            found = next((numbers[p] for p in around.parameters()), None)
            if found is not None or not name:
                return found or 0
            name = name.rpartition(".")[0]

    def take(self, said: Collected) -> None:
        """Take what layers said in a whole batch.

        Raises:
            ConfigurationError: there are losses that the step did not add to its own.
        """
        if said.losses:
            raise ConfigurationError(
                "layers have auxiliary losses that training_step did not add to its loss: run self.model(...) inside"
                " `with lightning_asyncpp.auxiliary.collecting() as said:` and add said.total_loss(), as GPTModule"
                " does, or give micro_batches"
            )
        for layer, counts in said.take_statistics().items():
            self.counted.add(layer, counts)

    def update(self) -> None:
        """Let the layers change their buffers, and take the metrics; a collective where there are several processes."""
        if not self._layers:
            return
        layers = {name: layer for name, layer in self._layers.items() if isinstance(layer, StatisticsLayer)}
        totals = self.layout.pack(self.counted.take_statistics(), layers)
        if dist.is_available() and dist.is_initialized():
            totals = _summed(totals, next(iter(layers.values())))
        for place in self.layout.layers:
            with torch.no_grad():
                layers[place.name].update_from_statistics(place.of(totals))
        for buffer, (layer, key) in self._buffers.items():
            if getattr(layer, key) is not buffer:  # its versions are in the memory of the one that was there
                buffer.data.copy_(getattr(layer, key))
                setattr(layer, key, buffer)
        self.metrics = self.layout.metrics(totals)

    def clear(self) -> None:
        """Begin the next mini-batch."""
        self.counted = Collected()


def _summed(totals: Tensor, layer: nn.Module) -> Tensor:
    device = next((tensor.device for tensor in (*layer.parameters(), *layer.buffers())), torch.device("cpu"))
    on_device = totals.to(device)
    dist.all_reduce(on_device)
    return on_device.cpu()
