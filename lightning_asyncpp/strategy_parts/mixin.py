"""What the Trainer's and Fabric's strategies share: connecting, cutting, seeding, and collectives that cannot hang."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_asyncpp.core.checkpoint.saving import CheckpointWriter
from lightning_asyncpp.core.cut.partition import WHOLE, Partition
from lightning_asyncpp.core.cut.partition_choice import Example, choose_partition
from lightning_asyncpp.core.local_session import LocalSession
from lightning_asyncpp.core.randomness import seed_of_run
from lightning_asyncpp.core.ranks.agreement import agree_on_error, broadcast
from lightning_asyncpp.core.ranks.interfaces import use_interface
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.ranks.process_groups import unbind_default_group
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.core.settings import PipelineSettings
from lightning_asyncpp.errors import lost_peers
from lightning_asyncpp.private_names import installed_versions, required
from lightning_asyncpp.strategy_parts.arguments import PipelineArguments
from lightning_asyncpp.strategy_parts.process_group import QUEUES_VARIABLE, backend_of, join_again, queue_warning
from lightning_asyncpp.strategy_parts.store import store_listening_on
from lightning_asyncpp.version import __version__

T = TypeVar("T")
_SHARED = ("state_dict_type", "async_checkpoints", "timeout")  # arguments, beside the pipeline's settings


class OneProcessMixin:
    """Runs all stages in this process: no launcher, no process group. Comes before a pipeline strategy.

    Attributes:
        num_stages: number of stages P.
    """

    session: PipelineSession
    num_stages: int

    def _new_session(self, settings: PipelineSettings, timeout: timedelta | None) -> PipelineSession:
        return LocalSession(settings, self.num_stages, timeout)

    def _configure_launcher(self) -> None:
        """One process needs no launcher."""

    @property
    def local_rank(self) -> int:
        """The first, also in a process that others were launched with: it has a device for itself."""
        return 0

    def setup_environment(self) -> None:
        """Take the device; a pipeline starts processes here.

        Raises:
            ConfigurationError: there are several devices, or the settings do not fit the number of stages.
        """
        strategy: Any = self
        self.session.connect(0, strategy.num_nodes * strategy.num_processes)
        assert strategy.accelerator is not None
        strategy.accelerator.setup_device(strategy.root_device)
        ranks = getattr(strategy, "set_world_ranks", None) or strategy._set_world_ranks  # the Trainer's, or Fabric's
        ranks()
        reset_seed()  # as launchers do: what is drawn from the process's generators is the same as in a pipeline


class PipelineStrategyMixin:
    """Comes before one of Lightning's DDP strategies, whose launchers and process group it uses.

    Attributes:
        delay: of the gradients, in updates: 1 or 0.
        session: the pipeline.
        checkpoints: writes them.
        interface: the network interface that the user named for connections.
    """

    applies_statistics = True  # a module need not look after its StatisticsLayers itself
    delay: int
    session: PipelineSession
    checkpoints: CheckpointWriter
    interface: str | None

    def _make_session(self, arguments: PipelineArguments) -> None:
        """Keep what the arguments say of the pipeline.

        Raises:
            ConfigurationError: arguments are wrong whatever the number of processes is; names all of them.
        """
        self.interface = arguments.interface
        self.session = self._new_session(arguments.settings(self.delay), arguments.timeout)
        versions = {**installed_versions(("lightning", "torch")), "lightning_asyncpp": __version__}
        self.session.started_with |= {**versions, **{name: str(getattr(arguments, name)) for name in _SHARED}}
        sharded = arguments.state_dict_type == "sharded"
        self.checkpoints = CheckpointWriter(self.session, sharded, arguments.async_checkpoints)

    def _new_session(self, settings: PipelineSettings, timeout: timedelta | None) -> PipelineSession:
        return PipelineSession(settings, timeout)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Lightning's question for names: they are registered by importing the package."""

    def setup_environment(self) -> None:
        """Start the process group and connect the mesh, on the interface to be used; a collective call.

        Raises:
            ConfigurationError: there is no such interface, or the settings do not fit the number of ranks.
        """
        # Before ranks wait for each other: one that failed in the midst of it would leave the others waiting.
        self.session.settings.resolved(self.num_nodes * self.num_processes)  # type: ignore[attr-defined]
        purpose = "choose the backend for stages that share a GPU"
        given = required(self, "_process_group_backend", purpose)
        self._process_group_backend = backend_of(self.parallel_devices, given)  # type: ignore[attr-defined]
        chosen = required(self, "_get_process_group_backend", "let torchrun start a run again")()
        with self._on_interface():
            join_again(chosen, self.root_device, self.session.timeout)  # type: ignore[attr-defined]
            super().setup_environment()  # type: ignore[misc]
        unbind_default_group()
        self.session.watch.guard.children = launched_processes(self)
        mesh = self.session.connect(self.global_rank, self.world_size)  # type: ignore[attr-defined]
        if mesh.num_stages > 1 and (warning := queue_warning(self.root_device, os.environ.get(QUEUES_VARIABLE))):  # type: ignore[attr-defined]
            rank_zero_warn(warning)
        if mesh.num_stages == 1:
            rank_zero_warn(
                f"{type(self).__name__} has one stage, and cuts nothing: devices={mesh.world_size} was given or found"
                f" for data_parallel_size={mesh.num_replicas}; devices={2 * mesh.num_replicas} makes two stages"
            )

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks, in a group that a rank which fails leaves (``failures/failure_watch.py``)."""
        self.session.check_failure()
        if (group := self._host_group()) is None:
            super().barrier(*args, **kwargs)  # type: ignore[misc]
            return
        with self.session.watch.collective(), lost_peers():
            dist.barrier(group=group)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of rank ``src`` on all ranks; like :meth:`barrier` it does not wait for a failed one."""
        self.session.check_failure()
        if self._host_group() is None:
            result: T = super().broadcast(obj, src)  # type: ignore[misc]
            return result
        with self.session.watch.collective():
            return broadcast(self._mesh, obj, src)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all ranks, stacked along a new first dimension."""
        self.session.check_failure()
        with self.session.watch.collective():
            gathered: Tensor = super().all_gather(tensor, group, sync_grads)  # type: ignore[misc]
        return gathered

    @contextmanager
    def _on_interface(self) -> Iterator[None]:
        """Nothing listens elsewhere than on the interface that was named, or than on loopback on a single machine."""
        strategy: Any = self
        given, size = strategy.cluster_environment, strategy.num_processes
        on_one_machine = strategy.num_nodes == 1 and given.world_size() <= size
        addresses = use_interface(self.interface, on_one_machine)
        given.set_global_rank(given.node_rank() * size + given.local_rank())  # as Lightning is about to do
        timeout = self.session.timeout
        with store_listening_on(given, addresses, given.global_rank(), on_one_machine, timeout) as environment:
            strategy.cluster_environment = environment
            try:
                yield
            finally:
                strategy.cluster_environment = given

    @property
    def _mesh(self) -> Mesh:
        assert self.session.mesh is not None, "the processes are not launched yet"
        return self.session.mesh

    def _host_group(self) -> dist.ProcessGroup | None:
        mesh = self.session.mesh
        return mesh.groups.host if mesh is not None and mesh.groups is not None else None

    def _cut(
        self,
        model: nn.Module,
        root: nn.Module | None = None,
        example: Example | None = None,
        averages: Sequence[AveragedModel] = (),
    ) -> None:
        """Reduce the model to this rank's stage; what fails on one rank is raised on all.

        Rank 0 chooses how many layers each stage gets, and the run's seed: that of ``seed_everything``, or a new one.

        Args:
            model: what is cut.
            root: the module around it.
            example: to measure its layers with, if the partition needs that.
            averages: of it, which are no part of ``root``.
        """
        seed, partition, error = seed_of_run(), None, None
        if self._mesh.rank == 0:
            try:
                partition = WHOLE if model is root else self._choose_partition(model, example, seed)
            except Exception as caught:
                error = caught
        seed, partition = self.broadcast((seed, partition))
        if partition is not None:
            try:
                self.session.cut(model, seed, torch.device("cpu"), root, partition, averages)
            except Exception as caught:
                error = caught
        agree_on_error(self._mesh, error)
        if partition is not None and partition.remark:
            rank_zero_warn(partition.remark)

    def _choose_partition(self, model: nn.Module, example: Example | None, seed: int) -> Partition:
        session, mesh = self.session, self._mesh
        if session.partition is not None and session.stage is not None and session.stage.model is model:
            return session.partition  # another training of what is cut already
        assert session.resolved is not None
        num_stages = session.resolved.num_stages
        return choose_partition(model, mesh.stage, num_stages, session.settings.partition, example, seed)


def register(registry: Any, **strategies: type) -> None:
    """Make strategies known to one of Lightning's registries, under the names that they are given here.

    Those that start processes get a second name with ``_notebook``: these are forked, as ``ddp_notebook`` does it.
    """
    for name, strategy in strategies.items():
        description = (strategy.__doc__ or "").partition("\n")[0]
        if name not in registry:
            registry.register(name, strategy, description=description)
        notebook = f"{name}_notebook"
        if issubclass(strategy, PipelineStrategyMixin) and notebook not in registry:
            registry.register(notebook, strategy, description=f"{description} In notebooks.", start_method="fork")


def mark_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Keep torch from warning that a scheduler stepped before the optimizer: the first mini-batch has no update yet."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def launched_processes(strategy: Any) -> list[subprocess.Popen]:
    """The launcher's own list of the processes that it started; empty where others start them.

    Raises:
        PrivateNameError: the launcher keeps no such list by now.
    """
    purpose = "leave no process behind"
    launcher = strategy.launcher
    if launcher is None or required(strategy, "_start_method", purpose) != "popen":
        return []
    processes: list[subprocess.Popen] = required(launcher, "procs", purpose)
    return processes
