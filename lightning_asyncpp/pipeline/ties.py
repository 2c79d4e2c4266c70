"""Parameters that layers of two stages share, such as the matrix of a tied embedding and head.

Each of the two stages holds a copy and steps it by itself. Both step with the same gradient, the sum of the two
copies', so that they stay equal, bitwise; the copies' gradients travel in the background, after the last backward of a
mini-batch and before its update. The earlier stage, whose gradient is complete last, finds the other one there already
and counts the sum in the norm.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_asyncpp.pipeline.buckets import Bucket, Gradients
from lightning_asyncpp.pipeline.errors import lost_peers
from lightning_asyncpp.pipeline.host_work import HostWork
from lightning_asyncpp.pipeline.mesh import Mesh
from lightning_asyncpp.pipeline.units import Unit, first_names

_TAG = 5


class Tie(NamedTuple):
    """A parameter that several stages hold: two, or if it is frozen any number.

    Attributes:
        stages: those, in order.
        names: its name in the model on each of them.
        is_trained: whether it was to be trained when the model was cut; between two trainings that may change.
    """

    stages: tuple[int, ...]
    names: tuple[str, ...]
    is_trained: bool = True

    def name_on(self, stage: int) -> str:
        """Its name on one of the stages."""
        return self.names[self.stages.index(stage)]

    def other(self, stage: int) -> int:
        """The other one of two stages."""
        return self.stages[1 - self.stages.index(stage)]

    def problems(self, fresh_stage: int | None = None) -> list[str]:
        """Why it cannot be trained, with the mend.

        Args:
            fresh_stage: a last stage without delay, if there is one.
        """
        if len(self.stages) > 2:
            where = ", ".join(f"{name} (stage {stage})" for stage, name in zip(self.stages, self.names))
            return [
                f"{where} are the same parameter: two stages may share weights, not {len(self.names)}; use fewer"
                " stages, or a partition that keeps these layers on two of them, or untie them"
            ]
        if self.stages[-1] == fresh_stage:
            return [
                f"fresh_last_stage=True steps the last stage before the gradient of {self.names[1]} is complete, which"
                f" stage {self.stages[0]} shares as {self.names[0]}: leave fresh_last_stage out, or untie them (for a"
                " GPT: tie_embeddings=False)"
            ]
        return []


def find_ties(units: Sequence[Unit], counts: Sequence[int]) -> tuple[list[Tie], list[str]]:
    """Parameters that layers of several stages share, and problems with those that cannot be trained so.

    Args:
        units: of the whole model, before it is cut.
        counts: number of units on each stage.
    """
    holders = first_names(units, counts, nn.Module.named_parameters)
    ties = [
        Tie(tuple(names), tuple(names.values()), parameter.requires_grad)
        for parameter, names in holders.items()
        if len(names) > 1
    ]
    return ties, [problem for tie in ties if tie.is_trained for problem in tie.problems()]


class TiedGradients:
    """The gradients of one mini-batch that this stage shares with others.

    Args:
        mesh: this rank's place, connected.
        ties: of this stage.
        parameters: name -> parameter of this stage.

    Attributes:
        names: of the parameters on this stage.
        counted_elsewhere: those of them that the other stage counts in the norm of the gradient.
    """

    def __init__(self, mesh: Mesh, ties: Sequence[Tie], parameters: dict[str, Tensor]) -> None:
        self.names = names_on(mesh.stage, ties)
        self.counted_elsewhere = frozenset(tie.names[1] for tie in ties if tie.stages[1] == mesh.stage)
        self._mesh, self._ties = mesh, ties
        self._buckets = [Bucket([tie.name_on(mesh.stage)], parameters) for tie in ties]
        # Posted before anybody sends: what comes need not be stored on its way. On the host, whatever the device is.
        like = [parameters[tie.name_on(mesh.stage)] for tie in ties]
        self._received = [torch.empty(p.numel() + 1, dtype=p.dtype, device="cpu") for p in like]
        with lost_peers():
            self._receives = [mesh.receive(flat, self._peer(tie), _TAG) for tie, flat in zip(ties, self._received)]
        self._sends: list[tuple[HostWork, Tensor]] = []
        self._sent = False
        self._missing = set(range(len(ties)))

    def send(self, gradients: Gradients) -> None:
        """Send this stage's gradients, the first time."""
        if self._sent:
            return
        self._sent = True
        with lost_peers():
            for tie, bucket in zip(self._ties, self._buckets):
                flat = bucket.pack(gradients).cpu()
                self._sends.append((self._mesh.send(flat, self._peer(tie), _TAG), flat))

    def have_arrived(self) -> bool:
        """Whether what this stage needs for the norm is there."""
        pairs = zip(self._ties, self._receives)
        return all(work.is_completed() for tie, work in pairs if tie.stages[0] == self._mesh.stage)

    def add_to(self, gradients: Gradients, counted: bool = False) -> None:
        """Add the other stages' gradients to this stage's, waiting for them; those that were added stay.

        Args:
            gradients: name -> gradient; entries are replaced.
            counted: only those that this stage counts in the norm.
        """
        for number, tie in enumerate(self._ties):
            if number not in self._missing or (counted and tie.stages[0] != self._mesh.stage):
                continue
            self._missing.discard(number)
            with lost_peers():
                self._receives[number].wait()
            bucket = self._buckets[number]
            ((name, other),) = bucket.unpack(self._received[number]).items()
            self._received[number] = torch.empty(0)  # not needed again, and as large as the parameter
            own = gradients[name]
            if other is not None:
                gradients[name] = other.to(own.device) + own if own is not None else other.to(bucket.device)

    def have_left(self) -> bool:
        """Whether nothing of what was sent is on its way; it is let go of then."""
        self._sends = [(work, flat) for work, flat in self._sends if not work.is_completed()]
        return not self._sends

    def settle(self) -> None:
        """Wait until what was sent has left."""
        with lost_peers():
            for work, _ in self._sends:
                work.wait()
        self._sends = []

    def _peer(self, tie: Tie) -> int:
        return self._mesh.rank_of(tie.other(self._mesh.stage))


def trained_on(stage: int, ties: Sequence[Tie], trained: Container[str]) -> list[Tie]:
    """The ties of a stage whose parameter is now trained.

    Args:
        stage: the stage.
        ties: of the whole model.
        trained: names of the stage's parameters that are.
    """
    return [tie for tie in ties if stage in tie.stages and tie.name_on(stage) in trained]


def names_on(stage: int, ties: Sequence[Tie]) -> frozenset[str]:
    """Names of the parameters of a stage that it shares with another."""
    return frozenset(tie.name_on(stage) for tie in ties if stage in tie.stages)
