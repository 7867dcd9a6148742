"""Write tests/golden/trl_grpo.json: losses, gradients and advantages of TRL's own GRPO code on random numbers.

TRL's ``GRPOTrainer._compute_loss`` and ``._generate_and_score_completions`` run unchanged, unbound, on stand-ins that
answer with fixed log-probabilities and rewards, so no model is loaded. This file imports nothing of vla_rlaif and runs
in an environment of its own, on a CPU in seconds:

    python -m venv trl-env
    trl-env/bin/pip install trl==1.16.0 torch==2.11.0 transformers==5.5.4
    trl-env/bin/python benchmarks/trl_golden.py

Axes: N episodes in groups of 4, C completion tokens. A token is one sub-step of one decision, C = T * S.
"""

import json
from collections import defaultdict
from importlib.metadata import version
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOTrainer  # pyright: ignore[reportMissingImports] (only in the environment above)

OUT = Path(__file__).parents[1] / "tests" / "golden" / "trl_grpo.json"
N, T, S, GROUP = 16, 3, 2, 4
EPSILON_LOW, EPSILON_HIGH = 0.2, 0.28
MICRO_BATCHES = 4
MODEL = SimpleNamespace(training=True, is_gradient_checkpointing=False)
ACCELERATOR = SimpleNamespace(
    device=torch.device("cpu"),
    num_processes=1,
    process_index=0,
    gather=lambda x: x,
    reduce=lambda x, reduction: x,
)


def advantages(reward: torch.Tensor, scale_rewards: str) -> torch.Tensor:
    tokens = [[0]] * N
    trainer = SimpleNamespace(
        accelerator=ACCELERATOR,
        model=MODEL,
        args=SimpleNamespace(
            gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None,
            per_device_train_batch_size=N,
            steps_per_generation=1,
        ),
        environment_factories=None,
        environments=None,
        tools=None,
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        num_iterations=1,
        use_vllm=False,
        beta=0.0,
        num_generations=GROUP,
        multi_objective_aggregation="sum_then_normalize",
        scale_rewards=scale_rewards,
        reward_weights=torch.ones(1, dtype=reward.dtype),
        reward_func_names=["reward"],
        log_multimodal=False,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        _generate=lambda prompts: (tokens, tokens, None, [""] * N, None, {}, None, None),
        _calculate_rewards=lambda *_: reward[:, None],
        _metrics=defaultdict(lambda: defaultdict(list)),
        _logs={"prompt": [], "completion": [], "rewards": defaultdict(list), "advantages": [], "extra": {}},
        _pending_extra_logs={},
        _pending_metrics={},
    )
    prompts = [{"prompt": ""} for _ in range(N)]
    return GRPOTrainer._generate_and_score_completions(trainer, prompts)["advantages"]


def loss(loss_type: str, beta: float, data: dict[str, torch.Tensor], micro_batches: int) -> dict[str, Any]:
    """The loss of each micro-batch, the gradient they add up to, and TRL's metrics (means over micro-batches)."""
    logp = data["logp"].clone().requires_grad_()
    trainer = SimpleNamespace(
        accelerator=ACCELERATOR,
        model=MODEL,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=micro_batches),
        aux_loss_enabled=False,
        beta=beta,
        current_gradient_accumulation_steps=micro_batches,
        epsilon_low=EPSILON_LOW,
        epsilon_high=EPSILON_HIGH,
        importance_sampling_level="token",
        loss_type=loss_type,
        max_completion_length=T * S,
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    losses = []
    for rows in torch.arange(N).chunk(micro_batches):
        tokens = torch.zeros(len(rows), T * S, dtype=torch.long)
        answer = (logp[rows], torch.zeros_like(logp[rows]), None)  # log-probabilities, entropies, auxiliary loss
        trainer._get_per_token_logps_and_entropies = lambda *_, answer=answer, **__: answer
        inputs = {
            "prompt_ids": tokens[:, :1],
            "prompt_mask": torch.ones_like(tokens[:, :1]),
            "completion_ids": tokens,
            "completion_mask": data["mask"][rows],
            "advantages": data["advantage"][rows],
            "old_per_token_logps": data["logp_old"][rows],
            "ref_per_token_logps": data["logp_ref"][rows],
            "num_items_in_batch": data["mask"].sum(),
        }
        value = GRPOTrainer._compute_loss(trainer, None, inputs)
        value.backward()
        losses.append(value.item())
    metrics = {name: sum(v) / len(v) for name, v in trainer._metrics["train"].items()}
    assert logp.grad is not None
    return {
        "loss_type": loss_type,
        "beta": beta,
        "losses": losses,
        "grad": [[float(f"{g:.13g}") for g in row] for row in logp.grad.tolist()],
        "clip_fraction": metrics["clip_ratio/region_mean"],
        "kl": metrics.get("kl"),
    }


def main() -> None:
    random = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).round(decimals=4)

    reward = normal(N)
    reward[5] = torch.nan  # unscorable
    reward[8:12] = 0.5  # tied
    reward[12:] = 0.5 + 1e-3 * reward[12:]  # spread below our std_floor
    logp = normal(N, T * S)
    # Decisions of each episode; sub-steps of one decision are never split.
    lengths = torch.randint(1, T + 1, (N,), generator=random)
    data = {
        "logp": logp,
        "logp_old": logp + 0.4 * normal(N, T * S),
        "logp_ref": logp + 0.3 * normal(N, T * S),
        "mask": (torch.arange(T) < lengths[:, None]).repeat_interleave(S, dim=1).long(),
        "advantage": advantages(reward, "group"),
    }
    data |= {name: data[name].round(decimals=5) for name in ("logp_old", "logp_ref")}
    golden = {
        "versions": {name: version(name) for name in ("trl", "torch", "transformers")},
        "shape": {"N": N, "T": T, "S": S, "group_size": GROUP},
        "epsilon_low": EPSILON_LOW,
        "epsilon_high": EPSILON_HIGH,
        "reward": [None if r != r else r for r in reward.tolist()],
        "advantage_unscaled": advantages(reward, "none").tolist(),
        **{name: value.tolist() for name, value in data.items()},
        "cases": [
            loss(loss_type, beta, data, MICRO_BATCHES if loss_type == "dapo" else 1)
            for loss_type, beta in product(("dr_grpo", "bnpo", "grpo", "dapo"), (0.0, 0.05))
        ],
    }
    OUT.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
