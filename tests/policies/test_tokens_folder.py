"""Transformers folders: what we write, transformers reads; what is damaged or foreign is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from token_policies import FAMILIES, SEEDS, make_config, make_obs, make_policy, make_spec, tensors
from transformers import AutoModelForImageTextToText, AutoProcessor

from vla_rlaif.policies.tokens.bins import Bins
from vla_rlaif.policies.tokens.construct import build, from_parts
from vla_rlaif.policies.tokens.folder import STATISTICS, export_folder
from vla_rlaif.token_config import FolderVLMConfig, TokenVLAConfig
from vla_rlaif.torch_weights import to_arrays
from vla_rlaif.tune_config import HeadTuning, LoraTuning


def folder_config(folder: Path, **changes: object) -> TokenVLAConfig:
    return make_config(vlm=FolderVLMConfig(folder=folder, **changes))  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    to = tmp_path_factory.mktemp("exported") / "model"
    export_folder(make_policy(), to)
    return to


def copied(folder: Path, to: Path, *, without: str = "") -> Path:
    to.mkdir()
    for path in folder.iterdir():
        if path.name != without:
            (to / path.name).write_bytes(path.read_bytes())
    return to


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_what_we_write(family: str, tmp_path: Path) -> None:
    policy = make_policy(family, tune=LoraTuning(rank=2))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in policy.module.named_parameters():
            if name in policy.trainable:
                value.add_(0.1 * torch.randn(value.shape, generator=generator))
    export_folder(policy, tmp_path / "model")
    loaded: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", output_loading_info=True)
    model, found = loaded
    assert not any(found.values())
    assert type(AutoProcessor.from_pretrained(tmp_path / "model")) is type(policy.prompter.processor)
    none = torch.zeros((1, 0), dtype=torch.long)
    one = policy.prompter.forward_keys(tensors(policy.prompter.encode(make_obs(1))), none)
    with torch.no_grad():
        torch.testing.assert_close(model(**one).logits, policy.module(**one).logits, rtol=1e-4, atol=1e-4)
    again = build(folder_config(tmp_path / "model"), make_spec(), seed=0)
    np.testing.assert_array_equal(again.act(make_obs(), SEEDS).action, policy.act(make_obs(), SEEDS).action)


def entry(low: float) -> dict[str, dict[str, list[float]]]:
    return {"action": {"q01": [low, -0.5], "q99": [0.25, 0.5]}, "proprio": {"q01": [0.0] * 3, "q99": [1.0] * 3}}


def test_statistics_of_the_folder(folder: Path, tmp_path: Path) -> None:
    ours = copied(folder, tmp_path / "ours")
    (ours / STATISTICS).write_text(json.dumps({"bridge": entry(-0.25), "fractal": entry(-0.75)}))
    policy = build(folder_config(ours, dataset="fractal"), make_spec(), seed=0)
    assert policy.bins.action_low.tolist() == [-0.75, -0.5]
    with pytest.raises(ValueError, match=r"vlm.dataset is None; .* has statistics of: bridge, fractal"):
        build(folder_config(ours), make_spec(), seed=0)
    with pytest.raises(ValueError, match=r"vlm.dataset is 'kuka'"):
        build(folder_config(ours, dataset="kuka"), make_spec(), seed=0)
    (ours / STATISTICS).unlink()  # OpenVLA's other place for it
    settings = json.loads((ours / "config.json").read_text())
    (ours / "config.json").write_text(json.dumps({**settings, "norm_stats": {"bridge": entry(-0.25)}}))
    assert build(folder_config(ours), make_spec(), seed=0).bins.action_low.tolist() == [-0.25, -0.5]
    (ours / "config.json").write_text(json.dumps(settings))  # none at all: the env's bounds
    assert build(folder_config(ours), make_spec(), seed=0).bins.action_low.tolist() == [-1, -1]
    demonstrated = Bins.of_env(2, 3)
    assert build(folder_config(folder), make_spec(), seed=0, bins=demonstrated).bins is demonstrated


def test_added_action_tokens(folder: Path, tmp_path: Path) -> None:
    """New ids behind all others; the folder that is written then has them."""
    config = folder_config(folder, action_ids="added")
    plain = copied(folder, tmp_path / "plain")
    known = json.loads((plain / "tokenizer.json").read_text())
    words = {w.replace("<action_", "<was_"): i for w, i in known["model"]["vocab"].items()}
    (plain / "tokenizer.json").write_text(json.dumps({**known, "model": {**known["model"], "vocab": words}}))
    config = folder_config(plain, action_ids="added")
    policy = build(config, make_spec(), seed=0)
    size = len(words)
    assert policy.allowed.tolist() == list(range(size, size + 256))
    assert policy.module.lm_head.weight.shape[0] == size + 256
    export_folder(policy, tmp_path / "grown")
    again = build(folder_config(tmp_path / "grown", action_ids="added"), make_spec(), seed=1)
    np.testing.assert_array_equal(again.act(make_obs(), SEEDS).action, policy.act(make_obs(), SEEDS).action)
    stored = from_parts(config, policy.metadata(), to_arrays(policy.params))
    np.testing.assert_array_equal(stored.act(make_obs(), SEEDS).action, policy.act(make_obs(), SEEDS).action)


def tied(folder: Path, to: Path) -> Path:
    """A model whose output head is its input embedding, as small Qwens are."""
    to = copied(folder, to)
    settings = json.loads((to / "config.json").read_text())
    settings["text_config"]["tie_word_embeddings"] = settings["tie_word_embeddings"] = True
    (to / "config.json").write_text(json.dumps(settings))
    weights = load_file(to / "model.safetensors")
    save_file({k: v for k, v in weights.items() if k != "lm_head.weight"}, to / "model.safetensors", {"format": "pt"})
    return to


def test_tied_embeddings(folder: Path, tmp_path: Path) -> None:
    vlm = FolderVLMConfig(folder=tied(folder, tmp_path / "tied"))
    policy = build(make_config(vlm=vlm, tune=LoraTuning(rank=2)), make_spec(), seed=0)
    assert "lm_head.weight" not in policy.params
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in policy.module.named_parameters():
            value.add_((0.1 if name in policy.trainable else 0.01) * torch.randn(value.shape, generator=generator))
    acted = policy.act(make_obs(), SEEDS)
    assert policy.module.lm_head.weight is policy.module.get_input_embeddings().weight
    export_folder(policy, tmp_path / "out")
    again = build(folder_config(tmp_path / "out"), make_spec(), seed=0)
    np.testing.assert_array_equal(again.act(make_obs(), SEEDS).action, acted.action)
    stored = from_parts(make_config(vlm=vlm), policy.metadata(), to_arrays(policy.params))  # adapters merged
    np.testing.assert_array_equal(stored.act(make_obs(), SEEDS).action, acted.action)
    with pytest.raises(ValueError, match=r"output head is its input embedding. Tune lora or full"):
        build(make_config(vlm=vlm, tune=HeadTuning()), make_spec(), seed=0)


def test_bfloat16_base_under_float32_adapters(folder: Path) -> None:
    vlm = FolderVLMConfig(folder=folder, dtype="bfloat16")
    policy = build(make_config(vlm=vlm, tune=LoraTuning(rank=2), compute="bfloat16"), make_spec(), seed=0)
    kinds = {name: value.dtype for name, value in policy.module.named_parameters()}
    assert {kinds[name] for name in policy.trainable} == {torch.float32}
    assert {kinds[name] for name in kinds if name not in policy.trainable} == {torch.bfloat16}
    decision = policy.act(make_obs(), SEEDS)
    logp, _ = policy.score(tensors(policy.inputs(make_obs(), decision.trace, np.full(5, 3))), None)
    assert logp.dtype == torch.float32
    with pytest.raises(ValueError, match="bfloat16 loses updates of trained parameters"):
        make_config(vlm=vlm)


def test_damaged_folders(folder: Path, tmp_path: Path) -> None:
    def refused(path: Path, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            build(folder_config(path), make_spec(), seed=0)

    refused(tmp_path / "nothing", "no transformers folder: config.json is missing")
    refused(copied(folder, tmp_path / "a", without="tokenizer_config.json"), "tokenizer_config.json is missing")
    pickled = copied(folder, tmp_path / "b", without="model.safetensors")
    (pickled / "pytorch_model.bin").write_bytes(b"")
    refused(pickled, "safetensors .a folder of pickled weights must be converted first. is missing")
    torn = copied(folder, tmp_path / "c")
    data = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(data[: len(data) // 2])
    refused(torn, "cannot be loaded")
    fewer = copied(folder, tmp_path / "d")
    weights = load_file(fewer / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "lm_head" not in k}, fewer / "model.safetensors", {"format": "pt"})
    refused(fewer, r"not those of its config.json: .'missing_keys': .'lm_head.weight'")
    foreign = copied(folder, tmp_path / "e")
    (foreign / "config.json").write_text(json.dumps({"model_type": "openvla", "auto_map": {"AutoModel": "x.Y"}}))
    refused(foreign, "holds a 'openvla', which brings code of its own")
    settings = json.loads((folder / "config.json").read_text())
    settings["text_config"]["hidden_size"] = 64
    (foreign / "config.json").write_text(json.dumps(settings))
    refused(foreign, "cannot be loaded|not those of its config.json")
