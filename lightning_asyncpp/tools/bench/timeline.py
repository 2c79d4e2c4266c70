"""Timelines of pipeline stages as a self-contained SVG: one lane per stage, panels below each other on one scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from lightning_asyncpp.core.schedule import Kind, Schedule
from lightning_asyncpp.core.trace import Span

# class -> (colour in light mode, colour in dark mode); the light one is also the attribute, for simple renderers.
_PALETTE = {
    "page": ("#ffffff", "#14171c"),
    "lane": ("#eceff3", "#242a33"),
    "ink": ("#1f2933", "#e4e9ef"),
    "dim": ("#5c6875", "#9aa7b5"),
    "line": ("#cfd6de", "#39424e"),
    "forward": ("#4c8fdb", "#5b9be6"),
    "backward": ("#f0a136", "#e59a33"),
    "update": ("#b02a5b", "#ff6b9d"),
}
_VERSION_HUES = (("#3f7fca", "#a8caee"), ("#d9822b", "#f6cf9b"), ("#3f9b63", "#b3dfc2"), ("#9556b8", "#dcbfea"))
_LABELS = {"on-strong": "#ffffff", "on-light": "#1f2933"}  # on boxes that look the same in both modes
_WIDTH, _LEFT, _RIGHT = 1120.0, 74.0, 22.0
_LANE, _GAP, _PANEL_HEAD, _PANEL_FOOT = 22.0, 4.0, 32.0, 10.0
_TOP, _AXIS, _LEGEND = 36.0, 42.0, 34.0
_MARKER = 2.5  # an update is a moment compared with a forward: drawn as a line that can be seen
_NAMES: dict[object, str] = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.UPDATE: "update"}
_LEGEND_ENTRIES = (("forward", "forward"), ("backward", "backward"), ("update", "update"), ("lane", "idle"))


@dataclass
class Drawing:
    """An SVG picture in the making.

    Attributes:
        width, height: in pixels.
        title: also what screen readers say.
    """

    width: float
    height: float
    title: str
    _parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, style: str, tip: str = "") -> None:
        """A filled rectangle; ``tip`` shows when the pointer rests on it."""
        fill = f'"{fill_of(style)}"'
        shape = f'x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.3):.2f}" height="{height:.2f}"'
        if tip:
            self._parts.append(f'<rect class="{style}" fill={fill} {shape}><title>{escape(tip)}</title></rect>')
        else:
            self._parts.append(f'<rect class="{style}" fill={fill} {shape}/>')

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A thin line."""
        ends = f'x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"'
        self._parts.append(f'<line class="rule" stroke="{_PALETTE["line"][0]}" stroke-width="1" {ends}/>')

    def text(
        self, x: float, y: float, content: str, style: str = "ink", size: float = 12, anchor: str = "start",
        bold: bool = False,
    ) -> None:  # fmt: skip
        """Text whose baseline is at ``y``."""
        weight = ' font-weight="600"' if bold else ""
        attributes = f'class="{style}" fill="{fill_of(style)}" font-size="{size:g}" text-anchor="{anchor}"{weight}'
        self._parts.append(f'<text {attributes} x="{x:.2f}" y="{y:.2f}">{escape(content)}</text>')

    def render(self) -> str:
        """The picture as a self-contained SVG document."""
        size = f'width="{self.width:g}" height="{self.height:g}"'
        fonts = "system-ui, Segoe UI, Helvetica, Arial, sans-serif"
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {self.width:g} {self.height:g}" role="img"'
            f' font-family="{fonts}">',
            f"<title>{escape(self.title)}</title>",
            f"<style>{_style()}</style>",
            f'<rect class="page" fill="{_PALETTE["page"][0]}" {size} rx="6"/>',
        ]
        return "\n".join([*head, *self._parts, "</svg>", ""])


def version_style(version: int, light: bool) -> str:
    """Style of a box that belongs to weight version ``version``: ``light`` for forwards, else for backwards."""
    return f"v{version % len(_VERSION_HUES)}{'f' if light else 'b'}"


def on_version(light: bool) -> str:
    """Style of text on such a box."""
    return "on-light" if light else "on-strong"


def fill_of(style: str) -> str:
    """Colour of a style in light mode."""
    if style in _PALETTE:
        return _PALETTE[style][0]
    if style in _LABELS:
        return _LABELS[style]
    strong, light = _VERSION_HUES[int(style[1])]
    return light if style.endswith("f") else strong


def _style() -> str:
    dark = "".join(f".{name}{{fill:{colour}}}" for name, (_, colour) in _PALETTE.items())
    return f"@media (prefers-color-scheme:dark){{{dark}.rule{{stroke:{_PALETTE['line'][1]}}}}}"


@dataclass(frozen=True)
class Paint:
    """How a span is drawn: its style, and what is written in it in which style."""

    style: str
    label: str = ""
    label_style: str = "ink"


@dataclass(frozen=True)
class Panel:
    """One run of a pipeline.

    Attributes:
        title: what ran.
        lanes: spans of each stage, the first stage first, on one clock.
        start: when the drawing begins on that clock.
        paint: how spans are drawn.
    """

    title: str
    lanes: Sequence[Sequence[Span]]
    start: float
    paint: Callable[[Span], Paint] = lambda span: Paint(_NAMES[span.kind])


@dataclass(frozen=True)
class Axis:
    """The time axis.

    Attributes:
        length: how much time is drawn, in the unit of the spans.
        factor: what a label shows of one such unit.
        unit: name of what a label shows.
    """

    length: float
    factor: float = 1e3
    unit: str = "ms"


def draw_timelines(
    title: str, panels: Sequence[Panel], axis: Axis, legend: Sequence[tuple[str, str]] = _LEGEND_ENTRIES
) -> str:
    """Draw runs below each other, on the same time scale.

    Args:
        title: of the whole picture.
        panels: the runs.
        axis: how much of each is drawn, and how time is labelled.
        legend: styles, and what they mean; a style ``a/b`` shows two halves.

    Returns:
        An SVG document.
    """
    heights = [_PANEL_HEAD + len(panel.lanes) * (_LANE + _GAP) + _PANEL_FOOT for panel in panels]
    drawing = Drawing(_WIDTH, _TOP + sum(heights) + _AXIS + _LEGEND, title)
    drawing.text(20, 28, title, size=17, bold=True)
    scale = (_WIDTH - _LEFT - _RIGHT) / axis.length
    y = _TOP
    for panel, height in zip(panels, heights):
        _draw_panel(drawing, panel, axis, y, scale)
        y += height
    _draw_axis(drawing, axis, _TOP + _PANEL_HEAD, y, scale)
    _draw_legend(drawing, legend, y + _AXIS)
    return drawing.render()


def by_version(schedule: Schedule, micro_batches: int) -> Callable[[Span], Paint]:
    """Colour by the weight version that a micro-batch runs on, and write its number into the box."""

    def paint(span: Span) -> Paint:
        if span.kind is Kind.UPDATE:
            return Paint("update")
        version = schedule.stage_rule.version(*divmod(span.index, micro_batches))
        light = span.kind is Kind.FORWARD
        return Paint(version_style(version, light), str(span.index), on_version(light))

    return paint


def _draw_panel(drawing: Drawing, panel: Panel, axis: Axis, top: float, scale: float) -> None:
    drawing.text(_LEFT, top + _PANEL_HEAD - 9, panel.title, size=13, bold=True)
    for stage, spans in enumerate(panel.lanes):
        y = top + _PANEL_HEAD + stage * (_LANE + _GAP)
        drawing.text(_LEFT - 8, y + _LANE / 2 + 4, f"stage {stage}", style="dim", anchor="end")
        drawing.box(_LEFT, y, axis.length * scale, _LANE, "lane")
        # Updates last: a marker must not vanish below the forward that follows it.
        work = [span for span in spans if isinstance(span.kind, Kind)]
        for span in sorted(work, key=lambda span: span.kind is Kind.UPDATE):
            _draw_span(drawing, panel, axis, span, y, scale)


def _draw_span(drawing: Drawing, panel: Panel, axis: Axis, span: Span, y: float, scale: float) -> None:
    start, end = max(span.start - panel.start, 0.0), min(span.end - panel.start, axis.length)
    if end < start or start >= axis.length:
        return
    paint = panel.paint(span)
    took = (span.end - span.start) * axis.factor
    tip = f"{_NAMES[span.kind]} {span.index}" + (f": {took:.3g} {axis.unit}" if took else "")
    x, width = _LEFT + start * scale, (end - start) * scale
    if span.kind is Kind.UPDATE:
        drawing.box(x, y - 2, max(width, _MARKER), _LANE + 4, paint.style, tip)
        return
    drawing.box(x, y, max(width - 0.6, 0.4), _LANE, paint.style, tip)
    if paint.label and width > 6.5 * len(paint.label) + 2:
        drawing.text(x + width / 2 - 0.3, y + _LANE / 2 + 4, paint.label, paint.label_style, size=11, anchor="middle")


def _draw_axis(drawing: Drawing, axis: Axis, top: float, y: float, scale: float) -> None:
    drawing.line(_LEFT, y, _LEFT + axis.length * scale, y)
    step = _tick_step(axis.length * axis.factor)
    for number in range(int(axis.length * axis.factor / step + 1e-9) + 1):
        x = _LEFT + number * step / axis.factor * scale
        drawing.line(x, y, x, y + 5)
        drawing.text(x, y + 18, f"{number * step:g}", style="dim", anchor="middle")
    drawing.text(_LEFT - 8, y + 18, axis.unit, style="dim", anchor="end")


def _tick_step(length: float) -> float:
    """A step of 1, 2 or 5 times a power of ten that gives at most twelve ticks."""
    step = 1e-3
    while True:
        for factor in (1, 2, 5):
            if length / (step * factor) <= 12:
                return step * factor
        step *= 10


def _draw_legend(drawing: Drawing, legend: Sequence[tuple[str, str]], y: float) -> None:
    x = _LEFT
    for style, meaning in legend:
        halves = style.split("/")
        for number, half in enumerate(halves):
            drawing.box(x + number * 26 / len(halves), y, 26 / len(halves), 14, half)
        drawing.text(x + 32, y + 11.5, meaning)
        x += 32 + 7.0 * len(meaning) + 22
