"""What mkdocs asks for while it builds the site: generated pages, and links where a page names another one."""

import re
from pathlib import Path
from typing import Any

import notebook_pages
import reference
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
NAMED_PAGE = re.compile(r"`docs/([\w/]+\.md)`")
BLOCK = re.compile(r"(?:[-*] |\d+\. |\|)")
FENCE = re.compile(r"\s*```")


def on_files(files: Files, config: Any) -> Files:
    """Add the reference and the notebooks."""
    executed = ROOT / config.extra["executed_notebooks"]
    generated: dict[str, str | bytes] = {**reference.pages(), **notebook_pages.pages(ROOT / "notebooks", executed)}
    for path, content in generated.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """GitHub's markdown as python-markdown wants it, and `docs/name.md` as a link."""
    up = "../" * page.file.src_uri.count("/")
    return NAMED_PAGE.sub(lambda found: f"[{found[1]}]({up}{found[1]})", _spaced(markdown))


def _spaced(markdown: str) -> str:
    """A blank line before each list and table that follows a paragraph at once: python-markdown needs one."""
    lines, is_code = [], False
    for line in markdown.splitlines():
        if FENCE.match(line):
            is_code = not is_code
        last = lines[-1] if lines else ""
        is_first = BLOCK.match(line) and last and not BLOCK.match(last) and not last.startswith((" ", "#"))
        if is_first and not is_code:
            lines.append("")
        lines.append(line)
    return "\n".join(lines) + "\n"
