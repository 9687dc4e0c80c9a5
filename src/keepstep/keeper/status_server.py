"""HTTP on the keeper's second socket: GET /status, /metrics, /healthz.

curl, the command line and the dashboard read the same values:
    curl --unix-socket <runtime dir>/<key>/http.sock http://keeper/status
"""

from __future__ import annotations

import socket
import socketserver
import threading
from concurrent.futures import CancelledError, Future
from http.server import BaseHTTPRequestHandler
from typing import Any

import msgspec

from keepstep.keeper.status import metrics
from keepstep.keeper.workers.results import Result, Results
from keepstep.types import Status

REQUEST_S = 10.0
STATUS_S = 5.0  # for the loop to read the status
MAX_REQUESTS = 16
POLL_S = 0.1  # how long the end of a keeper may wait for this thread


class StatusRequest(Result):
    """A thread waits for the status; the loop answers it."""

    def __init__(self) -> None:
        self._status: Future[Status] = Future()

    def answer(self, status: Status) -> None:
        self._status.set_result(status)

    def wait(self) -> Status:
        """Raises TimeoutError, or CancelledError when the keeper has ended."""
        return self._status.result(STATUS_S)

    def close(self) -> None:
        self._status.cancel()


class StatusServer:
    """Serves GET requests in threads of their own; the keeper's loop reads the status for them."""

    def __init__(self, sock: socket.socket, results: Results) -> None:
        self._server = _Server(sock, results)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="keepstep-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(timeout=5)


class _Server(socketserver.ThreadingMixIn, socketserver.BaseServer):
    daemon_threads = True
    block_on_close = False
    _seats = threading.BoundedSemaphore(MAX_REQUESTS)

    def __init__(self, sock: socket.socket, results: Results) -> None:
        super().__init__("keeper", _Request)
        self.socket = sock
        self.results = results

    def fileno(self) -> int:
        return self.socket.fileno()

    def get_request(self) -> tuple[socket.socket, Any]:
        sock, _ = self.socket.accept()
        sock.settimeout(REQUEST_S)
        return sock, ("keeper", 0)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._seats.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            request.close()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._seats.release()

    def shutdown_request(self, request: Any) -> None:
        request.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no event."""


class _Request(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        if self.path == "/healthz":
            self._send(200, "text/plain", b"ok\n")
            return
        if self.path not in ("/status", "/metrics"):
            self._send(404, "text/plain", b"try /status, /metrics or /healthz\n")
            return
        request = StatusRequest()
        self.server.results.put(request)
        try:
            status = request.wait()
        except (TimeoutError, CancelledError):
            self._send(503, "text/plain", b"the keeper is busy\n")
            return
        if self.path == "/status":
            self._send(200, "application/json", msgspec.json.encode(status))
        else:
            self._send(200, "text/plain; version=0.0.4", metrics(status))

    def _send(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not worth a line each."""
