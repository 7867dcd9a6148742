"""The judge without a mock: a small random Qwen3-VL in this process."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from synthetic import SPEC, make_episodes
from transformers import AutoModelForImageTextToText, AutoProcessor

from vla_rlaif.labeller_config import TransformersConfig
from vla_rlaif.preferences.asking import Asker
from vla_rlaif.preferences.judge import VLMJudge, filled
from vla_rlaif.preferences.judge_transformers import TransformersModel
from vla_rlaif.preferences.labelling import answer_counts, ask, make_records
from vla_rlaif.preferences.questions import JudgeFault, Question, VisionLanguageModel
from vla_rlaif.preferences.rubric import Rater, RubricLabeller
from vla_rlaif.preferences.store import PreferenceStore
from vla_rlaif.reward_models.vlm_judge import VLMJudgeReward

PAIRS = np.array([[0, 1], [2, 3], [4, 5], [6, 7], [0, 2]])


def asker(folder: Path, cache: Path, *, batch: int = 4) -> Asker:
    model = TransformersModel(TransformersConfig(folder=folder, batch=batch))
    return Asker(model, cache=cache / "judge.sqlite", invalid_budget=0)


def scaled(folder: Path, to: Path, *, blind: bool) -> Path:
    """A copy whose answers are more decided: logits twice as large. ``blind``: its layers add nothing to what the last
    word of the prompt says, so that it answers the same whatever it sees."""
    shutil.copytree(folder, to)
    weights = load_file(to / "model.safetensors")
    for name in weights:
        if name.endswith("lm_head.weight"):
            weights[name] = 2 * weights[name]
        if blind and "language_model" in name and name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = torch.zeros_like(weights[name])
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    return to


def test_probabilities_are_those_of_the_model(judge_folder: Path, tmp_path: Path) -> None:
    """Against transformers' own way from messages to logits, one question at a time."""
    model = TransformersModel(TransformersConfig(folder=judge_folder))
    assert isinstance(model, VisionLanguageModel)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
    question = Question(parts=("Clip A:", images[0], images[1], "Clip B:", images[2], "is:"), labels=("A", "B", "C"))
    ((row, answer),) = model.answer([question])
    assert row == 0 and answer.probabilities is not None and answer.probabilities.sum() == pytest.approx(1)

    loaded: Any = AutoModelForImageTextToText.from_pretrained(judge_folder)
    processor: Any = AutoProcessor.from_pretrained(judge_folder)
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": Image.fromarray(part)}
        for part in question.parts
    ]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    with torch.inference_mode():
        logits = loaded(**inputs).logits[0, -1]
    tokens = [processor.tokenizer.convert_tokens_to_ids(label) for label in "ABC"]
    np.testing.assert_allclose(answer.probabilities, logits[tokens].double().softmax(0), atol=1e-6)


def test_both_orders_in_batches_of_any_size(judge_folder: Path, tmp_path: Path) -> None:
    folder = scaled(judge_folder, tmp_path / "decided", blind=False)
    episodes = make_episodes(8, length=np.array([4, 4, 4, 1, 4, 4, 4, 4]))
    (tmp_path / "other").mkdir()
    judge = VLMJudge(asker(folder, tmp_path), num_frames=2)
    found = judge.answers(episodes, PAIRS, 0)
    one = VLMJudge(asker(folder, tmp_path / "other", batch=1), num_frames=2).answers(episodes, PAIRS[:, ::-1], 0)
    np.testing.assert_allclose(found.p_first, 1 - one.p_first, atol=1e-5)
    assert found.both_orders is not None and one.both_orders is not None
    np.testing.assert_allclose(found.both_orders, one.both_orders[:, ::-1], atol=1e-5)
    assert found.both_orders.std() > 1e-3  # it does see
    assert np.unique(found.p_first).size == len(PAIRS)


def test_a_blind_judge_is_indifferent_and_inconsistent(judge_folder: Path, tmp_path: Path) -> None:
    folder = scaled(judge_folder, tmp_path / "blind", blind=True)
    judge, episodes = VLMJudge(asker(folder, tmp_path), num_frames=2, ties=False), make_episodes(8)
    answers = ask(judge, episodes, PAIRS, 0)
    assert answers.p_first.tolist() == [0.5] * 5
    counts = answer_counts(answers)
    assert counts["labels/inconsistent"] == 5 and abs(counts["labels/position_bias"]) > 0.01
    ids = [f"0:{row}" for row in range(8)]
    records = make_records(episodes, ids, PAIRS, answers, np.zeros(5, bool), labeller=judge.name, step=0)
    with PreferenceStore(tmp_path / "preferences.sqlite") as store:
        store.append(records)
        assert all(record.is_tie and record.is_inconsistent for record in store.records())


def test_a_margin_makes_ties(judge_folder: Path, tmp_path: Path) -> None:
    found = VLMJudge(asker(judge_folder, tmp_path), num_frames=1, tie_margin=0.4).label(make_episodes(8), PAIRS, 0)
    assert found.tolist() == [0.5] * 5


def test_other_weights_are_another_judge(judge_folder: Path, tmp_path: Path) -> None:
    """Whatever its folder is called: a cache that goes by names would answer for the old one."""
    work = tmp_path / "tiny"
    shutil.copytree(judge_folder, work)
    before = VLMJudge(asker(work, tmp_path), num_frames=1)
    first = before.answers(make_episodes(8), PAIRS, 0)
    assert before.answers(make_episodes(8), PAIRS, 0).num_asked == 0
    shutil.rmtree(work)
    scaled(judge_folder, work, blind=False)
    after = VLMJudge(asker(work, tmp_path), num_frames=1)
    second = after.answers(make_episodes(8), PAIRS, 0)
    assert after.name != before.name and second.num_asked == 10
    assert np.abs(first.p_first - second.p_first).max() > 1e-3


def test_ratings_as_rewards_and_as_labels(judge_folder: Path, tmp_path: Path) -> None:
    folder = scaled(judge_folder, tmp_path / "decided", blind=False)
    rater = Rater(asker(folder, tmp_path), num_frames=2)
    episodes = make_episodes(8, valid=np.arange(8) != 3)
    p = rater.probabilities(episodes, np.arange(8))
    assert np.isnan(p[3]).all() and np.allclose(np.delete(p, 3, axis=0).sum(axis=1), 1)
    score = VLMJudgeReward(rater).score(episodes)
    want = (p @ [1, 2, 3, 4, 5] - 1) / 4
    np.testing.assert_allclose(score, want, rtol=1e-6)
    labels = RubricLabeller(rater).answers(episodes, PAIRS, 0)
    assert labels.num_asked == 0  # they were rated above
    for (a, b), label in zip(PAIRS, labels.p_first, strict=True):
        # P(first is rated higher) + P(equal) / 2, counted out over all 25 pairs of ratings
        table = np.outer(p[a], p[b])
        assert label == pytest.approx(np.tril(table, -1).sum() + np.trace(table) / 2, nan_ok=True)
    assert np.isnan(labels.p_first).tolist() == [False, True, False, False, False]


def test_a_model_whose_labels_are_no_tokens(judge_folder: Path, tmp_path: Path) -> None:
    model = TransformersModel(TransformersConfig(folder=judge_folder))
    with pytest.raises(ValueError, match="the answer 'first clip' is not a token of its own"):
        model.probe(Question(parts=("?",), labels=("first clip", "B")))
    with pytest.raises(ValueError, match="not a token of its own"):
        model.probe(Question(parts=("?",), labels=("zebra", "unicorn")))  # both are the unknown word


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json is missing"),
        (lambda f: (f / "model.safetensors").unlink(), r"\*.safetensors is missing"),
        (lambda f: (f / "model.safetensors").write_bytes(b"short"), "cannot be loaded"),
        (lambda f: (f / "chat_template.jinja").unlink(), "no chat template"),
    ],
)
def test_damaged_folders_are_named(judge_folder: Path, tmp_path: Path, break_it: Any, message: str) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(judge_folder, folder)
    break_it(folder)
    with pytest.raises(ValueError, match=message):
        VLMJudge(asker(folder, tmp_path), num_frames=1).probe(SPEC)


def test_code_in_a_folder_is_not_run(judge_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "foreign"
    shutil.copytree(judge_folder, folder)
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"model_type": "mine", "auto_map": {"AutoModelForImageTextToText": "mine.Model"}}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "mine.py").write_text("raise SystemExit('run')")
    with pytest.raises(ValueError, match="cannot be loaded"):
        VLMJudge(asker(folder, tmp_path), num_frames=1).probe(SPEC)


def test_names_in_prompts_are_filled() -> None:
    image = np.zeros((2, 2, 3), np.uint8)
    parts = filled("Do {instruction}: {first}|{second}.", {"{instruction}": ("it",), "{first}": (image,) * 2})
    assert [part if isinstance(part, str) else "image" for part in parts] == ["Do it: ", "image", "image", "|{second}."]


def test_the_parts_of_a_question_cannot_be_confused() -> None:
    """Each of these says or shows something else, so each has an answer of its own."""
    image, flat = np.zeros((2, 4, 3), np.uint8), np.zeros((4, 2, 3), np.uint8)
    questions = [
        Question(parts=("ab", image), labels=("A", "B")),
        Question(parts=("a", "b", image), labels=("A", "B")),
        Question(parts=("ab", flat), labels=("A", "B")),
        Question(parts=("ab", image + np.uint8(1)), labels=("A", "B")),
        Question(parts=("ab", image), labels=("B", "A")),
        Question(parts=(image, "ab"), labels=("A", "B")),
    ]
    digests = {question.digest("model") for question in questions} | {questions[0].digest("other")}
    assert len(digests) == 7
    assert questions[0].digest("model") == Question(parts=("ab", image.copy()), labels=("A", "B")).digest("model")


def test_cameras_are_named(judge_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No camera 'wrist' among \['top'\]"):
        VLMJudge(asker(judge_folder, tmp_path), num_frames=1, cameras=("wrist",)).label(make_episodes(8), PAIRS, 0)


def test_faults_are_no_user_mistakes() -> None:
    assert not issubclass(JudgeFault, ValueError)
