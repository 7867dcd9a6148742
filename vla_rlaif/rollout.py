"""Episodes from a policy and a vector env; start states; the batch a learner takes.

Axes as in types.py: N episodes, T decisions, F = T + 1 frames, B = N * T.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from enum import IntEnum
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int, UInt8, UInt32

from vla_rlaif.act_batch import decide
from vla_rlaif.interfaces import Policy, VectorEnv
from vla_rlaif.types import Batch, Decision, Episodes, Observation, Starts, Transition


class Split(IntEnum):
    """The high bits of a start seed. Different splits cannot share a seed, so their start states are disjoint."""

    TRAIN = 1
    DEMONSTRATION = 2
    REWARD = 3
    VALIDATION = 4
    TEST = 5


def start_seed(split: Split, *entropy: int) -> int:
    """A 52-bit seed: 4 bits of split, 48 of hash. One stream per (split, entropy)."""
    low, high = np.random.SeedSequence(entropy).generate_state(2)
    return (int(split) << 48) | ((int(high) & 0xFFFF) << 32) | int(low)


def train_starts(seed: int, step: int, num_groups: int, group_size: int, split: Split = Split.TRAIN) -> Starts:
    """``num_groups`` fresh start states, each played by ``group_size`` members."""
    first = step * num_groups
    group = first + np.repeat(np.arange(num_groups), group_size)
    seeds = np.array([start_seed(split, seed, first + g) for g in range(num_groups)])
    return Starts(seed=np.repeat(seeds, group_size), group=group, member=np.tile(np.arange(group_size), num_groups))


def dealt(seed: int, number: int, num_tasks: int, num_starts: int) -> int:
    """``seed`` with another remainder, so that consecutive ``number``s go through all tasks, and then through all start
    states of each (EnvSpec's num_tasks and num_starts)."""
    kinds = num_tasks * num_starts
    return seed - seed % kinds + number % kinds


def held_out_starts(split: Split, num: int, num_tasks: int = 1, num_starts: int = 1) -> Starts:
    """The first ``num`` start states of a held-out split: the same for every run, each exactly once, and of each of
    ``num_tasks`` tasks as many as of any other. Where a task has only ``num_starts``, they are gone through in turn."""
    seeds = np.array([dealt(start_seed(split, i), i, num_tasks, num_starts) for i in range(num)])
    return Starts(seed=seeds, group=np.arange(num), member=np.zeros(num, np.int64))


def noise_seeds(seed: int, starts: Starts, decision: int) -> UInt32[np.ndarray, " N"]:
    """One stream of action noise per (run seed, group, member, decision)."""
    rows = zip(starts.group.tolist(), starts.member.tolist(), strict=True)
    return np.array([np.random.SeedSequence((seed, g, m, decision)).generate_state(1)[0] for g, m in rows], np.uint32)


@runtime_checkable
class HalvedEnv(Protocol):
    """An env of two that are stepped apart, so that one computes while the policy decides for the other."""

    @property
    def halves(self) -> tuple[VectorEnv, VectorEnv]:
        """The first has the first half of the members."""
        ...


def rollout(
    policy: Policy,
    env: VectorEnv,
    starts: Starts,
    *,
    seed: int,
    noise_scale: float = 1.0,
    act_batch: int | None = None,
) -> Episodes:
    """Play one episode per start, in rounds of ``env.num_envs``; ``noise_scale`` 0 acts deterministically.

    ``act_batch``: the policy sees exactly so many rows at a time. Libraries sum in another order for another number of
    rows, so episodes are the same bits with another number of members only if it is given. None: all rows of an env.

    Raises ValueError if the members do not split into ``act_batch``.
    """
    total, size = len(starts.seed), env.num_envs
    envs = env.halves if isinstance(env, HalvedEnv) else (env,)
    for part in envs:
        if act_batch is not None and part.num_envs % act_batch:
            raise ValueError(
                f"{part.num_envs} members do not split into act batches of {act_batch} rows; choose a divisor."
            )
    act = partial(decide, policy, noise_scale=noise_scale, act_batch=act_batch)
    rounds = []
    for first in range(0, total, size):
        rows = np.arange(first, first + size) % total  # the last round is filled up by repeating, then cut
        plays, end = [], 0
        for part in envs:
            begin, end = end, end + part.num_envs
            plays.append(_episodes(policy, part, take_starts(starts, rows[begin:end]), seed, act))
        played = concatenate(_alternate(plays) if len(plays) > 1 else [_straight(plays[0])])
        rounds.append(take(played, np.arange(min(size, total - first))))
    return concatenate(rounds)


_Play = Generator[Callable[[], Transition], Transition, Episodes]  # yields what the env is to do next


def _straight(play: _Play) -> Episodes:
    call = next(play)
    while True:
        now = call()
        try:
            call = play.send(now)
        except StopIteration as end:
            return end.value


def _alternate(plays: Sequence[_Play]) -> list[Episodes]:
    """Go on with one after the other, always in this order and on this thread: the policy is asked by one at a time.
    Their envs compute meanwhile, on a thread each."""
    episodes: list[Episodes] = []
    with ThreadPoolExecutor(len(plays), "env") as threads:
        answers = [threads.submit(next(play)) for play in plays]
        while not episodes:  # all last equally long
            for k, play in enumerate(plays):
                now = answers[k].result()
                try:
                    answers[k] = threads.submit(play.send(now))
                except StopIteration as end:
                    episodes.append(end.value)
    return episodes


def _episodes(
    policy: Policy, env: VectorEnv, starts: Starts, seed: int, act: Callable[[Observation, np.ndarray], Decision]
) -> _Play:
    """One round of ``env``: it decides when it is sent the env's answer, and yields what the env is to do."""
    now = yield partial(env.reset, starts.seed)
    seen: list[Transition] = [now]
    decisions: list[Decision] = []
    live = []
    for t in range(env.spec.max_decisions):
        obs = windowed([s.obs for s in seen[-policy.window :]], policy.window)
        decision = act(obs, noise_seeds(seed, starts, t))
        live.append(~now.done)
        decisions.append(decision)
        now = yield partial(env.step, decision.action)
        seen.append(now)
    cameras = now.obs.images.keys()
    return Episodes(
        images={c: np.stack([s.obs.images[c] for s in seen], axis=1) for c in cameras},
        state=np.stack([s.obs.state for s in seen], axis=1),
        instruction=seen[0].obs.instruction,
        action=np.stack([d.action for d in decisions], axis=1),
        logp=np.stack([d.logp for d in decisions], axis=1),
        trace={k: np.stack([d.trace[k] for d in decisions], axis=1) for k in decisions[0].trace},
        mask=np.stack(live, axis=1),
        executed=np.stack([s.executed for s in seen[1:]], axis=1),
        success=now.success,
        truth=now.truth,
        valid=now.valid,
        starts=starts,
        version=policy.version,
    )


def windowed(seen: Sequence[Observation], window: int) -> Observation:
    """The last ``window`` observations as one, oldest first; where there are fewer, the first of them repeats."""
    if window == 1:
        return seen[-1]
    missing = window - len(seen)
    frames = [seen[0]] * missing + list(seen)
    return Observation(
        images={c: np.stack([o.images[c] for o in frames], axis=1) for c in seen[-1].images},
        state=np.stack([o.state for o in frames], axis=1),
        instruction=seen[-1].instruction,
        frame_ok=np.broadcast_to(np.arange(window) >= missing, (len(seen[-1].state), window)),
    )


def take_starts(starts: Starts, rows: np.ndarray) -> Starts:
    return Starts(seed=starts.seed[rows], group=starts.group[rows], member=starts.member[rows])


def take(episodes: Episodes, rows: np.ndarray) -> Episodes:
    """Some of the episodes, in the given order."""
    e = episodes
    return replace(
        e,
        images={k: v[rows] for k, v in e.images.items()},
        state=e.state[rows],
        instruction=tuple(e.instruction[i] for i in np.arange(len(e.instruction))[rows]),
        action=e.action[rows],
        logp=e.logp[rows],
        trace={k: v[rows] for k, v in e.trace.items()},
        mask=e.mask[rows],
        executed=e.executed[rows],
        success=e.success[rows],
        truth=e.truth[rows],
        valid=e.valid[rows],
        starts=take_starts(e.starts, rows),
    )


def concatenate(parts: list[Episodes]) -> Episodes:
    """Episodes of one weights version, one after the other."""
    first = parts[0]
    assert all(p.version == first.version for p in parts), "one batch never mixes weights versions"
    if len(parts) == 1:
        return first
    cat = lambda name: np.concatenate([getattr(p, name) for p in parts])  # noqa: E731
    return replace(
        first,
        images={k: np.concatenate([p.images[k] for p in parts]) for k in first.images},
        trace={k: np.concatenate([p.trace[k] for p in parts]) for k in first.trace},
        instruction=tuple(s for p in parts for s in p.instruction),
        starts=Starts(
            **{k: np.concatenate([getattr(p.starts, k) for p in parts]) for k in ("seed", "group", "member")}
        ),
        **{k: cat(k) for k in ("state", "action", "logp", "mask", "executed", "success", "truth", "valid")},
    )


def frames_at(
    images: Mapping[str, UInt8[np.ndarray, "N F height width 3"]],
    state: Float[np.ndarray, "N F P"],
    instruction: tuple[str, ...],
    n: Int[np.ndarray, " B"],
    t: Int[np.ndarray, " B"],
    window: int,
    stride: int = 1,
) -> Observation:
    """Row b sees frame ``t[b]`` of episode ``n[b]``, and with a window those before it, ``stride`` frames apart."""
    said = tuple(instruction[i] for i in n.tolist())
    if window == 1:
        return Observation(images={k: v[n, t] for k, v in images.items()}, state=state[n, t], instruction=said)
    frame = t[:, None] + stride * np.arange(1 - window, 1)
    at = n[:, None], np.maximum(frame, 0)
    return Observation(
        images={k: v[at] for k, v in images.items()}, state=state[at], instruction=said, frame_ok=frame >= 0
    )


def make_batch(
    episodes: Episodes,
    advantage: Float[np.ndarray, " N"] | Float[np.ndarray, "N T"],
    num_valid: float,
    *,
    window: int = 1,
    is_stale: bool = False,
) -> Batch:
    """Keep the live decisions that have an advantage, of their own or their episode's, flattened to B rows, with what
    each of them saw.

    ``is_stale``: older weights acted, so the log-probs that they gave go along. Of a chunk that success cut short they
    cover more than was executed, which the learner cannot take apart: such a decision has NaN there.
    """
    e = episodes
    worth = np.broadcast_to(advantage if advantage.ndim == 2 else advantage[:, None], e.mask.shape)
    n, t = np.nonzero(e.mask & (worth != 0))
    return Batch(
        obs=frames_at(e.images, e.state, e.instruction, n, t, window),
        trace={k: v[n, t] for k, v in e.trace.items()},
        executed=e.executed[n, t],
        advantage=worth[n, t].astype(np.float32),
        mask=np.ones(len(n), bool),
        num_valid=num_valid,
        logp_acted=np.where((e.executed == e.action.shape[2])[..., None], e.logp, np.nan)[n, t] if is_stale else None,
    )
