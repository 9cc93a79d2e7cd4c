"""A checkpoint of a run as a Hugging Face folder, without a model and without other processes.

A checkpoint has Hugging Face's tensors already, only cut into pieces: see pieces.py.
"""

import json
from pathlib import Path

from megatron_vlm.checkpoint.manifest import Manifest, read_manifest, verify
from megatron_vlm.checkpoint.pieces import PieceReader
from megatron_vlm.checkpoint.store import find_checkpoint
from megatron_vlm.config import from_yaml
from megatron_vlm.config.schema import ParallelConfig
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.errors import CheckpointError
from megatron_vlm.hf.card import Training
from megatron_vlm.hf.export import write_folder
from megatron_vlm.hf.export_mark import ExportMark, check_replaceable
from megatron_vlm.hf.load import check_tensors
from megatron_vlm.hf.names import exported, name_table
from megatron_vlm.hf.source import HFCheckpoint


def export_checkpoint(given: str, out: str, model_path: str | None = None) -> Path:
    """Write `out` from a checkpoint or the newest one of a run, and return which. All but the
    weights comes from the Hugging Face folder that was trained, or from `model_path`."""
    check_replaceable(Path(out), None)
    folder = find_checkpoint(Path(given))
    verify(folder)
    cfg = from_yaml((folder / "config.yaml").read_text())
    source = HFCheckpoint(model_path or cfg.model.path, cfg.data.add_tokens)
    source.read_headers()
    check_tensors(source)
    reader = PieceReader(folder, json.loads((folder / "index.json").read_text()))
    dims = ParallelDims.create(ParallelConfig(), 1, source.sizes.text.layers)
    table = name_table(source.family, source.sizes, cfg.model.backend, dims)
    names = exported(table)
    missing = [name for name in names if name not in reader.index]
    if missing:
        raise CheckpointError(
            f"{folder} is not of the model in {source.path}: it lacks {len(missing)} tensors, the "
            f"first {missing[0]}; give the folder that was trained with --model"
        )
    done = training_of(folder)
    mark = None if done is None else mark_of(read_manifest(folder), done.step)
    named = ((name, reader.whole(name)) for name in names)
    write_folder(source, table, named, out, mark=mark, done=done)
    return folder


def training_of(folder: Path) -> Training | None:
    """What a checkpoint says of its training; None of one that was not saved by a run."""
    progress = json.loads((folder / "state.json").read_text())["progress"]
    if "step" not in progress:
        return None
    cfg = from_yaml((folder / "config.yaml").read_text())
    facts = ("tokens", "scores", "scored_step")  # those of older versions lack them
    return Training(cfg, progress["step"], **{k: progress[k] for k in facts if k in progress})


def mark_of(manifest: Manifest, step: int) -> ExportMark:
    """What an export of this checkpoint says of itself."""
    return ExportMark(manifest.run, step, manifest.id)
