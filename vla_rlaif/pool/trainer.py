"""The process of a training run on the GPUs it was given. `python -m vla_rlaif.pool.trainer ORDER.json`

It loads its libraries, waits until the process before it has let go of the run, goes on from the newest checkpoint, and
ends after the step in which it gets SIGTERM, with a checkpoint that was read back. It ends at once when its stdin is
closed: the replica that started it is gone, and its GPUs with it.
"""

import contextlib
import fcntl
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

LOCK_POLL_S = 0.05


def main(order: Path) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    import jax  # noqa: F401 (loaded while the process before still trains)

    from vla_rlaif.build import build_env, build_parts
    from vla_rlaif.config import RunConfig, validate_again
    from vla_rlaif.metric_sinks import open_log
    from vla_rlaif.pool.committed import verify_newest
    from vla_rlaif.start import start_policy
    from vla_rlaif.train import train

    data = json.loads(order.read_text())
    config = RunConfig.model_validate(data["config"])
    learner = config.learner.model_copy(update={k: data[k] for k in ("devices", "micro_batches")})
    config = validate_again(config.model_copy(update={"learner": learner}))
    run_dir = config.run_dir
    with _hold(run_dir / "trainer.lock", stop) as is_held:
        if not is_held:
            return
        env = build_env(config.env)
        try:
            policy = start_policy(config, env, run_dir, say)
            parts = build_parts(config, env, policy, run_dir)
            if stop.is_set():
                return
            with open_log(config, run_dir) as log:
                state = train(config, parts, log, run_dir, resume=True, say=say, should_stop=stop.is_set)
        finally:
            env.close()
        verify_newest(run_dir)
        say(f"ended after step {state.step}")


@contextlib.contextmanager
def _hold(path: Path, stop: threading.Event) -> Iterator[bool]:
    """The run, for this process alone; the system lets go of it when the process ends, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        while not stop.is_set():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                stop.wait(LOCK_POLL_S)
            else:
                yield True
                return
        yield False


def _end_with_parent() -> None:
    while os.read(0, 1):  # not sys.stdin, whose lock would be held when the interpreter ends
        pass
    os._exit(1)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
