"""Who labels: the `labeller` of a learned reward, and the vision-language models that can be asked."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from vla_rlaif.config_base import Fraction, Model, Positive

Seconds = Annotated[float, Field(gt=0)]


class OracleConfig(Model):
    """Simulator ground truth with B-Pref's teacher errors (https://arxiv.org/abs/2111.03026)."""

    type: Literal["oracle"] = "oracle"
    beta: float | None = None  # None: perfectly rational; otherwise Boltzmann
    mistake: Fraction = 0.0  # probability of a flipped label
    equal_threshold: Annotated[float, Field(ge=0)] = 0.02  # closer than this is a tie
    skip_threshold: float | None = None  # both below this: skipped
    noise: Annotated[float, Field(ge=0)] = 0.0  # std of what the teacher perceives of each episode, units of truth
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0  # myopia per decision: what came early has faded at the end
    successes_tie: bool = True  # two successes are equally good


class PythonLabellerConfig(Model):
    """The user's own labeller: `package.module:function`, f(episodes, pairs) -> [M] probabilities, NaN is a skip."""

    type: Literal["python"] = "python"
    function: str
    blind: bool = False  # the function is not shown success, truth and start seeds; an audited run wants it so


class OpenAIConfig(Model):
    """A vision-language model behind an OpenAI-compatible server, such as vLLM; docs/labels.md starts one."""

    type: Literal["openai"] = "openai"
    url: str = "http://127.0.0.1:8000/v1"  # up to the version
    model: str  # as the server calls it
    revision: str | None = None  # of the model's files, which servers do not say: cached answers are told apart by it
    api_key_file: Path | None = None  # its first line is sent as the bearer token
    concurrency: Positive = 8  # requests at a time
    retries: Annotated[int, Field(ge=0)] = 5  # of 429, 5xx and broken connections; nothing else is asked again
    retry_s: Seconds = 0.5  # before the first retry; twice as long before each further one
    request_s: Seconds = 60.0  # how long an answer may take
    first_s: Seconds = 600.0  # how long the first one may take: servers compile then


class TransformersConfig(Model):
    """A vision-language model of a transformers folder, in this process. Nothing in the folder is executed."""

    type: Literal["transformers"] = "transformers"
    folder: Path
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    batch: Positive = 8  # questions at a time


VLMConfig = Annotated[OpenAIConfig | TransformersConfig, Field(discriminator="type")]


class JudgeSettings(Model):
    """What a vision-language judge is shown and how it is asked."""

    backend: VLMConfig
    frames: Positive = 4  # of each clip, evenly spaced, the first and the last included; 1 is the last
    cameras: tuple[str, ...] = ()  # side by side in every frame; none: the env's first
    prompt: str | None = None  # the question; null: ours. Docs/labels.md lists the {names} that it must hold
    invalid_budget: Annotated[int, Field(ge=0)] = 10  # answers that may be invalid; one more stops the run
    cache: Path | None = None  # SQLite file of answers; null: judge.sqlite beside the preference store


class VLMLabellerConfig(JudgeSettings):
    """A vision-language model: `pairwise` asks which clip is better, in both orders, `rubric` rates each clip."""

    type: Literal["vlm"] = "vlm"
    mode: Literal["pairwise", "rubric"] = "pairwise"
    ties: bool = True  # `equally good` is offered as a third answer; pairwise only
    tie_margin: Annotated[float, Field(ge=0, lt=0.5)] = 0.0  # a probability this near to 0.5 becomes a tie

    @model_validator(mode="after")
    def _names_fit(self) -> "VLMLabellerConfig":
        names = ("{instruction}", "{first}", "{second}") if self.mode == "pairwise" else ("{instruction}", "{clip}")
        check_prompt(self.prompt, names)
        return self


class HumanConfig(Model):
    """People: training waits while they label its pairs on a local page (docs/label_by_hand.md)."""

    type: Literal["human"] = "human"
    host: str = "127.0.0.1"  # address of the page; beyond loopback whoever has its token can label
    port: Annotated[int, Field(ge=0, le=65535)] = 8765  # 0 lets the system choose
    names: tuple[str, ...] = ()  # host names besides localhost that the page is opened under
    deadline_s: Seconds = 86400.0  # how long training waits for the labels of one refresh
    at_deadline: Literal["stop", "skip"] = "stop"  # skip: go on without the labels that are missing
    repeat: Annotated[float, Field(ge=0, lt=1)] = 0.05  # share of questions asked again, to measure agreement
    lease_s: Seconds = 300.0  # a pair that nobody answers for so long goes to somebody else
    fps: Annotated[float, Field(gt=0, le=60)] = 5.0  # frames a second at speed 1; there is one frame a decision
    cameras: tuple[str, ...] = ()  # to show; all of them by default


LabellerConfig = OracleConfig | VLMLabellerConfig | PythonLabellerConfig | HumanConfig


def check_prompt(prompt: str | None, names: tuple[str, ...]) -> None:
    """Raises ValueError unless each name is in the prompt once."""
    for name in names if prompt is not None else ():
        if prompt is not None and prompt.count(name) != 1:
            raise ValueError(f"prompt has {name} {prompt.count(name)} times; wanted once.")
