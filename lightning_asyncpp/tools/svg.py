"""A little SVG, written by hand: boxes, lines and text that can be read in light and in dark mode."""

from __future__ import annotations

from dataclasses import dataclass, field
from xml.sax.saxutils import escape

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
