"""A stand-in for the Hugging Face Hub on this machine: the answers that its client asks for, over HTTP."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"
BROKEN_OFF = 0


class StandIn(ThreadingHTTPServer):
    """Serves ``root/datasets/OWNER/NAME/...`` and ``root/models/OWNER/NAME/...``."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.ranges: list[tuple[str, str]] = []
        """Path and range of every request for content."""
        self.failures: Iterator[int | None] = iter(())
        """What becomes of the next requests for content: answered with this status, broken off, or (None) fulfilled."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving(root: Path) -> Iterator[StandIn]:
    server = StandIn(root)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: StandIn
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(body)

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, body: bytes = b"") -> None:
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/api/(datasets|models)/([^/]+/[^/]+)(?:/revision/[^/]+)?", path):
            self._information(*found.groups())
        elif found := re.fullmatch(r"/api/(datasets)/([^/]+/[^/]+)/tree/[^/]+/?(.*)", path):
            self._tree(*found.groups())
        elif found := re.fullmatch(r"/api/(datasets)/([^/]+/[^/]+)/paths-info/[^/]+", path):
            paths = json.loads(body)["paths"] if body.startswith(b"{") else re.findall(rb"paths=([^&]+)", body)
            self._paths(*found.groups(), [p if isinstance(p, str) else unquote(p.decode()) for p in paths])
        elif found := re.fullmatch(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            kind, repository, inside = found.groups()
            self._content(self.server.root / (kind or "models") / repository / inside)
        else:
            self._missing("EntryNotFound")

    def _information(self, kind: str, repository: str) -> None:
        if not (self.server.root / kind / repository).is_dir():
            return self._missing("RepoNotFound")
        return self._json({"id": repository, "sha": SHA, "siblings": []})

    def _tree(self, kind: str, repository: str, inside: str) -> None:
        folder = self.server.root / kind / repository
        recursive = "recursive=true" in self.path.lower()
        if not (folder / inside).is_dir():
            return self._missing("EntryNotFound")
        paths = (folder / inside).rglob("*") if recursive else (folder / inside).iterdir()
        return self._json([self._entry(folder, path) for path in sorted(paths)])

    def _paths(self, kind: str, repository: str, paths: list[str]) -> None:
        folder = self.server.root / kind / repository
        self._json([self._entry(folder, folder / path) for path in paths if (folder / path).exists()])

    def _entry(self, folder: Path, path: Path) -> dict[str, Any]:
        name = path.relative_to(folder).as_posix()
        oid = hashlib.sha1(name.encode()).hexdigest()
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": oid, "size": 0}
        return {"type": "file", "path": name, "oid": oid, "size": path.stat().st_size}

    def _content(self, path: Path) -> None:
        if not path.is_file():
            return self._missing("EntryNotFound")
        wanted = self.headers.get("Range", "")
        if self.command == "GET":
            self.server.ranges.append((path.name, wanted))
            failure = next(self.server.failures, None)
            if failure == BROKEN_OFF:
                self.close_connection = True
                return self._send(206, b"half", {"Content-Length": "8"})
            if failure is not None:
                return self._send(failure, b"")
        content = path.read_bytes()
        headers = {"ETag": '"etag"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", wanted):
            start, stop = int(found[1]), min(int(found[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{stop}/{len(content)}"
            return self._send(206, content[start : stop + 1], headers)
        return self._send(200, content, headers)

    def _json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _missing(self, code: str) -> None:
        self._send(404, b'{"error": "not found"}', {"X-Error-Code": code, "Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
