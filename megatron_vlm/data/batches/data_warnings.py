"""What a person should know of data that were opened, before anything is learnt from them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.batches.dataset import DataSet
from megatron_vlm.data.batches.stream_set import StreamSet

_MOST_KEYS = 100
_CUT = ("nothing left to learn after the cut", "above data.max_tokens or data.max_images")


@dataclass(frozen=True)
class Remarks:
    """Of one entry of data.train or data.eval; of a stream nothing is known yet."""

    lines: tuple[str, ...] = ()
    dropped: int = 0  # records that a rule left out
    wrong: int = 0  # records that data.on_error=skip left out

    @staticmethod
    def of(data: DataSet | StreamSet, key: str, cfg: DataConfig) -> "Remarks":
        if isinstance(data, StreamSet):
            return Remarks()
        dropped, errors = data.faults()
        return Remarks(tuple(_lines(data, key, cfg)), dropped.total(), len(errors))


def _lines(data: DataSet, key: str, cfg: DataConfig) -> Iterator[str]:
    dropped, errors = data.faults()
    records = f"of {sum(map(len, data.sources)):,} records"
    for rule, count in dropped.items():
        advice = f"; {_advice(data, cfg)}" if rule in _CUT else ""
        yield f"{key}: {count:,} {records} dropped: {rule}{advice}"
    if errors:
        yield f"{key}: {len(errors):,} {records} wrong and skipped, the first: {errors[0]}"
    yield from passed_over(key, data, cfg)


def passed_over(key: str, data: DataSet, cfg: DataConfig) -> Iterator[str]:
    """Which keys of records nothing is made of, if there are any, and that is to be said."""
    passed = sum((Counter(index.faults.passed) for index in data.indexes), Counter[str]())
    if not passed or cfg.unknown_keys != "warn":
        return
    names = [f"{name[:80]!r} ({count:,})" for name, count in passed.items()]
    more = len(names) - _MOST_KEYS
    shown = ", ".join(names[:_MOST_KEYS]) + (f" and {more:,} more" if more > 0 else "")
    yield (
        f"{key}: the model does not see these keys of records, whose meaning is not known here: "
        f"{shown}; data.unknown_keys=refuse makes them errors, ignore says nothing of them"
    )


def _advice(data: DataSet, cfg: DataConfig) -> str:
    images = data.readers[0].encoder.images
    of_a_token = (images.patch_size * images.merge_size) ** 2
    most, wanted = images.max_pixels // of_a_token, cfg.max_tokens // 4
    raised = "a higher data.max_tokens keeps more of them"
    if most <= wanted:
        return raised
    return (
        f"a picture may take {most:,} of data.max_tokens={cfg.max_tokens:,}: "
        f"data.max_pixels={wanted * of_a_token} makes that {wanted:,}, and {raised}"
    )
