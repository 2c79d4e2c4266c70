"""The report: what was found, for people, for other programs, and as a table for the terminal."""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lightning_asyncpp.tools.doctor.machine import Machine
from lightning_asyncpp.tools.doctor.parts import Result, shortened
from lightning_asyncpp.tools.doctor.task import Finding, worst
from lightning_asyncpp.tools.text import aligned

LOG_CHARACTERS = 12_000
"""Of each part, so that the report fits an issue, which GitHub ends at 65,536; more is in the other file."""
_HEADER = ["part", "result", "s", "failed", "warnings", "ok", "not checked"]
_IPV4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?!\w|\.\d)")
_COLONS = re.compile(r"(?<![\w:.])[0-9A-Fa-f]*:[0-9A-Fa-f:]*(?:[0-9A-Fa-f]|::)(?!\w|:[\w:])")
"""What may be an address of IPv6, or of hardware."""


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def as_json(results: Sequence[Result], machine: Machine | None, quick: bool) -> dict[str, Any]:
    """Everything; ``status`` is that of the whole."""
    content = {
        "status": worst(result.status for result in results),
        "written": _now(),
        "quick": quick,
        "machine": None if machine is None else asdict(machine),
        "parts": [
            {
                "name": result.part.name, "title": result.part.title, "status": result.status,
                "seconds": round(result.seconds, 1), "limit_seconds": result.part.limit,
                "findings": [asdict(finding) for finding in result.findings], "log": result.log,
            }
            for result in results
        ],
        "not_checked": [{"what": finding.title, "why": finding.text} for finding in not_checked(results)],
    }  # fmt: skip
    scrubbed: dict[str, Any] = Scrubber()(content)
    return scrubbed


def as_markdown(results: Sequence[Result], machine: Machine | None, quick: bool) -> str:
    """The same to be pasted into an issue."""
    seconds = sum(result.seconds for result in results)
    status = worst(result.status for result in results)
    lines = [
        "# asyncpp doctor",
        "",
        f"{_where(machine)}. {'Quick, ' if quick else ''}{seconds:.0f} s, {_now()}: **{status}**.",
        "",
    ]
    rows = [_HEADER, ["---"] * len(_HEADER), *_counts(results)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    for result in results:
        lines += ["", f"## {result.part.title[0].upper()}{result.part.title[1:]}", ""]
        for finding in result.findings:
            lines += _paragraph(finding)
        if result.log:
            log = shortened(result.log, LOG_CHARACTERS).replace("```", "'''")
            lines += ["", "<details><summary>log</summary>", "", "```", log, "```", "", "</details>"]
    lines += ["", "## Not checked on this machine", ""]
    lines += [f"- {finding.title}: {finding.text}" for finding in not_checked(results)] or ["Nothing was left out."]
    text: str = Scrubber()("\n".join(lines) + "\n")
    return text


def summary(results: Sequence[Result]) -> str:
    """A table for the terminal, and what to do about what is wrong."""
    lines = [aligned([_HEADER, *_counts(results)])]
    for result in results:
        for finding in result.findings:
            if finding.status in ("failed", "warning"):
                fix = f"\n    {finding.fix}" if finding.fix else ""
                lines.append(f"{finding.status}: {finding.title}: {finding.text}{fix}")
    return "\n".join(lines)


def not_checked(results: Sequence[Result]) -> Iterator[Finding]:
    """What could not be checked, or was not to be."""
    for result in results:
        yield from (finding for finding in result.findings if finding.status == "skipped")


def line(finding: Finding) -> str:
    """A finding as progress on the terminal."""
    return f"  {finding.status:<8} {finding.title}: {finding.text}"


def _where(machine: Machine | None) -> str:
    if machine is None:
        return "The machine could not be looked at"
    if not machine.is_complete:
        facts = {**machine.packages, "driver": machine.driver or "none"}
        return f"{machine.system}, whose GPUs could not be looked at; {', '.join(map(' '.join, facts.items()))}"
    names = [gpu.name for gpu in machine.gpus]
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "no GPU"
    return f"{gpus}, {machine.cpus} CPU cores, torch {machine.packages.get('torch')}, {machine.system}"


def _counts(results: Sequence[Result]) -> Iterator[list[str]]:
    for result in results:
        statuses = [finding.status for finding in result.findings]
        counts = [str(statuses.count(status)) for status in ("failed", "warning", "ok", "skipped")]
        yield [result.part.name, result.status, f"{result.seconds:.0f}", *counts]


def _paragraph(finding: Finding) -> Iterator[str]:
    status = finding.status if finding.status == "ok" else f"**{finding.status}**"
    yield f"- {status}: {finding.title}: {finding.text}"
    # Those that are words stand in the text already.
    numbers = {name: value for name, value in finding.figures.items() if isinstance(value, (int, float))}
    if numbers:
        yield f"  ({', '.join(f'{name} {_figure(value)}' for name, value in numbers.items())})"
    for value in finding.figures.values():
        if "\n" in str(value):
            yield from ("", "  ```", *(f"  {row}" for row in str(value).splitlines()), "  ```", "")
    if finding.fix:
        yield f"  To do: {finding.fix}."


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Scrubber:
    """Replaces them in a text, or in all texts of lists and mappings, whose keys stay; loopback stays, too."""

    def __init__(self) -> None:
        self._names: list[tuple[re.Pattern[str], str]] = []
        with contextlib.suppress(RuntimeError):
            if len(home := str(Path.home())) > 1:  # "/" in some containers
                self._names.append((re.compile(rf"{re.escape(home)}(?![\w.-])"), "~"))
        for host in _hosts():
            self._names.append((re.compile(rf"(?<![\w-]){re.escape(host)}(?![\w-])", re.IGNORECASE), "<host>"))
        with contextlib.suppress(KeyError, OSError):
            # Not in every place: it may be a word, such as "torch".
            user = re.escape(getpass.getuser())
            self._names.append((re.compile(rf"(?<=[/_]){user}(?!\w)|(?<!\w){user}(?=@)"), "<user>"))

    def __call__(self, value: Any) -> Any:
        """The same without them."""
        if isinstance(value, dict):
            return {key: self(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self(one) for one in value]
        return self._text(value) if isinstance(value, str) else value

    def _text(self, text: str) -> str:
        for pattern, instead in self._names:
            text = pattern.sub(instead, text)
        return _COLONS.sub(_address, _IPV4.sub(_address, text))


def _hosts() -> list[str]:
    """This machine's name, and its short form."""
    name = socket.gethostname()
    return [host for host in dict.fromkeys((name, name.partition(".")[0])) if host not in ("", "localhost")]


def _address(match: re.Match[str]) -> str:
    text = match[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return "<address>" if text.count(":") >= 5 else text  # of hardware, or cut off
    return text if address.is_loopback or address.is_unspecified else "<address>"
