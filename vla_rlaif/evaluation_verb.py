"""The verb `evaluate`: from policies to intervals, a comparison, JSON and a page."""

import json
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from vla_rlaif.build import build_env
from vla_rlaif.checkpoint import write_whole
from vla_rlaif.config import RunConfig, load_config
from vla_rlaif.evaluate import EVALUATION_SEED
from vla_rlaif.evaluation import Footage, evaluate_sides
from vla_rlaif.evaluation_page import as_json, page, spoken
from vla_rlaif.manifest import manifest
from vla_rlaif.policy_source import find_source
from vla_rlaif.serve.settings import ServedSettings

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is evaluated, and how."""

    policy: tuple[str, ...]
    against: tuple[str, ...] = ()
    against_config: Path | None = None  # whose policy section reads ``against``
    noise_seeds: tuple[int, ...] = (EVALUATION_SEED,)
    first_seed: int | None = None
    served: ServedSettings = field(default_factory=ServedSettings)
    to: Path | None = None  # JSON; the page goes beside it


def evaluate_policies(config: RunConfig, asked: Request, say: Say) -> None:
    """Raises ValueError if a policy cannot be read, or is of another env."""
    if not asked.policy:
        raise ValueError("--policy names no policy; give a folder, or the address of a policy server.")
    if len(set(asked.noise_seeds)) != len(asked.noise_seeds) or not asked.noise_seeds:
        raise ValueError(f"--noise-seeds {asked.noise_seeds}: each counts as a repetition, so name each once.")
    if asked.to is not None and asked.to.suffix != ".json":
        raise ValueError(f"--to is {asked.to}, wanted a .json file; the page goes beside it, as .html.")
    a = [find_source(name, config) for name in asked.policy]
    other = config if asked.against_config is None else load_config(asked.against_config)
    b = [find_source(name, other) for name in asked.against]
    env = build_env(config.env)
    try:
        with tempfile.TemporaryDirectory(prefix="vla_rlaif_evaluate_") as folder:
            footage = Footage(Path(folder)) if asked.to is not None and config.evaluate.clips else None
            found = evaluate_sides(
                env,
                a,
                b,
                episodes=config.evaluate.episodes,
                noise_seeds=asked.noise_seeds,
                first_seed=asked.first_seed,
                served=asked.served,
                footage=footage,
                say=say if len(a) + len(b) > 1 else _quiet,
            )
            for line in spoken(found):
                say(line)
            if asked.to is None:
                return
            made = manifest(config)
            values = {**as_json(found), "config": config.model_dump(mode="json"), "manifest": made}
            about = {
                "Command": shlex.join(["vla-rlaif", *sys.argv[1:]]),
                "Task": config.env.type,
                "Noise seeds": ", ".join(map(str, asked.noise_seeds)),
                "Start states": "test split" if asked.first_seed is None else f"seeds from {asked.first_seed} on",
                "Code": str(made["git"]["commit"]),
                "Versions": ", ".join(f"{name} {version}" for name, version in made["versions"].items()),
            }
            html = page(found, footage, clips=config.evaluate.clips, about=about)
    finally:
        env.close()
    write_whole(asked.to, json.dumps(values, indent=1).encode())
    write_whole(asked.to.with_suffix(".html"), html.encode())
    say(f"{asked.to.with_suffix('.html')}: page written")


def _quiet(text: str) -> None:
    """One policy needs no progress."""
