"""Predicted times, against what can be computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_asyncpp.core.schedule import Action, Kind, Schedule, StalenessRule
from lightning_asyncpp.core.simulation import simulate
from lightning_asyncpp.core.wire.header import Header, TensorInfo
from lightning_asyncpp.tools.plan.devices import DEVICES, default_reserve
from lightning_asyncpp.tools.plan.fake_tensors import Reading
from lightning_asyncpp.tools.plan.stage_run import Profile
from lightning_asyncpp.tools.plan.timing import Prediction, Speeds, predict

DEVICE = replace(DEVICES["h100"], tflops=1.0, bandwidth=100.0, link=1e9, network=1e-3)
SPEEDS = Speeds(DEVICE, mfu=0.5, bandwidth_share=0.5, per_node=8)
PROFILE = Profile(forward=Reading(flops=int(1e12)), backward_again=Reading(flops=int(2e12)))  # 2 s and 4 s


def schedules(stages: int, delay: int, lookahead: int = 0) -> list[Schedule]:
    return [Schedule(stage, stages, lookahead, StalenessRule(delay)) for stage in range(stages)]


def of(stages: int, m: int, delay: int, profile: Profile = PROFILE, **others: Any) -> Prediction:
    return predict(schedules(stages, delay, delay), [[profile] * m] * stages, m, SPEEDS, 1, **others)


@pytest.mark.parametrize(("stages", "m"), [(2, 2), (4, 4), (4, 12), (1, 3)])
def test_equal_stages(stages: int, m: int) -> None:
    sync, late = of(stages, m, 0), of(stages, m, 1)
    assert sync.step == pytest.approx(6.0 * (m + stages - 1), rel=1e-3)
    assert late.step == pytest.approx(6.0 * m, rel=1e-3)
    assert sync.bubble == pytest.approx((stages - 1) / (m + stages - 1), abs=1e-3)
    assert late.bubble == pytest.approx(0.0, abs=1e-3)


def test_the_slowest_stage_sets_the_pace_and_updates_take_their_part() -> None:
    slow = replace(PROFILE, forward=Reading(flops=int(2e12)), update=Reading(moved=int(50e9), flops=int(0.5e12)))
    late = predict(schedules(2, 1, 1), [[PROFILE] * 4, [slow] * 4], 4, SPEEDS, 1)
    assert late.stages[1].update == pytest.approx(1.0 + 1.0)
    assert late.step == pytest.approx(4 * 8.0 + 2.0, rel=1e-3)
    assert late.stages[0].busy == pytest.approx(4 * 6.0 / late.step, rel=1e-3)


def test_accumulation_takes_as_many_batches() -> None:
    assert of(2, 2, 1, accumulated=3).step == pytest.approx(3 * of(2, 2, 1).step, rel=1e-3)


def test_a_slow_link_between_nodes_is_where_the_nodes_meet() -> None:
    sent = Header(0, tensors=(TensorInfo((1000, 1000), torch.float32, True),))  # 4 s over the network
    profile = replace(PROFILE, sent=sent)
    slow = predict(schedules(4, 1), [[profile] * 4] * 4, 4, replace(SPEEDS, per_node=2), 1)
    assert [round(stage.hop, 2) for stage in slow.stages] == [0.0, 4.0, 0.0, 0.0]
    assert slow.step > 1.2 * of(4, 4, 1).step
    # Rank 0 is the last stage: of three stages the first one stands alone.
    odd = predict(schedules(3, 1), [[profile] * 4] * 3, 4, replace(SPEEDS, per_node=2), 1)
    assert [round(stage.hop) for stage in odd.stages] == [4, 0, 0]


def test_the_replica_with_the_slowest_link_counts() -> None:
    profile = replace(PROFILE, sent=Header(0, tensors=(TensorInfo((1000, 1000), torch.float32, True),)))

    def hops(stages: int, per_node: int, **placed: Any) -> list[int]:
        speeds = replace(SPEEDS, per_node=per_node)
        return [
            round(s.hop) for s in predict(schedules(stages, 1), [[profile] * 4] * stages, 4, speeds, 2, **placed).stages
        ]

    assert hops(2, 2) == [0, 0]
    assert hops(2, 2, placement="pipeline_across_nodes") == [4, 0]
    assert hops(3, 4) == [0, 4, 0]  # ranks 0 to 3 are the first replica and the last stage of the second


def test_replicas_sum_their_gradients_beside_other_work_if_there_is_any() -> None:
    profile = replace(PROFILE, gradients=int(2e9))
    speeds = replace(SPEEDS, device=replace(DEVICE, link=1.0))
    sync, late = (predict(schedules(2, d, d), [[profile] * 4] * 2, 4, speeds, 2) for d in (0, 1))
    assert sync.stages[0].reduction == pytest.approx(2.0, rel=1e-3)  # 2 * (D - 1) / D of 2 GB at 1 GB/s
    assert sync.step == pytest.approx(of(2, 4, 0).step + 2.0, rel=1e-3)
    assert late.step == pytest.approx(of(2, 4, 1).step, rel=1e-3)


def test_simulated_updates_and_reductions() -> None:
    lanes = simulate(schedules(1, 0), 2, 2, update=0.5, reduction=lambda stage, t: 1.0 + t)
    updates = [span for span in lanes[0] if span.kind is Kind.UPDATE]
    assert [(span.start, span.end) for span in updates] == [(7.0, 7.5), (15.5, 16.0)]


def test_a_link_carries_one_message_at_a_time_in_each_direction() -> None:
    lanes = simulate(schedules(3, 0), 1, 2, hop=0.5, transfer=lambda stage: [10.0, 1.0][stage])
    begins = [{str(Action(span.kind, span.index)): span.start for span in lane} for lane in lanes]
    # The second forward of stage 0 ends at 2 and is sent when the first one is through, at 11.
    assert [(begin["F0"], begin["F1"]) for begin in begins] == [(0.0, 1.0), (11.5, 21.5), (14.0, 24.0)]
    # Stage 1 has two in flight: B0 follows F1, at 22.5, and B1 has arrived at 28.5.
    assert (begins[1]["B0"], begins[1]["B1"]) == (22.5, 28.5)
    # Their gradients, from 24.5 to 34.5 and from there to 44.5.
    assert (begins[0]["B0"], begins[0]["B1"]) == (35.0, 45.0)
    # The control message waits for nothing but the hops.
    assert [begin["U0"] for begin in begins] == [47.0, 47.5, 47.5]


def test_kinds_of_devices_are_plausible_and_have_sources() -> None:
    for device in DEVICES.values():
        assert device.source
        assert device.memory_gib > 10 or not device.is_gpu
        assert device.link >= device.network
        assert 0 <= default_reserve(device) < 0.2 * device.memory_gib or not device.is_gpu
