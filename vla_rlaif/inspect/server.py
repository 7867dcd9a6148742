"""The page's server: reads only, answers GET only, and everything is below ``/TOKEN/``. Listens on loopback unless told
otherwise. A thread a connection; all of them have deadlines.
"""

import contextlib
import errno
import http.server
import secrets
import socket
import sys
import threading
from http import HTTPStatus
from types import TracebackType
from urllib.parse import urlsplit

from vla_rlaif.inspect.routes import Answer, Routes
from vla_rlaif.inspect.settings import InspectSettings
from vla_rlaif.local_page.guard import is_loopback, refusal, rest_of_path
from vla_rlaif.local_page.headers import HEADERS, cache_control

IDLE_S = 20.0  # that a connection may say nothing, or take to read an answer
MAX_CONNECTIONS = 64
CLOSE_S = 10.0  # for answers that are being given when the server ends


class InspectServer:
    """``with InspectServer(...) as server``: it answers in threads of its own until the end of the block."""

    def __init__(self, routes: Routes, settings: InspectSettings, token: str | None = None) -> None:
        """Raises ValueError if nobody can listen there now."""
        self._settings, self._token = settings, token or secrets.token_urlsafe(24)
        try:
            self._server = _Server(routes, settings, self._token)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
                raise
            raise ValueError(
                f"cannot listen on {settings.host}:{settings.port}: {error.strerror}. Choose another --port."
            ) from None
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, args=(0.1,), name="inspect page", daemon=True)

    @property
    def url(self) -> str:
        """Of the page, for a browser on this machine."""
        host = "127.0.0.1" if self._settings.host in ("0.0.0.0", "::", "") else self._settings.host
        port = self._server.server_address[1]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/{self._token}/"

    def __enter__(self) -> "InspectServer":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join(CLOSE_S)
        self._server.hang_up()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # an answer to a page that has gone to sleep must not hold up the end

    def __init__(self, routes: Routes, settings: InspectSettings, token: str) -> None:
        self.routes, self.settings, self.token = routes, settings, token
        self.places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._open: set[socket.socket] = set()
        self._changing = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        super().__init__((settings.host, settings.port), _Connection)

    def process_request(self, request: object, client_address: object) -> None:
        """Those beyond MAX_CONNECTIONS are hung up on: browsers open few and try again."""
        assert isinstance(request, socket.socket)
        if not self.places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: object, client_address: object) -> None:
        assert isinstance(request, socket.socket)
        with self._changing:
            self._open.add(request)
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._changing:
                self._open.discard(request)
            self.places.release()

    def hang_up(self) -> None:
        """On all browsers: they keep their connections open for more questions."""
        with self._changing:
            for connection in self._open:
                with contextlib.suppress(OSError):  # it has just ended by itself
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that goes away in the middle of an answer is no error of ours; anything else is said."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # pyright: ignore[reportArgumentType]


class _Connection(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self._send(self._answer(), with_body=True)

    def do_HEAD(self) -> None:
        self._send(self._answer(), with_body=False)

    def _answer(self) -> Answer:
        settings = self.server.settings
        hosts = self.headers.get_all("Host") or []
        problem = refusal(hosts, settings.names, only_loopback=is_loopback(settings.host))
        if problem is not None:
            return Answer(status=HTTPStatus.MISDIRECTED_REQUEST, body=f"{problem}\n".encode())
        rest = rest_of_path(self.path, self.server.token)
        if rest is None:
            text = "no such page; open the address that `vla-rlaif inspect` printed, with its token\n"
            return Answer(status=HTTPStatus.FORBIDDEN, body=text.encode())
        query = urlsplit(self.path).query
        return self.server.routes.answer(f"{rest}?{query}" if query else rest)

    def _send(self, answer: Answer, *, with_body: bool) -> None:
        self.send_response(answer.status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", cache_control(answer.age_s))
        self.end_headers()
        if with_body:
            self.wfile.write(answer.body)

    def version_string(self) -> str:
        return "vla-rlaif"

    def log_message(self, format: str, *args: object) -> None:
        """Silent: addresses hold the token."""
