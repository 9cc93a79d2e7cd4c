"""Remarks on opened data that a person should read before training starts."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.batches.dataset import DataSet, StreamSet
from megatron_vlm.data.tokens.boxes_as_text import box_of_parts
from megatron_vlm.errors import DataError

_MAX_KEYS = 100
_MAX_SURVEYED = 200  # records that are read again
_CUT = ("nothing left to learn after the cut", "above data.max_tokens or data.max_images")


@dataclass(frozen=True)
class Remarks:
    """Remarks on one entry of data.train or data.eval. Nothing is known yet about a stream."""

    lines: tuple[str, ...] = ()
    dropped: int = 0  # records that a rule left out
    wrong: int = 0  # records left out, as data.max_errors allows
    truncated: int = 0  # records that were truncated

    @staticmethod
    def from_data(data: DataSet | StreamSet, key: str, cfg: DataConfig) -> "Remarks":
        if isinstance(data, StreamSet):
            return Remarks()
        dropped, errors = data.faults()
        return Remarks(tuple(_lines(data, key, cfg)), dropped.total(), len(errors), data.truncated)


def _lines(data: DataSet, key: str, cfg: DataConfig) -> Iterator[str]:
    dropped, errors = data.faults()
    records = f"of {sum(map(len, data.sources)):,} records"
    for rule, count in dropped.items():
        advice = f"; {_advice(data, cfg)}" if rule in _CUT else ""
        yield f"{key}: {count:,} {records} dropped: {rule}{advice}"
    if data.truncated:
        yield f"{key}: {data.truncated:,} {records} cut to the limits; {_advice(data, cfg)}"
    if errors:
        yield f"{key}: {len(errors):,} {records} wrong and skipped, the first: {errors[0]}"
    yield from unused_key_warnings(key, data, cfg)
    yield from thinking_remarks(key, data)
    yield from box_remarks(key, data)


def box_remarks(key: str, data: DataSet) -> Iterator[str]:
    """Yield a remark on boxes whose coordinates are not those that models read and write."""
    boxes: list[str | None] = []
    for source, reader in zip(data.sources, data.readers, strict=True):
        for number in range(min(len(source), max(1, _MAX_SURVEYED // len(data.sources)))):
            with suppress(DataError):  # data.max_errors allows wrong records
                chats = reader.chats(source[number], source.where(number))
                boxes.append(next(filter(None, (box_of_parts(chat) for chat, _ in chats)), None))
    if found := [box for box in boxes if box]:
        yield (
            f"{key}: {len(found):,} of the first {len(boxes):,} records have boxes of 0 to 1 in "
            f"their texts, such as {found[0]}: the model learns this text as it is, and the boxes "
            "that it knows count thousandths, 0 to 1000; multiply them by 1000, or give them as "
            "objects with bbox_type: norm1"
        )


def thinking_remarks(key: str, data: DataSet) -> Iterator[str]:
    """Yield a remark on answers that begin in another way than the template's prompts ask for."""
    count = sum(index.faults.contrary for index in data.indexes)
    opening = data.readers[0].encoder.renderer.opening if count else None
    if opening is None:
        return
    block = f"an empty {data.readers[0].encoder.renderer.chat_format.thoughts.start} block"
    records = f"{key}: {count:,} of {sum(map(len, data.sources)):,} records"
    if opening.is_open:
        yield (
            f"{records} have answers without reasoning, and the chat template thinks by default: "
            f"the model learns {block} before them, and so to think less; "
            "data.template_kwargs={enable_thinking: false} puts the block into the prompt, where "
            "it is not trained"
        )
    else:
        yield (
            f"{records} have reasoning, and the chat template does not think by default: its "
            f"prompts have {block}, so that the model is not asked for what it "
            "learns; data.template_kwargs={enable_thinking: true} asks for it"
        )


def unused_key_warnings(key: str, data: DataSet, cfg: DataConfig) -> Iterator[str]:
    """Yield a warning that names the unused keys of records, if data.unknown_keys is warn."""
    counts = sum((Counter(index.faults.unused_keys) for index in data.indexes), Counter[str]())
    if not counts or cfg.unknown_keys != "warn":
        return
    names = [f"{name[:80]!r} ({count:,})" for name, count in counts.items()]
    num_hidden = len(names) - _MAX_KEYS
    listing = ", ".join(names[:_MAX_KEYS]) + (f" and {num_hidden:,} more" if num_hidden > 0 else "")
    yield (
        f"{key}: the model does not see these keys of records, whose meaning is not known here: "
        f"{listing}; data.unknown_keys=refuse makes them errors, ignore says nothing of them"
    )


def _advice(data: DataSet, cfg: DataConfig) -> str:
    images = data.readers[0].encoder.images
    image_tokens, target = images.most_tokens, cfg.max_tokens // 4
    remedy = "a higher data.max_tokens keeps more of them"
    if image_tokens <= target:
        return remedy
    return (
        f"a picture may take {image_tokens:,} of data.max_tokens={cfg.max_tokens:,}: "
        f"{images.limit_of(target)} makes that {target:,}, and {remedy}"
    )
