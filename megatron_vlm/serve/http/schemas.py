"""Forms of request bodies, except the protobuf of forward_backward.

Fields that are not listed here are ignored, since clients gain fields over time. Fields that would
change the result but are not supported are listed in order to refuse them: an optimizer other than
AdamW, `optimizer_params`, `age_encryption_recipients`, `prompt_alt_tokens_k`, and a model_path or
base_model in asample.
"""

import math
import re
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    create_model,
    field_validator,
)

from megatron_vlm.serve.journal.journal_records import checked_name
from megatron_vlm.serve.protocol.payloads import RequestError

Id = Annotated[str, StringConstraints(min_length=1, max_length=300)]
Name = Annotated[str, AfterValidator(checked_name)]
Seq = Annotated[int, Field(ge=1, lt=2**62)]
FromZero = Annotated[int, Field(ge=0, lt=2**62)]
_LONGEST_TEXT = _LONGEST_LIST = 4096
Text = Annotated[str, StringConstraints(max_length=_LONGEST_TEXT)]
Metadata = Annotated[dict[Text, Any], Field(max_length=256)]
Seconds = Annotated[int, Field(ge=1, le=10 * 366 * 86400)]
Positive = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]


# {switch of lora_config: the part of the model that it gives adapters}
PARTS = {"train_attn": "attention", "train_mlp": "mlp", "train_unembed": "head"}


def sdk_release(version: str) -> tuple[int, int] | None:
    """Return the first two numbers of a client's version, or None if it has none."""
    numbers = re.match(r"(\d{1,9})\.(\d{1,9})", version)
    return None if numbers is None else (int(numbers[1]), int(numbers[2]))


class JsonForm(BaseModel):
    """The JSON body of a request."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), frozen=True)


class CreateSession(JsonForm):
    tags: Annotated[list[Text], Field(max_length=256)] = []
    user_metadata: Metadata | None = None
    display_name: Text | None = None
    sdk_version: Text = ""

    @field_validator("sdk_version")
    @classmethod
    def _new_enough(cls, value: str) -> str:
        """Refuse clients that would wait for ever for forms that this service does not have."""
        if (sdk_release(value) or (0, 25)) < (0, 25):
            raise ValueError(f"tinker {value} is too old: install 0.25 or newer")
        return value


class ModelIdForm(JsonForm):
    """Body of unload_model."""

    model_id: Id


@cache
def one_field(name: str, kind: Any) -> type[JsonForm]:
    """Return the form of a body with one field."""
    field: dict[str, Any] = {name: (kind, ...)}
    return create_model("OneField", __base__=JsonForm, **field)


class Ttl(JsonForm):
    """Body of checkpoints/{id}/ttl."""

    ttl_seconds: Seconds | None = None


class Finish(JsonForm):
    """Body of sessions/{id}/finish."""

    reason: dict[str, Any] = {}
    detail: Text | None = None


class LoraForm(JsonForm):
    """Settings of LoRA. Rank 0 trains all weights."""

    rank: Annotated[int, Field(ge=0, le=4096)]
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @property
    def targets(self) -> tuple[str, ...]:
        """Parts of the model that get adapters."""
        return tuple(part for switch, part in PARTS.items() if getattr(self, switch))


class OptimizerConfig(JsonForm):
    type: Literal["adamw"] = "adamw"


class CreateModel(JsonForm):
    session_id: Id
    model_seq_id: FromZero
    base_model: Text
    lora_config: LoraForm | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()
    user_metadata: Metadata | None = None


class LoadModel(JsonForm):
    """Body of a load_weights that makes a model."""

    session_id: Id
    model_seq_id: FromZero
    path: Text
    optimizer: bool
    base_model: Text | None = None
    optimizer_config: OptimizerConfig | None = None
    user_metadata: Metadata | None = None


class OrderedForm(JsonForm):
    """Body of a call that takes its turn among the calls of a model."""

    model_id: Id
    seq_id: Seq


class LoadWeights(OrderedForm):
    """Body of a load_weights into an existing model."""

    path: Text
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None


class AdamParams(JsonForm):
    """Parameters of AdamW in this step. A clip of 0 disables clipping."""

    learning_rate: Positive = 1e-4
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    eps: Positive = 1e-12
    weight_decay: Positive = 0.0
    grad_clip_norm: float = 0.0

    @field_validator("grad_clip_norm")
    @classmethod
    def _clip(cls, value: float) -> float:
        if math.isnan(value):
            raise ValueError("give a number; 0 or inf for none")
        return 0.0 if math.isinf(value) else value


class OptimStep(OrderedForm):
    adam_params: AdamParams = AdamParams()
    optimizer_params: None = None  # belongs to other optimizers


class SaveForm(OrderedForm):
    """Body of a call that saves weights."""

    ttl_seconds: Seconds | None = None
    user_metadata: Annotated[dict[Text, Text], Field(max_length=256)] | None = None


class SaveWeights(SaveForm):
    path: Name
    overwrite: bool = False


class SaveWeightsExternal(SaveForm):
    path: Name
    age_encryption_recipients: Annotated[list[Text], Field(max_length=256)] | None = None

    @field_validator("age_encryption_recipients")
    @classmethod
    def _plain(cls, value: list[str] | None) -> list[str] | None:
        if value:
            raise ValueError(
                "encrypted exports are not supported; call save_weights_external without "
                "recipients, and download what it makes"
            )
        return value


class SaveWeightsForSampler(SaveForm):
    """Weights that are kept as `path` or for one sampling session. `kind` inflight would let
    existing sessions follow the newest weights. It promises only weights of its creation or newer,
    and a snapshot fulfils that promise."""

    path: Name | None = None
    sampling_session_seq_id: FromZero | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


# Calls whose bodies are JSON, by the names of the methods that run them: the form of each, and
# whether it changes its model. A form with `seq_id` takes its turn among the calls of the model.
# Weights are saved with the optimizer, to sample from, or for other programs to read.
CALL_FORMS: dict[str, tuple[type[JsonForm], bool]] = {
    "create_model": (CreateModel, False),
    "load_model": (LoadModel, False),
    "load_weights": (LoadWeights, True),
    "optim_step": (OptimStep, True),
    "save_weights": (SaveWeights, False),
    "save_weights_for_sampler": (SaveWeightsForSampler, False),
    "save_weights_external": (SaveWeightsExternal, False),
    "unload_model": (ModelIdForm, False),
}


class CreateSamplingSession(JsonForm):
    session_id: Id
    sampling_session_seq_id: FromZero
    base_model: Text | None = None
    model_path: Text | None = None


class SamplingParams(JsonForm):
    """Parameters of sampling. `stop` None is the end of the answer, [] is no stop."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: Positive = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0

    @field_validator("stop", mode="plain")
    @classmethod
    def _stop(cls, value: Any) -> Any:
        # An error of a union would name each of its types in turn.
        entries = value if isinstance(value, list) else [value]
        texts = all(isinstance(one, str) and len(one) <= _LONGEST_TEXT for one in entries)
        ids = isinstance(value, list) and all(
            type(one) is int and 0 <= one < 2**62 for one in entries
        )
        if value is not None and (len(entries) > _LONGEST_LIST or not (texts or ids)):
            raise ValueError(
                f"give a text, a list of texts, or a list of tokens; at most {_LONGEST_LIST} of "
                f"them, and at most {_LONGEST_TEXT} characters in each text"
            )
        return value


Penalty = Annotated[float, Field(ge=-2, le=2)]


class Penalties(JsonForm):
    """Settings of sampling by which a token's score is not its logit, as vLLM has them."""

    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    logit_bias: Annotated[
        dict[FromZero, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)
    ] = {}
    min_tokens: FromZero = 0

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of SamplingSettings."""
        names = set(Penalties.model_fields)
        return self.model_dump(include=names) | {"logit_bias": tuple(self.logit_bias.items())}


class PromptForm(JsonForm):
    """Chunks of a prompt as JSON; `read_prompt` of serve.protocol reads them."""

    chunks: Annotated[list[dict[str, Any]], FailFast()]


class SampleForm(JsonForm):
    """Body of asample."""

    sampling_session_id: Id
    seq_id: FromZero
    prompt: PromptForm
    num_samples: Annotated[int, Field(ge=1)] = 1
    sampling_params: SamplingParams = SamplingParams()
    base_model: None = None
    model_path: None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0)] = 0
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0, le=0)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    record_stability_info: bool | None = None
    stream_tokens: bool = False  # the service's own: tell of tokens while they are drawn
    # The service's own, from its routes of chats: what answers are held to, as in SamplingSettings,
    # and what changes the distribution.
    grammar: tuple[str, str] | None = None
    penalties: Penalties = Penalties()

    @field_validator("record_stability_info")
    @classmethod
    def _no_record(cls, value: bool | None) -> bool | None:
        """Refuse the field before anything is sampled for a loss that will be refused."""
        if value:
            raise ValueError(
                "the loss stable_reinforce, which asks for it, is not supported; use another one, "
                "such as loss_fn=importance_sampling"
            )
        return value


def check_top_k(form: SampleForm, tokens: int) -> None:
    """Refuse to list more of the most likely tokens than the model has."""
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if (count := getattr(form, name)) > tokens:
            raise RequestError(
                f"exceeds the {tokens} tokens of the model",
                key=name,
                found=count,
                allowed=range(tokens + 1),
            )
