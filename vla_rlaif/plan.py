"""What a run will do and need, from the config alone: neither torch, jax nor mujoco is loaded."""

from itertools import pairwise

from vla_rlaif.config import (
    KeypointStemConfig,
    OctoConfig,
    PreferenceRewardConfig,
    RunConfig,
    TabletopConfig,
    cautions,
    kl_coef,
)

FLOAT = 4  # bytes
NUM_CAMERAS = 2
STATE_DIM, ACTION_DIM = 8, 7  # of the tabletop family


def describe(config: RunConfig) -> str:
    """A table as text: groups a step, labels, parameters, memory."""
    env, group, loop = config.env, config.algorithm.group_size, config.loop
    rows = [
        ("run directory", str(config.run_dir)),
        ("placement", "one process (cluster: local)"),
        ("episodes a step", f"{env.num_envs} = {env.num_envs // group} groups of {group}"),
        ("steps", f"{loop.steps}, {loop.steps * env.num_envs} episodes in all"),
        ("validation", f"{loop.validation_episodes} episodes every {loop.validate_every} steps"),
        ("evaluation", f"{config.evaluate.episodes} episodes before and after, start states of their own"),
        ("reward", _labels(config)),
        ("KL to the start policy", f"coefficient {kl_coef(config)}"),
    ]
    if isinstance(config.policy, OctoConfig) and isinstance(env, TabletopConfig):
        rows += _octo(config.policy, env, config.learner.minibatch)
    rows += [("caution", text) for text in cautions(config)]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


def label_schedule(config: PreferenceRewardConfig, steps: int) -> tuple[int, int]:
    """(labels that the run asks for, number of fits)."""
    refreshes = len(range(config.refresh_every, steps, config.refresh_every))
    wanted = config.initial_labels + refreshes * config.labels_per_refresh
    paid = min(refreshes, -(-(config.budget - config.initial_labels) // config.labels_per_refresh))
    return min(wanted, config.budget), 1 + paid


def _labels(config: RunConfig) -> str:
    if not isinstance(config.reward, PreferenceRewardConfig):
        return f"{config.reward.type}, no labels"
    labels, fits = label_schedule(config.reward, config.loop.steps)
    return f"learned from {labels} labels (budget {config.reward.budget}), fitted {fits} times"


def _octo(policy: OctoConfig, env: TabletopConfig, minibatch: int) -> list[tuple[str, str]]:
    counts = octo_parameters(policy, env)
    total = sum(counts.values())
    trained = counts["head"] if policy.tune == "head" else total
    # Weights, reference and average of what is trained, its gradient and two Adam moments.
    weights = FLOAT * (total + counts["head"] + 5 * trained) / 2**20
    frames = env.max_steps // env.chunk + 1
    episodes = env.num_envs * frames * NUM_CAMERAS * 3 * env.image_size**2 / 2**20
    rows = minibatch * policy.tuned_steps
    head = FLOAT * rows * policy.head_blocks * 5 * policy.head_dim / 2**20
    return [
        ("parameters", f"{total:,} ({', '.join(f'{k} {v:,}' for k, v in counts.items())}); {trained:,} trained"),
        ("memory, weights and optimiser", f"{weights:.0f} MB"),
        ("memory, frames of a step", f"{episodes:.0f} MB"),
        ("memory, head activations", f"{head:.0f} MB"),
    ]


def octo_parameters(p: OctoConfig, env: TabletopConfig) -> dict[str, int]:
    """Parameter counts by part, without the word table; a test compares them with the network."""
    dense = lambda i, o: i * o + o  # noqa: E731
    if isinstance(p.stem, KeypointStemConfig):
        c = p.stem.channels
        stem, tokens, token_width = 36 * 3 * c + c + 9 * c * c + c, 1, 2 * c
    else:
        f, tokens, token_width = p.stem.features, (env.image_size // p.stem.patch_size) ** 2, p.stem.embedding
        channels = (6 if p.stem.goal_images else 3, *f)
        convs = sum(9 * i * o + 3 * o for i, o in pairwise(channels))
        stem = convs + dense((p.stem.patch_size // 16) ** 2 * f[-1], p.stem.embedding)
    block = 4 * dense(p.token_dim, p.token_dim) + dense(p.token_dim, p.mlp_dim) + dense(p.mlp_dim, p.token_dim)
    transformer = p.num_layers * (block + 4 * p.token_dim) + 2 * p.token_dim
    projections = dense(p.language_dim, p.token_dim) + NUM_CAMERAS * dense(token_width, p.token_dim)
    positions = p.token_dim * (p.language_tokens + p.max_horizon * (NUM_CAMERAS * tokens + 1))
    if p.proprio:
        projections += dense(1, p.token_dim)
        positions += p.token_dim * p.max_horizon * STATE_DIM
    width, out = p.head_dim, env.chunk * ACTION_DIM
    resnet = p.head_blocks * (dense(width, 4 * width) + dense(4 * width, width) + 2 * width)
    time = p.time_dim // 2 + dense(p.time_dim, 2 * p.time_dim) + dense(2 * p.time_dim, p.time_dim)
    head = time + dense(p.time_dim + p.token_dim + out, width) + resnet + dense(width, out)
    return {"stems": NUM_CAMERAS * stem, "transformer": transformer, "tokens": projections + positions, "head": head}
