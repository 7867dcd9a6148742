"""The commands that README and docs show: fenced shell blocks, indented blocks, and code within a sentence."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = ("make", "vla-rlaif", "python", "pip", "ray", "hf", "lerobot-eval", "jupyter", "tensorboard", "mkdocs")
FENCE = re.compile(r"^```(\w*)")


@dataclass(frozen=True)
class Command:
    page: str  # path in the project
    text: str  # one line, without its comment

    @property
    def words(self) -> list[str]:
        """Without the environment's path, the brackets of what may be left out, and the `...` of more of the same."""
        found = shlex.split(self.text.replace("[", "").replace("]", ""))
        if found[-1] == "..." and not found[-2].startswith("--"):
            found.pop()
        found[0] = found[0].removeprefix(".venv/bin/")
        return found


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def documented() -> list[Command]:
    """Every command, once a page."""
    found: dict[Command, None] = {}
    for page in pages():
        for text in commands_of(page.read_text()):
            found[Command(str(page.relative_to(ROOT)), text)] = None
    return list(found)


def commands_of(markdown: str) -> list[str]:
    """The commands of a page, in order."""
    blocks, prose = _blocks(markdown)
    found = []
    for is_shell, lines in blocks:
        commands = [_without_comment(line) for line in _joined(lines)]
        if is_shell or any(_is_command(text) for text in commands):
            found += [text for text in commands if text]
    inline = re.findall(r"`([^`\n]+)`", prose)
    return found + [text for text in map(_without_comment, inline) if _is_command(text)]


def _blocks(markdown: str) -> tuple[list[tuple[bool, list[str]]], str]:
    """Code blocks (is it a shell's, its lines), and the text without them."""
    blocks: list[tuple[bool, list[str]]] = []
    prose: list[str] = []
    fence, block, last = None, [], ""
    for line in [*markdown.splitlines(), ""]:
        if fence is not None:
            if line.startswith("```"):
                blocks.append((fence in ("bash", "sh", "shell"), block))
                fence, block = None, []
            else:
                block.append(line)
        elif match := FENCE.match(line):
            fence, block = match[1], []
        elif line.startswith("    ") and (block or not last.strip()):
            block.append(line[4:])
        else:
            if block:
                blocks.append((False, block))
                block = []
            prose.append(line)
        last = line
    return blocks, re.sub(r"(?<=\S)\n(?=\S)", " ", "\n".join(prose))


def _joined(lines: list[str]) -> list[str]:
    """Lines that end in a backslash go on in the next."""
    return re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()


def _without_comment(text: str) -> str:
    return re.sub(r"(^|\s+)#( .*)?$", "", text).strip()


def _is_command(text: str) -> bool:
    words = text.split()
    return len(words) > 1 and words[0].removeprefix(".venv/bin/") in PROGRAMS
