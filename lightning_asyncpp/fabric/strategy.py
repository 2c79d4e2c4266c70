"""The Fabric strategies by name."""

from __future__ import annotations

from lightning.fabric.strategies import STRATEGY_REGISTRY

from lightning_asyncpp.fabric.base import PipelineStrategy
from lightning_asyncpp.pipeline.strategy_mixin import with_arguments_of


class AsyncPipelineStrategy(PipelineStrategy):
    """Asynchronous pipeline parallelism: PipeDream-2BW, no flush, every gradient exactly one update old.

    Args:
        micro_batches: micro-batches that every batch is cut into; at least the number of stages, which is the default.
        lookahead: extra micro-batches in flight; hides latency and jitter, costs activation memory, never changes the
            delay. Default: 1 where it is allowed, else 0.
        data_parallel_size: number of replicas of the pipeline; ``devices`` is a multiple of it.
        fresh_last_stage: let the last stage run without delay, which costs nothing and needs no second copy of its
            weights: its updates are applied before its next mini-batch. Its gradients are then clipped by the norm of
            the whole gradient one mini-batch earlier.
        synchronous_start: number of mini-batches at the beginning that end with a flush and have no delay: while
            weights change fast an old gradient costs most. Corrections such as Error Feedback begin after them.
        weight_dtype: ``"bf16"`` keeps both weight versions in bf16, with the optimizer's parameters as fp32 masters
            beside them, which takes as much memory as two versions in fp32 and computes faster; needs precision
            ``"bf16-mixed"``. Checkpoints then hold the weights in bf16, and the masters beside them.
        partition: which layers each stage gets. ``"auto"`` makes the largest cost of a stage as small as it can be: by
            the model's ``pipeline_costs()``, or else by the times of its layers on ``example_input_array``, or else
            by numbers of parameters; ``"uniform"`` gives all the same number of layers; a list says how many layers
            each stage gets, first stage first.
        placement: with replicas, which ranks are neighbours: ``"pipeline_within_node"`` the stages of a replica,
            ``"pipeline_across_nodes"`` the replicas of a stage.
        nonfinite_gradients: ``"stop"`` raises on every rank, ``"skip"`` leaves weights and optimizer as they are.
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
        timeout: of blocking communication.
        start_method: how Fabric starts the processes; ``"popen"`` runs the script again, ``"fork"`` works in notebooks,
            ``"spawn"`` where everything can be pickled: with these two ``fabric.launch(function)`` brings back what the
            function returns on rank 0, and nothing else. A model from outside of it stays as it was: ``fabric.save`` it
            in the function, and load that.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision: as in every strategy; Fabric sets
            them.

    Raises:
        ConfigurationError: when Fabric launches or a model is set up, on every rank, with every problem found.

    Example::

        strategy = AsyncPipelineStrategy(micro_batches=8)
        fabric = L.Fabric(strategy=strategy, devices=4)
        fabric.launch()
        with fabric.init_module(empty_init=True):
            model = build()
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(make_optimizer(model))
        for batch in loader:
            loss = strategy.training_step(lambda micro_batch: loss_of(model, micro_batch), batch)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
        strategy.flush()

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (ICML 2021).
    """

    delay = 1


@with_arguments_of(AsyncPipelineStrategy)
class SyncPipelineStrategy(PipelineStrategy):
    """Synchronous pipeline parallelism on the same engine: 1F1B with a flush per mini-batch, no delay.

    Arguments as for :class:`AsyncPipelineStrategy`; any number of micro-batches works, ``lookahead`` defaults to 0.
    """

    delay = 0


def register() -> None:
    """Make the strategies known to ``Fabric(strategy=...)`` by name."""
    for name, strategy in (("async_pipeline", AsyncPipelineStrategy), ("sync_pipeline", SyncPipelineStrategy)):
        if name not in STRATEGY_REGISTRY:
            STRATEGY_REGISTRY.register(name, strategy, description=(strategy.__doc__ or "").partition("\n")[0])
