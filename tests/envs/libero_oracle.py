"""LIBERO by its own means, under its own interpreter: what test_libero.py compares our adapter with.

python libero_oracle.py SUITE TASK INITIAL_STATE OUTPUT.npz
"""

import os
import sys

import numpy as np
from libero.libero import benchmark, get_libero_path  # pyright: ignore[reportMissingImports]
from libero.libero.envs import OffScreenRenderEnv  # pyright: ignore[reportMissingImports]

suite, task, number, output = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
tasks = benchmark.get_benchmark_dict()[suite]()
about = tasks.get_task(task)
np.random.seed(0)
env = OffScreenRenderEnv(
    bddl_file_name=os.path.join(get_libero_path("bddl_files"), about.problem_folder, about.bddl_file),
    camera_heights=64,
    camera_widths=64,
)
env.seed(0)
env.reset()
states = np.asarray(tasks.get_task_init_states(task))
obs = env.set_init_state(states[number])
np.savez(
    output,
    agentview=obs["agentview_image"],
    wrist=obs["robot0_eye_in_hand_image"],
    position=obs["robot0_eef_pos"],
    fingers=obs["robot0_gripper_qpos"],
    sentence=np.array(about.language),
    num_states=np.array(len(states)),
    hertz=np.array(env.env.control_freq),
)
os._exit(0)  # the suite's contexts complain at exit
