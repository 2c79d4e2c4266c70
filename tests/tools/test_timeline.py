from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.core.trace import Span
from lightning_asyncpp.tools.bench.bench import main
from lightning_asyncpp.tools.bench.draw import draw_schedules
from lightning_asyncpp.tools.bench.timeline import Axis, Panel, draw_timelines

SVG = "{http://www.w3.org/2000/svg}"


def texts(document: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(document).iter(f"{SVG}text")]


def boxes(document: str, style: str) -> list[ElementTree.Element]:
    return [box for box in ElementTree.fromstring(document).iter(f"{SVG}rect") if box.get("class") == style]


def test_measured_spans_become_boxes_in_proportion() -> None:
    lanes = [[Span(Kind.FORWARD, 0, 5.0, 5.1), Span(Kind.BACKWARD, 0, 5.2, 5.4), Span(Kind.UPDATE, 0, 5.4, 5.4001)]]
    document = draw_timelines("a < b & c", [Panel("only", lanes, start=5.0)], Axis(0.5))
    assert {"a < b & c", "only", "stage 0", "ms", "forward", "backward", "update", "idle"} <= set(texts(document))
    forward, backward = boxes(document, "forward")[0], boxes(document, "backward")[0]
    assert float(backward.get("width", 0)) == pytest.approx(2 * float(forward.get("width", 0)), rel=0.02)
    assert len(boxes(document, "update")) == 2  # one span, one in the legend


def test_what_lies_outside_is_cut_off() -> None:
    lanes = [[Span(Kind.FORWARD, 0, 0.0, 1.0), Span(Kind.FORWARD, 1, 4.0, 9.0), Span(Kind.FORWARD, 2, 9.0, 10.0)]]
    document = draw_timelines("t", [Panel("p", lanes, start=2.0)], Axis(4.0, 1.0, "s"))
    drawn = boxes(document, "forward")
    lane = boxes(document, "lane")[0]
    assert len(drawn) == 2
    end = float(drawn[0].get("x", 0)) + float(drawn[0].get("width", 0))
    assert end <= float(lane.get("x", 0)) + float(lane.get("width", 0))


def test_the_ideal_drawing_shows_every_micro_batch_and_the_versions() -> None:
    shown = texts(draw_schedules(stages=4, micro_batches=4, mini_batches=3))
    assert all(shown.count(str(k)) >= 2 * 4 * 2 for k in range(1, 10))  # two runs, four stages, forward and backward
    assert "on W1: forward, backward" in shown


def test_bench_draw_writes_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ideal.svg"
    main(["draw", "--stages", "3", "--micro-batches", "3", "--svg", str(file)])
    assert ElementTree.parse(file).getroot().tag == f"{SVG}svg"


def test_colours_follow_the_viewer_and_nothing_is_loaded() -> None:
    document = draw_schedules(2, 2)
    assert "prefers-color-scheme:dark" in document
    assert "href" not in document
    assert "url(" not in document
