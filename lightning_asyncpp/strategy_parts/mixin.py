"""Common base of the Trainer's and Fabric's strategies: set-up, cutting, and collectives that cannot hang."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.seed import reset_seed
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from lightning_asyncpp.core.checkpoint import CheckpointWriter
from lightning_asyncpp.core.cut.partition import WHOLE, Partition
from lightning_asyncpp.core.cut.partition_choice import Example, choose_partition
from lightning_asyncpp.core.local_session import LocalSession
from lightning_asyncpp.core.randomness import seed_of_run
from lightning_asyncpp.core.ranks.agreement import agree_on_error, broadcast
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.ranks.process_groups import backend_of, join_again, unbind_default_group
from lightning_asyncpp.core.schedule import Slack, Staleness
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.core.settings import PipelineSettings
from lightning_asyncpp.core.wire.connect import use_loopback
from lightning_asyncpp.errors import ConfigurationError, lost_peers
from lightning_asyncpp.storage import is_sharded, load, local_path, remove_sharded, save_file


class DurableCheckpointIO(TorchCheckpointIO):
    """Checkpoint IO that replaces a file only by a complete one, and also reads sharded checkpoints.

    URLs (``s3://...``) are left to :class:`TorchCheckpointIO`.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a file.

        Raises:
            StorageError: the file cannot be written; an earlier file at this path is intact, or the complete new one
                has replaced it.
        """
        if storage_options is None and (local := local_path(path)) is not None:
            save_file(checkpoint, local)
        else:
            super().save_checkpoint(checkpoint, path, storage_options)

    @override
    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a file or a sharded folder; tensors are on the host.

        Raises:
            FileNotFoundError: the path does not exist.
            StorageError: the path is not a checkpoint, is damaged, or contains code while ``weights_only`` is not
                False.
        """
        local = local_path(path)
        if local is None or not local.exists():
            # By default Lightning would run code in a file at a URL.
            return super().load_checkpoint(path, map_location, weights_only is not False)
        content: dict[str, Any] = load(local, weights_only)
        return content

    @override
    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint if it exists."""
        local = local_path(path)
        if local is not None and is_sharded(local):
            remove_sharded(local)
        else:
            super().remove_checkpoint(path)


T = TypeVar("T")


class PipelineStrategyMixin:
    """Mixin for Lightning's DDP strategies, whose launchers and process group it uses.

    Args:
        microbatches: number of microbatches per batch, at least the number of stages P. Default: 2 P (1 for one stage).
            If a batch has fewer samples, the last microbatches are empty, and nothing is computed for them.
        staleness: choice of the microbatches of a mini-batch that run on the weights before the newest update.
            ``"least"`` (default): those that start before this update can be made, the first P - 1 - s on stage s. A
            stage then steps before the norm over all stages is known. So it clips by the larger one of the previous
            mini-batch's norm and that of its own gradients, and the first mini-batch has no delay. ``"uniform"``
            (PipeDream-2BW): all microbatches, so that gradients are one update old.
        slack: with ``staleness="least"``, number of further microbatches on the older weights; while these run,
            gradients can be summed over replicas. ``"exact"``: all stages run as many microbatches on the older weights
            as the first stage, so that clipping is exact and non-finite gradients can be skipped.
        synchronous_start: number of updates without a delay at the start of the training, with a flush after each.
        lookahead: extra microbatches in flight, up to ``microbatches`` - P + 1, one less with replicas. The extra
            microbatches hide latency and jitter, cost activation memory, and run on the older weights with
            ``staleness="least"``. Default: 0; with ``staleness="uniform"`` 1 if that is not too many.
        data_parallel_size: number of replicas of the pipeline; ``devices`` is a multiple of it.
        partition: layers of each stage. ``"auto"`` minimises the largest cost of a stage. Costs are the model's
            ``pipeline_costs()``; without that method the times of its layers on ``example_input_array``; without an
            example the numbers of parameters. ``"uniform"`` gives all stages the same number of layers. A list has the
            number of layers of each stage, first stage first.
        weight_dtype: ``"bf16"`` keeps both weight versions in bf16, in addition to fp32 masters for the optimizer. This
            takes as much memory as two versions in fp32 and computes faster; it needs precision ``"bf16-mixed"``.
            Checkpoints then have both the bf16 weights and the masters.
        nonfinite_gradients: ``"stop"`` raises on every rank, ``"skip"`` leaves weights and optimizer unchanged.
        state_dict_type: ``"full"`` writes a checkpoint as one file, on rank 0; ``"sharded"`` as a folder with one part
            per stage.
        async_checkpoints: write checkpoints while training continues; costs a copy of the saved state on the host.
        timeout: timeout of blocking communication.
        process_group_backend: backend of ``torch.distributed``; ``None``: NCCL if every rank has a GPU to itself, gloo
            if not.
        start_method: way in which Lightning starts the processes. ``"popen"`` runs the script again, ``"fork"`` works
            in notebooks, ``"spawn"`` needs objects that can be pickled. With ``"fork"`` and ``"spawn"`` the process
            that starts the ranks is not one of them: it has the whole trained module after ``fit``, and
            ``fabric.launch(function)`` returns to it only the function's result on rank 0.
        parallel_devices: devices of this machine's ranks, for instance to put several ranks on one GPU; ``None``: those
            of the Trainer or Fabric.

    Raises:
        ConfigurationError: arguments are wrong for any number of processes; the message names all wrong arguments.

    Attributes:
        delay: delay of the gradients in updates: 1 or 0.
        stages_in_process: number of stages if all of them run in this process; ``None`` if every rank runs one stage.
        session: the pipeline.
        checkpoints: writer of the checkpoints.
    """

    applies_statistics = True  # modules need not update their StatisticsLayers themselves
    delay: int
    stages_in_process: int | None = None
    session: PipelineSession
    checkpoints: CheckpointWriter

    def __init__(
        self,
        microbatches: int | None = None,
        staleness: Staleness | None = None,
        slack: Slack = 0,
        synchronous_start: int = 0,
        lookahead: int | None = None,
        data_parallel_size: int = 1,
        partition: Literal["auto", "uniform"] | list[int] = "auto",
        weight_dtype: Literal["bf16"] | None = None,
        nonfinite_gradients: Literal["stop", "skip"] = "stop",
        state_dict_type: Literal["full", "sharded"] = "full",
        async_checkpoints: bool = False,
        timeout: timedelta | None = timedelta(minutes=30),
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork"] = "popen",
        parallel_devices: list[torch.device] | None = None,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            parallel_devices=parallel_devices,
            checkpoint_io=DurableCheckpointIO(),
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        settings = PipelineSettings.chosen(
            self.delay,
            staleness,
            microbatches=microbatches,
            slack=slack,
            synchronous_start=synchronous_start,
            lookahead=lookahead,
            data_parallel_size=data_parallel_size,
            partition=partition,
            weight_dtype=weight_dtype,
            nonfinite_gradients=nonfinite_gradients,
        )
        problems = settings.problems()
        if state_dict_type not in ("full", "sharded"):
            problems.append(f"state_dict_type={state_dict_type!r} must be 'full' or 'sharded'")
        if problems:
            raise ConfigurationError.from_problems(problems)
        self.session = (
            PipelineSession(settings, timeout)
            if self.stages_in_process is None
            else LocalSession(settings, self.stages_in_process)
        )
        self.session.started_with["state_dict_type"] = state_dict_type
        self.session.started_with["async_checkpoints"] = str(async_checkpoints)
        self.checkpoints = CheckpointWriter(self.session, state_dict_type == "sharded", async_checkpoints)
        self.start_method: str = start_method
        self._init_state()

    def _init_state(self) -> None:
        """Initialise the attributes of a derived strategy; called at the end of the constructor."""

    def _configure_launcher(self) -> None:
        if self.stages_in_process is None:
            super()._configure_launcher()  # type: ignore[misc]

    @property
    def local_rank(self) -> int:
        """Local rank; 0 if all stages are in this process, even if other processes were launched with it."""
        rank: int = super().local_rank if self.stages_in_process is None else 0  # type: ignore[misc]
        return rank

    def setup_environment(self) -> None:
        """Start the process group and connect the mesh; a collective call.

        Raises:
            ConfigurationError: the settings do not fit the number of ranks.
        """
        strategy: Any = self
        if self.stages_in_process is not None:
            self._set_up_one_process()
            return
        # Check before any rank waits for another: a rank that fails later leaves the others waiting.
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
                f"{type(self).__name__} has a single stage, since a replica has devices={mesh.world_size} /"
                f" data_parallel_size={mesh.num_replicas} = 1 device; devices={2 * mesh.num_replicas} makes two stages"
            )

    def _get_process_group_backend(self) -> str:
        strategy: Any = self
        own: str | None = backend_of(strategy.parallel_devices, strategy.process_group_backend)
        return own or super()._get_process_group_backend()  # type: ignore[misc]

    def _set_up_one_process(self) -> None:
        """Set up the device of the only process."""
        strategy: Any = self
        self.session.connect(0, strategy.num_nodes * strategy.num_processes)
        assert strategy.accelerator is not None
        strategy.accelerator.setup_device(strategy.root_device)
        if hasattr(strategy, "set_world_ranks"):  # only the Trainer's strategies have this method
            strategy.set_world_ranks()
        reset_seed()  # as launchers do, so that the process's generators draw the same numbers as in a pipeline

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks; raise an error if one of them has failed (``core/failure_watch.py``)."""
        self.session.watch.check()
        if (group := self._host_group()) is None:
            super().barrier(*args, **kwargs)  # type: ignore[misc]
            return
        with self.session.watch.collective(), lost_peers():
            dist.barrier(group=group)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of rank ``src`` on all ranks; raise an error if a rank has failed."""
        self.session.watch.check()
        if self._host_group() is None:
            result: T = super().broadcast(obj, src)  # type: ignore[misc]
            return result
        with self.session.watch.collective():
            return broadcast(self._mesh, obj, src)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all ranks, stacked along a new first dimension."""
        self.session.watch.check()
        with self.session.watch.collective():
            gathered: Tensor = super().all_gather(tensor, group, sync_grads)  # type: ignore[misc]
        return gathered

    @property
    def _mesh(self) -> Mesh:
        return self.session.connected()

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
        """Reduce the model to this rank's stage; an error on one rank is raised on all.

        Rank 0 chooses the number of layers of each stage and the run's seed (that of ``seed_everything``, or a new
        one).

        Args:
            model: model that is cut.
            root: module that contains the model.
            example: input with which layers may be measured.
            averages: averages of the model's weights that ``root`` does not contain.
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
                self.session.cut(model, seed, torch.device("cpu"), partition, root, averages)
            except Exception as caught:
                error = caught
        agree_on_error(self._mesh, error)
        if partition is not None and partition.remark:
            rank_zero_warn(partition.remark)

    def _choose_partition(self, model: nn.Module, example: Example | None, seed: int) -> Partition:
        session, mesh = self.session, self._mesh
        if session.partition is not None and session.stage is not None and session.stage.model is model:
            return session.partition  # the model was cut for an earlier training
        assert session.resolved is not None
        num_stages = session.resolved.num_stages
        return choose_partition(model, mesh.stage, num_stages, session.settings.partition, example, seed)


def register(registry: Any, **strategies: type) -> None:
    """Add strategies to one of Lightning's registries; the keywords are their names.

    Strategies that start processes get a second name that ends in ``_notebook``. Under that name they fork the
    processes, as ``ddp_notebook`` does.
    """
    for name, strategy in strategies.items():
        description = (strategy.__doc__ or "").partition("\n")[0]
        if name not in registry:
            registry.register(name, strategy, description=description)
        notebook = f"{name}_notebook"
        if name != "delayed_gradient" and notebook not in registry:
            registry.register(notebook, strategy, description=f"{description} In notebooks.", start_method="fork")


def expect_early_schedulers() -> None:
    """Suppress torch's warning that a scheduler stepped before the optimizer: the first update comes a batch later."""
    warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler\.step\(\)` before")


def launched_processes(launcher: Any) -> list[subprocess.Popen]:
    """Return the launcher's list of the processes that it started; empty if the launcher starts none."""
    processes: list[Any] = getattr(launcher, "procs", [])
    return processes if all(isinstance(process, subprocess.Popen) for process in processes) else []
