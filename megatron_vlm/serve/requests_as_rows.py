"""Conversion of clients' requests into rows of the model: chunks of text and pictures, and the
inputs of a loss. LOSSES has the loss names of the client protocol, and the losses of this package
that compute them, with the defaults of the public service. Each is a sum over the targets.

Shapes: S tokens of a row, J targets of a place, P patches, C values of a patch."""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.config.schema import Config
from megatron_vlm.data.media.media import MediaPolicy, image_size, read_image
from megatron_vlm.data.records.record import Image
from megatron_vlm.data.tokens.row import IGNORE, Row, check_ids, place_row, prompt_row
from megatron_vlm.errors import MegatronVLMError, show_choices
from megatron_vlm.family import read_family
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.serve.protocol.payloads import (
    Chunk,
    Datum,
    ForwardBackward,
    Picture,
    RequestError,
    Text,
    entry,
)
from megatron_vlm.training.losses import SEQUENCES, Objective
from megatron_vlm.training.worker import StepMetrics

# {input name in the protocol: its name in the losses of this package}
_SAMPLED = {"logprobs": "old_log_probs", "advantages": "advantages"}
CROSS_ENTROPY = "weighted_cross_entropy"


@dataclass(frozen=True)
class LossMapping:
    """Loss of the client protocol."""

    loss: str
    inputs: Mapping[str, str]
    clips: tuple[float, float] | None = None  # default thresholds of the ratio, if the loss clips
    options: Mapping[str, float] = field(default_factory=dict)


FORMS = {
    "cross_entropy": LossMapping(CROSS_ENTROPY, {"weights": "weights"}),
    "importance_sampling": LossMapping("importance_sampling", _SAMPLED),
    "ppo": LossMapping("ppo", _SAMPLED, clips=(0.8, 1.2)),
    "cispo": LossMapping("cispo", _SAMPLED, clips=(0.0, 4.0)),
    "dro": LossMapping("dro", _SAMPLED, options={"beta": 0.05}),
    "gspo": LossMapping(
        "gspo_token", _SAMPLED | {"sequence_ratio_mask": "sequence_mask"}, clips=(0.8, 1.2)
    ),
}
OPTIONAL = {"weights": 1.0}  # inputs that may be missing, and their defaults
_LARGEST = float(np.finfo(np.float32).max)
_CONFIG = "loss_fn_config"
_LOW, _HIGH = "clip_low_threshold", "clip_high_threshold"


def form_of(name: str) -> LossMapping:
    """Return the loss of this name. Raise RequestError if there is none."""
    if name not in FORMS:
        raise RequestError(
            "is not supported",
            key="loss_fn",
            found=name,
            allowed=tuple(FORMS),
            remedy=f"give {show_choices(tuple(FORMS))}, or compute a loss of your own in the "
            "client (forward_backward_custom)",
        )
    return FORMS[name]


def options_of(name: str, loss_config: Mapping[str, float | str]) -> dict[str, float]:
    """Return the options of this package's loss for the options that the client has set."""
    form = form_of(name)
    options = dict(form.options)
    if form.clips is not None:
        options |= {_LOW: form.clips[0], _HIGH: form.clips[1]}
    for key, value in loss_config.items():
        key_name = entry(_CONFIG, key)
        if key not in options:
            raise RequestError(
                f"is not an option of {name}" + ("" if options else ", which has none"),
                key=key_name,
                allowed=tuple(options) or None,
                remedy="" if options else "leave it out",
            )
        if isinstance(value, str):
            raise RequestError("is text", key=key_name, found=value, allowed="a number")
        if not math.isfinite(value) and key != _HIGH:
            raise RequestError(key=key_name, found=value, allowed="a finite number")
        options[key] = value
    if form.clips is None:
        return options
    # No ratio exceeds the largest fp32 number, so this bound clips nothing.
    low, high = options.pop(_LOW), min(options.pop(_HIGH), _LARGEST)
    for key, value, fits, allowed in (
        (_LOW, low, 0 <= low < 1, "a number from 0 to below 1"),
        (_HIGH, high, high > 1, "a number above 1"),
    ):
        if not fits:
            raise RequestError(
                f": the ratio is clipped from {low} to {high}",
                key=entry(_CONFIG, key),
                found=value,
                allowed=allowed,
            )
    return options | {"clip_low": 1 - low, "clip_high": high - 1}


MAX_REQUEST_PIXELS = 2**30  # maximum pixels in the pictures of a request


class NoRoomError(MegatronVLMError):
    """Refusal to decode the pictures of a request now, for lack of memory."""


class RowReader:
    """Reader of requests for one model. Pictures are used as they are sent: never rotated, and
    resized as the checkpoint's image processor does. The headers of all pictures of a request are
    checked for pixels and tokens before the first one is decoded."""

    def __init__(
        self, cfg: Config, folder: str, sizes: ModelSizes, most_pixels: int = MAX_REQUEST_PIXELS
    ):
        self.images = read_family(folder).images(folder, vars(cfg.data))
        most = self.images.max_aspect
        self.policy = MediaPolicy(None, exif_orientation=False, max_aspect=most)
        self.tokens, self.longest = sizes.tokens, sizes.text.max_positions
        self.most_pixels = most_pixels
        self.room: Callable[[int], None] | None = None
        self.shared: dict[bytes, Row] | None = None  # pictures by their digests

    def for_request(self, room: Callable[[int], None]) -> "RowReader":
        """Return a copy for one request, which calls `room` with its pixels; that may raise."""
        reader = copy(self)
        reader.room = room
        return reader

    def for_episodes(self) -> "RowReader":
        """Return a copy for the requests of a group of episodes, which share each picture."""
        reader = copy(self)
        reader.shared = {}
        return reader

    def prompt(self, chunks: Sequence[Chunk], where: str) -> Row:
        """Return the concatenated chunks as a row without labels."""
        self.admit([(chunks, where)])
        return self._row(chunks, where)

    def admit(self, prompts: Iterable[tuple[Sequence[Chunk], str]]) -> None:
        """Check the tokens and picture headers of the prompts of a request, each with its name."""
        pixels = 0
        for chunks, where in prompts:
            pixels += self._count_pixels(chunks, where)
            if pixels > self.most_pixels:
                raise RequestError(
                    f": with its pictures the request has {pixels} pixels, and limit pixels is "
                    f"{self.most_pixels}",
                    key=where,
                    remedy="send fewer or smaller ones in a request",
                )
        if self.room is not None:
            self.room(pixels)

    def _count_pixels(self, chunks: Sequence[Chunk], where: str) -> int:
        """Check a prompt, and return its pixels."""
        tokens = pixels = 0
        for number, chunk in enumerate(chunks):
            at = f"{where}.chunks[{number}]"
            if isinstance(chunk, Text):
                check_ids(chunk.tokens, self.tokens, at)
                tokens += len(chunk.tokens)
                continue
            height, width = self._size(chunk, at)
            count = self.images.num_tokens(self.images.grid(height, width))
            if chunk.expected_tokens not in (None, count):
                raise RequestError(  # the wording that clients know
                    f": Expected {chunk.expected_tokens} tokens, got {count} from image",
                    key=at,
                    remedy="count them with the image processor of the checkpoint, on the picture "
                    "as it is sent",
                )
            tokens += count
            pixels += max(height * width, math.prod(self.images.resized_size(height, width)))
        if tokens > self.longest:
            raise RequestError(
                f"has {tokens} tokens with those of its pictures, and the model takes "
                f"{self.longest}",
                key=where,
                remedy="shorten it",
            )
        return pixels

    def _row(self, chunks: Sequence[Chunk], where: str) -> Row:
        rows = [self._chunk(each, f"{where}.chunks[{at}]") for at, each in enumerate(chunks)]
        row = prompt_row(np.concatenate([each.ids_S.numpy() for each in rows]), rows)
        # Parts that no other row has would only take memory.
        return replace(row, joined=()) if self.shared is None else row

    def _chunk(self, chunk: Chunk, where: str) -> Row:
        if isinstance(chunk, Text):
            return prompt_row(chunk.tokens)
        digest = hashlib.sha256(chunk.data).digest()
        if self.shared is not None and digest in self.shared:
            return self.shared[digest]
        opened = read_image(Image(chunk.data), self.policy, where)
        grid = self.images.grid(opened.height, opened.width)
        row = replace(
            prompt_row(np.full(self.images.num_tokens(grid), self.tokens.image_id)),
            pixel_values_PC=torch.from_numpy(self.images.patches(opened)),
            image_grid_I3=torch.tensor([grid]),
        )
        return row if self.shared is None else self.shared.setdefault(digest, row)

    def _size(self, picture: Picture, where: str) -> tuple[int, int]:
        if picture.size is not None:
            raise RequestError(
                "is not supported",
                key=f"{where}.override_dimensions",
                found=list(picture.size),
                remedy="resize the picture before it is sent",
            )
        return image_size(Image(picture.data), self.policy, where)

    def datum(self, datum: Datum, number: int, form: LossMapping) -> Row:
        """Return the row of an admitted datum, with its targets [S, J] and the values that the loss
        reads. `number` is the datum's place in the request."""
        where = f"data[{number}]"
        row = self._row(datum.chunks, f"{where}.model_input")
        length = len(row.ids_S)
        targets_SJ = _per_place(datum.inputs["target_tokens"], "target_tokens", length, where)
        values: dict[str, Tensor] = {}
        for client_name, our_name in form.inputs.items():
            if client_name in datum.inputs:
                client_values = datum.inputs[client_name]
            elif client_name in OPTIONAL:
                client_values = np.full(datum.inputs["target_tokens"].shape, OPTIONAL[client_name])
            else:
                raise RequestError(
                    "is missing",
                    key=entry(f"{where}.loss_fn_inputs", client_name),
                    remedy=f"give all that the loss reads: {_read_by(form)}",
                )
            values[our_name] = _per_place(client_values, client_name, length, where).float()
        _check_inputs(datum.inputs, form, where)
        row = replace(row, targets=targets_SJ, values_S=values)
        place_row(row, self.tokens, where, tuple(values))  # checks the row; errors name the datum
        return row


def _per_place(values: np.ndarray, name: str, length: int, where: str) -> Tensor:
    """Return an input of shape [S] or [S, J] as a tensor [S, J]."""
    if len(values) != length:
        raise RequestError(
            f"has {len(values)} entries, and model_input has {length} tokens",
            key=entry(f"{where}.loss_fn_inputs", name),
            allowed="one for each, also for those of pictures",
        )
    return torch.from_numpy(values.reshape(length, -1))


def _check_inputs(inputs: Mapping[str, np.ndarray], form: LossMapping, where: str) -> None:
    """Refuse inputs that this loss does not read, because the client expects them to count."""
    for name in inputs:
        if name not in ("target_tokens", *form.inputs):
            raise RequestError(
                f"is not read by this loss, which reads {_read_by(form)}",
                key=entry(f"{where}.loss_fn_inputs", name),
                remedy="leave it out",
            )


def _read_by(form: LossMapping) -> str:
    return ", ".join(("target_tokens", *form.inputs))


@dataclass(frozen=True)
class Batch:
    """Parsed forward_backward: its rows, longest first and dealt to the replicas."""

    rows: list[Row]
    order: list[int]  # number of the datum of each row
    shapes: list[tuple[int, ...]]  # shape of the targets of each datum
    loss: str
    options: dict[str, float]
    forward_only: bool

    @property
    def tokens(self) -> int:
        return sum(len(row.ids_S) for row in self.rows)

    def in_datum_order(self, log_probs: Sequence[Tensor]) -> list[np.ndarray]:
        """Return the log-probs of the rows by datum, in the shapes of their targets."""
        by_datum: list[np.ndarray] = [np.empty(0)] * len(self.order)
        for place, row_log_probs in zip(self.order, log_probs, strict=True):
            by_datum[place] = row_log_probs.float().reshape(self.shapes[place]).numpy()
        return by_datum


def read_batch(request: ForwardBackward, reader: RowReader, replicas: int) -> Batch:
    """Convert a forward_backward request into rows."""
    form = form_of(request.loss)
    options = options_of(request.loss, request.options)
    reader.admit(
        (datum.chunks, f"data[{place}].model_input") for place, datum in enumerate(request.data)
    )
    rows = [reader.datum(datum, place, form) for place, datum in enumerate(request.data)]
    # Rows of about the same length share a micro-batch, and replicas have about the same work.
    by_length = sorted(range(len(rows)), key=lambda place: -len(rows[place].ids_S))
    order = [place for first in range(replicas) for place in by_length[first::replicas]]
    shapes = [datum.inputs["target_tokens"].shape for datum in request.data]
    ordered = [rows[place] for place in order]
    return Batch(ordered, order, shapes, form.loss, options, request.forward_only)


def figures_of(done: StepMetrics) -> dict[str, float]:
    """Return the metrics of a backward pass under the names of the client protocol."""
    means = {f"{name}:mean": value for name, value in done.means.items()}
    return {"loss:sum": done.loss, **means}


def metrics_of(batch: Batch, log_probs: Sequence[Tensor]) -> dict[str, float]:
    """Compute the metrics of a forward pass from its log-probs, as a backward pass reports them."""
    objective = Objective.create(batch.loss, batch.options)
    masks = [row.targets != IGNORE for row in batch.rows if row.targets is not None]

    def of_targets(per_row: Iterable[Tensor]) -> Tensor:
        return torch.cat([each_SJ[mask] for each_SJ, mask in zip(per_row, masks, strict=True)])

    values = {
        name: of_targets(row.values_S[name] for row in batch.rows) for name in objective.value_names
    }
    values[SEQUENCES] = of_targets(
        torch.full(mask.shape, number) for number, mask in enumerate(masks)
    )
    loss_M, report = objective.of_tokens(of_targets(log_probs), None, values)
    means = {f"{name}:mean": float(each.double().mean()) for name, each in report.items()}
    return {"loss:sum": float(loss_M.double().sum()), **means}
