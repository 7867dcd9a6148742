"""Who may use the page: whoever has the token, from a page of ours, under a name that cannot be made to point here.

A web page that its reader has open elsewhere may try this server too. The token stops it, and so do the two checks
below, should a token leak: a foreign page has another Origin, and one that lets its own name point to this address
(DNS rebinding) has another Host.
"""

import hmac
import ipaddress
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

MIN_TOKEN = 16  # characters


def keep_token(path: Path) -> str:
    """The token of a store, made once and kept beside it, so that an open page survives a restart."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        token = path.read_text().strip()
        if len(token) < MIN_TOKEN:
            raise ValueError(f"{path} holds no token of {MIN_TOKEN} characters or more: remove it.") from None
        return token
    with os.fdopen(descriptor, "w") as file:
        token = secrets.token_urlsafe(24)
        file.write(token + "\n")
    return token


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def rest_of_path(path: str, token: str) -> str | None:
    """What follows ``/TOKEN/``; None without the right token. Takes as long for one wrong token as for another."""
    given, slash, rest = urlsplit(path).path.removeprefix("/").partition("/")
    is_right = hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode())
    return rest if is_right and slash else None


def refusal(hosts: Sequence[str], names: Sequence[str], *, only_loopback: bool) -> str | None:
    """Why a request is refused, judged by its Host headers; None if it is not.

    An address cannot be rebound, a name can: names other than localhost must have been given by the operator.
    """
    host = _host_of(hosts[0]) if len(hosts) == 1 else ""
    if host in ("localhost", *names):
        return None
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"this server does not answer for the host {host!r}; start it with --names {host or 'NAME'} if it should"
    if only_loopback and not address.is_loopback:
        return f"this server answers on this machine only, not for {host}"
    return None


def is_own_page(origins: Sequence[str], hosts: Sequence[str]) -> bool:
    """Whether a websocket is opened by a page of this server: browsers always send the Origin, and no page can forge
    it. Both are the values of a request's headers."""
    if len(origins) != 1 or len(hosts) != 1:
        return False
    origin = urlsplit(origins[0])
    return origin.scheme in ("http", "https") and origin.netloc.lower() == hosts[0].lower()


def _host_of(header: str) -> str:
    """Without the port, which a tunnel may change. Empty for what is no host."""
    if set(header) & set("@/?#\\"):
        return ""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
