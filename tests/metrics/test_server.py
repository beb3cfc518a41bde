"""Whether a tracker's server answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from titan.metrics.tracker_run import server_answers


class Status(BaseHTTPRequestHandler):
    """Answers with the status that the path names."""

    def do_GET(self) -> None:
        self.send_response(int(self.path.strip("/")))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Status) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "answers"), [(200, True), (401, True), (404, True), (500, True), (502, False), (503, False)]
)
def test_a_gateway_is_not_the_server_behind_it(address: str, status: int, answers: bool) -> None:
    assert server_answers(f"{address}/{status}", 5) is answers


def test_a_closed_port_does_not_answer(address: str) -> None:
    assert not server_answers("http://127.0.0.1:9", 5)
