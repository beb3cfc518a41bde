"""What titan needs of Hugging Face's hub, on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Repositories:
    """What the hub has.

    Attributes:
        files: of each repository (with datasets/ before a dataset's name) the content by path.
        gated: repositories that need the token.
        token: which.
        requests: the requests so far.
    """

    files: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    token: str = "hf_secret"
    requests: list[str] = field(default_factory=list)
    url: str = ""


@contextlib.contextmanager
def serve_repositories(repositories: Repositories) -> Iterator[Repositories]:
    """The hub, until the end of the block."""
    handler = type("Handler", (_Handler,), {"hub": repositories})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    repositories.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield repositories
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Repositories
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer_request()

    def do_HEAD(self) -> None:
        self._answer_request()

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        self._answer_request(self.rfile.read(size))

    def log_message(self, *arguments: Any) -> None:
        pass

    def _answer_request(self, body: bytes = b"") -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.requests.append(f"{self.command} {path}")
        for name, files in self.hub.files.items():
            api = f"api/{name if name.startswith('datasets/') else 'models/' + name}"
            if path == api or path.startswith((f"{api}/", f"{name}/resolve/")):
                return self._answer_repository(name, files, path.removeprefix(api).removeprefix(name).strip("/"), body)
        return self._send_error(401 if not self._has_token() else 404, "RepoNotFound")

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def _answer_repository(self, name: str, files: dict[str, bytes], rest: str, body: bytes) -> None:
        kind, _, rest = rest.partition("/")
        revision, _, path = rest.partition("/")
        if revision not in ("", "main", COMMIT):
            return self._send_error(404, "RevisionNotFound")
        if name in self.hub.gated and not self._has_token() and kind == "resolve":
            return self._send_error(403 if self.headers.get("Authorization") else 401, "GatedRepo")
        if kind == "resolve":
            return self._send_file(files, path)
        if kind == "tree":
            return self._send_tree(files, f"{path}/" if path else "")
        if kind == "paths-info":
            paths = json.loads(body)["paths"] if body.startswith(b"{") else []
            return self._send_json([_build_entry(p, data) for p, data in files.items() if p in paths])
        info = {"id": name.removeprefix("datasets/"), "sha": COMMIT, "siblings": [{"rfilename": p} for p in files]}
        return self._send_json(info | {"private": False, "downloads": 0, "likes": 0, "tags": []})

    def _send_tree(self, files: dict[str, bytes], folder: str) -> None:
        deep = "recursive=true" in self.path.lower()
        below = {p.removeprefix(folder): data for p, data in files.items() if p.startswith(folder)}
        if not below:
            return self._send_error(404, "EntryNotFound")
        folders = sorted({p.partition("/")[0] for p in below if "/" in p})
        entries = [{"type": "directory", "path": folder + name, "size": 0, "oid": "0" * 40} for name in folders]
        return self._send_json(
            entries + [_build_entry(folder + p, data) for p, data in below.items() if deep or "/" not in p]
        )

    def _send_file(self, files: dict[str, bytes], path: str) -> None:
        if path not in files:
            return self._send_error(404, "EntryNotFound")
        data, status, extra = files[path], 200, {}
        byte_range = self.headers.get("Range", "")
        if byte_range.startswith("bytes="):
            first, _, last = byte_range.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last or len(data) - 1), len(data) - 1)
            extra = {"Content-Range": f"bytes {begin}-{end}/{len(data)}"}
            data, status = data[begin : end + 1], 206
        self._send_content(status, data, extra | {"ETag": f'"{_compute_hash(files[path])}"', "X-Repo-Commit": COMMIT})

    def _send_json(self, content: Any) -> None:
        self._send_content(
            200, json.dumps(content).encode(), {"Content-Type": "application/json", "X-Repo-Commit": COMMIT}
        )

    def _send_error(self, status: int, code: str) -> None:
        self._send_content(status, b"", {"X-Error-Code": code, "X-Error-Message": code, "X-Repo-Commit": COMMIT})

    def _send_content(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _compute_hash(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _build_entry(path: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(data), "oid": _compute_hash(data)}
