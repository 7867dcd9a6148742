"""The notebooks as pages of the site, with the outputs of a run of them.

python docs/notebook_pages.py --to build/notebooks        # run them all; `make docs` does this first

How long each took is printed, kept beside the copies and shown in the list of them.
"""

import base64
import itertools
import json
import os
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import tyro
from traitlets.config import Config

TIMES = "times.json"
NOT_RUN = "!!! note\n    This copy has no outputs: `make docs` runs the notebooks and shows them.\n"
INTRODUCTION = """# Notebooks

Made for two CPU cores and less than two minutes each; the table says what the copies in this site took where it was
built. A test runs each at smaller sizes. Their first cell holds what is worth changing. Start them from the folder of
the project, with its environment: `.venv/bin/python -m pip install jupyterlab`, then `.venv/bin/jupyter lab notebooks`.
The first and the third look at the run of `make align`; without it they make a small one of their own.

| notebook | this copy took | file |
| --- | --- | --- |"""


@dataclass(frozen=True)
class Options:
    to: Path = Path("build/notebooks")  # folder of the executed copies
    only: tuple[str, ...] = ()  # names without .ipynb; default: all


def main(options: Options) -> None:
    root = Path(__file__).parents[1]
    options.to.mkdir(parents=True, exist_ok=True)
    kept = options.to / TIMES
    times = json.loads(kept.read_text()) if kept.exists() else {}
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        if options.only and path.stem not in options.only:
            continue
        print(f"running {path.name}", end="", flush=True)
        began, spent = time.monotonic(), _children_cpu_s()
        notebook = execute(path, {}, where=root)
        times[path.stem] = {
            "wall_s": round(time.monotonic() - began, 1),
            "cpu_s": round(_children_cpu_s() - spent, 1),
            "cores": len(os.sched_getaffinity(0)),
        }
        print(": {wall_s} s, {cpu_s} s of CPU time on {cores} cores".format(**times[path.stem]), flush=True)
        nbformat.write(notebook, options.to / path.name)
        kept.write_text(json.dumps(times, indent=1))


def _children_cpu_s() -> float:
    """User and system time of the processes that have ended: a kernel and those that it started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def execute(path: Path, parameters: dict[str, Any], *, where: Path) -> Any:
    """Run a notebook in the folder ``where``; ``parameters`` replace values of its cell tagged `parameters`.

    Raises ValueError for a parameter that the cell does not set, and nbclient's error if a cell raises.
    """
    notebook = nbformat.read(path, as_version=4)
    at = next(i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ()))
    unknown = [name for name in parameters if f"\n{name} = " not in "\n" + notebook.cells[at].source]
    if unknown:
        raise ValueError(f"{path.name}: its parameters cell does not set {', '.join(unknown)}.")
    if parameters:
        source = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
        notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(source))
    resources = {"metadata": {"path": str(where)}}
    # Sockets that are files: a port of TCP is open to everybody on this machine, and Jupyter warns of it at each start.
    with tempfile.TemporaryDirectory() as folder:
        private = Config(KernelManager={"transport": "ipc", "ip": f"{folder}/kernel"})
        nbclient.NotebookClient(notebook, timeout=600, resources=resources, config=private).execute()
    return notebook


def pages(folder: Path, executed: Path) -> dict[str, str | bytes]:
    """Path in the site -> its content: a page a notebook, its pictures, and a list of them."""
    found: dict[str, str | bytes] = {}
    times = json.loads((executed / TIMES).read_text()) if (executed / TIMES).exists() else {}
    entries = []
    for path in sorted(folder.glob("*.ipynb")):
        is_run = (executed / path.name).exists()
        notebook = nbformat.read(executed / path.name if is_run else path, as_version=4)
        text, pictures = page(notebook, path.stem)
        title, _, rest = text.partition("\n")
        found[f"notebooks/{path.stem}.md"] = f"{title}\n\n{'' if is_run else NOT_RUN}\n{rest}"
        found |= {f"notebooks/{name}": data for name, data in pictures.items()}
        took = "{wall_s:.0f} s, {cpu_s:.0f} s of CPU time".format(**times[path.stem]) if path.stem in times else "-"
        entries.append(f"| [{title.lstrip('# ')}]({path.stem}.md) | {took} | `notebooks/{path.name}` |")
    found["notebooks/index.md"] = "\n".join([INTRODUCTION, *entries]) + "\n"
    return found


def page(notebook: Any, name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as markdown, and its pictures."""
    parts, pictures = [], {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        outputs = cell.get("outputs", ())
        for kind, group in itertools.groupby(outputs, key=lambda output: output.output_type):
            if kind == "stream":  # a line each, if they were printed one by one
                parts.append(_printed("".join(output.text for output in group)))
            else:
                parts += [_output(output.data, name, pictures) for output in group]
    return "\n\n".join(part for part in parts if part) + "\n", pictures


def _output(data: Any, name: str, pictures: dict[str, bytes]) -> str:
    if "text/html" in data:
        return f'<div class="output" markdown="0">\n{data["text/html"].strip()}\n</div>'
    if "image/png" in data:
        picture = f"{name}-{len(pictures) + 1}.png"
        pictures[picture] = base64.b64decode(data["image/png"])
        return f"![Output of the cell above]({picture})"
    if "text/markdown" in data:
        return data["text/markdown"]
    return _printed(data.get("text/plain", ""))


def _printed(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```" if text.strip() else ""


if __name__ == "__main__":
    main(tyro.cli(Options))
