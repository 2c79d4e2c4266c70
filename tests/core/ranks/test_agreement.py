"""Texts of all ranks: a rank that announces more than any text has is refused before memory is made for it."""

from __future__ import annotations

import pytest
import torch

from lightning_asyncpp.core.ranks import agreement
from lightning_asyncpp.core.ranks.mesh import Groups, Mesh
from lightning_asyncpp.errors import PeerLostError, ProtocolError, lost_peers


@pytest.mark.parametrize("size", [2**60, 2**28 + 1, -1])
def test_a_text_of_a_size_that_cannot_be(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(agreement, "_gather", lambda mesh, tensor, group: [tensor, torch.full_like(tensor, size)])
    mesh = Mesh(2, 1, 0, groups=Groups(None, None))  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match=rf"in different calls: they exchange texts of \[5, {size}\] bytes"):
        agreement.exchange(mesh, "hello")


def test_a_broken_message_is_not_taken_for_a_peer_that_is_gone() -> None:
    with pytest.raises(ProtocolError, match=r"^17 values$"), lost_peers("rank 3"):
        raise ProtocolError("17 values")
    said = "rank 3 is gone: .*; if none did, a script ended before this one.*Connection closed by peer"
    with pytest.raises(PeerLostError, match=said), lost_peers("rank 3"):
        raise RuntimeError("Connection closed by peer")
