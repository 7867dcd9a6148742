"""What is answered over plain HTTP before a websocket opens: health, readiness, metrics, and who may connect.

/healthz   200 while the process can answer, 503 when the policy hangs: restart it
/readyz    200 while requests are admitted, 503 while it warms up or drains: send robots elsewhere
/metrics   Prometheus text; needs a token where robots need one
"""

import hmac
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import parse_qsl, urlsplit

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request, Response

from vla_rlaif.serve.metrics import ServeMetrics

MAX_NAME = 64  # characters of a robot's name


class Endpoints:
    def __init__(
        self,
        tokens: tuple[str, ...],
        metrics: ServeMetrics,
        *,
        ailment: Callable[[], str | None],
        unready: Callable[[], str | None],
    ) -> None:
        self._tokens, self._metrics = tokens, metrics
        self._ailment, self._unready = ailment, unready

    def respond(self, robot: ServerConnection, request: Request) -> Response | None:
        """None lets the websocket open."""
        path = urlsplit(request.path).path
        if path == "/healthz":
            return _state(robot, self._ailment())
        if path == "/readyz":
            return _state(robot, self._unready())
        if not self._is_admitted(request):
            response = robot.respond(HTTPStatus.UNAUTHORIZED, "no valid token; send Authorization: Api-Key TOKEN\n")
            response.headers["WWW-Authenticate"] = "Api-Key"
            return response
        if path == "/metrics":
            response = robot.respond(HTTPStatus.OK, self._metrics.text().decode())
            del response.headers["Content-Type"]
            response.headers["Content-Type"] = CONTENT_TYPE_PLAIN_0_0_4
            return response
        try:
            robot_name(request.path)
        except ValueError as error:
            return robot.respond(HTTPStatus.BAD_REQUEST, f"{error}\n")
        return None

    def _is_admitted(self, request: Request) -> bool:
        if not self._tokens:
            return True
        given = request.headers.get_all("Authorization")
        _, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        # All are compared, in constant time: how long it takes tells nothing about a token.
        octets = token.encode(errors="surrogateescape")
        return any([hmac.compare_digest(octets, known.encode()) for known in self._tokens])


def robot_name(path: str) -> str:
    """``arm-3`` of ws://host:port/?robot=arm-3; empty without one."""
    query = dict(parse_qsl(urlsplit(path).query, keep_blank_values=True))
    name = query.pop("robot", "")
    if query:
        raise ValueError(f"unknown parameter {next(iter(query))!r} in {path!r}; the only one is robot=NAME.")
    if len(name) > MAX_NAME:
        raise ValueError(f"the robot's name has {len(name)} characters, at most {MAX_NAME} are allowed.")
    return name


def _state(robot: ServerConnection, problem: str | None) -> Response:
    if problem is None:
        return robot.respond(HTTPStatus.OK, "ok\n")
    return robot.respond(HTTPStatus.SERVICE_UNAVAILABLE, f"{problem}\n")
