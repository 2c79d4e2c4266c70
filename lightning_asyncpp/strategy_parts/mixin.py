"""What the Trainer's and Fabric's strategies share: connecting, cutting, seeding, and collectives that cannot hang."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_asyncpp.core.checkpoint import CheckpointWriter
from lightning_asyncpp.core.cut.partition import WHOLE, Partition
from lightning_asyncpp.core.cut.partition_choice import Example, choose_partition
from lightning_asyncpp.core.local_session import LocalSession
from lightning_asyncpp.core.randomness import seed_of_run
from lightning_asyncpp.core.ranks.agreement import agree_on_error, broadcast
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.ranks.process_groups import unbind_default_group
from lightning_asyncpp.core.ranks.rendezvous import use_loopback
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.core.settings import PipelineSettings
from lightning_asyncpp.errors import ConfigurationError, lost_peers
from lightning_asyncpp.strategy_parts.process_group import backend_of, join_again

T = TypeVar("T")


class PipelineStrategyMixin:
    """Comes before one of Lightning's DDP strategies, whose launchers and process group it uses.

    Attributes:
        delay: of the gradients, in updates: 1 or 0.
        num_stages: that run in this process, on one device; ``None``: every rank runs one.
        session: the pipeline.
        checkpoints: writes them.
    """

    applies_statistics = True  # a module need not look after its StatisticsLayers itself
    delay: int
    num_stages: int | None = None
    session: PipelineSession
    checkpoints: CheckpointWriter

    def _make_session(
        self, settings: PipelineSettings, timeout: timedelta | None, state_dict_type: str, async_checkpoints: bool
    ) -> None:
        """Make what holds the pipeline.

        Raises:
            ConfigurationError: arguments are wrong whatever the number of processes is; names all of them.
        """
        problems = settings.problems()
        if state_dict_type not in ("full", "sharded"):
            problems.append(f"state_dict_type={state_dict_type!r} must be 'full' or 'sharded'")
        if problems:
            raise ConfigurationError.from_problems(problems)
        self.session = self._new_session(settings, timeout)
        self.session.started_with["state_dict_type"] = state_dict_type
        self.session.started_with["async_checkpoints"] = str(async_checkpoints)
        self.checkpoints = CheckpointWriter(self.session, state_dict_type == "sharded", async_checkpoints)

    def _new_session(self, settings: PipelineSettings, timeout: timedelta | None) -> PipelineSession:
        return (
            PipelineSession(settings, timeout) if self.num_stages is None else LocalSession(settings, self.num_stages)
        )

    def _configure_launcher(self) -> None:
        if self.num_stages is None:
            super()._configure_launcher()  # type: ignore[misc]

    @property
    def local_rank(self) -> int:
        """With all stages in one process the first, also in one that others were launched with."""
        rank: int = super().local_rank if self.num_stages is None else 0  # type: ignore[misc]
        return rank

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Lightning's question for names: they are registered by importing the package."""

    def setup_environment(self) -> None:
        """Start the process group and connect the mesh; a collective call.

        Raises:
            ConfigurationError: the settings do not fit the number of ranks.
        """
        strategy: Any = self
        if self.num_stages is not None:
            self._set_up_one_process()
            return
        # Before ranks wait for each other: one that failed in the midst of it would leave the others waiting.
        self.session.settings.resolved(strategy.num_nodes * strategy.num_processes)
        if strategy.num_nodes == 1 and strategy.cluster_environment.world_size() <= strategy.num_processes:
            use_loopback()
        join_again(strategy._get_process_group_backend(), strategy.root_device, self.session.timeout)
        super().setup_environment()  # type: ignore[misc]
        unbind_default_group()
        self.session.watch.children = launched_processes(strategy.launcher)
        mesh = self.session.connect(strategy.global_rank, strategy.world_size)
        if mesh.num_stages == 1:
            rank_zero_warn(
                f"{type(self).__name__} has one stage, and cuts nothing: devices={mesh.world_size} was given or found"
                f" for data_parallel_size={mesh.num_replicas}; devices={2 * mesh.num_replicas} makes two stages"
            )

    def _get_process_group_backend(self) -> str:
        strategy: Any = self
        own: str | None = backend_of(strategy.parallel_devices, strategy.process_group_backend)
        return own or super()._get_process_group_backend()  # type: ignore[misc]

    def _set_up_one_process(self) -> None:
        """Take the device."""
        strategy: Any = self
        self.session.connect(0, strategy.num_nodes * strategy.num_processes)
        assert strategy.accelerator is not None
        strategy.accelerator.setup_device(strategy.root_device)
        if hasattr(strategy, "set_world_ranks"):  # the Trainer's; in Fabric ranks follow from the environment
            strategy.set_world_ranks()
        reset_seed()  # as launchers do: what is drawn from the process's generators is the same as in a pipeline

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
        if name != "delayed_gradient" and notebook not in registry:
            registry.register(notebook, strategy, description=f"{description} In notebooks.", start_method="fork")


def mark_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Keep torch from warning that a scheduler stepped before the optimizer: the first mini-batch has no update yet."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def launched_processes(launcher: Any) -> list[subprocess.Popen]:
    """The launcher's own list of the processes that it started; empty where others start them."""
    processes: list[Any] = getattr(launcher, "procs", [])
    return processes if all(isinstance(process, subprocess.Popen) for process in processes) else []
