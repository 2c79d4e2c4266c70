"""A broken connection is blamed on another rank; errors of this rank, such as those of its device, are not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_asyncpp.core.failure_watch import FailureWatch
from lightning_asyncpp.errors import PeerLostError, lost_peers

NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, {}, NCCL version 2.27.5\n{}"
OF_THIS_RANK = {
    "no memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "a kernel before": torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    "of a time before the class": RuntimeError("CUDA error: the launch timed out and was terminated"),
    "no memory for NCCL": dist.DistBackendError(NCCL.format("unhandled cuda error", "ncclUnhandledCudaError: Call")),
    "seen by NCCL's watchdog": dist.DistBackendError(
        "Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered"
    ),
    "shapes": RuntimeError("The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0"),
}
OF_ANOTHER = {
    "gloo": RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]"),
    "gloo waits": RuntimeError("[/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms"),
    "gloo afterwards": RuntimeError("Application timeout caused pair closure"),
    "the store": dist.DistNetworkError("failed to recv, got 0 bytes"),
    "NCCL": dist.DistBackendError(NCCL.format("remote process exited or there was a network error", "ncclRemoteError")),
    "NCCL waits": dist.DistBackendError("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7"),
    "NCCL afterwards": dist.DistBackendError("NCCL communicator was aborted on rank 0."),
}


@pytest.mark.parametrize("name", OF_THIS_RANK)
def test_what_this_rank_says_itself_stays_the_first_cause(name: str) -> None:
    watch, error = FailureWatch(), OF_THIS_RANK[name]
    with pytest.raises(type(error)) as caught, watch.collective(), lost_peers():
        raise error
    assert caught.value is error
    assert watch.failure is None


@pytest.mark.parametrize("name", OF_ANOTHER)
def test_a_broken_connection_is_a_lost_peer(name: str) -> None:
    with pytest.raises(PeerLostError, match=r"^a rank is gone"), lost_peers():
        raise OF_ANOTHER[name]
