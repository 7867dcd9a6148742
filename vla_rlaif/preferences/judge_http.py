"""HTTP with deadlines and retries, JSON by default. Knows nothing of models.

Asked again: 429, 5xx, and connections that break or take too long. Everything else is final.
"""

import json
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from vla_rlaif.preferences.questions import JudgeFault

LONGEST_WAIT_S = 60.0  # between two tries, whatever a server's Retry-After says


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Status and content: a final one, not always a good one."""

    status: int
    body: bytes
    retry_after_s: float | None  # that the server asks to be left alone, if it says so in seconds

    @property
    def text(self) -> str:
        """For messages."""
        return self.body[:500].decode(errors="replace")


class Endpoint:
    """A server by its URL. Threads may share it; every request has a connection of its own."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        retries: int,
        retry_s: float,
        request_s: float,
        first_s: float,
        key: str = "backend.url",
        on_failure: str = "What was answered so far is in the cache: just start again.",
    ) -> None:
        """``retry_s`` is the wait before the first retry, doubled with each; until something was answered, a request
        may take ``first_s`` instead of ``request_s``. ``key`` of the config and ``on_failure`` are for messages.

        Raises:
            ValueError: the URL is none of HTTP.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{key} is {url!r}; wanted something like http://127.0.0.1:8000/v1.")
        self.url, self._parts = url.rstrip("/"), parts
        self._retries, self._retry_s, self._request_s, self._first_s = retries, retry_s, request_s, first_s
        self._key, self._on_failure = key, on_failure
        self._is_warm = threading.Event()
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> Reply:
        """``path`` follows the URL. Raises JudgeFault when all tries have failed."""
        return self._request("GET", path, None, threading.Event(), self._headers)

    def post(self, path: str, body: Mapping[str, Any], give_up: threading.Event) -> Reply:
        """As ``get``; an answer to this one ends the time of long first calls. Set ``give_up`` to end the retries."""
        return self.post_bytes(path, json.dumps(body).encode(), "application/json", give_up)

    def post_bytes(self, path: str, body: bytes, content_type: str, give_up: threading.Event) -> Reply:
        """As ``post``, of a body that is no JSON."""
        reply = self._request("POST", path, body, give_up, {**self._headers, "Content-Type": content_type})
        self._is_warm.set()
        return reply

    def _request(
        self, method: str, path: str, body: bytes | None, give_up: threading.Event, headers: Mapping[str, str]
    ) -> Reply:
        problem, wait_s = "nobody waits for it any more", 0.0
        for number in range(self._retries + 1):
            if give_up.wait(min(wait_s, LONGEST_WAIT_S)):
                break
            wait_s = self._retry_s * 2**number
            limit_s = self._request_s if self._is_warm.is_set() else self._first_s
            try:
                reply = self._once(method, path, body, headers, limit_s)
            except TimeoutError:
                problem = f"it took longer than {limit_s:g} s"
            except (OSError, HTTPException) as error:
                problem = repr(error)
            else:
                if reply.status != HTTPStatus.TOO_MANY_REQUESTS and reply.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                    return reply
                problem = f"status {reply.status}: {reply.text}"
                wait_s = wait_s if reply.retry_after_s is None else reply.retry_after_s
        raise JudgeFault(
            f"{method} {self.url}{path} failed in {self._retries + 1} tries, the last time because {problem}. Is the "
            f"server up, and is {self._key} right? {self._on_failure}"
        )

    def _once(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], limit_s: float) -> Reply:
        host, port = self._parts.hostname, self._parts.port
        assert host is not None
        if self._parts.scheme == "https":
            connection = HTTPSConnection(host, port, timeout=limit_s, context=ssl.create_default_context())
        else:
            connection = HTTPConnection(host, port, timeout=limit_s)
        try:
            connection.request(method, f"{self._parts.path.rstrip('/')}{path}", body, dict(headers))
            with connection.getresponse() as response:
                asked = response.headers.get("Retry-After", "")
                return Reply(
                    status=response.status,
                    body=response.read(),
                    retry_after_s=float(asked) if asked.isdigit() else None,
                )
        finally:
            connection.close()
