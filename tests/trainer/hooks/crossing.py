"""Modules of which more crosses a cut than a tensor of real numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.core.cases import DIM
from tests.trainer.runs import Net, Run


class Wide(nn.Module):
    """Hands on ever more tensors, among them whole numbers, with long names around them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, given: Any) -> dict[str, Any]:
        x = given if isinstance(given, Tensor) else given["x"]
        skips = [] if isinstance(given, Tensor) else given["skips"]
        x = self.linear(x).tanh()
        new = [{"a skip connection of a U-Net": x * i, "number": torch.tensor(i)} for i in range(self.count)]
        return {"x": x, "skips": [*skips, *new]}


class Narrow(nn.Module):
    def forward(self, given: dict[str, Any]) -> Tensor:
        return given["x"] + sum(skip["number"] * skip["a skip connection of a U-Net"] for skip in given["skips"])


class UNet(Net):
    """Many tensors cross its cuts."""

    tensors = 10

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        count = self.tensors
        self.model = nn.Sequential(Wide(count), Wide(count), Wide(count), Narrow(), nn.Linear(DIM, 1))


class TooWide(UNet):
    tensors = 200


class Complex(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), ToComplex(), FromComplex())


class ToComplex(nn.Linear):
    def __init__(self) -> None:
        super().__init__(DIM, DIM)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = torch.complex(super().forward(x), x)
        conjugate = z.conj()  # noted, and not applied yet; in its imaginary part as a sign
        return {"z": z, "conjugate": conjugate, "sign": conjugate[:1, :1].imag, "whole": z.to(torch.complex128)}


class FromComplex(nn.Linear):
    def __init__(self) -> None:
        super().__init__(DIM, 1)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        z = given["z"] * given["z"] + given["conjugate"] + given["whole"]
        return super().forward((z.real - z.imag + given["sign"]).float())


class Codes(Net):
    """Numbers of a kind that no header names."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = nn.Sequential(nn.Linear(DIM, DIM), Coded(), nn.Linear(DIM, 1))


class Coded(nn.Linear):
    def __init__(self) -> None:
        super().__init__(DIM, DIM)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x.to(torch.float8_e4m3fn)


class Routed(nn.Linear):
    """Keeps its own loss in an attribute, as many routers do, and an average of it that needs no gradient."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM)
        self.average = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.balance = out.square().mean()
        self.average = self.balance.detach()
        return out


class KeepsForItsBackward(Net):
    """The first layer's backward hook reads what its forward hook kept, which is a later micro-batch's by then."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        layer = next(iter(self.model.children()))
        layer.register_forward_hook(lambda at, _, output: setattr(at, "kept", output.detach()))
        layer.register_full_backward_hook(lambda at, gradients, _: tuple(g if g is None else g / 2 for g in gradients))


class SumsBalances(Net):
    """The first and the last stage hold a router each; the older weight_norm computes an attribute before the call."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        first, last = Routed(), Routed()
        self.features: dict[str, Tensor] = {}
        norm = torch.nn.utils.weight_norm(nn.Linear(DIM, DIM))
        self.model = nn.Sequential(nn.Linear(DIM, DIM), first, norm, nn.Linear(DIM, DIM), last, nn.Linear(DIM, 1))
        self.model[0].register_forward_hook(self.keep)

    def keep(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.features["first"] = output

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + sum(m.balance for m in self.model.modules() if isinstance(m, Routed))
