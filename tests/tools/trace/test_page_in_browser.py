"""The timeline in a real browser: it draws without an error, zooms, and says what lies under the pointer."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_asyncpp.tools.trace.trace import main
from tests.tools.trace.browser import Page, find_browser
from tests.tools.trace.synthetic import Recording

BROWSER = find_browser()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on the PATH: install one to check the page"),
]
RECORDING = Recording(
    stages=4, replicas=2, micro_batches=8, mini_batches=6, lookahead=1, forward=[0.01, 0.01, 0.015, 0.01]
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    RECORDING.write(folder / "trace")
    main([str(folder / "trace"), "--html", str(folder / "page.html")])
    return folder / "page.html"


@pytest.fixture
def page(file: Path) -> Iterator[Page]:
    assert BROWSER is not None
    with Page(BROWSER, file) as page:
        yield page
        assert page.errors == []
        assert page.requests == [file.absolute().as_uri()]


def test_no_column_is_cut_off_at_1400_pixels(file: Path, tmp_path: Path) -> None:
    """Also where time went to every cause that there is, and figures are long."""
    before, data, after = re.split(r'(?<=type="application/json">)(.*?)(?=</script>)', file.read_text(), maxsplit=1)
    content = json.loads(data)
    for row in [*content["summary"]["rows"], content["summary"]["total"]]:
        row["shares"] = {cause: max(share, 0.123) for cause, share in row["shares"].items()}
        row |= {
            "forward_ms": 1234.56,
            "backward_ms": 2345.67,
            "bytes_sent": 876_500_000_000,
            "versions": [99000, 99999],
        }
        row["staleness"] = "0.00-0.75"
    wide = tmp_path / "wide.html"
    wide.write_text(before + json.dumps(content) + after)
    assert BROWSER is not None
    with Page(BROWSER, wide, size=(1400, 900)) as page:
        widths = "(() => {const t = document.getElementById('table'); return [t.scrollWidth, t.clientWidth];})()"
        needed, there_is = page.evaluate(widths)
        assert needed <= there_is
        assert page.evaluate("document.querySelectorAll('#table tr:first-child th').length") == 21
        assert page.evaluate("document.documentElement.scrollWidth") <= 1400


def view(page: Page) -> tuple[float, float]:
    start, end = page.evaluate("[asyncppTrace.view.start, asyncppTrace.view.end]")
    return start, end


def length(page: Page) -> float:
    """Of the recording, in milliseconds."""
    found: float = page.evaluate("asyncppTrace.model.length")
    return found


def place_of(page: Page, lane: int, kind: int, index: int) -> tuple[float, float]:
    """Where the middle of a span is in the window."""
    page.frame()
    x, y = page.evaluate(f"""(() => {{
        const t = asyncppTrace, lane = t.model.lanes[{lane}], box = t.painter.canvas.getBoundingClientRect();
        const i = lane.kinds.findIndex((kind, i) => kind === {kind} && lane.indices[i] === {index});
        const x = t.painter.x(t.view, (lane.start[i] + lane.end[i]) / 2) / t.painter.ratio;
        return [box.left + x, box.top + t.painter.place.tops[{lane}] + t.painter.place.height / 2];
    }})()""")
    return x, y


def tooltip(page: Page) -> dict[str, str] | None:
    found: dict[str, str] | None = page.evaluate("""(() => {
        const tip = document.getElementById("tip");
        if (tip.hidden) return null;
        const names = [...tip.querySelectorAll("dt")], values = [...tip.querySelectorAll("dd")];
        return {title: tip.querySelector("b").textContent,
          ...Object.fromEntries(names.map((name, i) => [name.textContent, values[i].textContent]))};
    })()""")
    return found


def choose(page: Page, control: str, value: str | int) -> None:
    """Give a control of the page another value."""
    element = f"document.getElementById('{control}')"
    page.evaluate(f"{element}.value = '{value}'; {element}.dispatchEvent(new Event('change'))")
    page.frame()


def pixels(page: Page) -> int:
    """How many different colours are on the canvas: an empty one has a few."""
    colours: int = page.evaluate("""(() => {
        const canvas = asyncppTrace.painter.canvas, context = canvas.getContext("2d");
        return new Set(new Uint32Array(context.getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size;
    })()""")
    return colours


def test_it_draws_all_lanes_and_the_table(page: Page) -> None:
    assert view(page) == pytest.approx((0, length(page)), abs=1e-6)
    assert page.evaluate("asyncppTrace.painter.painted") == page.evaluate(
        "asyncppTrace.model.lanes.reduce((sum, lane) => sum + lane.count, 0)"
    )
    assert pixels(page) > 6
    rows = page.evaluate("[...document.querySelectorAll('table tr')].map((row) => row.innerText)")
    assert len(rows) == 1 + 8 + 1
    busy = page.evaluate("asyncppTrace.model.summary.rows[0].utilisation")
    assert busy == pytest.approx(6 * 8 * 30 / length(page))
    assert f"{100 * busy:.1f}" in rows[1]
    assert page.evaluate("document.getElementById('legend').innerText").split("\n")[:2] == ["forward", "backward"]


def test_the_wheel_zooms_around_the_pointer_and_culls(page: Page) -> None:
    x, y = place_of(page, 1, 0, 20)
    before = page.evaluate(f"asyncppTrace.timeAt({x} - document.getElementById('lanes').getBoundingClientRect().left)")
    all_spans = page.evaluate("asyncppTrace.painter.painted")
    for _ in range(4):
        page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-300)
    start, end = view(page)
    assert end - start < length(page) / 4
    after = page.evaluate(f"asyncppTrace.timeAt({x} - document.getElementById('lanes').getBoundingClientRect().left)")
    assert after == pytest.approx(before, abs=1.5)  # the pointer stands on whole pixels
    assert page.evaluate("asyncppTrace.painter.painted") < all_spans / 3
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=5000)
    assert view(page) == pytest.approx((0, length(page)), abs=1e-6)


def test_the_pointer_is_told_what_lies_under_it(page: Page) -> None:
    page.mouse("mouseMoved", *place_of(page, 1, 1, 20))
    assert tooltip(page) == {
        "title": "backward", "stage": "r0 stage 1", "micro-batch": "20", "mini-batch": "2", "weights": "W1",
        "staleness": "1", "takes": "20.00 ms", "from": tooltip(page)["from"],  # type: ignore[index]
    }  # fmt: skip
    page.evaluate("asyncppTrace.show(0, 200)")
    page.frame()
    page.mouse("mouseMoved", *place_of(page, 4, 4, 0))
    found = tooltip(page)
    assert found is not None
    assert (found["title"], found["stage"]) == ("wait: gradient", "r1 stage 0")
    page.mouse("mouseMoved", 2, 2)
    assert tooltip(page) is None


def test_a_message_shows_its_bytes(page: Page) -> None:
    page.evaluate("asyncppTrace.show(9, 11)")
    page.frame()
    x, y = place_of(page, 0, 7, 0)
    height = page.evaluate("asyncppTrace.painter.place.height")
    page.mouse("mouseMoved", x, y - height / 2 + 2)
    found = tooltip(page)
    assert found is not None
    assert (found["title"], found["bytes"]) == ("send", "1,000 (1.0 kB)")


def test_keys_buttons_and_dragging_move_the_view(page: Page) -> None:
    page.key("+")
    start, end = view(page)
    assert end - start == pytest.approx(0.6 * length(page))
    page.key("ArrowRight")
    assert view(page)[0] > start
    page.evaluate("document.getElementById('left').click()")
    page.key("0")
    assert view(page) == pytest.approx((0, length(page)), abs=1e-6)
    page.evaluate("asyncppTrace.show(500, 700)")
    page.frame()
    y = place_of(page, 0, 1, 20)[1]
    page.mouse("mousePressed", 800, y, button="left", clickCount=1)
    page.mouse("mouseMoved", 700, y, button="left")
    page.mouse("mouseReleased", 700, y, button="left", clickCount=1)
    assert view(page)[0] > 505
    choose(page, "go", 3)
    page.frame()
    shown = view(page)
    assert 300 < shown[0] < 1200 < shown[1] < length(page)


def test_what_is_hidden_in_the_legend_is_not_drawn(page: Page) -> None:
    before = page.evaluate("asyncppTrace.painter.painted")
    page.evaluate("document.querySelector('#legend .key').click()")
    page.frame()
    assert page.evaluate("asyncppTrace.painter.painted") == before - 8 * 48


def test_weight_versions_have_colours(page: Page) -> None:
    page.evaluate("asyncppTrace.show(400, 700)")
    page.frame()
    choose(page, "colours", "version")
    page.frame()
    assert page.evaluate("document.getElementById('hues').hidden") is False
    assert pixels(page) > 8


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark(file: Path, dark: bool, tmp_path: Path) -> None:
    assert BROWSER is not None
    with Page(BROWSER, file, dark=dark) as page:
        assert page.evaluate("document.documentElement.dataset.theme") == ("dark" if dark else "light")
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
        page.evaluate("document.getElementById('theme').click()")
        assert page.evaluate("document.documentElement.dataset.theme") == ("light" if dark else "dark")
        page.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 20_000
        assert page.errors == []


def test_a_hundred_thousand_spans_on_32_stages_stay_quick(tmp_path: Path) -> None:
    """A frame takes tens of milliseconds on an idle core; the bound leaves room for a busy one."""
    Recording(stages=32, micro_batches=64, mini_batches=16, lookahead=1).write(tmp_path / "trace")
    main([str(tmp_path / "trace"), "--html", str(tmp_path / "page.html")])
    assert BROWSER is not None
    begun = time.monotonic()
    with Page(BROWSER, tmp_path / "page.html") as page:
        assert time.monotonic() - begun < 30
        drawn: dict[str, Any] = page.evaluate("""(() => {
            const {painter, view} = asyncppTrace, times = [];
            for (let i = 0; i < 7; i++) {
                const begun = performance.now();
                painter.draw(view, null);
                times.push(performance.now() - begun);
            }
            return {ms: times.sort((a, b) => a - b)[3], painted: painter.painted};
        })()""")
        assert drawn["painted"] > 100_000
        assert drawn["ms"] < 250
        assert page.errors == []
