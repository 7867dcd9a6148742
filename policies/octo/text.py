"""Instructions to T5 features: the tokenizer, and the frozen encoder with its caches.

The tokenizer reads ``tokenizer.json`` alone, as its authors wrote it: no class is chosen by a name in a file, and no
deep-learning library is imported for it. Axes: n sentences, K token slots, L feature width.
"""

import hashlib
import json
import os
import subprocess
import sys
import uuid
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from vla_rlaif.policies.octo.t5 import encoder_of, features_of

if TYPE_CHECKING:
    import tokenizers

FILE = "tokenizer.json"
HUB_NAMES = {name: f"google-t5/{name}" for name in ("t5-small", "t5-base", "t5-large")}  # checkpoints use short names
FETCH = """
import sys
from huggingface_hub import hf_hub_download
sys.stdout.write(hf_hub_download(*sys.argv[1:]))
"""
FORMAT = 1  # part of the key of a stored feature; another one when the numbers of the encoder change


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Padded sentences. ``is_truncated`` tells which lost their end."""

    ids: Int[np.ndarray, "n K"]
    mask: Int[np.ndarray, "n K"]  # 1 token, 0 padding
    is_truncated: Bool[np.ndarray, " n"]


class Tokenizer:
    """T5's conventions: ``</s>`` at the end, padded to ``max_length``. Made by ``load_tokenizer``."""

    def __init__(self, rules: "tokenizers.Tokenizer", *, max_length: int = 16):
        pad = rules.token_to_id("<pad>")
        if pad is None or rules.token_to_id("</s>") is None:
            raise ValueError("the tokenizer has no <pad> or no </s>; wanted the one of a T5 model.")
        rules.enable_truncation(max_length)
        rules.enable_padding(length=max_length, pad_id=pad, pad_token="<pad>")
        self.max_length = max_length
        self._rules = rules

    def __call__(self, sentences: Sequence[str], *, allow_truncation: bool = False) -> Tokens:
        """Token ids of ``sentences``; "" is valid, and is what upstream uses for "no instruction".

        Raises:
            ValueError: a sentence is too long. A robot told half a sentence does something else, so upstream's silent
                cut has to be asked for with ``allow_truncation``.
        """
        encodings = [self._rules.encode(sentence) for sentence in sentences]
        is_truncated = np.array([bool(encoding.overflowing) for encoding in encodings], bool)
        if is_truncated.any() and not allow_truncation:
            first = sentences[int(is_truncated.argmax())]
            raise ValueError(
                f"{first!r} has more than {self.max_length} tokens with its </s>. Say it shorter, or pass"
                " allow_truncation=True to drop its end as upstream does."
            )
        shape = (len(encodings), self.max_length)
        return Tokens(
            ids=np.array([encoding.ids for encoding in encodings], np.int32).reshape(shape),
            mask=np.array([encoding.attention_mask for encoding in encodings], np.int32).reshape(shape),
            is_truncated=is_truncated,
        )


def load_tokenizer(
    name_or_folder: str, *, near: Path | None, local_only: bool, max_length: int = 16, deadline_s: float = 30.0
) -> Tokenizer:
    """The tokenizer that a checkpoint names, e.g. "t5-base".

    A folder wins: an absolute one, one below ``near`` (the checkpoint), one below the working directory. Else the hub's
    cache, and, unless ``local_only``, the hub itself for at most ``deadline_s`` seconds.

    Raises:
        ValueError: there is none, or it is damaged; the message says what to put where.
    """
    import tokenizers

    bases = [*([near] if near is not None else []), Path()]
    folders = [base / name_or_folder for base in bases]  # an absolute name replaces its base
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is not None and not (folder / FILE).is_file():
        raise ValueError(f"{folder} holds no {FILE}; put the one of the T5 model there.")
    path = folder / FILE if folder is not None else _from_hub(name_or_folder, near, local_only, deadline_s)
    rules = path.read_text(encoding="utf-8")
    try:
        json.loads(rules)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON ({error}); a git LFS pointer, or cut short? Fetch it again.") from None
    return Tokenizer(tokenizers.Tokenizer.from_str(rules), max_length=max_length)


def _from_hub(name: str, near: Path | None, local_only: bool, deadline_s: float) -> Path:
    """The file in the hub's cache, fetched if need be, in a process that can be ended: the client retries for long."""
    repository = HUB_NAMES.get(name, name)
    wanted = (
        f"The policy needs the tokenizer {name!r}, and no folder of that name was found. Run"
        f" `hf download {repository} {FILE} --local-dir {Path(near or '<checkpoint>') / name}` where there is a network"
        " and copy the folder to the same place here, or point policy.tokenizer at a folder with that file."
    )
    command = [sys.executable, "-c", FETCH, repository, FILE]
    env = {**os.environ, **({"HF_HUB_OFFLINE": "1"} if local_only else {})}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, env=env)
    except subprocess.TimeoutExpired:
        raise ValueError(f"The hub gave no {repository}/{FILE} within {deadline_s:g} s. {wanted}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ValueError(f"{wanted} (The hub's client: {lines[-1]})")
    return Path(done.stdout)


class T5Features:
    """The encoder of a checkpoint as a function of sentences, each computed once.

    ``params`` is the flat tree of the checkpoint; the encoder's part stays on the host, and is on the device only while
    new sentences are encoded. With ``cache_dir``, features outlive the process there, one file for each instruction.
    """

    def __init__(
        self,
        params: Mapping[str, np.ndarray],
        tokenizer: Tokenizer,
        cache_dir: Path | None = None,
        *,
        task_tokenizer: str = "language",
        max_in_memory: int = 1024,
    ):
        prefix = f"octo_transformer/task_tokenizers_{task_tokenizer}/hf_model/"
        self._params = {name.removeprefix(prefix): v for name, v in params.items() if name.startswith(prefix)}
        if not self._params:
            raise ValueError(f"no parameter starts with {prefix}: the checkpoint has no T5 encoder of that name.")
        self.encoder = encoder_of(self._params)
        self._tokenizer, self._cache_dir, self._max_in_memory = tokenizer, cache_dir, max_in_memory
        self._memory: OrderedDict[str, Float[np.ndarray, "K L"]] = OrderedDict()  # least recently used first
        self._digest = b"" if cache_dir is None else _digest(self._params)

    def __call__(self, sentences: Sequence[str]) -> Float[np.ndarray, "n K L"]:
        """Features of every token slot, padding included: Octo attends to all of them."""
        known = {s: self._memory[s] for s in set(sentences) & self._memory.keys()}
        new = sorted(set(sentences) - known.keys())
        known |= dict(zip(new, self._features(new), strict=True))
        for sentence in dict.fromkeys(sentences):
            self._memory[sentence] = known[sentence]
            self._memory.move_to_end(sentence)
        while len(self._memory) > self._max_in_memory:
            self._memory.popitem(last=False)
        empty = np.empty((0, self._tokenizer.max_length, self.encoder.width), np.float32)
        return np.stack([known[s] for s in sentences]) if len(sentences) else empty

    def _features(self, sentences: Sequence[str]) -> list[Float[np.ndarray, "K L"]]:
        tokens = self._tokenizer(sentences)
        paths = [None if self._cache_dir is None else self._path(self._cache_dir, ids) for ids in tokens.ids]
        shape = (self._tokenizer.max_length, self.encoder.width)
        found = [None if path is None else _read(path, shape) for path in paths]
        missing = [i for i, features in enumerate(found) if features is None]
        computed = features_of(self.encoder, self._params, tokens.ids[missing], tokens.mask[missing])
        for i, features in zip(missing, computed, strict=True):
            path, found[i] = paths[i], features
            if path is not None:
                _write(path, features)
        return [features for features in found if features is not None]

    def _path(self, folder: Path, ids: Int[np.ndarray, " K"]) -> Path:
        key = hashlib.sha256(self._digest + np.asarray(ids, "<i4").tobytes()).hexdigest()
        return folder / f"{key}.safetensors"


def _digest(params: Mapping[str, np.ndarray]) -> bytes:
    total = hashlib.sha256(bytes([FORMAT]))
    for name, value in sorted(params.items()):
        total.update(f"{name} {value.dtype} {value.shape}\n".encode())
        total.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return total.digest()


def _read(path: Path, shape: tuple[int, int]) -> Float[np.ndarray, "K L"] | None:
    """Stored features, or None if there are none or they are damaged. Damage is a warning."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            features, checksum = file.get_tensor("features"), (file.metadata() or {}).get("sha256")
    except SafetensorError as error:
        problem = str(error)
    else:
        if features.shape == shape and checksum == hashlib.sha256(features.data).hexdigest():
            return features
        problem = f"shape {features.shape}, wanted {shape}, or a wrong checksum"
    warnings.warn(f"the stored features {path} are damaged ({problem}); computing them anew.", stacklevel=2)
    return None


def _write(path: Path, features: Float[np.ndarray, "K L"]) -> None:
    """Several processes may write the same features: each under a name of its own, then renamed."""
    features = np.ascontiguousarray(features)
    data = save({"features": features}, {"sha256": hashlib.sha256(features.data).hexdigest()})
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.stem}.{uuid.uuid4().hex}.part")
    part.write_bytes(data)
    os.replace(part, path)
