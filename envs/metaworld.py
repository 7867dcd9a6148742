"""Meta-World's tasks as ``SingleEnv``: a sentence for each, fast images, the suite's experts, and snapshots.

Numpy, mujoco and metaworld only (see single.py). An action is (move xyz, grip), each in [-1, 1]; a unit moves the
target of the hand 1 cm, and grip 1 is closed. The state is the hand's position (metres) and the opening of the gripper
in [0, 1]; with observation full it goes on with the suite's 35 others: position and quaternion of two objects, all 18
numbers again as they were an env step ago, and the goal.

A start state is drawn from the task's own distribution by the seed alone; with several tasks, seed modulo their number
says which. ``restore`` brings back MuJoCo's state with the solver's warm start, what reset writes into the model, and
the suite's Python attributes: docs/envs.md says how exactly that continues.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import mujoco
import numpy as np

from vla_rlaif.envs.gl import Cameras, make_fast
from vla_rlaif.envs.metaworld_tasks import SENTENCES
from vla_rlaif.envs.randomization import ModelRandomizer
from vla_rlaif.envs.single import Reading, SingleSpec

ACTION_DIM = 4
STATE_DIMS = {"proprio": 4, "full": 39}
FPS = 80
_STATE = int(mujoco.mjtState.mjSTATE_INTEGRATION)
_LEROBOT = "lerobot"  # corner2 as LeRobot's datasets and checkpoints have it: moved
_LEROBOT_POSITION = (0.75, 0.075, 0.7)  # metres
_UPSIDE_DOWN = ("corner", "corner2", "corner3", _LEROBOT)  # in the suite's models
_SKIPPED = ("num_resets", "current_seed", "_last_stable_obs")  # attributes of the past, which no future depends on
_BROKEN = (mujoco.mjtWarning.mjWARN_BADQPOS, mujoco.mjtWarning.mjWARN_BADQVEL, mujoco.mjtWarning.mjWARN_BADQACC)


class MetaWorldTask:
    teaches = True
    _drawn: dict[tuple[str, ...], Cameras] = {}  # noqa: RUF012 (of this process: members of one task share a context)
    _last_start: tuple[tuple[object, ...], str, dict[str, np.ndarray]] | None = None  # of this process, by any member

    def __init__(
        self,
        *,
        tasks: Sequence[str],
        observation: str,
        cameras: Sequence[str],
        image_size: int,
        renderer: str,
        fast_render: bool,
        randomize: Mapping[str, float],
    ) -> None:
        """``renderer`` is egl or osmesa; without ``fast_render`` images are as the suite draws them, at eight times the
        cost. ``randomize`` has the strengths of randomization.py; without any the model is the suite's."""
        import_suite()
        self.spec = SingleSpec(
            cameras=tuple(cameras),
            image_size=image_size,
            state_dim=STATE_DIMS[observation],
            action_dim=ACTION_DIM,
            instructions=tuple(SENTENCES[t] for t in tasks),
            fps=FPS,
            num_tasks=len(tasks),
        )
        self._tasks, self._renderer, self._fast = tuple(tasks), renderer, fast_render
        self._strength = {kind: strength for kind, strength in randomize.items() if strength}
        self._suite: dict[str, Any] = {}  # SawyerXYZEnv by task, made when first played
        self._randomizers: dict[str, ModelRandomizer] = {}
        self._start(self._tasks[0])
        if cameras:
            self._cameras()  # a machine that cannot draw is found now

    def reset(self, seed: int) -> Reading:
        """The suite's reset simulates hundreds of steps, so members of a group take over what the first one came to."""
        task, last = self._tasks[seed % len(self._tasks)], MetaWorldTask._last_start
        key = (task, seed, *sorted(self._strength.items()))
        if last is not None and last[0] == key:
            return self._put(task, last[1], {name: value.copy() for name, value in last[2].items()})
        self._start(task)
        self._randomize(seed)
        env = self._env
        # The suite ignores the seed of reset(). It draws a start vector in every reset_model(), of which reset() calls
        # two, and observes where the first one put things; so, as its benchmarks do, draw once and keep the vector.
        env.seed(seed)
        env._freeze_rand_vec, env._last_stable_obs = False, None
        env.reset_model()
        env._freeze_rand_vec = True
        self._obs, _ = env.reset()
        reading = self._reading(success=False, truth=0.0)
        MetaWorldTask._last_start = key, self._rng(), {name: value.copy() for name, value in self._parts().items()}
        return reading

    def step(self, action: np.ndarray) -> Reading:
        self._obs, reward, _, _, info = self._env.step(action.astype(np.float32))
        if any(self._env.data.warning[w].number for w in _BROKEN):
            raise FloatingPointError("MuJoCo reports a broken simulation.")
        success = bool(info["success"])
        return self._reading(success=success, truth=min(max(float(reward) / 10, -1.0), 1.0) + success)

    def render(self, images: np.ndarray) -> None:
        if not self.spec.cameras:
            return
        env = self._env
        # Reset moves bodies after its last forward pass. Only positions are computed, so the future stays the same.
        mujoco.mj_kinematics(env.model, env.data)
        mujoco.mj_camlight(env.model, env.data)
        self._cameras().draw(env.model, env.data, images)
        for image, camera in zip(images, self.spec.cameras, strict=True):
            if camera in _UPSIDE_DOWN:
                image[:] = image[::-1, ::-1].copy()

    def expert(self) -> np.ndarray:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a gain is so high that the action is clipped
            action = self._policy.get_action(self._obs)
        return np.clip(action, -1, 1).astype(np.float32)

    def fingerprint(self) -> bytes:
        rows = [f"{k}:{v.shape}:".encode() + v.tobytes() for k, v in sorted(self._parts().items())]
        return b"\n".join([self._task.encode(), self._rng().encode(), *rows])

    def snapshot(self) -> bytes:
        buffer = io.BytesIO()
        names = {"task": np.array(self._task), "rng": np.array(self._rng())}
        np.savez(buffer, allow_pickle=False, **names, **self._parts())
        return buffer.getvalue()

    def restore(self, snapshot: bytes) -> Reading:
        with np.load(io.BytesIO(snapshot), allow_pickle=False) as saved:
            parts = {k: saved[k] for k in saved.files}
        return self._put(str(parts.pop("task")), str(parts.pop("rng")), parts)

    def _put(self, task: str, rng: str, parts: dict[str, np.ndarray]) -> Reading:
        """Go to the state that is ``parts``, which become this env's own."""
        self._start(task)
        self._randomize(int(parts.pop("seed")))
        env = self._env
        env.np_random.bit_generator.state = json.loads(rng)
        env.model.body_pos[:], env.model.site_pos[:] = parts.pop("model/body_pos"), parts.pop("model/site_pos")
        state = parts.pop("state")
        mujoco.mj_setState(env.model, env.data, state, _STATE)
        mujoco.mj_forward(env.model, env.data)
        mujoco.mj_setState(env.model, env.data, state, _STATE)  # the warm start, which forward has overwritten
        self._obs = parts.pop("obs")
        success, truth = parts.pop("outcome")
        for path, value in parts.items():
            kind, _, name = path.partition("/")
            vars(env)[name] = None if kind == "none" else value if value.ndim else value.item()
        return self._reading(success=bool(success), truth=float(truth))

    def close(self) -> None:
        for env in self._suite.values():
            env.close()
        self._suite.clear()
        self._randomizers.clear()

    def _start(self, task: str) -> None:
        """Make ``task`` the one that is played."""
        from metaworld.policies import ENV_POLICY_MAP

        if task not in self._suite:
            self._suite[task] = self._made(task)
        self._task, self._env, self._policy = task, self._suite[task], ENV_POLICY_MAP[task]()

    def _randomize(self, seed: int) -> None:
        self._seed = seed
        if self._strength:
            if self._task not in self._randomizers:
                self._randomizers[self._task] = ModelRandomizer(self._env.model, self._strength)
            self._randomizers[self._task].apply(seed)

    def _made(self, task: str) -> Any:
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS

        try:
            env = ALL_V3_ENVIRONMENTS[task]()
        except (OSError, ValueError) as error:  # of gymnasium for the model, of mujoco for what it includes
            raise ValueError(
                f"Meta-World cannot load the scene of {task}: {error}. Its assets are a part of the package: "
                "pip install --force-reinstall --no-deps metaworld==3.0.0"
            ) from error
        # What the suite's own benchmarks set, but for the draw of the start state: by seed, not from a list of 50.
        env._partially_observable = False
        del env.sawyer_observation_space  # cached, and of the goal's visibility
        env.seeded_rand_vec, env._set_task_called = True, True
        names = {mujoco.mj_id2name(env.model, mujoco.mjtObj.mjOBJ_CAMERA, i) for i in range(env.model.ncam)}
        missing = [c for c in self.spec.cameras if _model_name(c) not in names]
        if missing:
            raise ValueError(f"{task} has no camera {', '.join(missing)}; it has {', '.join(sorted(names))}.")
        if _LEROBOT in self.spec.cameras:
            env.model.camera("corner2").pos = _LEROBOT_POSITION
        if self._fast:
            make_fast(env.model, self.spec.image_size)
        return env

    def _cameras(self) -> Cameras:
        key = (self._task, *self.spec.cameras, str(self.spec.image_size), self._renderer, str(self._fast))
        if key not in self._drawn:
            names = [_model_name(c) for c in self.spec.cameras]
            self._drawn[key] = Cameras(
                self._env.model, names, self.spec.image_size, backend=self._renderer, fast=self._fast
            )
        return self._drawn[key]

    def _reading(self, *, success: bool, truth: float) -> Reading:
        self._outcome = np.array([success, truth])
        sentence = SENTENCES[self._task]
        return Reading(
            state=self._obs[: self.spec.state_dim].astype(np.float32),
            instruction=sentence,
            success=success,
            ended=False,
            truth=truth,
        )

    def _rng(self) -> str:
        return json.dumps(self._env.np_random.bit_generator.state)

    def _parts(self) -> dict[str, np.ndarray]:
        """All of the state but the random generator, as arrays."""
        env = self._env
        state = np.empty(mujoco.mj_stateSize(env.model, _STATE))
        mujoco.mj_getState(env.model, env.data, state, _STATE)
        parts = {"state": state, "obs": self._obs, "outcome": self._outcome, "seed": np.array(self._seed)}
        # What the suite's reset writes into the model.
        parts |= {"model/body_pos": env.model.body_pos.copy(), "model/site_pos": env.model.site_pos.copy()}
        live = (env.data.xpos, env.data.site_xpos)  # attributes that are views of these follow the state by themselves
        for name, value in vars(env).items():
            is_plain = isinstance(value, (bool, int, float, np.number)) or (
                isinstance(value, np.ndarray)
                and value.dtype.kind in "fiub"
                and not any(np.may_share_memory(value, field) for field in live)
            )
            if is_plain and name not in _SKIPPED:
                parts[f"attribute/{name}"] = np.asarray(value)
            if value is None and name not in _SKIPPED:
                parts[f"none/{name}"] = np.zeros(0)
        return parts


def _model_name(camera: str) -> str:
    return "corner2" if camera == _LEROBOT else camera


def import_suite() -> None:
    """Make the suite work with this mujoco.

    Raises ValueError if it is not installed.
    """
    try:
        from metaworld import sawyer_xyz_env
    except ModuleNotFoundError as error:
        raise ValueError("env type metaworld needs the package metaworld: pip install 'vla_rlaif[suites]'") from error
    sawyer_xyz_env.SawyerMocapBase.reset_mocap_welds = _reset_mocap_welds


def _reset_mocap_welds(self: Any) -> None:
    """In place of the suite's, which writes 11 columns: mujoco has 12 now, and the last is not a weld's."""
    weld = self.model.eq_type == int(mujoco.mjtEq.mjEQ_WELD)
    if self.model.nmocap > 0:
        self.model.eq_data[weld, :11] = [0, 0, 0, 0, 0, 0, -1, 0, 0, 0, 5]
