"""Records that go into the journal and come out of it, and the names of what they describe."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from megatron_vlm.errors import DataError

# The kinds of calls. `load_model` makes a model from a checkpoint; `load_weights` loads one into an
# existing model.
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

CheckpointKind = Literal["training", "sampler", "external"]
SEGMENTS: Mapping[str, str] = {
    "training": "weights",
    "sampler": "sampler_weights",
    "external": "external_weights",
}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class Outcome:
    """The result of a call, as it is sent to the client."""

    content: bytes
    content_type: Literal["json", "protobuf"] = "json"


@dataclass(frozen=True)
class Failure:
    """The reason why a call was not done, and whose fault it is."""

    text: str
    category: Literal["user", "server"] = "server"


@dataclass(frozen=True)
class Model:
    """A model. The call that creates it gives the fields up to `source`, the journal the others."""

    id: str
    session: str
    base_model: str
    lora_rank: int
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    source: Path | None = None  # folder of the checkpoint that it is loaded from
    key: str = ""
    created: float = 0.0
    used: float = 0.0
    state: Literal["creating", "ready", "failed", "unloaded"] = "creating"
    facts: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    next_seq: int = 1
    saved: int = 0  # last call that the durable state in `folder` includes
    folder: Path | None = None  # None for the state at creation


@dataclass(frozen=True)
class Call:
    """A call. Its request gives the fields up to `model`, and the journal the others. A retry has
    the same (owner, seq) as its original."""

    kind: str
    owner: str  # the model, the sampling session or, for creation calls, the session
    seq: int
    key: str
    body: bytes = b""  # may be large: a call from the journal has none, and `journal.body` reads it
    changes_state: bool = False
    # The reason why the request is refused at once. Such a call still takes its place in the order,
    # since the calls after it would wait for ever.
    failure: Failure | None = None
    model: Model | None = None
    parsed: Any = None  # the body as the front has parsed it; not on the disk
    request_id: str = ""
    number: int = 0  # the order in which calls were accepted
    seed: int = 0  # drawn at acceptance, so that a sample without a seed is the same when repeated
    attempts: int = 0  # number of earlier starts; above 0, the process died in between
    accepted: float = 0.0
    size: int = 0


@dataclass(frozen=True)
class Accepted:
    """An accepted call. A retry has `new` False and the request id of its original."""

    request_id: str
    new: bool = True


@dataclass(frozen=True)
class QuotaExceeded:
    """A call that was not accepted because there is no room."""

    text: str
    passing: bool = True  # there will be room when other calls are done


@dataclass(frozen=True)
class Conflict:
    """A call that was not accepted because another call has its number."""

    text: str


Promise: TypeAlias = Accepted | QuotaExceeded | Conflict


@dataclass(frozen=True)
class ModelChange:
    """Changes to the row of a model; None leaves a field as it is."""

    id: str
    state: Literal["ready", "failed", "unloaded"] | None = None
    facts: Mapping[str, Any] | None = None  # anything that is needed again later
    figures: Mapping[str, float] | None = None  # numbers that pages show


@dataclass(frozen=True)
class NamedCheckpoint:
    """A checkpoint that is complete on the disk, and that clients know by its path. It replaces one
    with the same name. The journal adds `key` and `created`."""

    model: str
    kind: CheckpointKind
    name: str
    folder: Path
    size: int
    expires: float | None = None  # a time of `time.time()`
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""
    created: float = 0.0

    @property
    def path(self) -> str:
        return tinker_path(self.model, self.kind, self.name)

    @property
    def id(self) -> str:
        """The id within the run: weights/NAME."""
        return f"{SEGMENTS[self.kind]}/{self.name}"


@dataclass(frozen=True)
class SamplingSession:
    """A sampling session on a checkpoint (`path`), on a model's weights at some time, or on the
    base model (`folder` and `model` are None). The journal adds the last three fields."""

    id: str
    session: str
    model: str | None
    base_model: str
    folder: Path | None = None
    path: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""
    created: float = 0.0
    used: float = 0.0


@dataclass(frozen=True)
class Saved:
    """A folder with the state of a model and its optimizer after its call `seq`."""

    model: str
    seq: int
    folder: Path


@dataclass(frozen=True)
class Changes:
    """Changes that a call makes in addition to its own result, in the same transaction."""

    models: tuple[ModelChange, ...] = ()
    checkpoints: tuple[NamedCheckpoint, ...] = ()
    samplers: tuple[SamplingSession, ...] = ()
    saved: tuple[Saved, ...] = ()


Done: TypeAlias = tuple[Outcome, Changes]


@dataclass(frozen=True)
class Finished:
    """A call and its outcome, for finishing several calls in one transaction."""

    request_id: str
    outcome: Outcome | Failure
    changes: Changes = Changes()


@dataclass(frozen=True)
class CompletedCall:
    """A call that was just completed, and the seconds that it took."""

    request_id: str
    kind: str
    succeeded: bool
    seconds: float


@dataclass(frozen=True)
class Result:
    """The state of a promise."""

    key: str
    kind: str
    outcome: Outcome | Failure | None  # None while the call waits
    dropped: bool  # the result is no longer kept


@dataclass(frozen=True)
class Session:
    """A session that a client created."""

    id: str
    key: str
    created: float
    heard: float
    finished: float | None
    reason: str | None
    user_metadata: Mapping[str, Any]
    display_name: str | None


@dataclass(frozen=True)
class Event:
    """An entry of the audit log."""

    time: float
    key: str
    event: str
    details: Mapping[str, Any]


def model_id(session: str, seq: int) -> str:
    """Return the id of a session's model. The client computes the same id by itself."""
    return f"{session}:train:{seq}"


def sampler_id(session: str, seq: int) -> str:
    """Return the id of a session's sampling session."""
    return f"{session}:sample:{seq}"


def tinker_path(model: str, kind: CheckpointKind, name: str) -> str:
    """Return the path by which clients know a checkpoint."""
    return f"tinker://{model}/{SEGMENTS[kind]}/{checked_name(name)}"


def plain_name(path: str) -> str:
    """Return a second name of a model, for clients that divide names at / and :."""
    return re.sub("[/:]", ".", path.removeprefix("tinker://")).strip(".")


def path_of(name: str) -> str:
    """Return the path of a checkpoint by its second name, and any other name as it is."""
    found = re.fullmatch(r"([^./:]+)\.train\.(\d+)\.(\w+)\.([^/:]+)", name)
    return "tinker://{}:train:{}/{}/{}".format(*found.groups()) if found else name


def checked_name(name: str) -> str:
    """Return the name if it can be one part of a path, and raise DataError otherwise."""
    if not _NAME.fullmatch(name):
        raise DataError(
            key="path",
            found=name,
            allowed="1 to 128 letters, digits, '.', '_' or '-', not beginning with '.' or '-'",
        )
    return name
