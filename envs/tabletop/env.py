"""``Tabletop``: N copies of one tabletop task behind the ``VectorEnv`` seam.

N members, H actions in a chunk, L live members, S the length of a state vector. The action of one env step (50 ms) is
(move xyz, turn xyz, grip), each in [-1, 1]: a unit moves the gripper's target 5 cm or turns it 0.25 rad, and grip 1 is
closed. Components outside [-1, 1] are clipped.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mujoco
import numpy as np
from jaxtyping import Float, Int

from vla_rlaif.envs.arguments import check_chunk, check_seeds
from vla_rlaif.envs.randomization import UNCHANGED
from vla_rlaif.envs.tabletop import rotations
from vla_rlaif.envs.tabletop.expert import expert_action
from vla_rlaif.envs.tabletop.physics import FPS, Physics
from vla_rlaif.envs.tabletop.ray_render import RayRenderer
from vla_rlaif.envs.tabletop.render import RENDERERS, GLRenderer, Renderer
from vla_rlaif.envs.tabletop.scene import CAMERAS, load_model
from vla_rlaif.envs.tabletop.tasks import TASKS, Positions
from vla_rlaif.envs.tabletop.variation import Looks, Variation
from vla_rlaif.types import EnvSpec, Observation, Transition

ACTION_DIM = 7
STATE_DIM = 8


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One member at one moment; ``Tabletop.restore`` continues from it bit for bit."""

    task: str
    state: Float[np.ndarray, " S"]  # mjSTATE_INTEGRATION: with the solver's warm start, the target and the goal
    cube: int  # which one the instruction names
    seed: int  # of the start state, by which the member's model was drawn
    num_steps: int  # env steps since reset
    initial_distance: float  # metres, at reset
    done: bool
    success: bool
    truncated: bool
    valid: bool


class Tabletop:
    """Owns simulators, renderer and the episode book-keeping. Never resets on its own and knows no reward."""

    def __init__(
        self,
        task: str,
        *,
        num_envs: int,
        image_size: int = 64,
        chunk: int = 4,
        max_steps: int = 16,
        success_radius: float = 0.03,
        renderer: str = "egl",
        physics_threads: int = 2,
        render_threads: int = 2,
        randomize: Mapping[str, float] = UNCHANGED,
    ) -> None:
        """``max_steps`` counts env steps, ``success_radius`` is in metres, ``renderer`` is egl, osmesa, ray or warp,
        ``randomize`` has the strengths of randomization.py."""
        _require(task in TASKS, f"Unknown task {task!r}; choose one of {', '.join(TASKS)}.")
        _require(renderer in RENDERERS, f"Unknown renderer {renderer!r}; choose one of {', '.join(RENDERERS)}.")
        counts = {"num_envs": num_envs, "image_size": image_size, "chunk": chunk, "max_steps": max_steps}
        counts |= {"physics_threads": physics_threads, "render_threads": render_threads}
        for name, count in counts.items():
            _require(count >= 1, f"{name} is {count}; it must be at least 1.")
        _require(success_radius > 0, f"success_radius is {success_radius} m; it must be positive.")
        self._task_name, self._task = task, TASKS[task]
        self._num_envs, self._max_steps, self._radius = num_envs, max_steps, success_radius
        self._spec = EnvSpec(
            cameras=CAMERAS,
            image_size=image_size,
            state_dim=STATE_DIM,
            action_dim=ACTION_DIM,
            chunk=chunk,
            max_decisions=-(-max_steps // chunk),
            instructions=self._task.instructions,
            fps=FPS,
        )
        model = load_model(image_size)
        self._physics = Physics(model, num_envs=num_envs, num_threads=physics_threads)
        self._variation = Variation(model, randomize, self._physics)
        self._renderer = _make_renderer(model, image_size, renderer, render_threads, num_envs, self._variation.looks)
        self._images = np.zeros((num_envs, len(CAMERAS), image_size, image_size, 3), np.uint8)
        self._seconds = {"physics": 0.0, "render": 0.0}
        self._is_started = False
        self._clear(self._num_envs)

    @property
    def num_envs(self) -> int:
        return self._num_envs

    @property
    def spec(self) -> EnvSpec:
        return self._spec

    @property
    def seconds(self) -> Mapping[str, float]:
        """Wall seconds spent so far, by "physics" (control and book-keeping included) and "render"."""
        return dict(self._seconds)

    def reset(self, seeds: Int[np.ndarray, " N"]) -> Transition:
        """Start episodes. Equal seeds give bit-identical states and images."""
        check_seeds(seeds, self._num_envs)
        start = time.perf_counter()
        self._clear(self._num_envs)
        self._variation.apply(np.arange(self._num_envs), seeds.tolist())
        self._cube = self._physics.reset(seeds.tolist(), self._task)
        self._initial_distance = self.truth_distance()
        self._done[:] = False
        self._is_started = True
        self._seconds["physics"] += time.perf_counter() - start
        self._render(np.arange(self._num_envs))
        return self._transition(np.zeros(self._num_envs, int))

    def step(self, action: Float[np.ndarray, "N H 7"]) -> Transition:
        """Execute a chunk of any length. Members that finish inside it are frozen there, in state and images."""
        _require(self._is_started, "Call reset before step.")
        check_chunk(action, self._done, ACTION_DIM)
        action = np.clip(np.asarray(action, np.float64), -1, 1)
        live_before = np.flatnonzero(~self._done)
        executed = np.zeros(self._num_envs, int)
        start = time.perf_counter()
        for h in range(action.shape[1]):
            live = np.flatnonzero(~self._done)
            if not len(live):
                break
            broken = self._physics.advance(live, action[live, h])
            executed[live] += 1
            self._judge(live, broken)
        self._seconds["physics"] += time.perf_counter() - start
        self._render(live_before)
        return self._transition(executed)

    def close(self) -> None:
        """Free the renderer's contexts. May be called twice."""
        self._renderer.close()

    def expert(self) -> Float[np.ndarray, "N 7"]:
        """The scripted expert's action for one env step, float32."""
        p = self._physics
        return expert_action(self._task_name, self._positions(), p.fingers, p.target, p.target_quat)

    def truth_distance(self) -> Float[np.ndarray, " N"]:
        """How far each member is from done, metres; what ``truth`` is measured with."""
        return self._task.distance(self._positions())

    def snapshot(self, i: int) -> Snapshot:
        return Snapshot(
            task=self._task_name,
            state=self._physics.states[i].copy(),
            cube=int(self._cube[i]),
            seed=int(self._variation.seeds[i]),
            num_steps=int(self._num_steps[i]),
            initial_distance=float(self._initial_distance[i]),
            done=bool(self._done[i]),
            success=bool(self._success[i]),
            truncated=bool(self._truncated[i]),
            valid=bool(self._valid[i]),
        )

    def restore(self, ids: Sequence[int] | Int[np.ndarray, " L"], snapshot: Snapshot) -> Transition:
        """Put one snapshot, of the same task, into the members ``ids``; the others keep what they have."""
        _require(snapshot.task == self._task_name, f"The snapshot is of {snapshot.task!r}, not {self._task_name!r}.")
        members = np.asarray(ids, int)
        start = time.perf_counter()
        self._variation.apply(members, [snapshot.seed] * len(members))
        self._physics.states[members] = snapshot.state
        self._physics.refresh(members)
        self._cube[members] = snapshot.cube
        self._num_steps[members] = snapshot.num_steps
        self._initial_distance[members] = snapshot.initial_distance
        self._done[members] = snapshot.done
        self._success[members] = snapshot.success
        self._truncated[members] = snapshot.truncated
        self._valid[members] = snapshot.valid
        self._is_started = True
        self._seconds["physics"] += time.perf_counter() - start
        self._render(members)
        return self._transition(np.zeros(self._num_envs, int))

    def state_hash(self) -> tuple[str, ...]:
        """A digest of each member's simulator state, model (where they differ), step count and named cube: equal means
        the same future."""
        models = (self._variation.digest(i) for i in range(self._num_envs))
        rows = zip(self._physics.states, models, self._num_steps, self._cube, strict=True)
        return tuple(hashlib.sha256(s.tobytes() + m + f"{n},{c}".encode()).hexdigest() for s, m, n, c in rows)

    def _clear(self, n: int) -> None:
        self._cube, self._num_steps = np.zeros(n, int), np.zeros(n, int)
        self._initial_distance = np.ones(n)
        self._done, self._valid = np.ones(n, bool), np.ones(n, bool)  # done: nothing runs before reset
        self._success, self._truncated = np.zeros(n, bool), np.zeros(n, bool)

    def _judge(self, live: Int[np.ndarray, " L"], broken: np.ndarray) -> None:
        self._num_steps[live] += 1
        success = self._task.success(self._positions(), self._radius)[live] & ~broken
        timed_out = self._num_steps[live] >= self._max_steps
        self._success[live] = success
        self._truncated[live] = timed_out & ~success & ~broken
        self._valid[live] = ~broken
        self._done[live] = success | timed_out | broken

    def _positions(self) -> Positions:
        return Positions(gripper=self._physics.gripper, cube=self._physics.cube(self._cube), goal=self._physics.goal)

    def _render(self, ids: Int[np.ndarray, " L"]) -> None:
        start = time.perf_counter()
        if len(ids):
            self._renderer(self._physics.states, self._images, ids)
        self._seconds["render"] += time.perf_counter() - start

    def _transition(self, executed: Int[np.ndarray, " N"]) -> Transition:
        progress = np.clip(1 - self.truth_distance() / self._initial_distance, -1, 1)
        return Transition(
            obs=self._observation(),
            done=self._done.copy(),
            truncated=self._truncated.copy(),
            success=self._success.copy(),
            truth=progress + self._success,
            executed=executed,
            valid=self._valid.copy(),
        )

    def _observation(self) -> Observation:
        p = self._physics
        # The turn away from pointing straight down: measured from the identity it would be half a turn, where rotation
        # vectors jump between pi and -pi.
        quat = p.gripper_quat
        turn = rotations.difference(quat, np.broadcast_to(rotations.GRIPPER_DOWN, quat.shape))
        state = np.concatenate([p.gripper, turn, p.fingers], axis=-1).astype(np.float32)
        sentences = self._task.instructions
        return Observation(
            images={camera: self._images[:, k].copy() for k, camera in enumerate(CAMERAS)},
            state=state,
            instruction=tuple(sentences[cube % len(sentences)] for cube in self._cube),
        )


def _make_renderer(
    model: mujoco.MjModel, image_size: int, renderer: str, num_threads: int, num_envs: int, looks: Looks
) -> Renderer:
    if renderer == "warp":
        from vla_rlaif.envs.tabletop.warp_render import WarpRenderer

        return WarpRenderer(model, cameras=CAMERAS, image_size=image_size, num_envs=num_envs, looks=looks)
    if renderer == "ray":
        return RayRenderer(model, cameras=CAMERAS, image_size=image_size, num_threads=num_threads, looks=looks)
    return GLRenderer(
        model, cameras=CAMERAS, image_size=image_size, backend=renderer, num_threads=num_threads, looks=looks
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
