"""What an Octo network is made of, as typed data: the ``model`` section of an official config.json, both ways.

Names in a checkpoint's config pick from the classes here; its ``module`` entries are never imported. Every spec is
frozen and hashable, so equal networks share their compiled functions. Defaults: octo-models/octo @ 241fb35.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

COMPONENTS = "octo.model.components"


@dataclass(frozen=True, kw_only=True)
class StemSpec:
    """SmallStem16 or SmallStem32: strided standardised convolutions, then a patch embedding."""

    NAME: ClassVar[str] = "SmallStem16"
    MODULE: ClassVar[str] = f"{COMPONENTS}.vit_encoders"
    use_film: bool = False
    patch_size: int = 16
    kernel_sizes: tuple[int, ...] = (3, 3, 3, 3)
    strides: tuple[int, ...] = (2, 2, 2, 2)
    features: tuple[int, ...] = (32, 96, 192, 384)
    padding: tuple[int, ...] = (1, 1, 1, 1)
    num_features: int = 512
    img_norm_type: Literal["default", "imagenet"] = "default"
    num_groups: int = 32  # of the normalisation; not a key of upstream, whose groups are always 32


@dataclass(frozen=True, kw_only=True)
class Stem32Spec(StemSpec):
    NAME: ClassVar[str] = "SmallStem32"
    patch_size: int = 32


@dataclass(frozen=True, kw_only=True)
class PatchSpec:
    """One convolution whose stride equals its kernel."""

    NAME: ClassVar[str] = "PatchEncoder"
    MODULE: ClassVar[str] = f"{COMPONENTS}.vit_encoders"
    use_film: bool = False
    patch_size: int = 32
    num_features: int = 512
    img_norm_type: Literal["default", "imagenet"] = "default"


@dataclass(frozen=True, kw_only=True)
class KeypointSpec:
    """Ours (keypoints.py), for small budgets; upstream cannot read it."""

    NAME: ClassVar[str] = "KeypointStem"
    MODULE: ClassVar[str] = "vla_rlaif.policies.octo.keypoints"
    channels: int = 32


EncoderSpec = StemSpec | Stem32Spec | PatchSpec | KeypointSpec


@dataclass(frozen=True, kw_only=True)
class ImageSpec:
    """An image group: the observation keys that match are stacked on channels, the matching goal images behind them."""

    NAME: ClassVar[str] = "ImageTokenizer"
    MODULE: ClassVar[str] = f"{COMPONENTS}.tokenizers"
    encoder: EncoderSpec
    use_token_learner: bool = False
    num_tokens: int = 8
    obs_stack_keys: tuple[str, ...] = ("image_.*", "depth_.*")  # regular expressions, matched from the start
    task_stack_keys: tuple[str, ...] = ()
    task_film_keys: tuple[str, ...] = ()
    proper_pad_mask: bool = True


@dataclass(frozen=True, kw_only=True)
class LowdimSpec:
    """Numbers as tokens: of width 1, or one-hot over bins."""

    NAME: ClassVar[str] = "LowdimObsTokenizer"
    MODULE: ClassVar[str] = f"{COMPONENTS}.tokenizers"
    obs_keys: tuple[str, ...] = ()
    discretize: bool = False
    proper_pad_mask: bool = True
    n_bins: int = 256
    bin_type: Literal["uniform", "normal"] = "uniform"
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LanguageSpec:
    """A frozen T5 encoder (``encoder`` names it), or features that come from elsewhere (None)."""

    NAME: ClassVar[str] = "LanguageTokenizer"
    MODULE: ClassVar[str] = f"{COMPONENTS}.tokenizers"
    encoder: str | None = None
    finetune_encoder: bool = False
    proper_pad_mask: bool = True


@dataclass(frozen=True, kw_only=True)
class DiffusionSpec:
    """The official head."""

    NAME: ClassVar[str] = "DiffusionActionHead"
    MODULE: ClassVar[str] = f"{COMPONENTS}.action_heads"
    readout_key: str
    use_map: bool = False
    action_horizon: int = 1
    action_dim: int = 7
    max_action: float = 5.0
    loss_type: Literal["mse", "l1"] = "mse"
    time_dim: int = 32
    num_blocks: int = 3
    dropout_rate: float = 0.0
    hidden_dim: int = 256
    use_layer_norm: bool = True
    diffusion_steps: int = 20
    n_diffusion_samples: int = 1


@dataclass(frozen=True, kw_only=True)
class ContinuousSpec:
    """A point estimate through a squashed projection."""

    NAME: ClassVar[str] = "ContinuousActionHead"
    MODULE: ClassVar[str] = f"{COMPONENTS}.action_heads"
    readout_key: str
    use_map: bool = False
    action_horizon: int = 1
    action_dim: int = 7
    max_action: float = 5.0
    loss_type: Literal["mse", "l1"] = "mse"


@dataclass(frozen=True, kw_only=True)
class MseSpec(ContinuousSpec):
    NAME: ClassVar[str] = "MSEActionHead"
    use_map: bool = True


@dataclass(frozen=True, kw_only=True)
class L1Spec(ContinuousSpec):
    NAME: ClassVar[str] = "L1ActionHead"
    use_map: bool = True
    loss_type: Literal["mse", "l1"] = "l1"


@dataclass(frozen=True, kw_only=True)
class DiscreteSpec:
    """A categorical distribution over bins for every number of the chunk."""

    NAME: ClassVar[str] = "DiscreteActionHead"
    MODULE: ClassVar[str] = f"{COMPONENTS}.action_heads"
    readout_key: str
    use_map: bool = False
    token_per: Literal["", "action_horizon", "action_dim_and_action_horizon"] = "action_dim_and_action_horizon"
    action_horizon: int = 1
    action_dim: int = 7
    vocab_size: int = 256
    normalization_type: Literal["uniform", "normal"] = "uniform"


ObservationSpec = ImageSpec | LowdimSpec
HeadSpec = DiffusionSpec | ContinuousSpec | MseSpec | L1Spec | DiscreteSpec
ENCODERS = (StemSpec, Stem32Spec, PatchSpec, KeypointSpec)
TOKENIZERS = (ImageSpec, LowdimSpec, LanguageSpec)
HEADS = (DiffusionSpec, ContinuousSpec, MseSpec, L1Spec, DiscreteSpec)
CLASSES: Mapping[str, type] = {kind.NAME: kind for kind in (*ENCODERS, *TOKENIZERS, *HEADS)}


@dataclass(frozen=True, kw_only=True)
class TransformerSpec:
    """Sizes of the body. Dropout is kept for the round trip and never applied: the official models have none."""

    num_layers: int
    mlp_dim: int
    num_attention_heads: int
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    add_position_embedding: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The whole network. Names map to parts in the order of the token sequence."""

    observation_tokenizers: tuple[tuple[str, ObservationSpec], ...]
    task_tokenizers: tuple[tuple[str, LanguageSpec], ...]
    readouts: tuple[tuple[str, int], ...]
    heads: tuple[tuple[str, HeadSpec], ...]
    transformer: TransformerSpec
    token_embedding_size: int
    max_horizon: int
    repeat_task_tokens: bool = False
    use_correct_attention: bool = False

    @property
    def head(self) -> HeadSpec:
        """The action head."""
        return dict(self.heads)["action"]

    @classmethod
    def from_official(cls, model: Mapping[str, Any]) -> "ModelSpec":
        """Read the ``model`` section of a config.json of any version.

        Raises:
            ValueError: an unknown part or key; the message lists the known ones.
        """
        model = dict(model)
        model.pop("num_tokens_dict", None)  # a leftover of some torch converters
        unknown = sorted(model.keys() - {f.name for f in dataclasses.fields(cls)} - {"transformer_kwargs"})
        if unknown:
            known = sorted({f.name for f in dataclasses.fields(cls)} - {"transformer"} | {"transformer_kwargs"})
            raise ValueError(f"unknown key {unknown[0]!r} in the model's config; known are {', '.join(known)}.")
        wanted = {
            "observation_tokenizers",
            "heads",
            "readouts",
            "transformer_kwargs",
            "token_embedding_size",
            "max_horizon",
        }
        missing = sorted(wanted - model.keys())
        if missing:
            raise ValueError(f"the model's config lacks {missing[0]!r}: it is not an Octo config.")
        for group in ("observation_tokenizers", "task_tokenizers", "readouts", "heads", "transformer_kwargs"):
            if not isinstance(model.get(group, {}), Mapping):
                raise ValueError(f"{group} of the model's config is {model[group]!r}, wanted a mapping by name.")
        readouts: Mapping[str, int] = model["readouts"]
        spec = cls(
            observation_tokenizers=tuple((k, _part(v, k)) for k, v in model["observation_tokenizers"].items()),
            task_tokenizers=tuple((k, _part(v, k)) for k, v in model.get("task_tokenizers", {}).items()),
            readouts=tuple(readouts.items()),
            heads=tuple((k, _part(v, k)) for k, v in model["heads"].items()),
            transformer=_fill(TransformerSpec, model["transformer_kwargs"], "transformer_kwargs"),
            token_embedding_size=model["token_embedding_size"],
            max_horizon=model["max_horizon"],
            repeat_task_tokens=model.get("repeat_task_tokens", False),
            use_correct_attention=model.get("use_correct_attention", False),
        )
        spec._check()
        return spec

    def to_official(self) -> dict[str, Any]:
        """The ``model`` section that upstream reads."""
        values: dict[str, Any] = {
            group: {name: _module_spec(part) for name, part in getattr(self, group)}
            for group in ("observation_tokenizers", "task_tokenizers", "heads")
        }
        plain = ("token_embedding_size", "max_horizon", "repeat_task_tokens", "use_correct_attention")
        return {
            **values,
            "readouts": dict(self.readouts),
            "transformer_kwargs": dataclasses.asdict(self.transformer),
            **{name: getattr(self, name) for name in plain},
        }

    def _check(self) -> None:
        if "action" not in dict(self.heads):
            raise ValueError(f"the model has heads {', '.join(dict(self.heads)) or 'none'}, wanted one named 'action'.")
        wanted = self.head.readout_key.removeprefix("readout_")
        if wanted not in dict(self.readouts):
            raise ValueError(
                f"the action head reads {self.head.readout_key!r}; readouts are {', '.join(dict(self.readouts))}."
            )
        if self.transformer.add_position_embedding:
            raise ValueError(
                "transformer_kwargs.add_position_embedding is true; positions are added by group: use false."
            )


def _part(value: Mapping[str, Any], where: str) -> Any:
    """A spec from upstream's {"module", "name", "args", "kwargs"}; only the name is used to choose."""
    if not isinstance(value, Mapping) or "name" not in value:
        raise ValueError(f"{where}: wanted a mapping with name and kwargs, got {value!r}.")
    kind = CLASSES.get(str(value["name"]))
    if kind is None:
        raise ValueError(f"{where}: {value['name']!r} is not supported; known are {', '.join(CLASSES)}.")
    if value.get("args"):
        raise ValueError(f"{where}: {value['name']} has positional args {value['args']}; wanted kwargs only.")
    return _fill(kind, value.get("kwargs", {}), f"{where} ({value['name']})")


def _fill(kind: type, kwargs: Mapping[str, Any], where: str) -> Any:
    kwargs = dict(kwargs)
    if "pred_horizon" in kwargs:  # v1.0
        kwargs["action_horizon"] = kwargs.pop("pred_horizon")
    fields = {f.name for f in dataclasses.fields(kind)}
    unknown = sorted(kwargs.keys() - fields)
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(fields))}.")
    missing = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING and f.name not in kwargs]
    if missing:
        raise ValueError(f"{where}: {missing[0]!r} is missing.")
    if isinstance(kwargs.get("encoder"), Mapping):
        kwargs["encoder"] = _part(kwargs["encoder"], f"{where}.encoder")
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in kwargs.items()})


def _module_spec(part: Any) -> dict[str, Any]:
    """The other way. Values at their defaults are written too, except ours that upstream does not know."""
    kwargs: dict[str, Any] = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.name == "num_groups" and value == field.default:
            continue
        if dataclasses.is_dataclass(value):
            value = _module_spec(value)
        kwargs[field.name] = list(value) if isinstance(value, tuple) else value
    return {"module": part.MODULE, "name": part.NAME, "args": [], "kwargs": kwargs}
