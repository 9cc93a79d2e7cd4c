"""Export of a run's checkpoint as a Hugging Face folder, without a model and without other
processes. A checkpoint already has Hugging Face's tensors, in pieces: see tensor_pieces.py."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from megatron_vlm.checkpoint.manifest import verify
from megatron_vlm.checkpoint.rank_state import is_kept
from megatron_vlm.checkpoint.run_checkpoints import held_checkpoint
from megatron_vlm.checkpoint.state_json import check_base, mark_of, read_state, training_of
from megatron_vlm.checkpoint.tensor_pieces import PieceReader, read_index
from megatron_vlm.config import read_saved
from megatron_vlm.config.schema import ParallelConfig
from megatron_vlm.config.trainable import Exported, export_of
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.errors import ConfigError
from megatron_vlm.hf.checkpoint_files import weights_digest
from megatron_vlm.hf.export_mark import check_replaceable
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.hf.load_weights import check_tensors
from megatron_vlm.hf.weight_map import Entry, exported_names, name_table
from megatron_vlm.hf.write_export import ChangeFolder, write_folder
from megatron_vlm.lora.export_adapter import TrainedAdapter, write
from megatron_vlm.lora.targets import adapted_linears, adapted_weights, adapter_entries


def export_checkpoint(
    folder_or_run: str,
    out: str,
    model_path: str | None = None,
    kind: Exported | None = None,
    change: ChangeFolder | None = None,
) -> Path:
    """Write `out` from a checkpoint, or from the newest one of a run, and return the checkpoint's
    folder. Everything but the weights comes from the Hugging Face folder that was trained, or from
    `model_path`. `kind` is the form in which adapters are exported; the default is
    checkpoint.export of the run. `change` changes the folder of the whole model."""
    check_replaceable(Path(out), None)
    with held_checkpoint(Path(folder_or_run)) as folder:
        _export(folder, out, model_path, kind, change)
    return folder


def _export(
    folder: Path,
    out: str,
    model_path: str | None,
    kind: Exported | None,
    change: ChangeFolder | None,
) -> None:
    manifest = verify(folder)
    cfg = read_saved(folder)
    source = HFCheckpoint.of(cfg, model_path)
    source.read_headers()
    check_tensors(source)
    reader = PieceReader(folder, read_index(folder))
    dims = ParallelDims.create(ParallelConfig(), 1, source.sizes.text.num_layers)
    table = name_table(source.sizes, cfg.model.backend, dims)
    done = training_of(folder)
    mark = None if done is None else mark_of(folder, manifest, done.step)
    if not cfg.lora.rank:
        if kind is not None:
            raise ConfigError(
                ": the checkpoint has no adapters, only whole weights",
                place=str(folder),
                key="--as",
                found=kind,
                remedy=f"leave out --as {kind}",
            )
        tensors = _tensors(reader, table, source)
        names = exported_names(table)
        write_folder(source, names, tensors, out, mark=mark, done=done, change=change)
        return
    weights = adapted_weights(cfg, source.sizes)
    state = read_state(folder)
    check_base(folder, state, weights_digest(source.path), str(source.path))
    table += adapter_entries(adapted_linears(table, weights), cfg.lora.rank)
    entries = [entry for entry in table if is_kept(cfg, entry)]
    adapter = TrainedAdapter(cfg.lora, weights, source, dict(_tensors(reader, entries, source)))
    kind = kind or ("merged" if change else export_of(cfg))
    write(adapter, table, out, kind, mark, done, change)


def _tensors(
    reader: PieceReader, entries: Sequence[Entry], source: HFCheckpoint
) -> Iterator[tuple[str, Tensor]]:
    shapes = {tensor.name: tensor.shape for entry in entries for tensor in entry.hf_tensors}
    remedy = f"{source.path} is another one: give the folder that was trained with --model"
    reader.check(shapes, shapes, remedy)
    return ((name, reader.read_tensor(name)) for name in shapes)
