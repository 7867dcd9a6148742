"""Where a run's metrics go besides its own files, if its logging section says so: W&B, trackio, a Prometheus port."""

import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from vla_rlaif.config import RunConfig
from vla_rlaif.doctor import require, require_package
from vla_rlaif.logging_config import LoggingConfig, TrackioConfig, WandbConfig
from vla_rlaif.metric_schema import described
from vla_rlaif.metrics import MetricSink, MetricsLog

WANDB_ID = "wandb_id"  # file of the run directory: a resumed run goes on under the same id
PREFIX = "vla_rlaif_train_"


def open_log(config: RunConfig, run_dir: Path) -> MetricsLog:
    """The log of a run, with all sinks that its config names.

    Raises:
        ValueError: a package is missing, or the port is taken.
    """
    check_logging(config.logging)
    settings, name = config.model_dump(mode="json"), run_dir.name
    sinks: list[MetricSink] = []
    with ExitStack() as opened:  # closes them if a later one fails
        add = lambda sink: sinks.append(opened.enter_context(closing(sink)))  # noqa: E731
        if config.logging.prometheus_port is not None:
            add(PrometheusSink(config.logging.prometheus_port))
        if config.logging.wandb is not None:
            add(WandbSink(config.logging.wandb, run_dir, name, settings))
        if config.logging.trackio is not None:
            add(TrackioSink(config.logging.trackio, name, settings))
        log = MetricsLog(run_dir, sinks=sinks)
        opened.pop_all()
    return log


def check_logging(config: LoggingConfig) -> None:
    """Find a missing package before anything is done."""
    if config.wandb is not None:
        require_package("wandb", "logging.wandb")
    if config.trackio is not None:
        require_package("trackio", "logging.trackio")
    if config.prometheus_port is not None:
        require("serve", "logging.prometheus_port")


class WandbSink:
    """One W&B run. Rows are never taken back there: what a resumed run repeats is in it twice, with equal numbers."""

    def __init__(self, config: WandbConfig, run_dir: Path, name: str, settings: Mapping[str, Any]) -> None:
        import wandb

        file = run_dir / WANDB_ID
        if not file.exists():
            file.write_text(uuid.uuid4().hex)
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=config.tags,
            mode=config.mode,
            name=name,
            id=file.read_text().strip(),
            resume="allow" if config.mode == "online" else None,  # offline, the parts meet when they are uploaded
            dir=run_dir,
            config=dict(settings),
            settings=wandb.Settings(console="off", silent=True),
        )
        # W&B's own counter only grows, and a resumed run goes back: ours is the axis of every chart.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, numbers: Mapping[str, int | float]) -> None:
        self._run.log({"step": step, **numbers})

    def close(self) -> None:
        self._run.finish()


class TrackioSink:
    """One trackio run. As with W&B, what a resumed run repeats is in it twice."""

    def __init__(self, config: TrackioConfig, name: str, settings: Mapping[str, Any]) -> None:
        import trackio  # pyright: ignore[reportMissingImports] (a tool of the user's; no extra brings it)

        space = {} if config.space is None else {"space_id": config.space}
        self._run = trackio.init(project=config.project, name=name, config=dict(settings), resume="allow", **space)
        self._finish = trackio.finish

    def write(self, step: int, numbers: Mapping[str, int | float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._finish()


class PrometheusSink:
    """The newest step on http://127.0.0.1:PORT/metrics, as gauges: vla_rlaif_train_rollout_success."""

    def __init__(self, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(self)
        self._lock, self._step, self._numbers = threading.Lock(), -1, dict[str, int | float]()
        try:
            self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            raise ValueError(
                f"logging.prometheus_port {port} cannot be opened: {error.strerror}. Choose another port."
            ) from None

    def collect(self) -> Iterator[Any]:
        """What a scrape gets; called from the server's threads."""
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:
            step, numbers = self._step, self._numbers
        yield GaugeMetricFamily(f"{PREFIX}step", "The newest step; -1 before the first", value=step)
        for name, value in numbers.items():
            metric = described(name)
            text = "" if metric is None else f"{metric.meaning} [{metric.unit}]"
            yield GaugeMetricFamily(PREFIX + name.replace("/", "_"), text, value=value)

    def write(self, step: int, numbers: Mapping[str, int | float]) -> None:
        with self._lock:
            self._step, self._numbers = step, dict(numbers)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
