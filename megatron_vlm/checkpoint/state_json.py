"""state.json of a checkpoint: the state of the training besides the tensors, and the settings that
a loading run must share."""

from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_vlm.checkpoint.manifest import Manifest
from megatron_vlm.checkpoint.tensor_pieces import outside_file
from megatron_vlm.config import Config, read_saved
from megatron_vlm.config.trainable import scale_of
from megatron_vlm.distributed.process import print_to_user
from megatron_vlm.errors import CheckpointError, show_value
from megatron_vlm.family.tower_attention import set_kernel
from megatron_vlm.hf.export_mark import ExportMark
from megatron_vlm.hf.model_card import TrainingSummary
from megatron_vlm.io.untrusted import JsonField
from megatron_vlm.model.attention_kernels import TOWER, attention_shapes, kept_kernels
from megatron_vlm.training.frozen_inputs import FrozenInput, changed_inputs
from megatron_vlm.training.worker import MegatronWorker

FORMAT = 2
OR_BEGIN = "or give run=FOLDER for a new run"


def make_state(worker: MegatronWorker, progress: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the content of state.json. `progress` is plain JSON, and the optimizer has done
    `steps` steps."""
    cfg, dims = worker.cfg, worker.dims
    state = {
        "format": FORMAT,
        "layout": {"tp": dims.tp, "pp": dims.pp, "dp": dims.dp, "ep": dims.ep},
        "add_tokens": list(cfg.data.add_tokens),
        "optimizer_steps": steps,
        "lr": worker.lr,
        "optimizer": cfg.optim.name,
        "moments": cfg.optim.states,
        "attention": list(worker.chunks[0].kernels.values()),
        "progress": progress,
    }
    if cfg.lora.rank:
        lora = {"base": worker.base_digest, "scale": scale_of(cfg.lora)}
        base_type = cfg.lora.base
        state["lora"] = lora if base_type is None else {**lora, "base_type": base_type}
    return state


def read_state(folder: Path) -> JsonField:
    """Read the state.json of a checkpoint."""
    return outside_file(folder / "state.json").json()


# Checks of a run that loads a checkpoint.


def check_state(cfg: Config, folder: Path, state: JsonField, moments: bool) -> None:
    """Refuse a checkpoint whose tensors would mean something else in this run. Without `moments`,
    the optimizer may differ."""
    if (version := state["format"].value) != FORMAT:
        raise CheckpointError(
            f"cannot be read: this version reads {FORMAT}",
            place=str(folder),
            key="format",
            found=version,
            allowed=(FORMAT,),
            remedy="load it with the version of megatron_vlm that wrote it",
        )
    saved = [each.string() for each in state["add_tokens"].items()]
    if (tokens := list(cfg.data.add_tokens)) != saved:
        raise CheckpointError(
            f"is not the {show_value(saved)} of the checkpoint: the same rows would belong to "
            "other tokens",
            place=str(folder),
            key="data.add_tokens",
            found=tokens,
            remedy="give the same ones in the same order, or add to its export: megatron-vlm "
            f"export {folder} DIR, model.path=DIR",
        )
    _check_lora(cfg, folder, state)
    now = cfg.optim.name
    if moments and (before := state["optimizer"].string()) != now:
        raise CheckpointError(
            f"keeps other states of the weights than {before}, which saved the checkpoint",
            place=str(folder),
            key="optim.name",
            found=now,
            remedy=f"resume with optim.name={before}, or start a new run from its weights: "
            f"megatron-vlm export {folder} DIR, model.path=DIR",
        )


def say_conversion(worker: MegatronWorker, folder: Path, state: JsonField) -> None:
    """Tell the user if the run keeps moments in another type than the checkpoint's run did."""
    before, after = state["moments"].string(), worker.cfg.optim.states
    if before != after and worker.optimizer is not None and dist.get_rank() == 0:
        print_to_user(f"the moments of {folder} were {before}, and go on as {after}")


def keep_kernels(worker: MegatronWorker, folder: Path, state: JsonField) -> None:
    """Take the attention kernels that the checkpoint's run had, in place of those that `auto` has
    measured now: others would change the last digits. A collective."""
    kept, own, cfg = state.get("attention"), worker.chunks[0].kernels, worker.cfg
    names = [] if kept is None else [each.string() for each in kept.items()]
    is_measured = cfg.model.attention == "auto" and worker.platform.is_cuda
    if not (names and own and is_measured) or names == list(own.values()):
        return
    dtype, how, why = worker.chunks[0].config.params_dtype, "keeps", ""
    shapes = attention_shapes(cfg, worker.source.sizes, worker.dims, dtype)
    found = kept_kernels(names, shapes, worker.platform)
    if isinstance(found, str):
        how, why = "cannot keep", f" ({found}), and its last digits may differ"
    else:
        own.update(found)
        for chunk in worker.chunks:
            set_kernel(chunk, own[TOWER])
    if dist.get_rank() == 0:
        print_to_user(f"model.attention=auto {how} the kernels of {folder}: {names}{why}")


def _check_lora(cfg: Config, folder: Path, state: JsonField) -> None:
    """Refuse adapters with another scale: they would be meaningless."""
    saved, rank = state.get("lora"), cfg.lora.rank
    if (saved is None) != (not rank):
        raise CheckpointError(
            f"{'trains adapters' if rank else 'has no adapters'}, and the checkpoint "
            f"{'has none' if rank else 'is one of adapters'}",
            place=str(folder),
            key="lora.rank",
            found=rank,
            remedy=f"{'leave lora out' if rank else 'give its lora.*'} to resume, {OR_BEGIN}",
        )
    if saved is None:
        return
    if (saved_scale := saved["scale"].number()) != (scale := scale_of(cfg.lora)):
        raise CheckpointError(
            f"with lora.rank and lora.rslora scales adapters by {scale:g}, and those of the "
            f"checkpoint are scaled by {saved_scale:g}",
            place=str(folder),
            key="lora.alpha",
            found=cfg.lora.alpha,
            remedy="resume with the values in its config.yaml",
        )


# Facts for an export of the checkpoint.


def training_of(folder: Path) -> TrainingSummary | None:
    """Return the summary of a checkpoint's training, or None if no run saved the checkpoint."""
    progress = read_state(folder)["progress"]
    if progress.get("step") is None:
        return None
    tokens, scored = progress.get("tokens"), progress.get("scored_step")
    scores = progress.get("scores")  # the progress of a controller's own loop has none
    return TrainingSummary(
        read_saved(folder),
        progress["step"].whole(),
        None if tokens is None else tokens.whole(),
        {} if scores is None else {name: _figures(each) for name, each in scores.object().items()},
        None if scored is None else scored.whole(),
    )


def _figures(scores: JsonField) -> dict[str, float]:
    """Return the finite scores: JSON has NaN where a score could not be computed."""
    values = {key: field.value for key, field in scores.object().items()}
    return {key: value for key, value in values.items() if type(value) in (int, float)}


def mark_of(folder: Path, manifest: Manifest, step: int) -> ExportMark:
    """Return the mark of an export of this checkpoint."""
    lora = read_state(folder).get("lora")
    if lora is None:
        return ExportMark(manifest.run, step, manifest.id)
    base_type = lora.get("base_type")
    bases = lora["base"].string(), None if base_type is None else base_type.string()
    return ExportMark(manifest.run, step, manifest.id, *bases)


def check_base(folder: Path, state: JsonField, digest: str, path: str) -> None:
    """Refuse adapters that were trained with other weights. `state` is the checkpoint's state.json,
    and `digest` that of the weights in `path`."""
    if (saved := state.get("lora")) is None:
        return
    before, now = (FrozenInput(path, each) for each in (saved["base"].string(), digest))
    changed_inputs(
        folder,
        {"model.path": before},
        {"model.path": now},
        "give the model that the adapters were trained with: as model.path, or to export with "
        "--model",
    )
