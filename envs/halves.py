"""``Halves``: two envs of one kind as one, so that one of them computes while the policy decides for the other.

N members: those of the first env, then those of the second.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from vla_rlaif.envs.arguments import check_chunk, check_seeds
from vla_rlaif.envs.joined import joined
from vla_rlaif.step_metrics import WatchedEnv
from vla_rlaif.types import EnvSpec, Transition


@runtime_checkable
class RestorableVectorEnv(Protocol):
    """A VectorEnv with all that ours can do besides; what a snapshot is, each knows for itself."""

    @property
    def num_envs(self) -> int: ...
    @property
    def spec(self) -> EnvSpec: ...
    @property
    def seconds(self) -> Mapping[str, float]: ...
    def reset(self, seeds: Int[np.ndarray, " N"]) -> Transition: ...
    def step(self, action: Float[np.ndarray, "N H A"]) -> Transition: ...
    def expert(self) -> Float[np.ndarray, "N A"]: ...
    def state_hash(self) -> tuple[str, ...]: ...
    def snapshot(self, i: int) -> Any: ...
    def restore(self, ids: Sequence[int] | Int[np.ndarray, " L"], snapshot: Any) -> Transition: ...
    def close(self) -> None: ...


class Halves:
    """Owns both envs. ``rollout`` steps them apart; for all others they are one env, and are stepped together."""

    def __init__(self, first: RestorableVectorEnv, second: RestorableVectorEnv) -> None:
        """Both must have the same spec; the second may have another number of members."""
        assert first.spec == second.spec, f"the halves differ: {first.spec}, {second.spec}"
        self._envs = (first, second)
        self._threads = ThreadPoolExecutor(2, "half")
        self._done = np.ones(self.num_envs, bool)

    @property
    def halves(self) -> tuple[RestorableVectorEnv, RestorableVectorEnv]:
        return self._envs

    @property
    def num_envs(self) -> int:
        return sum(env.num_envs for env in self._envs)

    @property
    def spec(self) -> EnvSpec:
        return self._envs[0].spec

    @property
    def seconds(self) -> Mapping[str, float]:
        """Wall seconds spent so far, by "physics" and "render": the mean of the halves, which overlap."""
        total = Counter[str]()
        for env in self._envs:
            total.update(env.seconds)  # pyright: ignore[reportArgumentType] (adds floats too)
        return {part: value / 2 for part, value in total.items()}

    @property
    def faults(self) -> Mapping[str, int]:
        """As of the halves; nothing where they have no parts that fail."""
        total = Counter[str]()
        for env in self._envs:
            if isinstance(env, WatchedEnv):
                total.update(dict(env.faults))
        return dict(total)

    def reset(self, seeds: Int[np.ndarray, " N"]) -> Transition:
        check_seeds(seeds, self.num_envs)
        return self._joined(lambda env, rows: env.reset(seeds[rows]))

    def step(self, action: Float[np.ndarray, "N H A"]) -> Transition:
        check_chunk(action, self._done, self.spec.action_dim)  # here, where members are those of the whole
        return self._joined(lambda env, rows: env.step(action[rows]))

    def expert(self) -> Float[np.ndarray, "N A"]:
        return np.concatenate(self._both(lambda env, rows: env.expert()))

    def state_hash(self) -> tuple[str, ...]:
        first, second = self._both(lambda env, rows: env.state_hash())
        return first + second

    def snapshot(self, i: int) -> Any:
        """Of member ``i``; it fits into either half."""
        split = self._envs[0].num_envs
        return self._envs[0].snapshot(i) if i < split else self._envs[1].snapshot(i - split)

    def restore(self, ids: Sequence[int] | Int[np.ndarray, " L"], snapshot: Any) -> Transition:
        members = np.asarray(ids, int)
        mine = lambda rows: members[(members >= rows.start) & (members < rows.stop)] - rows.start  # noqa: E731
        return self._joined(lambda env, rows: env.restore(mine(rows), snapshot))

    def close(self) -> None:
        """End both. May be called twice."""
        for env in self._envs:
            env.close()
        self._threads.shutdown()

    def _joined(self, call: Callable[[RestorableVectorEnv, slice], Transition]) -> Transition:
        now = joined(self._both(call))
        self._done = now.done.copy()
        return now

    def _both[T](self, call: Callable[[RestorableVectorEnv, slice], T]) -> tuple[T, T]:
        """Of each half and its members, at the same time."""
        first, second = self._envs
        split = first.num_envs
        other = self._threads.submit(call, second, slice(split, split + second.num_envs))
        try:
            mine = call(first, slice(0, split))
        finally:
            other.exception()  # neither is left computing
        return mine, other.result()
