"""What is taken over from a checkpoint, and the spec of an adapted model. Shapes are those of upstream's tiny model."""

import dataclasses
import json
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_rlaif.policies.octo.adapt import PROPRIO, adapted_spec, collapse, merge
from vla_rlaif.policies.octo.spec import (
    DiffusionSpec,
    ImageSpec,
    KeypointSpec,
    L1Spec,
    LanguageSpec,
    LowdimSpec,
    ModelSpec,
    PatchSpec,
    StemSpec,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "octo"
LOADED: dict[str, np.ndarray] = dict(np.load(GOLDEN / "tiny_params.npz"))
SPEC = ModelSpec.from_official(json.loads((GOLDEN / "tiny_config.json").read_text())["config"]["model"])
HEAD = "heads_action/diffusion_model/reverse_network"
OBS = "octo_transformer/obs"
TOKENIZER = "octo_transformer/observation_tokenizers"


def fresh() -> dict[str, np.ndarray]:
    """Initial values of the same network; none is equal to a loaded one."""
    return {name: np.full_like(value, 9.0) for name, value in LOADED.items()}


def another_robot() -> dict[str, np.ndarray]:
    """Without the wrist camera, with 3 numbers of proprioception, and chunks of 4 x 14 instead of 4 x 7 actions."""
    wanted = {name: value for name, value in fresh().items() if "wrist" not in name}
    wanted[f"{HEAD}/Dense_0/kernel"] = np.full((32 + 64 + 56, 64), 9.0, np.float32)
    wanted[f"{HEAD}/Dense_1/kernel"] = np.full((64, 56), 9.0, np.float32)
    wanted[f"{HEAD}/Dense_1/bias"] = np.full(56, 9.0, np.float32)
    wanted[f"{OBS}_proprio_projection/kernel"] = np.full((1, 64), 9.0, np.float32)
    wanted[f"{OBS}_proprio_projection/bias"] = np.full(64, 9.0, np.float32)
    wanted[f"{OBS}_proprio_pos_embedding"] = np.full((1, 4, 3, 64), 9.0, np.float32)
    return wanted


NEW = ("*proprio*", f"{HEAD}/Dense_?/*")
SKIP = ("*wrist*",)


def test_the_same_network_takes_over_everything():
    params, report = merge(LOADED, fresh())
    assert list(params) == list(LOADED)
    assert all(params[name] is value for name, value in LOADED.items())  # not copied in memory
    assert report.copied == tuple(LOADED)
    assert not report.initialised and not report.reshaped and not report.unused


def test_pain_12_the_report_says_where_each_parameter_came_from():
    """#95, #134, #153, #13: which parameters of an adapted model are re-initialised?"""
    wanted = another_robot()
    params, report = merge(LOADED, wanted, allow_new=NEW, skip=SKIP)
    assert list(params) == list(wanted)
    reshaped = {r.name for r in report.reshaped}
    assert reshaped == {f"{HEAD}/Dense_0/kernel", f"{HEAD}/Dense_1/kernel", f"{HEAD}/Dense_1/bias"}
    assert set(report.initialised) == {name for name in wanted if "proprio" in name}
    assert set(report.unused) == {name for name in LOADED if "wrist" in name}
    assert set(report.copied) == LOADED.keys() - reshaped - set(report.unused)
    for name, value in params.items():
        assert value is (LOADED if name in report.copied else wanted)[name]
    # 126 loaded: 21 are the wrist's, 27 the head's, 3 of which change; 3 new ones are proprio's
    assert str(report) == (
        "copied 102 of 108: heads_action 24, octo_transformer 78\n"
        f"initialised 3: {OBS}_proprio_pos_embedding, {OBS}_proprio_projection/* (2)\n"
        f"reshaped 3: {HEAD}/Dense_0/kernel had (124, 64) wants (152, 64), {HEAD}/Dense_1/bias had (28,) wants (56,), "
        f"{HEAD}/Dense_1/kernel had (64, 28) wants (64, 56)\n"
        f"unused 21: {OBS}_wrist_pos_embedding, {OBS}_wrist_projection/* (2), {TOKENIZER}_wrist/* (18)"
    )
    plain = json.loads(json.dumps(report.to_json()))
    assert plain["reshaped"][1] == {"name": f"{HEAD}/Dense_1/bias", "had": [28], "wants": [56]}
    assert [len(plain[k]) for k in ("copied", "initialised", "unused")] == [102, 3, 21]


def test_pain_12_nothing_is_new_or_dropped_without_being_allowed():
    with pytest.raises(ValueError) as error:
        merge(LOADED, another_robot())
    new = (f"{HEAD}/Dense_0/kernel", f"{HEAD}/Dense_1/*", f"{OBS}_proprio_pos_embedding", f"{OBS}_proprio_projection/*")
    skip = (f"{OBS}_wrist_pos_embedding", f"{OBS}_wrist_projection/*", f"{TOKENIZER}_wrist/*")
    assert str(error.value) == (
        "the checkpoint does not fit the wanted network.\n"
        f"Not in the checkpoint: {OBS}_proprio_pos_embedding, {OBS}_proprio_projection/* (2).\n"
        f"Of another shape: {HEAD}/Dense_0/kernel had (124, 64) wants (152, 64), {HEAD}/Dense_1/bias had (28,) wants "
        f"(56,), {HEAD}/Dense_1/kernel had (64, 28) wants (64, 56).\n"
        f"In the checkpoint but not wanted: {OBS}_wrist_pos_embedding, {OBS}_wrist_projection/* (2), "
        f"{TOKENIZER}_wrist/* (18).\n"
        f"If that is meant, pass allow_new={new} to start them anew, and skip={skip} to leave them behind; "
        "else build the network of the checkpoint's config."
    )
    _, report = merge(LOADED, another_robot(), allow_new=new, skip=skip)  # the advice holds
    assert len(report.copied) == 102


@pytest.mark.parametrize(
    ("allow_new", "skip", "left"),
    [
        (NEW[:1], SKIP, r"Of another shape: .*Dense_0/kernel had \(124, 64\)"),
        (NEW[1:], SKIP, "Not in the checkpoint: .*proprio"),
        (NEW, (), "In the checkpoint but not wanted: .*wrist"),
        (NEW, (f"{OBS}_wrist*",), "not wanted: octo_transformer/observation_tokenizers_wrist/\\* \\(18\\)"),
    ],
)
def test_patterns_cover_only_what_they_match(allow_new, skip, left):
    with pytest.raises(ValueError, match=left) as error:
        merge(LOADED, another_robot(), allow_new=allow_new, skip=skip)
    assert sum(line.startswith(("Not in", "Of another", "In the")) for line in str(error.value).splitlines()) == 1


def test_pain_4_patterns_that_match_nothing_are_refused():
    """#107: upstream's example froze nothing, because its pattern had to match the whole name."""
    with pytest.raises(ValueError, match=r"allow_new has 'heads_action', which matches none of the 126 wanted.*whole"):
        merge(LOADED, fresh(), allow_new=("heads_action/*", "heads_action"))
    with pytest.raises(ValueError, match=r"skip has '\*Wrist\*'.*126 checkpoint's .*observation_tokenizers_wrist"):
        merge(LOADED, fresh(), skip=("*Wrist*",))


def test_skipped_parameters_start_anew():
    params, report = merge(LOADED, fresh(), skip=("heads_action/*",))
    assert set(report.initialised) == {name for name in LOADED if name.startswith("heads_action/")}
    assert len(report.initialised) == 27 and not report.unused
    assert params[f"{HEAD}/Dense_1/bias"][0] == 9.0
    assert str(report).splitlines()[:2] == [
        "copied 99 of 126: octo_transformer 99",
        "initialised 27: heads_action/* (27)",
    ]


def test_allowed_parameters_are_copied_where_they_fit():
    _, report = merge(LOADED, fresh(), allow_new=("heads_action/*",))
    assert len(report.copied) == 126


@pytest.mark.parametrize("rows", [2, 9])
def test_position_tables_are_not_cut_or_stretched(rows):
    name = "octo_transformer/readout_action_pos_embedding"
    wanted = fresh() | {name: np.full((1, rows, 1, 64), 9.0, np.float32)}
    with pytest.raises(
        ValueError, match=rf"readout_action_pos_embedding had \(1, 4, 1, 64\) wants \(1, {rows}, 1, 64\)"
    ):
        merge(LOADED, wanted)
    params, report = merge(LOADED, wanted, allow_new=("*_pos_embedding",))
    assert [r.name for r in report.reshaped] == [name] and (params[name] == 9.0).all()


def test_many_shapes_are_told_by_group():
    """A checkpoint of another size differs everywhere; the message stays short and still names every parameter."""
    wanted = {n: v if n.startswith("heads") else np.ones((2, *v.shape), np.float32) for n, v in LOADED.items()}
    with pytest.raises(ValueError) as error:
        merge(LOADED, wanted)
    assert str(error.value).count(" had ") == 12
    block, language = "BlockTransformer_0/Transformer_0/encoderblock_1/* (16)", "task_tokenizers_language/* (19)."
    assert f"octo_transformer/{block}, {OBS}_primary_pos_embedding" in str(error.value)
    assert f"octo_transformer/{language}\n" in str(error.value)
    assert "allow_new=('octo_transformer/*',) to start" in str(error.value)


def test_values_of_another_dtype_are_not_converted():
    name = f"{HEAD}/Dense_1/bias"
    loaded = LOADED | {name: LOADED[name].astype(np.float16)}
    with pytest.raises(ValueError, match=r"Dense_1/bias is float16 in the checkpoint, wanted float32"):
        merge(loaded, fresh())


def test_groups_of_the_official_small_model():
    """A whole part of the real tree is one pattern."""
    names = list(json.loads((GOLDEN / "octo_small_15_params.json").read_text())["params"])
    assert collapse(names, names) == ["heads_action/*", "octo_transformer/*"]
    t5 = [name for name in names if "hf_model" in name]
    assert collapse(t5, names) == ["octo_transformer/task_tokenizers_language/*"]
    assert collapse(t5[:1], names) == t5[:1]


@settings(max_examples=50, deadline=None)
@given(
    st.sets(
        st.lists(st.sampled_from(["a", "ab", "b_1"]), min_size=1, max_size=4).map("/".join), min_size=1, max_size=20
    ),
    st.data(),
)
def test_collapsed_patterns_match_exactly_what_was_collapsed(universe, data):
    names = data.draw(st.sets(st.sampled_from(sorted(universe))))
    matched = {name for name in universe if any(fnmatchcase(name, p) for p in collapse(names, universe))}
    assert matched == names


# Specs


def parts(spec: ModelSpec) -> dict[str, object]:
    return dict(spec.observation_tokenizers)


def test_a_spec_that_nothing_was_asked_of_stays():
    assert adapted_spec(SPEC) == SPEC
    assert adapted_spec(SPEC, cameras={"wrist": "image_wrist", "primary": "image_primary"}) == SPEC


def test_cameras_that_the_robot_lacks_are_dropped_and_new_ones_are_like_the_first():
    edited = adapted_spec(SPEC, cameras={"primary": "image_primary", "left": "image_side_left"})
    first = SPEC.observation_tokenizers[0][1]
    assert isinstance(first, ImageSpec) and first.task_stack_keys == ("image_primary",)
    left = dataclasses.replace(first, obs_stack_keys=("image_side_left",), task_stack_keys=("image_side_left",))
    assert edited.observation_tokenizers == (("primary", first), ("left", left))
    assert edited.heads == SPEC.heads and edited.task_tokenizers == SPEC.task_tokenizers


def test_a_camera_under_another_key_and_another_encoder():
    edited = adapted_spec(SPEC, cameras={"wrist": "gripper_cam", "top": "image_top"}, encoder=PatchSpec(patch_size=8))
    wrist, top = parts(edited)["wrist"], parts(edited)["top"]
    assert isinstance(wrist, ImageSpec) and isinstance(top, ImageSpec)
    assert wrist.obs_stack_keys == wrist.task_stack_keys == ("gripper_cam",)
    assert isinstance(wrist.encoder, StemSpec) and top.encoder == PatchSpec(patch_size=8)


def test_a_camera_for_a_model_that_had_none():
    blind = adapted_spec(SPEC, add_lowdim={"proprio": PROPRIO}, drop=("primary", "wrist"))
    with pytest.raises(ValueError, match="no image tokenizer that 'top' could be like: give its encoder"):
        adapted_spec(blind, cameras={"top": "image_top"})
    edited = adapted_spec(blind, cameras={"top": "image_top"}, encoder=KeypointSpec())
    assert parts(edited) == {
        "proprio": PROPRIO,
        "top": ImageSpec(encoder=KeypointSpec(), obs_stack_keys=("image_top",)),
    }


def test_a_key_that_two_tokenizers_would_read():
    """``image_wrist`` is matched from the start, so the tokenizer of that name would stack the second wrist as well."""
    cameras = {"wrist": "image_wrist", "wrist_left": "image_wrist_left"}
    with pytest.raises(ValueError, match=r"'image_wrist_left' would be read by the tokenizers wrist, wrist_left"):
        adapted_spec(SPEC, cameras=cameras)


def test_proprioception_is_added_and_removed():
    edited = adapted_spec(SPEC, add_lowdim={"proprio": PROPRIO})
    assert edited.observation_tokenizers == (*SPEC.observation_tokenizers, ("proprio", PROPRIO))
    assert LowdimSpec(obs_keys=("proprio",)) == PROPRIO and not PROPRIO.discretize
    assert adapted_spec(edited, drop=("proprio",)) == SPEC
    with pytest.raises(ValueError, match=r"already a tokenizer 'proprio'.*primary, wrist, proprio"):
        adapted_spec(edited, add_lowdim={"proprio": PROPRIO})
    with pytest.raises(ValueError, match="already a tokenizer 'proprio'"):
        adapted_spec(edited, cameras={"proprio": "image_primary"})
    finer = LowdimSpec(obs_keys=("proprio",), discretize=True)
    assert parts(adapted_spec(edited, drop=("proprio",), add_lowdim={"proprio": finer}))["proprio"] == finer


def test_the_language_can_be_dropped():
    assert adapted_spec(SPEC, drop=("language",)).task_tokenizers == ()
    assert isinstance(dict(SPEC.task_tokenizers)["language"], LanguageSpec)


def test_another_head_and_other_sizes():
    head = L1Spec(readout_key="readout_action", action_horizon=8, action_dim=14)
    assert adapted_spec(SPEC, head=head).head == head
    wider = adapted_spec(SPEC, action_dim=14)
    assert wider.head == dataclasses.replace(SPEC.head, action_dim=14)
    assert isinstance(wider.head, DiffusionSpec) and wider.head.hidden_dim == 64
    assert adapted_spec(SPEC, head=head, action_horizon=2).head == dataclasses.replace(head, action_horizon=2)
    with pytest.raises(ValueError, match=r"reads 'readout_value'; readouts are action"):
        adapted_spec(SPEC, head=dataclasses.replace(head, readout_key="readout_value"))
    with pytest.raises(ValueError, match="action_dim is 0"):
        adapted_spec(SPEC, action_dim=0)


def test_what_does_not_exist_is_named():
    with pytest.raises(ValueError, match=r"no tokenizer 'side' to drop; the model has primary, wrist, language"):
        adapted_spec(SPEC, drop=("side",))
    with pytest.raises(ValueError, match="no observation tokenizer is left of primary, wrist"):
        adapted_spec(SPEC, cameras={})
    with pytest.raises(ValueError, match="an encoder was given without cameras"):
        adapted_spec(SPEC, encoder=PatchSpec())
