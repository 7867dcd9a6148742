"""A vLLM server that does not come up; those that do are in test_tokens_vllm.py, which is opt-in."""

import sys
from pathlib import Path

import pytest
from token_policies import make_config, make_policy

from vla_rlaif.policies.tokens.vllm_policy import VLLMPolicy
from vla_rlaif.policies.tokens.vllm_server import ServerFault
from vla_rlaif.token_config import VLLMConfig
from vla_rlaif.torch_weights import to_arrays


def test_an_interpreter_without_vllm(tmp_path: Path) -> None:
    """Ours has none. What the server says last is in the error, and nothing of it is left behind."""
    policy = make_policy()
    engine = VLLMPolicy(policy, VLLMConfig(python=Path(sys.executable), start_s=60.0), tmp_path)
    with pytest.raises(ServerFault, match=r"no whole set of weights"):
        _ = engine.version
    with pytest.raises(ServerFault, match=r"(?s)ended while starting \(exit 1\).*No module named .*vllm"):
        engine.load(to_arrays(policy.params), 1)
    folder = engine.server.exchange
    assert folder.exists()
    engine.close()
    assert not folder.exists()


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"engine.python: there is no .*nowhere.*make env-vllm"):
        VLLMPolicy(make_policy(), VLLMConfig(python=tmp_path / "nowhere"), tmp_path)
    with pytest.raises(ValueError, match="vLLM writes PaliGemma's prompts in its own way"):
        VLLMPolicy(make_policy("paligemma"), VLLMConfig(python=Path(sys.executable)), tmp_path)
    with pytest.raises(ValueError, match="with device cpu there is none"):
        make_config(engine=VLLMConfig(python=Path(sys.executable), sleep=True))
