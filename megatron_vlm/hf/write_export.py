"""Writing of an export: a copy of the source checkpoint with new values, in files that do not
depend on the layout that trained them. Tensors keep the source's dtypes, and so does the field
dtype of config.json: `copy_files` copies that file, and `untie` and others change other fields."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.errors import CheckpointError
from megatron_vlm.hf.checkpoint_files import copy_files, remove_quantization, set_score_class, untie
from megatron_vlm.hf.export_mark import ExportMark, check_replaceable, finish_mark, is_replaceable
from megatron_vlm.hf.gather_weights import write_gathered
from megatron_vlm.hf.hf_checkpoint import FLOATS, INDEX, WEIGHTS_FILE, HFCheckpoint
from megatron_vlm.hf.model_card import CARD, TrainingSummary, model_card
from megatron_vlm.hf.retrieval_files import write_retrieval_files
from megatron_vlm.hf.weight_map import Entry, exported_names
from megatron_vlm.io.atomic import MARK, asides_of, begin, discard, put_in_place, sync

_MAX_SHARD_BYTES = 5 * 10**9
ChangeFolder = Callable[[HFCheckpoint, Path], None]  # gives a written folder another form


def export_hf(
    held: Mapping[Entry, nn.Parameter],
    source: HFCheckpoint,
    table: Sequence[Entry],
    grid: RankGroups,
    out: str | Path,
    max_shard_bytes: int = _MAX_SHARD_BYTES,
    mark: ExportMark | None = None,
    done: TrainingSummary | None = None,
) -> None:
    """Write the model as a Hugging Face folder, see `write_folder`. This is a collective."""

    def write(named: Iterator[tuple[str, Tensor | None]]) -> None:
        write_folder(source, exported_names(table), named, out, max_shard_bytes, mark, done)

    write_gathered(held, table, grid, write)


def write_folder(
    source: HFCheckpoint,
    names: Sequence[str],
    named: Iterable[tuple[str, Tensor | None]],
    out: str | Path,
    max_shard_bytes: int = _MAX_SHARD_BYTES,
    mark: ExportMark | None = None,
    done: TrainingSummary | None = None,
    change: ChangeFolder | None = None,
) -> None:
    """Write a Hugging Face checkpoint folder of the tensors with these names: shards and index,
    unchanged copies of the source's other files (config, tokenizer, image processor, chat
    template), and a model card that describes what was `done`. Tensors keep their dtype, and those
    that are passed through also their values, unless `change` changes the folder. See
    `new_export`."""
    with new_export(out, mark) as partial:
        writer = _ShardWriter(source, names, partial, max_shard_bytes)
        for name, tensor in named:
            assert tensor is not None
            check_finite(name, tensor, out)
            for stored_name, value in source.as_stored(name, tensor):
                dtype = FLOATS[source.tensors[stored_name].dtype]
                writer.add(stored_name, value.to(dtype, copy=True).contiguous())
        for name, tensor in source.read_passthrough():
            writer.add(name, tensor)
        writer.finish()
        if done is not None:
            write_retrieval_files(partial, done.cfg, source.sizes.text.hidden)
        (partial / CARD).write_text(model_card(source, done), encoding="utf-8")
        if change is not None:
            change(source, partial)


def check_finite(name: str, tensor: Tensor, out: str | Path) -> None:
    """Refuse to export a model that is unusable."""
    if not torch.isfinite(tensor).all():
        raise CheckpointError(
            "has values that are NaN or infinite, so nothing is written",
            place=str(out),
            key=name,
            remedy="export an earlier checkpoint",
        )


@contextmanager
def new_export(out: str | Path, mark: ExportMark | None) -> Iterator[Path]:
    """Create a folder to fill, under a temporary name next to `out`, and rename it when it is
    complete. With a `mark` it replaces an earlier export of the same run."""
    out = Path(out)
    run = None if mark is None else mark.run
    check_replaceable(out, run)
    partial = begin(out, run)
    try:
        yield partial
        finish_mark(partial, mark)
        for path in partial.rglob("*"):
            sync(path)
        check_replaceable(out, run)
        put_in_place(out)
        for old_export in filter(lambda path: is_replaceable(path, run), asides_of(out)):
            discard(old_export)
    except (OSError, SafetensorError, CheckpointError) as error:
        discard(partial)
        if isinstance(error, CheckpointError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"cannot be written: {reason}",
            place=str(out),
            remedy="free space there or give another folder",
        ) from error


class _ShardWriter:
    """Writer that takes tensors in their stored form in any order, and writes each shard as soon as
    its last tensor has arrived.

    The assignment of tensors to shards follows from names and sizes alone.
    """

    def __init__(self, source: HFCheckpoint, names: Sequence[str], folder: Path, max_bytes: int):
        self.source = source
        self.folder = folder
        self.shard_of, self.total_bytes = plan_shards(source, names, max_bytes)
        self.left = Counter(self.shard_of.values())
        self.held: dict[str, dict[str, Tensor]] = {shard: {} for shard in self.left}

    def add(self, name: str, tensor: Tensor) -> None:
        shard = self.shard_of[name]
        self.held[shard][name] = tensor
        self.left[shard] -= 1
        if not self.left[shard]:
            tensors = self.held.pop(shard)
            ordered = {key: tensors[key] for key in sorted(tensors)}
            write_tensors(self.folder / shard, ordered)

    def finish(self) -> None:
        assert not self.held, f"tensors never arrived for {sorted(self.held)}"
        if len(self.left) > 1:
            write_index(self.folder, self.total_bytes, self.shard_of)
        copy_files(self.source.path, self.folder)
        if self.source.new_tokens is not None:
            self.source.new_tokens.write(self.folder)
        if self.source.is_untied:
            untie(self.folder)
        if self.source.sizes.has_score:
            family = type(self.source.config).__name__.removesuffix("Config")
            set_score_class(self.folder, family)
        if self.source.in_blocks:
            remove_quantization(self.folder)


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file in a folder of `new_export`."""
    save_file(tensors, file, metadata={"format": "pt"})
    # safetensors makes the file unreadable for other users. Like any other file, it gets the mode
    # of the umask.
    shutil.copymode(file.parent / MARK, file)


def write_index(folder: Path, total_bytes: int, shard_of: Mapping[str, str]) -> None:
    """Write the index of a folder with several weight files: the file of each tensor."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(shard_of.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def plan_shards(
    source: HFCheckpoint, names: Sequence[str], max_bytes: int
) -> tuple[dict[str, str], int]:
    """Assign tensors to shards in the order of their names, so that one shard after the other
    is complete. Return each tensor's shard and the total size."""
    number, filled, total, numbers = 0, 0, 0, {}
    infos = [(name, source.tensors[name]) for each in names for name in source.stored_names(each)]
    for name, info in [*infos, *sorted(source.passthrough.items())]:
        size = info.num_bytes
        if filled and filled + size > max_bytes:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += size
        total += size
    count = number + 1
    if count == 1:
        return dict.fromkeys(numbers, WEIGHTS_FILE), total
    shard = {name: f"model-{n + 1:05d}-of-{count:05d}.safetensors" for name, n in numbers.items()}
    return shard, total
