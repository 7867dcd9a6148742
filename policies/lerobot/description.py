"""A `pretrained_model` folder without its weights, as JSON: what a policy checkpoint carries to make the folder again.

config.json, both processors with their statistics, and the files of a VLM that comes along (SmolVLA's config and
tokenizer), so that a policy made from scratch needs no hub.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PROCESSORS = ("policy_preprocessor", "policy_postprocessor")
VLM = "vlm"  # subfolder of the VLM's files
NORMALISERS = ("normalizer_processor", "unnormalizer_processor")
TOKENIZER = "tokenizer_processor"


@dataclass(frozen=True, kw_only=True)
class Description:
    config: Mapping[str, Any]
    processors: Mapping[str, Mapping[str, Any]]  # by file name without .json
    states: Mapping[str, Mapping[str, Any]]  # by file name: nested lists by tensor name
    vlm: Mapping[str, str]  # text by file name; empty: ``config`` names it

    @property
    def type(self) -> str:
        return self.config["type"]

    @classmethod
    def read(cls, folder: Path) -> "Description":
        """Raises ValueError for a folder that is not whole."""
        config = _json(folder / CONFIG, "It is not a pretrained_model folder of LeRobot.")
        if "type" not in config:
            raise ValueError(f"{folder / CONFIG} has no type; it is not the config of a LeRobot policy.")
        hint = "Save the processors beside the policy, as lerobot-train does since LeRobot 0.4."
        processors = {name: _json(folder / f"{name}.json", hint) for name in PROCESSORS}
        files = [s["state_file"] for p in processors.values() for s in p["steps"] if "state_file" in s]
        inside = folder / VLM
        texts = {p.name: p.read_text() for p in sorted(inside.iterdir())} if inside.is_dir() else {}
        states = {name: _tensors(folder / name) for name in files}
        return cls(config=config, processors=processors, states=states, vlm=texts)

    def write(self, folder: Path, *, final: Path) -> None:
        """All files but the weights. ``final`` is where ``folder`` will be when LeRobot reads it: the path of a VLM
        that comes along is in the files."""
        folder.mkdir(parents=True, exist_ok=True)
        config, processors = dict(self.config), dict(self.processors)
        if self.vlm:
            (folder / VLM).mkdir(exist_ok=True)
            for name, text in self.vlm.items():
                (folder / VLM / name).write_text(text)
            config["vlm_model_name"] = str(final / VLM)
            processors[PROCESSORS[0]] = _with_tokenizer(processors[PROCESSORS[0]], str(final / VLM))
        (folder / CONFIG).write_text(json.dumps(config, indent=4))
        for name, pipeline in processors.items():
            (folder / f"{name}.json").write_text(json.dumps(pipeline, indent=2))
        for name, state in self.states.items():
            save_file({k: np.asarray(v, np.float32) for k, v in state.items()}, folder / name)

    def with_statistics(self, stats: Mapping[str, Mapping[str, Any]]) -> "Description":
        """The same with other statistics in both processors."""
        flat = {f"{key}.{name}": np.asarray(v).tolist() for key, part in stats.items() for name, v in part.items()}
        processors, states = {}, {}
        for name, pipeline in self.processors.items():
            steps = []
            for i, step in enumerate(pipeline["steps"]):
                registry = step.get("registry_name")
                if registry in NORMALISERS:
                    file = step.get("state_file", f"{name}_step_{i}_{registry}.safetensors")
                    step, states[file] = {**step, "state_file": file}, flat
                elif "state_file" in step:
                    states[step["state_file"]] = self.states[step["state_file"]]
                steps.append(step)
            processors[name] = {**pipeline, "steps": steps}
        return replace(self, processors=processors, states=states)

    def with_sizes(self, sizes: Mapping[str, int]) -> "Description":
        """The same with features of other sizes, in the config and in the processors."""

        def changed(features: Mapping[str, Any]) -> dict[str, Any]:
            return {k: {**v, "shape": [sizes[k]]} if k in sizes else v for k, v in features.items()}

        config = {k: changed(v) if k in ("input_features", "output_features") else v for k, v in self.config.items()}
        processors = {}
        for name, pipeline in self.processors.items():
            steps = []
            for step in pipeline["steps"]:
                settings = step.get("config", {})
                if "features" in settings:
                    step = {**step, "config": {**settings, "features": changed(settings["features"])}}
                steps.append(step)
            processors[name] = {**pipeline, "steps": steps}
        return replace(self, config=config, processors=processors)

    def with_tokenizer(self, path: str) -> "Description":
        processors = {**self.processors, PROCESSORS[0]: _with_tokenizer(self.processors[PROCESSORS[0]], path)}
        return replace(self, processors=processors)

    @property
    def tokenizer(self) -> str | None:
        """Hub id or folder that the preprocessor reads; None: it has no tokenizer."""
        found = [s["config"] for s in self.processors[PROCESSORS[0]]["steps"] if s.get("registry_name") == TOKENIZER]
        return found[0].get("tokenizer_name") if found else None

    def to_json(self) -> dict[str, Any]:
        return {k: dict(v) for k, v in vars(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Description":
        return cls(**values)


def _with_tokenizer(pipeline: Mapping[str, Any], path: str) -> dict[str, Any]:
    def changed(step: Mapping[str, Any]) -> Mapping[str, Any]:
        if step.get("registry_name") != TOKENIZER:
            return step
        return {**step, "config": {**step["config"], "tokenizer_name": path}}

    return {**pipeline, "steps": [changed(step) for step in pipeline["steps"]]}


def _json(path: Path, hint: str) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path.parent} has no {path.name}. {hint}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}. Copy the folder again.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, not a mapping. Copy the folder again.")
    return values


def _tensors(path: Path) -> dict[str, Any]:
    try:
        return {name: value.tolist() for name, value in load_file(path).items()}
    except (FileNotFoundError, SafetensorError) as error:
        raise ValueError(f"the statistics in {path} cannot be read: {error}. Copy the folder again.") from None
