"""Who may use the page."""

import os
import stat

import pytest

from vla_rlaif.local_page.guard import is_own_page, keep_token, refusal, rest_of_path

TOKEN = "q" * 32


def refused(host, *names, only_loopback=True):
    return refusal([] if host is None else [host], names, only_loopback=only_loopback)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8765", "localhost:8765", "LOCALHOST", "[::1]:8765", "localhost:9999"]
)
def test_this_machine_is_answered(host):
    assert refused(host) is None


@pytest.mark.parametrize(
    "host",
    [None, "", "evil.example", "evil.example:8765", "127.0.0.1.evil.example", "localhost.evil.example", "x@127.0.0.1",
     "127.0.0.1@evil.example", "[::1", "127.0.0.1/..", "0x7f000001"],
)  # fmt: skip
def test_names_that_may_be_rebound_are_refused(host):
    assert "does not answer for the host" in (refused(host) or "")
    assert "does not answer for the host" in (refused(host, only_loopback=False) or "")


def test_other_machines_only_if_told_so():
    assert "on this machine only" in (refused("192.0.2.7:8765") or "")
    assert refused("192.0.2.7:8765", only_loopback=False) is None
    assert refused("lab.example:8765", "lab.example", only_loopback=False) is None


def test_two_hosts_are_none():
    assert refusal(["localhost", "localhost"], (), only_loopback=True) is not None


@pytest.mark.parametrize(
    ("origin", "host", "is_own"),
    [
        ("http://127.0.0.1:8765", "127.0.0.1:8765", True),
        ("https://lab.example", "lab.example", True),
        ("http://127.0.0.1:8766", "127.0.0.1:8765", False),
        ("http://evil.example", "127.0.0.1:8765", False),
        ("null", "127.0.0.1:8765", False),
        ("file://", "", False),
        (None, "127.0.0.1:8765", False),
    ],
)
def test_only_the_page_itself_may_connect(origin, host, is_own):
    assert is_own_page([] if origin is None else [origin], [host]) == is_own


@pytest.mark.parametrize(
    ("path", "rest"),
    [
        (f"/{TOKEN}/", ""),
        (f"/{TOKEN}/clip/0%3A1/top?x=1", "clip/0%3A1/top"),
        (f"/{TOKEN}", None),
        ("/", None),
        ("", None),
        (f"/{TOKEN[:-1]}/", None),
        (f"/{TOKEN}q/", None),
        ("/\udcff/", None),
        (f"//{TOKEN}/", None),
    ],
)
def test_the_token_opens_the_door(path, rest):
    assert rest_of_path(path, TOKEN) == rest


def test_the_token_is_made_once_and_is_the_owners_alone(tmp_path):
    path = tmp_path / "labels.sqlite.token"
    token = keep_token(path)
    assert len(token) >= 32 and keep_token(path) == token != keep_token(tmp_path / "other")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    path.write_text("short\n")
    with pytest.raises(ValueError, match="holds no token of 16 characters or more: remove it"):
        keep_token(path)
