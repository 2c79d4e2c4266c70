"""On a single machine only torch's store listens on an address that other machines could reach.

Run as a program with FOLDER DEVICES, this file trains two replicas; every rank writes the addresses it listens on.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_asyncpp.core.wire.connect import Listener
from lightning_asyncpp.trainer import AsyncPipelineStrategy
from tests.helpers.pool import free_port
from tests.helpers.programs import run_ranks
from tests.helpers.trainer import Net, Run, Samples

LOOPBACK, EVERYWHERE = {"127.0.0.1", "::1"}, {"::", "0.0.0.0"}
AT_SETUP: list[str] = []  # addresses listened on while the stages connected

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads sockets in /proc")


def listening_addresses() -> list[str]:
    """Return the addresses of TCP sockets that this process listens on, such as ``127.0.0.1`` or ``0.0.0.0``."""
    links = []
    for entry in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
    sockets = {match[1] for link in links if (match := re.fullmatch(r"socket:\[(\d+)\]", link))}
    tables = [Path(f"/proc/self/net/{table}").read_text().splitlines() for table in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    return sorted(_address(line[1].partition(":")[0]) for line in lines if line[3] == "0A" and line[9] in sockets)


def _address(hexadecimal: str) -> str:
    # These are words of four bytes, each in the machine's byte order, which is little-endian wherever this runs.
    words = [bytes.fromhex(hexadecimal[i : i + 8])[::-1] for i in range(0, len(hexadecimal), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return str(getattr(address, "ipv4_mapped", None) or address)


class Writes(L.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 2:
            names = [os.environ.get(f"{kind}_SOCKET_IFNAME") for kind in ("GLOO", "NCCL")]
            found = {"at setup": AT_SETUP, "in training": listening_addresses(), "names": names}
            (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(found))


def main(folder: Path, devices: int) -> None:
    answer = Listener.answer

    def watched(self: Listener, *args: Any, **kwargs: Any) -> Any:
        AT_SETUP[:] = listening_addresses()
        return answer(self, *args, **kwargs)

    Listener.answer = watched  # type: ignore[method-assign]
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=AsyncPipelineStrategy(data_parallel_size=2), logger=False,
        max_steps=4, enable_checkpointing=False, enable_progress_bar=False, callbacks=[Writes(folder)],
    )  # fmt: skip
    trainer.fit(Net(Run(Net)), torch.utils.data.DataLoader(Samples(64), batch_size=8))


def test_on_one_machine_loopback_alone_is_listened_on(tmp_path: Path) -> None:
    """Ranks that were started by hand listen on loopback only; torch's store, on rank 0, may listen everywhere."""
    devices, port = 4, str(free_port())
    ranks = [{"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_PORT": port} for rank in range(devices)]
    ended = run_ranks(("-m", "tests.trainer.launching.test_listening", str(tmp_path), str(devices)), tmp_path, ranks)
    assert [rank.returncode for rank in ended] == [0] * devices, ended
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(devices)]
    for rank, seen in enumerate(found):
        assert {*seen["in training"], *seen["at setup"]} <= (LOOPBACK if rank else LOOPBACK | EVERYWHERE), (rank, seen)
        assert seen["names"] in (["lo", "=lo"], ["lo", None])
    listening = [len(seen["in training"]) for seen in found]
    assert listening[0] == max(listening) > min(listening) > 0, "gloo listens, and the store on rank 0"
    assert any(len(seen["at setup"]) > len(seen["in training"]) for seen in found), "a stage listens for its neighbour"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
