"""Weights of the last updates, so that a gradient can be taken where a pipeline would have taken it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpp.errors import ConfigurationError


class DelayedWeights:
    """Versions of every trained parameter: W_t, the newest, and those back to W_{t-d}, d the parameter's delay.

    The parameters hold W_t, but inside :meth:`stale`, where they hold W_{max(t-d, 0)}. Forward and backward both run
    there: no graph outlives it, so no graph mixes versions. Parameters of delay 0 and frozen ones are never touched.
    Within it, :meth:`go_to` lets those hold W_t again of which enough micro-batches have run on older weights.

    Args:
        delays: parameter -> its delay, for every parameter that may be trained.
        buffers: buffer -> its delay, for those that change with an update and so belong to a version.
        held: parameter or buffer -> how many micro-batches of a mini-batch its delay is for; those that lack: all.
    """

    def __init__(
        self,
        delays: Mapping[nn.Parameter, int],
        buffers: Mapping[Tensor, int] | None = None,
        held: Mapping[Tensor, int] | None = None,
    ) -> None:
        self.buffers, self.held = dict(buffers or {}), dict(held or {})
        self.delays: dict[Tensor, int] = dict(chain(delays.items(), self.buffers.items()))
        self._versions: dict[Tensor, deque[Tensor]] = {}  # oldest first, the newest last
        self._stale = False
        self._writes: dict[Tensor, int] = {}  # how often each was written to in place, before it went back
        self._written: set[Tensor] = set()
        self.track(self.buffers)

    @property
    def is_stale(self) -> bool:
        """Whether the parameters hold older weights now."""
        return self._stale

    @property
    def keeps_older(self) -> bool:
        """Whether any parameter has a delay."""
        return bool(self._versions)

    def track(self, parameters: Iterable[Tensor]) -> None:
        """Keep versions of these parameters from now on; so far they were not moved, so all versions are equal."""
        for parameter in parameters:
            if self.delays[parameter] and parameter not in self._versions:
                self._versions[parameter] = deque([parameter.data], maxlen=self.delays[parameter] + 1)

    def go_back(self) -> None:
        """Let the parameters hold the weights that their next gradient is taken at."""
        if self._stale:
            return
        for parameter in [p for p in self._versions if not p.requires_grad and p not in self.buffers]:
            del self._versions[parameter]  # no gradient is taken of it; what moves it moves the newest weights
        for parameter, versions in self._versions.items():
            versions[-1] = parameter.data  # somebody may have given it other memory
            parameter.data = versions[0]
            self._writes[parameter] = parameter._version
        self._stale = True

    def go_to(self, place: int) -> None:
        """Let the parameters hold the weights that micro-batch number ``place`` of a mini-batch runs on."""
        for parameter, versions in self._versions.items() if self._stale else ():
            if place >= self.held.get(parameter, place + 1):
                parameter.data = versions[-1]

    def come_forward(self) -> None:
        """Let the parameters hold the newest weights again."""
        for parameter, versions in self._versions.items() if self._stale else ():
            parameter.data = versions[-1]
            if parameter._version != self._writes[parameter]:
                self._written.add(parameter)
        self._stale = False

    def take_written(self) -> set[Tensor]:
        """What was written to in place while it held older weights, since the last call: that is lost."""
        self.come_forward()
        written, self._written = self._written, set()
        return written

    @contextmanager
    def stale(self) -> Iterator[None]:
        """Run on the older weights."""
        self.go_back()
        try:
            yield
        finally:
            self.come_forward()

    @contextmanager
    def newest(self) -> Iterator[None]:
        """Let the parameters hold the newest weights for a while, between a forward and its backward too."""
        was_stale = self._stale
        self.come_forward()
        try:
            yield
        finally:
            if was_stale:
                self.go_back()

    @torch.no_grad()
    def advance(self) -> dict[Tensor, Tensor]:
        """Make W_{t+1}, equal to W_t, the newest version: the optimizer then steps on it.

        Returns:
            parameter or buffer -> its weights W_t, which stay alive; without those of delay 0.
        """
        self.come_forward()
        before = {}
        for parameter, versions in self._versions.items():
            before[parameter] = versions[-1] = parameter.data
            full = len(versions) == versions.maxlen
            newest = versions.popleft() if full else torch.empty_like(parameter.data)
            versions.append(newest.copy_(before[parameter]))
            parameter.data = newest
        return before

    def state_dict(self, names: Mapping[Tensor, str]) -> dict[str, list[Tensor]]:
        """Weights older than the newest, oldest first, by parameter name; parameters whose versions are equal lack."""
        return {names[p]: [v.detach().clone() for v in versions][:-1] for p, versions in self._versions.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, list[Tensor]], names: Mapping[Tensor, str]) -> None:
        """Take the parameters, as they were just loaded, for the newest weights, and ``state`` for those before.

        The state belongs to the same delays.
        """
        self.come_forward()
        # Also of parameters that no optimizer holds yet: a callback may add their group later.
        self.track(p for p in self.delays if names[p] in state)
        for parameter, versions in self._versions.items():
            older = state.get(names[parameter], [])
            versions.clear()
            versions.extend(torch.empty_like(parameter.data).copy_(weights) for weights in older)
            versions.append(parameter.data)


def check_same_delay(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Refuse to go on under another delay than a checkpoint's.

    Raises:
        ConfigurationError: naming every setting that differs.
    """
    saved = {"synchronous_start": 0, "slack": 0, "lookahead": 0, **saved}
    before, now = saved.get("delays", {}), present.get("delays", {})
    moved = [name for name in now if before.get(name, now[name]) != now[name]]
    problems = [
        f"in the checkpoint the gradients of {name!r} were {before[name]} updates old, in this run they are"
        f" {now[name]}: use the stage_of, or the partition, that it was written with"
        for name in moved[:1]
        if saved.get("delay") == present["delay"] and saved.get("stages") == present["stages"]
    ]
    problems += [
        f"the checkpoint was written with {name}={saved.get(name)!r}, this run has {value!r}: the weights that it needs"
        f" are not there; use {name}={saved.get(name)!r}, or load only the weights"
        for name, value in present.items()
        if name != "delays" and saved.get(name) != value
    ]
    if problems:
        raise ConfigurationError.from_problems(problems)
