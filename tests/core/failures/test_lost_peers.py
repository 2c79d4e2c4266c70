"""What is blamed on another rank: a broken connection, and nothing that this rank's own device says meanwhile."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_asyncpp.core.failure_watch import FailureWatch
from lightning_asyncpp.core.wire.handover import Outbox
from lightning_asyncpp.errors import ConsequenceError, PeerLostError, ProtocolError, is_noise, lost_peers

NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, {}, NCCL version 2.27.5\n{}"
NO_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"
OF_THIS_RANK = {
    "no memory": torch.OutOfMemoryError(NO_MEMORY),
    "a kernel before": torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    "of a time before the class": RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be"),
    "a kernel that took too long": RuntimeError("CUDA error: the launch timed out and was terminated"),
    "a library's": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "no memory for NCCL": dist.DistBackendError(
        NCCL.format("unhandled cuda error", "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:")
    ),
    "seen by NCCL's watchdog": dist.DistBackendError(
        "Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered"
    ),
    "shapes": RuntimeError("The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0"),
    "a mistake": NotImplementedError("not implemented for 'Half'"),
}
OF_ANOTHER = {
    "gloo": RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:9"
    ),
    "gloo waits": RuntimeError("[/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms"),
    "gloo afterwards": RuntimeError("Application timeout caused pair closure"),
    "the store": dist.DistNetworkError("failed to recv, got 0 bytes"),
    "NCCL": dist.DistBackendError(
        NCCL.format("remote process exited or there was a network error", "ncclRemoteError: A call failed possibly")
    ),
    "NCCL waits": dist.DistBackendError("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7"),
    "NCCL afterwards": dist.DistBackendError("NCCL communicator was aborted on rank 0."),
}


@pytest.mark.parametrize("name", OF_THIS_RANK)
def test_what_this_rank_says_itself_stays_the_first_cause(name: str) -> None:
    error = OF_THIS_RANK[name]
    with pytest.raises(type(error)) as caught, lost_peers("rank 3"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("name", OF_ANOTHER)
def test_a_broken_connection_is_a_lost_peer(name: str) -> None:
    with pytest.raises(PeerLostError, match=r"^rank 3 is gone"), lost_peers("rank 3"):
        raise OF_ANOTHER[name]


@pytest.mark.parametrize("error", [ProtocolError("Connection closed by peer"), ConsequenceError("pair.cc closed")])
def test_what_is_translated_already_stays_so(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, lost_peers():
        raise error
    assert caught.value is error


@pytest.mark.parametrize("name", OF_THIS_RANK)
def test_a_session_does_not_take_it_for_another_ranks_either(name: str) -> None:
    watch, error = FailureWatch(), OF_THIS_RANK[name]
    with pytest.raises(type(error)) as caught, watch.collective():
        raise error
    assert caught.value is error
    assert watch.failure is None


@pytest.mark.parametrize("errors", [OF_THIS_RANK, OF_ANOTHER], ids=["own", "of another"])
def test_an_error_of_the_thread_that_sends_is_told_apart_as_well(errors: dict[str, Exception]) -> None:
    """Whose thread hands tensors over tells whoever puts the next ones in."""
    for error in errors.values():
        outbox = object.__new__(Outbox)
        outbox._error, outbox._link, outbox._closed = error, _Link(), False  # type: ignore[assignment]
        with pytest.raises(RuntimeError) as caught:
            outbox._raise_error()
        assert isinstance(caught.value, PeerLostError) == (errors is OF_ANOTHER), error
        assert is_noise(error) == (errors is OF_ANOTHER), error


class _Link:
    peer = "rank 1 (stage 0)"
