"""Headless Chromium for tests of pages: Debian's browser, driven by the pip package playwright.

Tests that ask for ``page_in`` are skipped where either is missing; `make test` installs both where it may.
``BROWSER_SHOTS=folder`` keeps the screenshots that tests take.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


@pytest.fixture(scope="module")  # while it is open this thread has a running event loop, which other files mind
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine; apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="pip install playwright (extra dev)")
    with api.sync_playwright() as playwright:
        # Its sandbox needs rights that root in a container lacks; the only pages are ours.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page_in(browser: Any) -> Iterator[Callable[..., Any]]:
    """``page_in(width, height, **options)``: a page in a browser profile of its own, as of another person. A test fails
    on any error that its pages meet: exceptions, refused requests, breaches of the content security policy; but for
    those that contain a text of ``page.expected``, which come when they like. Ask for it after the server's fixture, so
    that its pages close first."""
    contexts, errors, expected = [], [], []

    def open_page(width: int = 1280, height: int = 800, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: errors.append(f"exception: {error}"))
        page.on("console", lambda message: message.type == "error" and errors.append(f"console: {message.text}"))
        page.expected = expected
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [error for error in errors if not any(text in error for text in expected)] == []


@pytest.fixture
def shoot(request: pytest.FixtureRequest) -> Callable[[Any, str], None]:
    """``shoot(page, name)`` takes a screenshot, if somebody wants to look at it."""
    folder = os.environ.get("BROWSER_SHOTS")

    def take(page: Any, name: str) -> None:
        if folder is not None:
            page.screenshot(path=Path(folder) / f"{request.node.name}-{name}.png")

    return take
