"""Files that a run reads and does not train: the reference, teachers, stored scores. A checkpoint
has their digests, and a run that resumes compares them, as it does for the base of adapters."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vlm.config.evaluation_checks import reward_model_of
from megatron_vlm.config.objectives import reference_folder, reference_of
from megatron_vlm.config.teachers import needs_initial_model, target_folder, teacher_checkpoints
from megatron_vlm.data.scores.score_index import ScoreIndex
from megatron_vlm.errors import CheckpointError, MegatronVLMError
from megatron_vlm.hf.checkpoint_files import weight_file_digest, weights_digest
from megatron_vlm.io.hub import folder_of
from megatron_vlm.io.untrusted import home_path, real_path
from megatron_vlm.lora.peft_folder import ADAPTER_FILE
from megatron_vlm.training.worker import MegatronWorker

_SHOWN = 12  # letters of a digest


@dataclass(frozen=True)
class FrozenInput:
    """The value of a key that names files, and the digest of their content."""

    path: str
    digest: str


def frozen_inputs(worker: MegatronWorker, is_rl: bool) -> dict[str, FrozenInput]:
    """Return what a run with this worker reads and does not train, by key."""
    cfg, found = worker.cfg, dict[str, FrozenInput]()
    scores = {"teacher.path": target_folder(cfg), "preference.reference": reference_folder(cfg)}
    has_reference = needs_initial_model(cfg)
    if not is_rl:
        has_reference = reference_of(cfg) is not None and reference_folder(cfg) is None
    if has_reference:
        found["model.path"] = FrozenInput(cfg.model.path, worker.base_digest)
    if has_reference and cfg.lora.path is not None:
        digest = weight_file_digest(home_path(cfg.lora.path) / ADAPTER_FILE)
        found["lora.path"] = FrozenInput(cfg.lora.path, digest)
    for source, path in teacher_checkpoints(cfg if is_rl else None).items():
        key = f"teacher.path.{source}" if source else "teacher.path"
        try:
            found[key] = FrozenInput(path, weights_digest(folder_of(path, weights=True)))
        except MegatronVLMError as error:
            raise error.within(f"{key}={path}") from error
    if is_rl and (folder := reward_model_of(cfg.rl)) is not None:
        found["rl.reward"] = FrozenInput(folder, weights_digest(home_path(folder)))
    for key, folder in scores.items():
        if folder is not None:
            found[key] = FrozenInput(folder, ScoreIndex.read(folder).digest)
    return found


def inputs_from_json(progress: Mapping[str, Any]) -> dict[str, FrozenInput]:
    """Return the inputs in the progress of a checkpoint."""
    saved = progress.get("frozen", {})
    return {key: FrozenInput(**each) for key, each in saved.items()}


def changed_inputs(
    checkpoint: Path,
    before: Mapping[str, FrozenInput],
    now: Mapping[str, FrozenInput],
    remedy: str = "",
) -> list[str]:
    """Return the inputs that differ from a checkpoint's because their keys name other files. Refuse
    one whose files have changed in their place. An input that a former version did not have is not
    compared."""
    changed = []
    for key, found in now.items():
        saved = before.get(key, found)
        if saved.digest == found.digest:
            continue
        if real_path(home_path(saved.path)) != real_path(home_path(found.path)):
            changed.append(f"another content of {key}")
            continue
        raise CheckpointError(
            "has another content than when the checkpoint was saved (digest "
            f"{found.digest[:_SHOWN]}, was {saved.digest[:_SHOWN]})",
            place=str(checkpoint),
            key=key,
            found=found.path,
            remedy=remedy
            or "put the former files back; to go on with these, move them to another "
            f"folder and give that one as {key}",
        )
    return changed
