"""Tokenizer and T5 features against upstream's numbers and against transformers with torch."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax.traverse_util import unflatten_dict
from safetensors import safe_open
from safetensors.numpy import load_file
from transformers import AutoTokenizer, T5Config, T5EncoderModel, T5Tokenizer

from vla_rlaif.policies.octo import text
from vla_rlaif.policies.octo.t5 import T5Encoder, encoder_of
from vla_rlaif.policies.octo.text import T5Features, Tokenizer, load_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "octo"
CHECKPOINT = GOLDEN / "tiny_ckpt"
T5 = "octo_transformer/task_tokenizers_language/hf_model/"
SPACE = "\u2581"  # SentencePiece's


@cache
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / "tiny_golden.npz"))


@cache
def params() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / "tiny_params.npz"))


def tokenizer() -> Tokenizer:
    return load_tokenizer("t5-tiny", near=CHECKPOINT, local_only=True)


def golden_sentences() -> list[str]:
    """The instructions of the golden batch, from their token ids."""
    vocabulary = json.loads((CHECKPOINT / "t5-tiny" / "tokenizer.json").read_text())["model"]["vocab"]
    words = {i: word for word, i in vocabulary.items()}
    ids = golden()["in/task/language_instruction/input_ids"]
    return [" ".join(words[i] for i in row if i > 1) for row in ids.tolist()]


def features(tmp_path: Path | None = None, **changes: Any) -> T5Features:
    return T5Features(params(), tokenizer(), tmp_path, **changes)


# Tokenizer


def test_tokens_are_upstreams() -> None:
    texts = json.loads((GOLDEN / "create_tasks.json").read_text())["texts"]
    for sentences, case in ((texts, "texts"), (["", "", ""], "goals")):
        got = tokenizer()(sentences)
        np.testing.assert_array_equal(got.ids, golden()[f"create_tasks/{case}/language_instruction/input_ids"])
        np.testing.assert_array_equal(got.mask, golden()[f"create_tasks/{case}/language_instruction/attention_mask"])


def test_a_long_sentence_is_refused_unless_asked_for() -> None:
    fits, long = " ".join(["the"] * 15), " ".join(["the"] * 16)  # and </s>: 16 and 17 tokens
    assert tokenizer()([fits]).ids.tolist() == [[5] * 15 + [1]]
    with pytest.raises(ValueError, match="more than 16 tokens"):
        tokenizer()([fits, long])
    cut = tokenizer()([fits, long], allow_truncation=True)
    assert cut.is_truncated.tolist() == [False, True]
    assert cut.ids.tolist() == [[5] * 15 + [1]] * 2


def sentencepiece_like(folder: Path) -> Path:
    """A Unigram tokenizer with T5's pieces in small, made by transformers."""
    scores = {SPACE: -2.0, f"{SPACE}pick": -3.0, "up": -4.0, f"{SPACE}up": -3.0, "cube": -3.0, "s": -2.0, "p": -6.0}
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *scores.items()]
    T5Tokenizer(vocab=vocabulary, extra_ids=0).save_pretrained(folder)
    return folder


def test_subwords_as_transformers_cuts_them(tmp_path: Path) -> None:
    folder = sentencepiece_like(tmp_path / "t5-pieces")
    sentences = ["pick up cubes", "", " pick  up\n", "Pick upp", "</s> cube", "up " * 40]
    got = load_tokenizer(str(folder), near=None, local_only=True)(sentences, allow_truncation=True)
    reference = AutoTokenizer.from_pretrained(folder)
    want = reference(sentences, max_length=16, padding="max_length", truncation=True, return_tensors="np")
    np.testing.assert_array_equal(got.ids, want["input_ids"])
    np.testing.assert_array_equal(got.mask, want["attention_mask"])
    # "_pick" 4, "_up" 6, then "_" 3 + "cube" 7 + "s" 8: the only way to cut "_cubes"
    assert got.ids[:2, :6].tolist() == [[4, 6, 3, 7, 8, 1], [1, 0, 0, 0, 0, 0]]


def test_folders_are_looked_up_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (CHECKPOINT / "t5-tiny" / "tokenizer.json").read_text()
    near, here = tmp_path / "checkpoint", tmp_path / "here"
    for base, word in ((near, "alpha"), (here, "beta")):
        (base / "t5-tiny").mkdir(parents=True)
        (base / "t5-tiny" / "tokenizer.json").write_text(source.replace('"cube"', f'"{word}"'))
    monkeypatch.chdir(here)

    def knows(name: str, near: Path | None) -> list[str]:
        ids = load_tokenizer(name, near=near, local_only=True)(["alpha", "beta", "cube"]).ids[:, 0]
        return [word for word, i in zip(("alpha", "beta", "cube"), ids.tolist(), strict=True) if i == 11]

    assert knows(str(CHECKPOINT / "t5-tiny"), near) == ["cube"]
    assert knows("t5-tiny", near) == ["alpha"]
    assert knows("t5-tiny", None) == ["beta"]


def test_what_is_missing_is_said_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(ValueError) as raised:
        load_tokenizer("t5-base", near=tmp_path, local_only=True)
    command = f"`hf download google-t5/t5-base tokenizer.json --local-dir {tmp_path / 't5-base'}`"
    assert command in str(raised.value) and "policy.tokenizer" in str(raised.value)
    (tmp_path / "t5-base").mkdir()
    with pytest.raises(ValueError, match=r"t5-base holds no tokenizer\.json"):
        load_tokenizer("t5-base", near=tmp_path, local_only=True)
    with pytest.raises(ValueError, match=r"hf download.*HFValidationError"):
        load_tokenizer("/no/such/folder", near=None, local_only=False)


def test_files_that_are_no_t5_tokenizer_are_refused(tmp_path: Path) -> None:
    source = (CHECKPOINT / "t5-tiny" / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(source.replace("<pad>", "[PAD]"))
    with pytest.raises(ValueError, match="no <pad>"):
        load_tokenizer(str(tmp_path), near=None, local_only=True)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match="a git LFS pointer"):
        load_tokenizer(str(tmp_path), near=None, local_only=True)


class Hub(BaseHTTPRequestHandler):
    """Serves one file as the hub does; ``silent/...`` is never answered."""

    body = (CHECKPOINT / "t5-tiny" / "tokenizer.json").read_bytes()
    released = threading.Event()
    paths: Sequence[str] = ()

    def do_HEAD(self) -> None:
        type(self).paths = [*self.paths, self.path]
        if self.path.startswith("/silent/"):
            self.released.wait(20)
            return
        self.send_response(200 if self.path.endswith("/tokenizer.json") else 404)
        headers = {"ETag": '"abc"', "X-Repo-Commit": "0" * 40, "Content-Length": str(len(self.body))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Hub.paths = ()
    Hub.released.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    Hub.released.set()
    server.shutdown()
    server.server_close()


def test_short_names_come_from_the_hub_and_stay_in_its_cache(hub: None) -> None:
    got = load_tokenizer("t5-base", near=None, local_only=False)(["pick up"])
    assert got.ids[0, :3].tolist() == [3, 4, 1]
    asked = list(Hub.paths)
    assert {path for path in asked if path.endswith(".json")} == {"/google-t5/t5-base/resolve/main/tokenizer.json"}
    again = load_tokenizer("t5-base", near=None, local_only=True)(["pick up"])
    np.testing.assert_array_equal(again.ids, got.ids)
    assert Hub.paths == asked


def test_a_silent_hub_is_given_up(hub: None) -> None:
    before = time.monotonic()
    with pytest.raises(ValueError, match=r"within 2 s.*hf download silent/t5"):
        load_tokenizer("silent/t5", near=None, local_only=False, deadline_s=2.0)
    assert time.monotonic() - before < 15  # the server answers after 20 s, and the client would retry five times


def test_importing_text_imports_no_torch_and_no_transformers() -> None:
    code = "import sys, vla_rlaif.policies.octo.text; print({'torch', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "set()"


# Encoder


def test_features_are_upstreams() -> None:
    got = features()(golden_sentences())
    np.testing.assert_allclose(got, golden()["inter/full/t5_last_hidden_state"], rtol=0, atol=2e-5)


def torch_encoder(**sizes: Any) -> tuple[T5EncoderModel, dict[str, np.ndarray]]:
    """A random encoder of transformers, and its parameters under the names of a checkpoint."""
    torch.manual_seed(0)
    model = T5EncoderModel(T5Config(**sizes)).eval()
    flat = {}
    for name, value in model.named_parameters():
        *path, leaf = name.split(".")
        array = (value.detach() + 0.1 * torch.randn(value.shape)).numpy()
        value.data = torch.from_numpy(array)
        if path[-1] in ("shared", "relative_attention_bias"):
            leaf = "embedding"
        elif "layer_norm" not in path[-1]:
            leaf, array = "kernel", array.T
        flat["/".join([*path, leaf])] = np.ascontiguousarray(array)
    model.tie_weights()
    return model, flat


@pytest.mark.parametrize("length", [16, 40, 300])
def test_encoder_against_torch(length: int) -> None:
    """Beyond 8 tokens the position buckets are logarithmic, beyond 128 the last one takes all."""
    sizes = {"vocab_size": 40, "d_model": 12, "d_kv": 5, "d_ff": 20, "num_layers": 2, "num_heads": 3}
    model, flat = torch_encoder(**sizes)
    encoder = encoder_of(flat)
    assert encoder == T5Encoder(vocabulary=40, width=12, head_dim=5, num_heads=3, hidden=20, num_layers=2)
    rng = np.random.default_rng(0)
    ids, mask = rng.integers(0, 40, (2, length)), np.ones((2, length), int)
    mask[1, length // 3 :] = 0
    with torch.no_grad():
        want = model(torch.from_numpy(ids), torch.from_numpy(mask)).last_hidden_state.numpy()
    got = jax.jit(encoder.apply)({"params": unflatten_dict(flat, sep="/")}, ids, mask)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def test_sizes_of_the_official_encoder() -> None:
    manifest = json.loads((GOLDEN / "octo_small_15_params.json").read_text())["params"]
    zero = np.zeros((), np.float32)
    flat = {k.removeprefix(T5): np.broadcast_to(zero, v["shape"]) for k, v in manifest.items() if k.startswith(T5)}
    assert encoder_of(flat) == T5Encoder()


def test_parameters_that_are_no_encoder_are_refused() -> None:
    flat = {name.removeprefix(T5): value for name, value in params().items() if name.startswith(T5)}
    wi = "encoder/block/0/layer/1/DenseReluDense/wi/kernel"
    with pytest.raises(ValueError, match="wi_0 and wi_1"):
        encoder_of({name.replace("/wi/", "/wi_0/"): value for name, value in flat.items()})
    with pytest.raises(ValueError, match=r"block/1/.*wi/kernel has shape \(32, 60\), wanted \(32, 64\)"):
        encoder_of(flat | {wi.replace("block/0", "block/1"): np.zeros((32, 60), np.float32)})
    with pytest.raises(ValueError, match="final_layer_norm/weight has shape none"):
        encoder_of({name: value for name, value in flat.items() if "final" not in name})
    with pytest.raises(ValueError, match="decoder/x has shape"):
        encoder_of(flat | {"decoder/x": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match="task_tokenizers_words/hf_model/"):
        features(task_tokenizer="words")


# Caches


def test_memory_keeps_the_latest_and_answers_in_order() -> None:
    words = ["cube", "cup", "cube", "fork"]
    small, large = features(max_in_memory=1), features()
    got = small(words)
    np.testing.assert_array_equal(got, large(words))
    np.testing.assert_array_equal(got[0], got[2])
    assert np.abs(got[0] - got[1]).max() > 0.1
    got[:] = 0  # callers own what they get
    np.testing.assert_array_equal(small(["fork"]), large(["fork"]))
    assert small([]).shape == (0, 16, 32)


def stored(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_stored_features_are_used_by_the_next_process(tmp_path: Path) -> None:
    want = features(tmp_path / "new")(["cube", "cup"])
    files = stored(tmp_path / "new")
    assert len(files) == 2 and all(path.suffix == ".safetensors" for path in files)
    held = np.stack([load_file(path)["features"] for path in files])
    assert {a.tobytes() for a in held} == {a.tobytes() for a in want}
    marked = np.full((16, 32), 7, np.float32)  # what nobody computes
    text._write(files[0], marked)
    text._write(files[1], marked)
    np.testing.assert_array_equal(features(tmp_path / "new")(["cup"])[0], marked)


def test_memory_forgets_the_least_recently_used(tmp_path: Path) -> None:
    """The files are replaced by marked ones, which only show for a sentence that was forgotten."""
    recent = features(tmp_path, max_in_memory=2)
    for sentence in ("cube", "cup", "cube", "fork"):
        recent([sentence])
    marked = np.full((16, 32), 7, np.float32)
    for path in stored(tmp_path):
        text._write(path, marked)
    assert [bool((recent([word]) == marked).all()) for word in ("cube", "fork", "cup")] == [False, False, True]


def test_stored_features_belong_to_parameters_and_tokens(tmp_path: Path) -> None:
    features(tmp_path)(["cube", " cube "])  # equal tokens
    assert len(stored(tmp_path)) == 1
    other = params() | {f"{T5}shared/embedding": params()[f"{T5}shared/embedding"] + 1e-6}
    T5Features(other, tokenizer(), tmp_path)(["cube"])
    assert len(stored(tmp_path)) == 2


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "misshaped"])
def test_damaged_files_are_reported_and_replaced(tmp_path: Path, damage: str) -> None:
    want = features(tmp_path)(["cube"])
    (path,) = stored(tmp_path)
    whole = path.read_bytes()
    if damage == "misshaped":
        text._write(path, np.zeros((8, 32), np.float32))
    else:
        flipped = whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:]
        path.write_bytes({"flipped": flipped, "truncated": whole[:-5], "empty": b""}[damage])
    with pytest.warns(UserWarning, match=rf"{path.name} are damaged"):
        got = features(tmp_path)(["cube"])
    np.testing.assert_array_equal(got, want)
    assert path.read_bytes() == whole and stored(tmp_path) == [path]
    with safe_open(path, framework="numpy") as file:
        assert file.keys() == ["features"]
