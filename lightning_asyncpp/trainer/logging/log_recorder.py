"""``self.log`` inside micro-batches: values as they were logged, over a mini-batch, and on their way to all ranks."""

from __future__ import annotations

import itertools
import json
import math
import numbers
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_asyncpp.core.host_copies import Reading
from lightning_asyncpp.errors import ConfigurationError

METRIC_SLOTS = 128
"""How many names steps may log per training batch."""
_REDUCTIONS = ("mean", "sum", "min", "max")
_HEAD = 2  # schema; the first micro-batch whose loss is NaN, from 1, or 0
_ABSENT = -1.0  # in place of a weight: the batch did not log this name


@dataclass(frozen=True)
class Entry:
    """What ``self.log`` was told about a name."""

    name: str
    reduction: str
    prog_bar: bool
    logger: bool | None
    on_step: bool
    on_epoch: bool
    add_dataloader_idx: bool = True


@dataclass
class Accumulator:
    """Values of one name over micro-batches."""

    reduction: str
    value: float | None = None
    weight: float = 0.0

    def add(self, value: float, weight: float) -> None:
        """Take in a value that stands for ``weight`` (samples, tokens)."""
        self.weight += weight
        if self.value is None:
            self.value = value * weight if self.reduction == "mean" else value
        elif self.reduction == "mean":
            self.value += value * weight
        elif self.reduction == "sum":
            self.value += value
        else:
            self.value = min(self.value, value) if self.reduction == "min" else max(self.value, value)

    def result(self) -> float:
        """The value so far."""
        assert self.value is not None
        if self.reduction == "mean":
            return self.value / self.weight if self.weight else float("nan")
        return self.value


class Logged(NamedTuple):
    """A value that is logged, and the weight that it stands for."""

    entry: Entry
    value: float
    weight: float


def combined(of_replicas: Iterable[Logged]) -> list[Logged]:
    """Values of replicas put together; as over micro-batches NaN is left out where another replica has a number."""
    rows: dict[Entry, list[Logged]] = {}
    for logged in of_replicas:
        rows.setdefault(logged.entry, []).append(logged)
    return [_together(entry, values) for entry, values in rows.items()]


def _together(entry: Entry, values: list[Logged]) -> Logged:
    accumulator = Accumulator(entry.reduction)
    for _, value, weight in [logged for logged in values if not math.isnan(logged.value)] or values:
        accumulator.add(value, weight)
    return Logged(entry, accumulator.result(), accumulator.weight)


@dataclass
class Gaps:
    """Batches of an evaluation in which a name's value was NaN on this replica: others may have a number there.

    Attributes:
        batch: index of the one that runs.
        nan: name -> batches in which it was NaN.
        known: name -> batches in which it was a number.
    """

    batch: int = 0
    nan: dict[str, set[int]] = field(default_factory=dict)
    known: dict[str, set[int]] = field(default_factory=dict)

    def clear(self) -> None:
        """Begin with the next loader."""
        self.batch = 0
        self.nan.clear()
        self.known.clear()


class Row(NamedTuple):
    """What one call of ``self.log`` recorded; the value stays where it was computed."""

    entry: Entry
    value: Tensor | float
    weight: float


@dataclass
class Recorded:
    """What was logged in a mini-batch.

    Attributes:
        places: name -> what it is, in the order of a payload.
        values: name -> its values so far.
        rows: further values, some of them on the device.
    """

    places: dict[str, Entry]
    values: dict[str, Accumulator]
    rows: list[Row]

    def tensors(self) -> list[Tensor]:
        """What :meth:`settle` needs the numbers of."""
        return [row.value for row in self.rows if isinstance(row.value, Tensor)]

    def settle(self, numbers: Sequence[float], gaps: Gaps | None = None) -> None:
        """Add the rows to the values.

        A micro-batch whose value is NaN is left out where others of the batch have a number: that of the whole batch
        would be one.

        Args:
            numbers: those of :meth:`tensors`.
            gaps: takes note of a NaN in place of the values.
        """
        of_tensors = iter(numbers)
        values = [float(next(of_tensors) if isinstance(row.value, Tensor) else row.value) for row in self.rows]
        with_number = {row.entry.name for row, value in zip(self.rows, values) if not math.isnan(value)}
        for (entry, _, weight), value in zip(self.rows, values):
            if gaps is not None:
                noted = gaps.known if entry.name in with_number else gaps.nan
                noted.setdefault(entry.name, set()).add(gaps.batch)
            if not math.isnan(value) or (entry.name not in with_number and gaps is None):
                self.values.setdefault(entry.name, Accumulator(entry.reduction)).add(value, weight)
        self.rows = []


@dataclass
class LogRecorder:
    """Takes the place of ``LightningModule.log`` while a micro-batch runs.

    Attributes:
        on_step, on_epoch: what they default to in the step that runs.
        entries: name -> what was logged, in order of appearance.
        values: name -> its values.
        metrics: name -> the torchmetrics object logged under it.
        weight: of the micro-batch that runs.
        slots: how many names fit.
        gaps: takes note of batches whose value is NaN; None: that is their value.
    """

    on_step: bool
    on_epoch: bool
    entries: dict[str, Entry] = field(default_factory=dict)
    values: dict[str, Accumulator] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)
    metric_entries: dict[str, Entry] = field(default_factory=dict)
    weight: float = 0.0
    slots: float = math.inf
    gaps: Gaps | None = None
    _pending: list[Row] = field(default_factory=list)
    _places: dict[str, Entry] = field(default_factory=dict)  # names so far, in the order of a payload

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Record a value; arguments as in :meth:`lightning.pytorch.LightningModule.log`.

        ``sync_dist`` is implied: the value is always reduced over micro-batches and replicas.
        """
        entry = _entry(
            name, reduce_fx, prog_bar, logger,
            self.on_step if on_step is None else on_step, self.on_epoch if on_epoch is None else on_epoch,
            add_dataloader_idx,
        )  # fmt: skip
        if isinstance(value, Metric):
            self._log_metric_object(entry, value)
            return
        if not (isinstance(value, Tensor) and value.numel() == 1):
            check_loggable(name, value)
        if name not in self.entries and len(self.entries) >= self.slots:
            raise ConfigurationError(f"more than {self.slots} names are logged in one batch: log fewer")
        known = self.entries.setdefault(name, entry)
        if known is not entry and known != entry:
            raise ConfigurationError(f"self.log({name!r}, ...) was called twice with different arguments")
        kept = value.detach() if isinstance(value, Tensor) else float(value)
        self._pending.append(Row(entry, kept, float(self.weight if batch_size is None else batch_size)))

    def _log_metric_object(self, entry: Entry, metric: Metric) -> None:
        """Keep the object for the epoch's end; its value on this micro-batch is one like any other."""
        self.metrics[entry.name], self.metric_entries[entry.name] = metric, entry
        value = getattr(metric, "_forward_cache", None)
        if entry.on_step and isinstance(value, Tensor) and value.numel() == 1:
            name = f"{entry.name}_step" if entry.on_epoch else entry.name
            self.log(name, value, entry.prog_bar, entry.logger, on_step=True, on_epoch=False)

    def settle(self) -> None:
        """Turn what was recorded into numbers; waits for the device once."""
        recorded = self._recorded({})
        recorded.settle([number for (number,) in Reading(recorded.tensors()).get()], self.gaps)
        self._pending.clear()

    def _recorded(self, places: dict[str, Entry]) -> Recorded:
        rows = [row for row in self._pending if row.weight or row.entry.reduction != "mean"]
        return Recorded(places, self.values, rows)

    def clear(self) -> None:
        """Forget the values; names and torchmetrics objects stay."""
        self._pending.clear()
        self.values.clear()
        self.entries.clear()
        if self.gaps is not None:
            self.gaps.clear()

    def logged(self) -> list[Logged]:
        """The values so far, after :meth:`settle`."""
        return [Logged(self.entries[name], a.result(), a.weight) for name, a in self.values.items()]

    def objects(self, modules: Mapping[str, Any]) -> list[tuple[dict[str, Any], str]]:
        """The torchmetrics objects that were logged, as other replicas know them: what of, and the object's name.

        Args:
            modules: name -> module, those objects among them.
        """
        name_of = {id(module): name for name, module in modules.items()}
        own = ((asdict(self.metric_entries[name]), name_of.get(id(m), "")) for name, m in self.metrics.items())
        return list(own)

    def agree_on_objects(
        self, of_replicas: Iterable[Sequence[tuple[dict[str, Any], str]]], modules: Mapping[str, Any]
    ) -> None:
        """Have what any replica logged, in the same order on all: to compute it takes all of them.

        Args:
            of_replicas: what :meth:`objects` returned on each.
            modules: name -> module.
        """
        own, entries = dict(self.metrics), dict(self.metric_entries)
        self.metrics.clear()
        self.metric_entries.clear()
        for fields, place in itertools.chain.from_iterable(of_replicas):
            name = fields["name"]
            metric = own.get(name, modules.get(place))
            if name not in self.metrics and isinstance(metric, Metric):
                self.metrics[name], self.metric_entries[name] = metric, entries.get(name) or Entry(**fields)

    def hand_over(self, slots: int) -> Recorded:
        """Hand over what was recorded, with its places in a payload of ``slots`` names, and forget it.

        A name keeps its place in batches that do not log it: what is logged now and then changes the schema once.
        """
        recorded = self._recorded({})
        present = {name: self.entries[name] for name in (*self.values, *(row.entry.name for row in recorded.rows))}
        together = self._places | present
        recorded.places = self._places = together if len(together) <= slots else present
        self._pending, self.values = [], {}
        self.clear()
        return recorded


def check_loggable(name: str, value: Any) -> None:
    """Refuse what is no single number.

    Raises:
        ConfigurationError: it is none.
    """
    if not isinstance(value, (Tensor, numbers.Number)) or (isinstance(value, Tensor) and value.numel() != 1):
        raise ConfigurationError(f"self.log({name!r}, ...) takes a number, a tensor of one element or a Metric")


def number(name: str, computed: Any) -> float:
    """What a Metric computed, as it is logged.

    Raises:
        ConfigurationError: it is no single number.
    """
    if (isinstance(computed, Tensor) and computed.numel() != 1) or not isinstance(computed, (Tensor, numbers.Number)):
        what = (
            f"a tensor of shape {tuple(computed.shape)}"
            if isinstance(computed, Tensor)
            else f"a {type(computed).__name__}"
        )
        raise ConfigurationError(
            f"self.log({name!r}, ...): compute() of the Metric returned {what}, but a number is logged: log the entries"
            " of compute() by their own names in on_*_epoch_end, where rank 0's count for all"
        )
    return float(computed)  # type: ignore[arg-type]


@lru_cache(maxsize=256)  # made once, not in every micro-batch
def _entry(name: str, reduce_fx: str | Callable[..., Any], *options: Any) -> Entry:
    text = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", repr(reduce_fx))
    text = "mean" if text == "avg" else text
    if text not in _REDUCTIONS:
        raise ConfigurationError(f"self.log({name!r}, reduce_fx={text!r}): use one of {', '.join(_REDUCTIONS)}")
    return Entry(name, text, *options)


class LoggedBatch:
    """Logged values of a mini-batch on their way from the device, as a payload of the control message.

    They are numbers at agreed places of it. What stands where (the schema) is exchanged only when it changes. Every
    rank then logs the same value under the same name, so callbacks that decide on a metric decide alike everywhere.

    Args:
        recorded: what was logged.
        nan_places: of its batches, which micro-batch is the first whose loss is NaN, from 1; or 0.
        slots: how many names a payload has places for.

    Attributes:
        length: of the payload.
        schema: names and options of the values in the order of the payload, as JSON.
        schema_number: stands for it.
    """

    def __init__(self, recorded: Recorded, nan_places: Sequence[Tensor], slots: int) -> None:
        self.length = payload_length(slots)
        self.schema, self.schema_number = _encode_schema(tuple(recorded.places.values()))
        self._recorded, self._num_places = recorded, len(nan_places)
        tensors = [*nan_places, *recorded.tensors()]
        late = True in [tensor.is_cuda for tensor in tensors]  # they come in the background
        self._reading = Reading(tensors) if late else None
        self._numbers = [] if late else [tensor.item() for tensor in tensors]

    def is_there(self) -> bool:
        """Whether :meth:`get` need not wait."""
        return self._reading is None or self._reading.is_there()

    def get(self) -> Tensor:
        """The payload, (length,) fp64 on the host; waits for the device."""
        numbers = self._numbers if self._reading is None else [number for (number,) in self._reading.get()]
        self._recorded.settle(numbers[self._num_places :])
        payload = [float(self.schema_number), next(filter(None, numbers[: self._num_places]), 0.0)]
        for name in self._recorded.places:
            logged = self._recorded.values.get(name)
            payload += (0.0, _ABSENT) if logged is None else (logged.result(), logged.weight)
        payload += [0.0] * (self.length - len(payload))
        return torch.tensor(payload, dtype=torch.float64, device="cpu")


@lru_cache(maxsize=256)
def _encode_schema(entries: tuple[Entry, ...]) -> tuple[str, int]:
    """A schema, and a number that stands for it; 0 is the empty one's."""
    schema = json.dumps([asdict(entry) for entry in entries])
    return schema, zlib.crc32(schema.encode()) + 1 if entries else 0


def payload_length(slots: int) -> int:
    """Length of the vector that carries up to ``slots`` values."""
    return _HEAD + 2 * slots


def decode_schema(schema: str) -> list[Entry]:
    """Entries in the order of a payload, out of its schema."""
    return [Entry(**fields) for fields in json.loads(schema)]


def combine(payload: Tensor, layouts: Sequence[Sequence[Entry]]) -> list[Logged]:
    """Values of a mini-batch over the replicas that logged them.

    Args:
        payload: shape (replicas, payload length).
        layouts: what stands at the places, for each replica.

    Returns:
        For every entry its value and the weight that it stands for.
    """
    rows = []
    for row, entries in zip(payload.tolist(), layouts):
        for index, entry in enumerate(entries):
            value, weight = row[_HEAD + 2 * index : _HEAD + 2 * index + 2]
            if weight != _ABSENT:
                rows.append(Logged(entry, value, weight))
    return combined(rows) if len(layouts) > 1 else rows


def nan_micro_batch(payload: Tensor) -> int:
    """Which micro-batch of a replica was the first whose loss is NaN, from 1; 0 if none was."""
    return next((int(place) for place in payload[:, 1].tolist() if place), 0)
