"""Generation by a real vLLM server on the CPU; opt-in, because vLLM has an environment of its own.

`make test-vllm` builds that and runs these: VLLM_PYTHON=.venv-vllm/bin/python pytest tests/policies/test_tokens_vllm.py
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file
from test_tokens_folder import tied
from test_tokens_train import check_run, run_config
from token_policies import SEEDS, make_config, make_obs, make_policy, make_spec, take, tensors

from vla_rlaif.interfaces import Policy
from vla_rlaif.policies.tokens.construct import build
from vla_rlaif.policies.tokens.folder import export_folder
from vla_rlaif.policies.tokens.policy import TokenPolicy
from vla_rlaif.policies.tokens.tuning import merged_tensors
from vla_rlaif.policies.tokens.vllm_policy import VLLMPolicy
from vla_rlaif.policies.tokens.vllm_server import ServerFault
from vla_rlaif.run import align
from vla_rlaif.token_config import FolderVLMConfig, TinyVLMConfig, VLLMConfig
from vla_rlaif.torch_weights import to_arrays
from vla_rlaif.tune_config import LoraTuning

PYTHON = os.environ.get("VLLM_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="VLLM_PYTHON names no interpreter that has vLLM")
TOLERANCE = 1e-4  # nats, a token's log-prob by vLLM against ours, both float32 on the CPU (measured: 3e-6)
WIDE = TinyVLMConfig()  # vLLM's attention on the CPU knows no heads as small as those of the other tests


def config(**changes: object) -> VLLMConfig:
    assert PYTHON is not None
    return VLLMConfig(python=Path(PYTHON), max_rows=8, memory_gb=0.25, start_s=900.0, **changes)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMPolicy]:
    """One server for all tests; each loads the weights that it needs."""
    engine = VLLMPolicy(make_policy(vlm=WIDE, tune=LoraTuning(rank=2)), config(), tmp_path_factory.mktemp("vllm"))
    yield engine
    engine.close()


def moved(policy: TokenPolicy, seed: int) -> dict[str, np.ndarray]:
    """Weights after some training, as it were: the adapters have an effect."""
    rng = np.random.default_rng(seed)
    weights = to_arrays(policy.params)
    trained = {
        name: weights[name] + rng.normal(0, 0.1, weights[name].shape).astype(np.float32)
        for name in sorted(policy.trainable)
    }
    return {**weights, **trained}


def check(engine: VLLMPolicy, policy: TokenPolicy) -> np.ndarray:
    """The engine samples from what ``policy`` says; returns its log-probs there."""
    obs = make_obs()
    decision = engine.act(obs, SEEDS)
    scored, _ = policy.score(tensors(policy.inputs(obs, decision.trace, np.full(5, 3))), None)
    np.testing.assert_allclose(decision.logp, scored.detach(), atol=TOLERANCE)
    greedy, want = engine.act(obs, SEEDS, noise_scale=0.0), policy.act(obs, SEEDS, noise_scale=0.0)
    np.testing.assert_array_equal(greedy.action, want.action)
    return scored.detach().numpy()


def test_same_distribution_before_and_after_updates(engine: VLLMPolicy) -> None:
    assert isinstance(engine, Policy)
    policy = make_policy(vlm=WIDE, tune=LoraTuning(rank=2))
    for version in (1, 2, 3):
        weights = moved(policy, version)
        policy.load(weights, version)
        engine.load(weights, version)
        assert engine.version == version
        check(engine, policy)
    again = make_policy(vlm=WIDE, tune=LoraTuning(rank=2))
    stale = again.score(tensors(again.inputs(make_obs(), engine.act(make_obs(), SEEDS).trace, np.full(5, 3))), None)[0]
    assert (
        np.abs(stale.detach().numpy() - check(engine, policy)).max() > 0.05
    )  # the updates did change what is sampled from


def test_a_row_depends_on_its_own_seed_only(engine: VLLMPolicy) -> None:
    engine.load(to_arrays(engine.local.params), 1)
    obs = make_obs()
    together = engine.act(obs, SEEDS)
    for row in range(2):
        alone = engine.act(take(obs, [row]), SEEDS[row : row + 1])
        np.testing.assert_array_equal(alone.trace["bins"][0], together.trace["bins"][row])
    other = engine.act(obs, SEEDS + 100)
    assert (other.trace["bins"] != together.trace["bins"]).any(axis=1).all()
    with pytest.raises(ValueError, match=r"noise_scale 0.5: with policy.engine vllm it is 0 or 1"):
        engine.act(obs, SEEDS, noise_scale=0.5)


def test_other_weights_than_were_sent(engine: VLLMPolicy) -> None:
    engine.load(to_arrays(engine.local.params), 4)
    engine.server.post("/update_weight_version", {"new_version": "9"})  # somebody else's doing
    with pytest.raises(ServerFault, match="has weights of version 9, wanted 4"):
        engine.act(make_obs(), SEEDS)
    engine.load(to_arrays(engine.local.params), 4)
    check(engine, engine.local)


def test_a_failed_transfer_is_not_resumed(engine: VLLMPolicy, tmp_path: Path) -> None:
    """Half a model arrives; nothing acts until all of it has been sent again."""
    engine.load(to_arrays(engine.local.params), 5)
    tensors_sent = merged_tensors(engine.local.module)
    half = dict(sorted(tensors_sent.items())[: len(tensors_sent) // 2])
    save_file({name: value + 1 for name, value in half.items()}, tmp_path / "half.safetensors", {"version": "6"})
    with pytest.raises(ServerFault, match="refused POST"):
        engine.send(tmp_path / "half.safetensors", 6)
    assert engine.server.get("/is_paused")["is_paused"]
    with pytest.raises(ServerFault, match="no whole set of weights"):
        engine.act(make_obs(), SEEDS)
    engine.load(to_arrays(engine.local.params), 6)
    check(engine, engine.local)


def test_slow_and_dead_servers(tmp_path: Path) -> None:
    engine = VLLMPolicy(make_policy(vlm=WIDE), config(request_s=5.0), tmp_path)
    engine.load(to_arrays(engine.local.params), 0)
    check(engine, engine.local)
    group = engine.server.pid
    os.killpg(group, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(ServerFault, match=r"too slow: GET /weight_info took longer than request_s .5 s"):
        engine.act(make_obs(), SEEDS)
    assert time.monotonic() - begun < 10
    os.killpg(group, signal.SIGCONT)
    check(engine, engine.local)
    os.killpg(group, signal.SIGKILL)
    with pytest.raises(ServerFault, match=r"vLLM server (has ended|does not answer)"):
        engine.act(make_obs(), SEEDS)
    engine.close()
    assert_ends(group)


def assert_ends(group: int) -> None:
    deadline = time.monotonic() + 30
    while running(group) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not running(group)


def running(group: int) -> list[str]:
    """Commands of the processes of a group, ended ones that nobody has waited for aside."""
    found = subprocess.run(["ps", "-o", "stat=,args=", "-g", str(group)], capture_output=True, text=True, check=False)
    return [line for line in found.stdout.splitlines() if not line.startswith("Z")]


def test_the_server_ends_with_us(tmp_path: Path) -> None:
    """However we end: here by SIGKILL."""
    script = tmp_path / "owner.py"
    script.write_text(
        "import pathlib, sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from token_policies import make_policy\n"
        "from vla_rlaif.policies.tokens.vllm_policy import VLLMPolicy\n"
        "from vla_rlaif.token_config import TinyVLMConfig, VLLMConfig\n"
        f"config = VLLMConfig(python=pathlib.Path({PYTHON!r}), start_s=900.0)\n"
        f"engine = VLLMPolicy(make_policy(vlm=TinyVLMConfig()), config, pathlib.Path({str(tmp_path)!r}))\n"
        "engine.server.wait()\n"
        "print(engine.server.pid, engine.server.exchange, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid, folder = owner.stdout.readline().split()
        assert running(int(pid)) and Path(folder).exists()
        owner.kill()
    assert_ends(int(pid))
    assert not Path(folder).exists()


def test_tied_embeddings(tmp_path: Path) -> None:
    """A model whose output head is its input embedding: both have the new weights after an update."""
    export_folder(make_policy(vlm=WIDE), tmp_path / "plain")
    vlm = FolderVLMConfig(folder=tied(tmp_path / "plain", tmp_path / "tied"))
    policy = build(make_config(vlm=vlm), make_spec(), seed=0)
    engine = VLLMPolicy(policy, config(), tmp_path)
    for version in (1, 2):
        rng, weights = np.random.default_rng(version), to_arrays(policy.params)
        engine.load({k: v + rng.normal(0, 0.05, v.shape).astype(np.float32) for k, v in weights.items()}, version)
        check(engine, policy)
    engine.close()


def test_trains_through_vllm(tmp_path: Path) -> None:
    """The loop of test_tokens_train.py, its rollouts and validations by the server."""
    vlm = {"type": "tiny", "hidden_dim": 64, "mlp_dim": 64, "vision_dim": 16}
    run = run_config(tmp_path, vlm=vlm, engine=config().model_dump())
    align(run, resume=False, overwrite=False, say=lambda text: None)
    check_run(tmp_path / "run")
    assert "POST /v1/chat/completions" in (tmp_path / "run" / "vllm" / "server.log").read_text()
