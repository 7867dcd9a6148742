"""What the notebooks show: pictures that Jupyter displays, and curves that grow while a run trains.

Neither IPython nor pyplot is imported: Jupyter asks an object for its `_repr_png_` or `_repr_html_`.
"""

import io
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from matplotlib.figure import Figure

from vla_rlaif.metrics import FILE_NAME, read_metrics
from vla_rlaif.report_charts import points
from vla_rlaif.report_clips import animation
from vla_rlaif.report_data import load_run

DPI = 90
WIDTH = 8.0  # inches


@dataclass(frozen=True)
class Picture:
    """A PNG."""

    png: bytes

    def _repr_png_(self) -> bytes:
        return self.png


@dataclass(frozen=True)
class Html:
    """A piece of a page."""

    text: str

    def _repr_html_(self) -> str:
        return self.text

    @classmethod
    def framed(cls, page: str, *, height: int = 600) -> "Html":
        """A whole page in a frame of its own, so that its style stays its own; ``height`` in pixels."""
        return cls(
            f'<iframe srcdoc="{escape(page)}" title="page" sandbox style="width:100%;height:{height}px;border:0">'
            "</iframe>"
        )


def picture(figure: Figure) -> Picture:
    """A figure as it is now."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=DPI)
    return Picture(data.getvalue())


def curves(metrics: Sequence[dict], panels: Sequence[Mapping[str, str]]) -> Picture:
    """Lines over the training steps: a panel for each mapping of a metric's name to its label.

    A metric that no step has yet, or that only some steps have, is drawn as far as it goes.
    """
    figure = Figure(figsize=(WIDTH, 2.4), layout="constrained")
    for axes, panel in zip(np.ravel(figure.subplots(1, len(panels), squeeze=False)), panels, strict=True):
        for key, label in panel.items():
            line = points(metrics, key)
            axes.plot(line.steps + 1, line.values, marker="o" if len(line.steps) < 12 else None, ms=3, label=label)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return picture(figure)


@contextmanager
def live_curves(
    run_dir: Path,
    panels: Sequence[Mapping[str, str]],
    show: Callable[[Picture], object],
    *,
    every_s: float = 2.0,
) -> Iterator[None]:
    """While the block runs, ``show`` gets the curves of ``run_dir`` every ``every_s`` seconds if steps have come, and
    once more at its end. In a notebook ``show`` is the `update` of a display handle. An error of ``show`` is raised
    at the end of the block.
    """
    stop, seen, errors = threading.Event(), 0, []

    def draw() -> None:
        nonlocal seen
        path = run_dir / FILE_NAME
        metrics = read_metrics(path) if path.exists() else []
        if metrics and len(metrics) != seen:
            show(curves(metrics, panels))
        seen = len(metrics)

    def follow() -> None:
        try:
            while not stop.wait(every_s):
                draw()
        except Exception as error:  # of a thread, which nobody would see
            errors.append(error)

    thread = threading.Thread(target=follow, name="live curves", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]
    draw()


def clip_row(clips: Sequence[tuple[str, UInt8[np.ndarray, "F height width 3"]]], *, pixels: int = 128) -> Html:
    """Small looping animations side by side, each under its caption."""
    figures = "".join(
        '<figure style="display:inline-block;margin:0 8px 8px 0;text-align:center">'
        f"<figcaption>{escape(caption)}</figcaption>"
        f'<img src="{animation(frames)}" alt="{escape(caption)}" width="{pixels}" style="image-rendering:pixelated">'
        "</figure>"
        for caption, frames in clips
    )
    return Html(f"<div>{figures}</div>")


def before_after(run_dir: Path, *, num_starts: int = 4) -> Html:
    """The same start states before and after a finished run, one above the other."""
    clips = load_run(run_dir).clips
    if clips is None:
        raise ValueError(f"{run_dir} has no clips.npz: the run has not finished, or evaluate.clips is 0.")
    rows = []
    for label, frames, won in (
        ("before", clips.before, clips.before_success),
        ("after", clips.after, clips.after_success),
    ):
        outcomes = ["success" if w else "failure" for w in won[:num_starts]]
        rows.append(clip_row([(f"{label}: {o}", f) for o, f in zip(outcomes, frames[:num_starts], strict=True)]).text)
    return Html("".join(rows))
