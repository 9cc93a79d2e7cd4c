"""Beside which weights the adapters of a checkpoint were trained."""

from pathlib import Path

from megatron_vlm.errors import CheckpointError
from megatron_vlm.io.untrusted import Field


def check_base(folder: Path, state: Field, digest: str, path: str) -> None:
    """Refuse adapters beside other weights; `state` is the checkpoint's state.json, and `digest`
    that of the weights in `path`."""
    saved = state.get("lora")
    if saved is not None and saved["base"].string() != digest:
        raise CheckpointError(
            ": the adapters were trained beside other weights than these",
            place=str(folder),
            key="model.path",
            found=path,
            remedy="give the model that they were trained with: as model.path, or to export with "
            "--model",
        )
