"""The arguments of the strategies: each is told here once, and a constructor, its help and its checks come from that.

A strategy's arguments are the fields of a dataclass: of one here, and of the one derived from it in the Trainer's or
Fabric's ``arguments.py``, which adds what only that framework has. :func:`takes` gives a constructor these arguments.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, get_type_hints

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_asyncpp.core.schedule import Slack, Staleness
from lightning_asyncpp.core.settings import PipelineSettings, is_whole
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.private_names import UntestedVersionWarning, untested_versions
from lightning_asyncpp.strategy_parts.checkpoint_io import DurableCheckpointIO

P = ParamSpec("P")
A = TypeVar("A")
S = TypeVar("S")


@dataclass(frozen=True)
class DDPArguments:
    """What every strategy takes and hands on to Lightning's DDP strategy, from which it is derived."""

    process_group_backend: str | None = None
    timeout: timedelta | None = timedelta(minutes=30)
    start_method: Literal["popen", "spawn", "fork"] = "popen"
    parallel_devices: list[torch.device] | None = None
    cluster_environment: ClusterEnvironment | None = None
    checkpoint_io: CheckpointIO | None = None


@dataclass(frozen=True)
class PipelineArguments(DDPArguments, PipelineSettings):
    """What the pipeline strategies take: the settings of a pipeline, and how its ranks are started, talk and save.

    The list has what only the Trainer's or only Fabric's strategies take, too; all are shown in its order.

    Args:
        micro_batches: micro-batches that every batch is cut into, at least the number of stages P. Default: 2 P (1 for
            one stage). A batch with fewer samples leaves the last ones empty: nothing is computed for them.
        lookahead: extra micro-batches in flight, up to ``micro_batches`` - P + 1, one less with replicas. It hides
            latency and jitter, costs activation memory, and adds to what ``staleness="least"`` holds back. Default: 0;
            with ``staleness="uniform"`` 1 where it fits.
        data_parallel_size: number of replicas of the pipeline; ``devices`` is a multiple of it.
        staleness: which micro-batches of a mini-batch run on the weights before the newest update. ``"least"``, the
            default: those that are under way before that update can be made, P - 1 - s on stage s. Stages then step
            before all know the norm of a gradient, so they clip it by the norm one mini-batch earlier, and the first
            mini-batch has no delay. ``"uniform"`` (PipeDream-2BW): all, so that gradients are one update old.
        slack: with ``staleness="least"``, how many micro-batches more than that, for a reduction over replicas to hide
            behind; ``"exact"``: as many on all stages as on the first, so that clipping is exact, and gradients may be
            left out.
        weight_dtype: ``"bf16"`` keeps both weight versions in bf16, with the optimizer's parameters as fp32 masters
            beside them, which takes as much memory as two versions in fp32 and computes faster; needs precision
            ``"bf16-mixed"``. Checkpoints then hold the weights in bf16, and the masters beside them.
        partition: which layers each stage gets. ``"auto"`` makes the largest cost of a stage as small as it can be: by
            the model's ``pipeline_costs()``, or else by the times of its layers on the module's
            ``example_input_array``, or else by numbers of parameters; ``"uniform"`` gives all the same number of
            layers; a list says how many layers each stage gets, first stage first.
        placement: with replicas, which ranks are neighbours: ``"pipeline_within_node"`` the stages of a replica,
            ``"pipeline_across_nodes"`` the replicas of a stage.
        nonfinite_gradients: ``"stop"`` raises on every rank, ``"skip"`` leaves weights and optimizer as they are.
        metric_slots: how many names ``self.log`` may log per training batch.
        split_batch: (batch, parts) -> that many micro-batches, ``None`` for an empty slot. Default: the model's method
            of that name, else every tensor is cut along its first dimension.
        micro_batch_weight: micro-batch -> its weight in the mean loss. Default: the model's method of that name, else
            the number of samples.
        loss_reduction: ``"mean"`` if the step returns the mean over the micro-batch's weight, ``"sum"`` if the sum.
            Default: the model's attribute of that name, else ``"mean"``.
        example_input_array: arguments of the model, to measure its layers with: a tensor, a tuple of positional
            arguments or a dict of keyword arguments. Default: the model's attribute of that name, if it has one.
        max_message_bytes: largest activation message that a stage accepts, in bytes.
        interface: network interface that connections of the ranks use, such as ``"eth1"``; several with commas between.
            Default: what the environment variables ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` say, or else
            loopback if all ranks run on one machine, or else any.
        state_dict_type: ``"full"`` writes a checkpoint into one file, on rank 0; ``"sharded"`` into a folder, every
            stage its part.
        async_checkpoints: write checkpoints while training goes on; costs a copy of what is saved, on the host.
        heartbeat: seconds after which a rank that gives no sign of life is taken for lost, and all ranks end. A thread
            gives them, so slow ranks do, too; for progress there is ``timeout``. ``None``: nobody watches.
        neighbour_ctas: over NCCL, how many thread blocks (CTAs) of a GPU a message between neighbouring stages may take
            beside what is computed; more carry large activations faster. ``None`` leaves it to NCCL.
        process_group_backend: as in DDP; default: NCCL on GPUs, else gloo.
        timeout: of blocking communication; and of a training or evaluation in which a rank waits for nobody and makes
            no progress all the same, as in a loader whose disk does not answer: then all ranks end.
    """

    delay: int = field(default=1, init=False)  # no argument: it comes with the strategy
    staleness: Staleness | None = None  # type: ignore[assignment]  # of a delay
    partition: Literal["auto", "uniform"] | list[int] = "auto"  # what a command line can give
    interface: str | None = None
    state_dict_type: Literal["full", "sharded"] = "full"
    async_checkpoints: bool = False

    def settings(self, delay: int) -> PipelineSettings:
        """Those of the pipeline.

        Raises:
            ConfigurationError: arguments are wrong whatever the number of processes is; names all of them.
        """
        settings = PipelineSettings.chosen(**part_of(PipelineSettings, self) | {"delay": delay})
        check_arguments(settings, self)
        return settings


@dataclass(frozen=True)
class DelayArguments:
    """What ``delayed_gradient`` takes: the settings of a pipeline, and how many stages of it run in this process.

    Args:
        stages: number of stages. With one, any module will do: it is not cut, and its whole step runs on older weights.
        delay: 1 for what an asynchronous pipeline trains, 0 for what a synchronous one does.
        micro_batches: as for ``async_pipeline``.
        staleness: as for ``async_pipeline``; with one stage ``"uniform"``, which makes every gradient one update old.
        slack: as for ``async_pipeline``.
        lookahead: as for ``async_pipeline``.
        partition: as for ``async_pipeline``.
        weight_dtype: as for ``async_pipeline``.
        nonfinite_gradients: as for ``async_pipeline``.
    """

    stages: int = 1
    delay: int = 1
    micro_batches: int | None = None
    staleness: Staleness | None = None
    slack: Slack = 0
    lookahead: int | None = None
    partition: Literal["auto", "uniform"] | list[int] = "auto"
    weight_dtype: Literal["bf16"] | None = None
    nonfinite_gradients: Literal["stop", "skip"] = "stop"

    def of_pipeline(self) -> dict[str, Any]:
        """Name -> value of the arguments that a pipeline strategy takes.

        Raises:
            ConfigurationError: ``stages`` is no number of stages.
        """
        if not is_whole(self.stages) or self.stages < 1:
            raise ConfigurationError(f"stages={self.stages!r} must be a whole number of at least 1")
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("stages", "delay")}
        return given | ({"staleness": "uniform"} if self.stages == 1 else {})


def part_of(declaration: type, arguments: object) -> dict[str, Any]:
    """Name -> value of those arguments that are fields of ``declaration``, too."""
    return {f.name: getattr(arguments, f.name) for f in fields(declaration)}


def for_ddp(declaration: type[DDPArguments], arguments: DDPArguments) -> dict[str, Any]:
    """Name -> value of the arguments that DDP takes: the fields of ``declaration``."""
    files = arguments.checkpoint_io or DurableCheckpointIO()
    return part_of(declaration, arguments) | {"checkpoint_io": files}


# -- from a declaration to a constructor and its help ---------------------------------------------------------------


def takes(declaration: Callable[P, A]) -> Callable[[Callable[[S, A], None]], Callable[Concatenate[S, P], None]]:
    """Decorator of ``__init__(self, arguments)``: callers give the fields of a dataclass, ``__init__`` gets it made.

    Type checkers see the fields; so do ``inspect.signature`` and the command line, with what docstrings say of them.
    No ``**kwargs`` is among them: DDP would take any argument for one of its own, and the command line would offer
    them all.
    """
    make: Callable[..., A] = declaration
    signature, texts = _signature(declaration), argument_texts(declaration)

    def decorated(init: Callable[[S, A], None]) -> Callable[Concatenate[S, P], None]:
        def __init__(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:  # noqa: N807
            try:
                given = signature.bind(*args, **kwargs)
            except TypeError as error:  # an unknown name, or one given twice
                raise TypeError(f"{type(self).__name__}.__init__() {error}") from None
            is_outermost = vars(self).setdefault("_declaration", declaration) is declaration
            if is_outermost and (told := untested_versions()):
                rank_zero_warn(told, category=UntestedVersionWarning, stacklevel=5)
            init(self, make(**given.arguments))

        __init__.__qualname__ = init.__qualname__
        __init__.__doc__ = "\n".join(["Its arguments may be given by name.", "", "Args:", *texts.values()])
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [itself, *signature.parameters.values()]
        __init__.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return __init__

    return decorated


def argument_texts(declaration: Any) -> dict[str, str]:
    """Argument -> its lines in the docstrings of a dataclass and its bases, in their order; what is derived counts.

    What one text explains together is one entry: ``"a, b"``.
    """
    taken = {f.name for f in fields(declaration) if f.init}
    texts: dict[str, str] = {}
    for cls in reversed(declaration.__mro__):
        section = re.search(r"(?ms)^Args:\n(.*?)(?=^\S|\Z)", inspect.cleandoc(cls.__dict__.get("__doc__") or ""))
        entries = re.findall(r"(?ms)^    (\w[\w, ]*):(.*?)(?=^    \w|\Z)", section.group(1) if section else "")
        texts |= {names: f"    {names}:{text.rstrip()}" for names, text in entries}
    return {names: text for names, text in texts.items() if taken.intersection(names.split(", "))}


def _signature(declaration: Any) -> inspect.Signature:
    """Of a dataclass, with types instead of their names, in the order in which docstrings tell of the fields."""
    order = [name for names in argument_texts(declaration) for name in names.split(", ")]
    types = get_type_hints(declaration)
    parameters = inspect.signature(declaration).parameters.values()
    found = [p.replace(annotation=types[p.name]) for p in parameters]
    # Without docstrings (python -OO) it is the order of the fields.
    return inspect.Signature(sorted(found, key=lambda p: order.index(p.name) if p.name in order else len(order)))


# -- what no number of processes could make right --------------------------------------------------------------------


class HasProblems(Protocol):
    """Settings that know what is wrong with them."""

    def problems(self) -> list[str]:
        """Each with its mend."""


def check_arguments(settings: HasProblems, arguments: object) -> None:
    """Refuse what is wrong whatever the number of processes is.

    Args:
        settings: of the strategy.
        arguments: all of its arguments, a dataclass.

    Raises:
        ConfigurationError: with every problem.
    """
    problems = settings.problems()
    for name, check in _CHECKS.items():
        if hasattr(arguments, name) and (wanted := check(getattr(arguments, name))):
            problems.append(f"{name}={getattr(arguments, name)!r} must be {wanted}")
    if problems:
        raise ConfigurationError.from_problems(problems)


def _one_of(*values: object) -> Callable[[object], str | None]:
    words = " or ".join(repr(value) for value in values)
    return lambda value: None if any(value is v or (isinstance(value, str) and value == v) for v in values) else words


def _start_method(value: object) -> str | None:
    wanted = _one_of("popen", "spawn", "fork")(value)
    # Lightning gives them the model in shared memory, and a copy of it only to those that are spawned.
    return f"{wanted}: processes of a fork server would all train the same memory" if value == "forkserver" else wanted


def _switch(value: object) -> str | None:
    return None if isinstance(value, bool) else "True or False"


def _function(value: object) -> str | None:
    return None if value is None or callable(value) else "a function, or None"


def _name(what: str) -> Callable[[object], str | None]:
    return lambda value: None if value is None or (isinstance(value, str) and value) else f"the name of {what}, or None"


def _backend(value: object) -> str | None:
    if isinstance(value, str) and {":", ","} & set(value):
        return "one backend, such as 'nccl', and not several: host data goes over gloo anyway"
    if isinstance(value, str) and value and value.lower() not in dist.Backend.backend_list:
        return "a backend that torch.distributed knows, such as 'nccl' or 'gloo'"
    return _name("a backend of torch.distributed, such as 'nccl' or 'gloo'")(value)


def _devices(value: object) -> str | None:
    if value is None or (isinstance(value, list) and value and all(isinstance(d, torch.device) for d in value)):
        return None
    return "a list of devices, one for each rank of this machine: [torch.device('cuda:0')] * 4"


def _timeout(value: object) -> str | None:
    if value is None or (isinstance(value, timedelta) and value > timedelta(0)):
        return None
    return "a datetime.timedelta above 0, such as timedelta(minutes=5), or None"


_CHECKS: dict[str, Callable[[object], str | None]] = {
    "timeout": _timeout,
    "interface": _name("a network interface, such as 'eth1'"),
    "state_dict_type": _one_of("full", "sharded"),
    "start_method": _start_method,
    "process_group_backend": _backend,
    "parallel_devices": _devices,
    "async_checkpoints": _switch,
    "split_batch": _function,
    "micro_batch_weight": _function,
    "loss_reduction": _one_of("mean", "sum", None),
}
