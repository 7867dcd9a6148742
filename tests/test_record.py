"""The verbs that write datasets, in both formats: the same data, so that everything after them works on either."""

import dataclasses

import numpy as np
import pytest
from compilation import little_optimised
from test_cli import POINT, TABLETOP
from test_dataset import assert_same

from vla_rlaif import offline
from vla_rlaif.build import build_env, build_policy
from vla_rlaif.checkpoint import load_policy, save_policy
from vla_rlaif.config import parse_config
from vla_rlaif.dataset import load_demonstrations, load_episodes
from vla_rlaif.lerobot_files import open_files
from vla_rlaif.preferences.labelled import gather_episodes
from vla_rlaif.record import Storage, collect, convert
from vla_rlaif.start import run_demonstrations

LEROBOT = Storage(format="lerobot")


def quiet(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """(config, folder) of a policy that wanders in the plane."""
    env = {**POINT["env"], "radius": 0.8}  # so large that some episodes end early
    config, folder = parse_config({**POINT, "env": env}, source="test"), tmp_path_factory.mktemp("policy")
    made = build_policy(config.policy, build_env(config.env).spec, 0)
    save_policy(folder, made.metadata(), {k: np.asarray(v) for k, v in made.params.items()})
    return config, folder


@pytest.fixture(scope="module")
def tabletop(tmp_path_factory):
    """(config, demonstrations in npz, the same for LeRobot)."""
    warm_start = {"collect": {"episodes": 3}, "imitate": {"steps": 2, "batch": 8, "samples": 1}}
    config = parse_config({**TABLETOP, "warm_start": warm_start}, source="test")
    folder = tmp_path_factory.mktemp("tabletop")
    collect(config, folder / "npz", None, 0, Storage(), quiet)
    collect(config, folder / "lerobot", None, 0, LEROBOT, quiet)
    return config, folder / "npz", folder / "lerobot"


def test_demonstrations_are_the_same_in_both_formats(tabletop):
    _, npz, lerobot = tabletop
    one, other = load_demonstrations(npz), load_demonstrations(lerobot)
    num = one.mask.sum(axis=1).max()  # LeRobot's end with the longest episode, and are empty after each one's end
    live = one.mask[:, :num]
    np.testing.assert_array_equal(other.mask, live)
    for name in ("state", "action"):
        np.testing.assert_array_equal(getattr(other, name)[live], getattr(one, name)[:, :num][live])
    for camera in ("primary", "wrist"):
        np.testing.assert_array_equal(other.images[camera][live], one.images[camera][:, :num][live])
    assert other.instruction == one.instruction
    np.testing.assert_array_equal(other.success, one.success)
    assert open_files(lerobot).fps == 20


def test_octo_learns_from_a_lerobot_dataset(tabletop, tmp_path):
    """That it learns the same as from npz follows from the test above."""
    config, _, lerobot = tabletop
    said = []
    with little_optimised():
        offline.imitate(config, lerobot, tmp_path / "policy", said.append)
    assert any("imitate step 2: loss" in line for line in said)
    metadata, _ = load_policy(tmp_path / "policy")
    assert metadata["spec"]["cameras"] == ["primary", "wrist"]


def test_a_run_takes_demonstrations_that_are_there(tabletop, tmp_path):
    config, _, lerobot = tabletop
    assert config.warm_start is not None
    warm = config.warm_start.model_copy(update={"data": lerobot, "data_episodes": 2})
    env = build_env(config.env)
    demos = run_demonstrations(config.model_copy(update={"warm_start": warm}), env, tmp_path, quiet)
    env.close()
    every = load_demonstrations(lerobot)
    assert len(demos.success) == 2 < len(every.success)
    length = demos.mask.shape[1]
    np.testing.assert_array_equal(demos.images["wrist"], every.images["wrist"][:2, :length])


def test_a_policys_episodes_are_the_same_in_both_formats(policy, tmp_path):
    config, folder = policy
    npz, lerobot = tmp_path / "npz", tmp_path / "lerobot"
    for to, storage in ((npz, Storage()), (lerobot, dataclasses.replace(LEROBOT, fps=10))):
        for _ in range(2):  # the second goes on with other start states
            collect(config, to, folder, 4, storage, quiet)
    # What `label` and `reward` read of it:
    (ids, one), (other_ids, other) = gather_episodes(npz), gather_episodes(lerobot)
    assert ids == other_ids == [f"{shard}:{row}" for shard in range(2) for row in range(4)]
    ended = np.where(one.mask[..., None, None], one.action, 0).astype(one.action.dtype)
    assert not one.mask.all()  # so that there is something to leave out
    assert_same(other, dataclasses.replace(one, action=ended))
    assert len(set(one.starts.seed.tolist())) == 2
    convert(config, lerobot, tmp_path / "back", Storage(), quiet)
    for (_, a), (_, b) in zip(load_episodes(tmp_path / "back"), load_episodes(lerobot), strict=True):
        assert_same(a, b)
    convert(config, npz, tmp_path / "again", dataclasses.replace(LEROBOT, fps=10), quiet)
    for (_, a), (_, b) in zip(load_episodes(tmp_path / "again"), load_episodes(lerobot), strict=True):
        assert_same(a, b)


def test_formats_are_not_mixed(policy, tabletop, tmp_path):
    config, folder = policy
    _, npz, lerobot = tabletop
    with pytest.raises(ValueError, match="is a dataset in format npz; choose another folder, or --format npz"):
        collect(config, npz, folder, 4, LEROBOT, quiet)
    with pytest.raises(ValueError, match="is a dataset in format lerobot"):
        collect(config, lerobot, folder, 4, Storage(), quiet)
    with pytest.raises(ValueError, match="already holds demonstrations; choose another folder for episodes"):
        collect(config, lerobot, folder, 4, LEROBOT, quiet)
    with pytest.raises(ValueError, match="exists; demonstrations for LeRobot go to a folder that does not exist"):
        collect(tabletop[0], lerobot, None, 0, LEROBOT, quiet)
    with pytest.raises(ValueError, match="--video and --fps are for --format lerobot"):
        collect(config, tmp_path / "e", folder, 4, Storage(video=True), quiet)
    with pytest.raises(ValueError, match=r"does not say how many steps a second is; .*pass --fps"):
        collect(config, tmp_path / "e", folder, 4, LEROBOT, quiet)
    assert not (tmp_path / "e").exists()


def test_a_copy_is_in_the_other_format_and_in_a_new_folder(tabletop, tmp_path):
    config, npz, lerobot = tabletop
    with pytest.raises(ValueError, match="is no dataset"):
        convert(config, tmp_path, tmp_path / "to", LEROBOT, quiet)
    with pytest.raises(ValueError, match="is in format lerobot already"):
        convert(config, lerobot, tmp_path / "to", LEROBOT, quiet)
    with pytest.raises(ValueError, match="exists; a copy goes to a folder that does not exist yet"):
        convert(config, npz, lerobot, LEROBOT, quiet)
