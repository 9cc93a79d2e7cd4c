"""What goes into the journal and comes out of it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from megatron_vlm.errors import DataError

# What a call can ask for. `load_model` makes a model from a checkpoint; `load_weights` puts one
# into a model that is there.
CREATION = ("create_model", "load_model")
TRAINING = (
    "forward_backward",
    "optim_step",
    "load_weights",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
)
SAMPLE = "asample"
UNLOAD = "unload_model"
KINDS = (*CREATION, *TRAINING, SAMPLE, UNLOAD)

Category = Literal["user", "server"]
CheckpointKind = Literal["training", "sampler", "external"]
SEGMENTS: Mapping[str, str] = {
    "training": "weights",
    "sampler": "sampler_weights",
    "external": "external_weights",
}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class Outcome:
    """The answer to a call, as it goes over the wire."""

    content: bytes
    content_type: Literal["json", "protobuf"] = "json"


@dataclass(frozen=True)
class Failure:
    """Why a call was not done. `user`: the request is at fault; `server`: we are."""

    text: str
    category: Category = "server"


@dataclass(frozen=True)
class NewModel:
    """The model that a creation call makes. `source` is the folder that it is loaded from."""

    id: str
    session: str
    base_model: str
    lora_rank: int
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    source: Path | None = None


@dataclass(frozen=True)
class NewCall:
    """A request on its way into the journal.

    `owner` is the model, the sampling session, or for creation calls the session; (owner, seq) is
    what a retry has in common with its original. `failure` is set where the request is refused at
    once: it still takes its place in the order, since the calls after it would wait for ever.
    """

    kind: str
    owner: str
    seq: int
    key: str
    body: bytes
    changes_state: bool = False
    failure: Failure | None = None
    model: NewModel | None = None


@dataclass(frozen=True)
class Accepted:
    """A promise. `new` is False for a retry: the promise is the first one's."""

    request_id: str
    new: bool = True


@dataclass(frozen=True)
class QuotaExceeded:
    """Nothing was promised: there is no room, until others are done where it is `passing`."""

    text: str
    passing: bool = True


@dataclass(frozen=True)
class Conflict:
    """Nothing was promised: another call has this number."""

    text: str


Promise: TypeAlias = Accepted | QuotaExceeded | Conflict


@dataclass(frozen=True)
class Call:
    """A call that was accepted. Its body is read by itself: `journal.body(request_id)`."""

    request_id: str
    number: int  # the order in which calls were accepted
    kind: str
    owner: str
    seq: int
    key: str
    seed: int  # drawn when it was accepted, so that a sample without a seed is the same again
    attempts: int  # how often it was begun before; above 0, the process died in between
    accepted: float
    size: int
    changes_state: bool


@dataclass(frozen=True)
class ModelChange:
    """What is set in a model's row; None leaves a field as it is.

    `facts` is anything that the engine wants to find again; `figures` is what pages show.
    """

    id: str
    state: Literal["ready", "failed", "unloaded"] | None = None
    base_model: str | None = None
    lora_rank: int | None = None
    facts: Mapping[str, Any] | None = None
    figures: Mapping[str, float] | None = None


@dataclass(frozen=True)
class NewCheckpoint:
    """A checkpoint that is complete on the disk. It takes the place of one with the same name;
    `expires` is a time of `time.time()`."""

    model: str
    kind: CheckpointKind
    name: str
    folder: Path
    size: int
    expires: float | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NewSampler:
    """A sampling session of a model's weights as they are now. `folder` has them, if anything."""

    id: str
    session: str
    model: str | None
    base_model: str
    folder: Path | None = None
    path: str | None = None  # of the checkpoint, where it samples from one
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Saved:
    """The model's state after its call `seq` is in this folder, with the optimizer's."""

    model: str
    seq: int
    folder: Path


@dataclass(frozen=True)
class Changes:
    """What a call changes beside its own result, in the same transaction."""

    models: tuple[ModelChange, ...] = ()
    checkpoints: tuple[NewCheckpoint, ...] = ()
    samplers: tuple[NewSampler, ...] = ()
    saved: tuple[Saved, ...] = ()


@dataclass(frozen=True)
class Finished:
    """A call and what became of it, where several are finished in one transaction."""

    request_id: str
    outcome: Outcome | Failure
    changes: Changes = Changes()


@dataclass(frozen=True)
class CompletedCall:
    """A promise that was just kept, and the seconds it took."""

    request_id: str
    kind: str
    succeeded: bool
    seconds: float


@dataclass(frozen=True)
class Result:
    """What is known of a promise: `outcome` is None while it is waiting, and `dropped` where it
    was there but is no longer kept."""

    key: str
    kind: str
    outcome: Outcome | Failure | None
    dropped: bool


@dataclass(frozen=True)
class Session:
    """A client that announced itself."""

    id: str
    key: str
    created: float
    heard: float
    finished: float | None
    user_metadata: Mapping[str, Any]
    display_name: str | None


@dataclass(frozen=True)
class Model:
    """A model. What it was made from is `creation`, the body of its creation call, of the kind
    `creation_kind`; `source` is the folder of the checkpoint that `load_model` starts from.
    Its durable state is in `folder` (None: as it was created) and holds the calls up to `saved`."""

    id: str
    session: str
    key: str
    created: float
    used: float
    state: Literal["creating", "ready", "failed", "unloaded"]
    base_model: str
    lora_rank: int
    user_metadata: Mapping[str, Any]
    facts: Mapping[str, Any]
    figures: Mapping[str, float]
    creation_kind: str
    creation: bytes
    seed: int
    source: Path | None
    next_seq: int
    saved: int
    folder: Path | None


@dataclass(frozen=True)
class SamplingSession:
    """A sampling session: of a checkpoint (`path`), of a model's weights as they were, or of the
    base model (`folder` and `model` are None)."""

    id: str
    session: str
    key: str
    created: float
    used: float
    base_model: str
    model: str | None
    path: str | None
    folder: Path | None
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class NamedCheckpoint:
    """A checkpoint that clients know by its path."""

    path: str
    model: str
    key: str
    kind: CheckpointKind
    name: str
    folder: Path
    size: int
    created: float
    expires: float | None
    user_metadata: Mapping[str, str]
    facts: Mapping[str, Any]

    @property
    def id(self) -> str:
        """Its id within the run: weights/NAME."""
        return f"{SEGMENTS[self.kind]}/{self.name}"


def tinker_path(model: str, kind: CheckpointKind, name: str) -> str:
    """The path by which clients know a checkpoint."""
    return f"tinker://{model}/{SEGMENTS[kind]}/{checked_name(name)}"


def checked_name(name: str) -> str:
    """A name that is one part of a path, here and in a tinker path."""
    if not _NAME.fullmatch(name):
        raise DataError(
            key="path",
            found=name,
            allowed="1 to 128 letters, digits, '.', '_' or '-', not beginning with '.' or '-'",
        )
    return name
