"""Waiting for something on a page. Playwright's own ``wait_for_function`` needs eval in the page, which our pages'
content security policy forbids."""

import time
from typing import Any


def until(page: Any, expression: str, arg: Any = None, timeout_s: float = 15.0) -> None:
    """Until a JavaScript expression (or a function of ``arg``) is true."""
    end = time.monotonic() + timeout_s
    while not page.evaluate(expression, arg):
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_s} s: {expression}")
        page.wait_for_timeout(20)
