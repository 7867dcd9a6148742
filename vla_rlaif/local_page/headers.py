"""The headers of every answer of a local page: nothing from elsewhere is loaded, and no other page may use it."""

from collections.abc import Mapping

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def cache_control(age_s: int) -> str:
    """For how long a browser may keep an answer; 0: not at all."""
    return f"private, max-age={age_s}" if age_s else "no-store"
