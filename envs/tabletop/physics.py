"""The simulators of all members: one ``mujoco.batch.Batch`` and the end-effector controller in front of it.

N simulators, L of them live (those a call advances), S the length of a state vector. Positions are metres and world
frame, angles radians. Knows nothing of tasks, episodes or images.
"""

from collections.abc import Sequence

import mujoco
import numpy as np
from jaxtyping import Bool, Float, Int
from mujoco import batch

from vla_rlaif.envs.tabletop import rotations
from vla_rlaif.envs.tabletop.scene import COLORS, NUM_ARM_JOINTS
from vla_rlaif.envs.tabletop.tasks import Task

SUBSTEPS = 10  # of 5 ms: one env step is 50 ms
FPS = 20  # env steps a second
_IK_ROUNDS = 2  # the joint targets are solved for twice per env step
_MAX_MOVE = 0.05  # metres a unit action moves the target
_MAX_TURN = 0.25  # radians a unit action turns the target
_MAX_LEAD = 0.10  # metres the target may run ahead of the arm
_MAX_JOINT_MOVE = 0.3  # radians per IK round
_IK_DAMPING = 1e-3
_TARGET_LOW = np.array([0.25, -0.35, 0.012])
_TARGET_HIGH = np.array([0.75, 0.35, 0.6])
_START_LOW, _START_HIGH = (0.38, -0.22), (0.62, 0.22)  # where cubes and the goal start, x and y
_START_GAP = 0.09  # metres between any two of them
_HALF_FINGER_TRAVEL = 0.02
# The stage that makes positions current after a step. It runs no solver, so the warm start in the state survives and
# derived fields are a function of the state; a persistent batch then continues from it at no extra cost.
_STAGE = mujoco.mjtStage.mjSTAGE_VEL
_BROKEN_WARNINGS = [
    int(mujoco.mjtWarning.mjWARN_BADQPOS),
    int(mujoco.mjtWarning.mjWARN_BADQVEL),
    int(mujoco.mjtWarning.mjWARN_BADQACC),
    int(mujoco.mjtWarning.mjWARN_BADCTRL),
]


class Physics:
    def __init__(self, model: mujoco.MjModel, *, num_envs: int, num_threads: int) -> None:
        # persistent: one MjData each. Results are the same without; it saves a position stage per IK round.
        self._batch = batch.Batch(model, num_envs, num_threads, persistent=True)
        self.num_envs = num_envs
        self.states: Float[np.ndarray, "N S"] = self._batch.state  # live mjSTATE_INTEGRATION rows
        self._qpos, self._ctrl = self._batch.bind("qpos"), self._batch.bind("ctrl")
        self._mocap_pos, self._mocap_quat = self._batch.bind("mocap_pos"), self._batch.bind("mocap_quat")
        self._site_pos, self._site_mat = self._batch.bind("site_xpos"), self._batch.bind("site_xmat")
        self._body_pos = self._batch.bind("xpos")
        self._anchor, self._axis = self._batch.bind("xanchor"), self._batch.bind("xaxis")
        self._ee = model.site("ee").id
        self._target = int(model.body_mocapid[model.body("target").id])
        self._goal = int(model.body_mocapid[model.body("goal").id])
        self._cubes = np.array([model.body(f"cube{i}").id for i in range(len(COLORS))])
        self._cube_qpos = [int(model.jnt_qposadr[model.joint(f"cube{i}").id]) for i in range(len(COLORS))]
        self._joint_low, self._joint_high = model.actuator_ctrlrange[:NUM_ARM_JOINTS].T

    @property
    def gripper(self) -> Float[np.ndarray, "N 3"]:
        return self._site_pos[:, self._ee]

    @property
    def gripper_quat(self) -> Float[np.ndarray, "N 4"]:
        return rotations.from_matrix(self._site_mat[:, self._ee].reshape(-1, 3, 3))

    @property
    def fingers(self) -> Float[np.ndarray, "N 2"]:
        """Opening of each finger, metres: 0 closed, 0.04 open."""
        return self._qpos[:, NUM_ARM_JOINTS : NUM_ARM_JOINTS + 2]

    @property
    def target(self) -> Float[np.ndarray, "N 3"]:
        """Where the controller wants the gripper."""
        return self._mocap_pos[:, self._target]

    @property
    def target_quat(self) -> Float[np.ndarray, "N 4"]:
        return self._mocap_quat[:, self._target]

    @property
    def goal(self) -> Float[np.ndarray, "N 3"]:
        return self._mocap_pos[:, self._goal]

    def cube(self, index: Int[np.ndarray, " N"]) -> Float[np.ndarray, "N 3"]:
        """Centre of the cube ``index[i]`` of each member i."""
        return self._body_pos[np.arange(len(index)), self._cubes[index]]

    def reset(self, seeds: Sequence[int], task: Task) -> Int[np.ndarray, " N"]:
        """Random cubes, goal and arm; returns the cube that each instruction names. Row i depends on seed i only."""
        self._batch.reset(keyframe=0, stage=mujoco.mjtStage.mjSTAGE_NONE)
        cubes = np.array([self._scatter(i, np.random.default_rng(s), task) for i, s in enumerate(seeds)])
        self.refresh(np.arange(len(seeds)))
        self._mocap_pos[:, self._target] = self.gripper
        self._mocap_quat[:, self._target] = self.gripper_quat
        return cubes

    def _scatter(self, i: int, rng: np.random.Generator, task: Task) -> int:
        points: list[np.ndarray] = []
        while len(points) < len(COLORS) + 1:
            p = rng.uniform(_START_LOW, _START_HIGH)
            if all(np.linalg.norm(p - q) > _START_GAP for q in points):
                points.append(p)
        for point, address in zip(points[:-1], self._cube_qpos, strict=True):
            half = rng.uniform(-0.4, 0.4) / 2  # of the turn about z
            self._qpos[i, address : address + 7] = [*point, 0.02, np.cos(half), 0, 0, np.sin(half)]
        cube = int(rng.integers(len(COLORS)))
        self._mocap_pos[i, self._goal] = [*points[-1], task.goal_height(rng)]
        self._qpos[i, :NUM_ARM_JOINTS] += rng.uniform(-0.02, 0.02, NUM_ARM_JOINTS)
        return cube

    def advance(self, live: Int[np.ndarray, " L"], action: Float[np.ndarray, "L 7"]) -> Bool[np.ndarray, " L"]:
        """One env step of the ``live`` members; returns which of them broke.

        An action is (move xyz, turn xyz, grip), each in [-1, 1]; grip 1 is closed. MuJoCo resets a broken simulation
        to the model's defaults, so its state is finite again afterwards but means nothing.
        """
        self._batch.warning[live] = 0  # MuJoCo does not count on from a reset of its own
        self._move_target(live, action)
        for _ in range(_IK_ROUNDS):
            self._ctrl[live, :NUM_ARM_JOINTS] = self._solve_joints(live)
            self._ctrl[live, NUM_ARM_JOINTS] = (1 - action[:, 6]) * _HALF_FINGER_TRAVEL
            self._batch.step(live, nstep=SUBSTEPS // _IK_ROUNDS, stage=_STAGE)
        return self._batch.warning[live][:, _BROKEN_WARNINGS, 1].any(axis=1)

    def model_field(self, name: str) -> np.ndarray:
        """A field of the model, live and with a value for each member: "N ...". It costs time at every step."""
        return self._batch.expand(name)

    def derive_constants(self, ids: Int[np.ndarray, " L"]) -> None:
        """Recompute what the solver derives from masses, after they were written."""
        self._batch.set_const(ids)

    def refresh(self, ids: Int[np.ndarray, " L"]) -> None:
        """Recompute positions after the state rows were written from outside."""
        self._batch.forward(ids, stage=_STAGE)

    def _move_target(self, live: Int[np.ndarray, " L"], action: Float[np.ndarray, "L 7"]) -> None:
        gripper = self._site_pos[live, self._ee]
        goal = self._mocap_pos[live, self._target] + action[:, :3] * _MAX_MOVE
        lead = np.clip(goal, _TARGET_LOW, _TARGET_HIGH) - gripper
        norm = np.linalg.norm(lead, axis=-1, keepdims=True)
        self._mocap_pos[live, self._target] = gripper + lead * np.minimum(1, _MAX_LEAD / np.maximum(norm, 1e-9))
        turn = rotations.from_rotvec(action[:, 3:6] * _MAX_TURN)
        quat = rotations.multiply(turn, self._mocap_quat[live, self._target])
        self._mocap_quat[live, self._target] = quat / np.linalg.norm(quat, axis=-1, keepdims=True)

    def _solve_joints(self, live: Int[np.ndarray, " L"]) -> Float[np.ndarray, "L 7"]:
        """Damped least squares: the joint targets that move the gripper to its target, radians."""
        gripper = self._site_pos[live, self._ee]
        quat = rotations.from_matrix(self._site_mat[live, self._ee].reshape(-1, 3, 3))
        error = np.empty((len(live), 6, 1))
        error[:, :3, 0] = self._mocap_pos[live, self._target] - gripper
        error[:, 3:, 0] = rotations.difference(self._mocap_quat[live, self._target], quat)
        transposed = self._transposed_jacobian(live, gripper)
        square = transposed.transpose(0, 2, 1) @ transposed + _IK_DAMPING * np.eye(6)
        move = (transposed @ np.linalg.solve(square, error))[..., 0]
        joints = self._qpos[live, :NUM_ARM_JOINTS] + np.clip(move, -_MAX_JOINT_MOVE, _MAX_JOINT_MOVE)
        return np.clip(joints, self._joint_low, self._joint_high)

    def _transposed_jacobian(
        self, live: Int[np.ndarray, " L"], point: Float[np.ndarray, "L 3"]
    ) -> Float[np.ndarray, "L 7 6"]:
        """Of a point on the hand. All arm joints are hinges, so a row is (axis x arm, axis); ``Batch.jac`` would run
        the kinematics a second time."""
        axis = self._axis[live, :NUM_ARM_JOINTS]
        arm = point[:, None] - self._anchor[live, :NUM_ARM_JOINTS]
        jacobian = np.empty((len(live), NUM_ARM_JOINTS, 6))
        for k, (i, j) in enumerate(((1, 2), (2, 0), (0, 1))):  # np.cross takes four times as long
            jacobian[..., k] = axis[..., i] * arm[..., j] - axis[..., j] * arm[..., i]
        jacobian[..., 3:] = axis
        return jacobian
