"""The site builds strictly and without a network, and its reference pages miss no verb, no option and no key."""

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
from pydantic import BaseModel

from vla_rlaif import cli
from vla_rlaif.config import RunConfig
from vla_rlaif.pool.config import PoolConfig
from vla_rlaif.pool.verbs import VERBS as POOL_VERBS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Strict: a link to nowhere, or a page that is in no menu, fails."""
    folder = tmp_path_factory.mktemp("site")
    # Not --quiet: then --strict would see no warning.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0 and "Documentation built" in built.stderr, built.stderr
    return folder


def section(page: str, start: str, end: str) -> str:
    """From one heading's id to the next heading of the same or a higher level."""
    found = re.search(rf'id="{start}".*?(?=<{end}|<footer)', page, re.DOTALL)
    assert found is not None, f"no section {start}"
    return html.unescape(re.sub(r"<[^>]+>", " ", found[0]))


@pytest.mark.parametrize(("name", "root"), [("config", RunConfig), ("pool", PoolConfig)])
def test_reference_has_every_key(site: Path, name: str, root: type[BaseModel]):
    page = (site / "reference" / name / "index.html").read_text()
    # pydantic's own list of the sections and keys of a file, in place of ours.
    schema = root.model_json_schema(by_alias=True)
    sections = {**schema["$defs"], root.__name__: schema}
    assert len(sections) > 5
    for title, model in sections.items():
        if "properties" not in model:
            continue
        text = page if title == root.__name__ else section(page, title.lower(), "h[123]")
        for key in model["properties"]:
            assert re.search(rf"\b{re.escape(key)}\b", text), f"{title}.{key}"


def test_reference_gives_type_default_and_meaning(site: Path):
    text = section((site / "reference/config/index.html").read_text(), "tabletopconfig", "h3")
    row = re.sub(r"\s+", " ", text)
    assert "image_size int, >= 16 64 pixels" in row and "chunk int, > 0 4 actions executed per decision" in row


@pytest.mark.parametrize("command", [*cli.VERBS, *(f"pool {name}" for name in POOL_VERBS)])
def test_reference_has_every_option(site: Path, capsys: pytest.CaptureFixture[str], command: str):
    page = (site / "reference/cli/index.html").read_text()
    kind = POOL_VERBS[command.removeprefix("pool ")] if command.startswith("pool ") else cli.VERBS[command]
    text = section(page, f"vla-rlaif-{command.replace(' ', '-')}", "h2")
    with pytest.raises(SystemExit):
        tyro.cli(kind, args=["--help"])
    shown = capsys.readouterr().out
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", shown)) - {"--help"}
    flags = {flag for flag in flags if not flag.startswith("--no-")}
    assert flags <= set(re.findall(r"--[a-z][a-z0-9-]*", text)), flags


def test_pages_load_nothing_from_elsewhere(site: Path):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        loaded = re.findall(r'<(?:script|link|img|iframe|source)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text())
        assert not loaded, (page, loaded)
    styles = "".join(sheet.read_text() for sheet in site.rglob("*.css"))
    assert "fonts.googleapis" not in styles


def test_a_page_that_is_named_is_linked(site: Path):
    assert re.search(r'href="[^"]*labels/"', (site / "concepts/index.html").read_text())


def test_lists_and_tables_are_not_paragraphs(site: Path):
    """GitHub needs no blank line before them, python-markdown does; what it does not see stays as dashes and pipes."""
    for page in site.rglob("*.html"):
        article = re.search(r"<article.*?</article>", page.read_text(), re.DOTALL)
        text = re.sub(r"<pre.*?</pre>|<code.*?</code>", "", article[0] if article else "", flags=re.DOTALL)
        assert not re.search(r"^(?:\| .* \||- \S)", text, re.MULTILINE), page
