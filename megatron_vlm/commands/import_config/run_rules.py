"""The run itself: its folder, the layout on the GPUs, what is computed again, and its figures."""

from megatron_vlm.commands.import_config.source_settings import Setting
from megatron_vlm.commands.import_config.translation import OutputLine, Translation, is_off

_SHARDED = ("deepspeed", "fsdp", "fsdp_config", "deepspeed_config")
_DEGREES = {
    "parallel.tp": ("tensor_model_parallel_size", "tensor_parallel_size", "tp_size"),
    "parallel.pp": ("pipeline_model_parallel_size", "pp_size"),
    "parallel.ep": ("expert_model_parallel_size", "ep_size"),
}
_CHECKPOINTING = (
    *("gradient_checkpointing", "model.enable_gradient_checkpointing"),
    "enable_gradient_checkpointing",
)
_CONTEXT = (
    *("context_parallel_size", "sequence_parallel_size"),
    *("context_parallel_degree", "actor.ulysses_sequence_parallel_size"),
)
_HF_PROJECT = "huggingface"  # project of transformers where WANDB_PROJECT is not set


def translate_folder(t: Translation) -> None:
    """Set run, and where a run goes on."""
    folder = t.given("output_dir", "save", "trainer.default_local_dir")
    project, name = t.given("trainer.project_name"), t.given("trainer.experiment_name")
    if folder is not None:
        t.put("run", str(folder.value), folder)
    elif name is not None:
        t.put("run", f"runs/{name.value}", name)
    mode = t.given("trainer.resume_mode")
    path = t.given("resume_from_checkpoint", "trainer.resume_from_path")
    if mode is not None and str(mode.value) == "disable":
        t.put("checkpoint.resume", "never", mode)
    elif path is not None and str(path.value).lower() not in ("true", "false", "auto"):
        t.differ(
            "checkpoints of other trainers are not resumed: give model.path the folder that they "
            "export, or lora.path that of their adapter",
            path,
        )
    _translate_trackers(t, project)


def _translate_trackers(t: Translation, project: Setting | None) -> None:
    setting = t.take("report_to", "trainer.logger")
    given = t.given("wandb_project")
    names = [] if setting is None else [name.lower() for name in t.words(setting)]
    names = [name.strip("[]'\" ") for name in names]
    if "tensorboard" in names or "all" in names:
        t.put("log.tensorboard", True, *([setting] if setting else []))
    if given is not None:
        t.put("log.wandb", str(given.value), given)
    elif ("wandb" in names or "all" in names) and setting is not None:
        which = project or t.variable("WANDB_PROJECT")
        value = _HF_PROJECT if which is None else str(which.value)
        t.put("log.wandb", value, setting, *([which] if which else []))
    others = [name for name in names if name not in ("tensorboard", "wandb", "all", "console")]
    if setting is not None and (others := [name for name in others if not is_off(name)]):
        t.differ(
            f"{', '.join(others)}: figures go to metrics.jsonl, the report, log.tensorboard=true "
            "and log.wandb=PROJECT",
            setting,
        )


def translate_layout(t: Translation) -> None:
    """Set the degrees of parallelism, or let the planner choose them where others shard the
    weights over all GPUs."""
    for key, names in _DEGREES.items():
        nested = [f"actor.megatron.{name}" for name in names]
        degree = t.given(*names, *nested)
        if degree is not None:
            t.put(key, t.whole(degree), degree)
    for name in (*_CONTEXT, "actor.megatron.context_parallel_size"):
        size = t.given(name)
        if size is not None and t.number(size) > 1:
            t.differ(
                "no sequence is cut over ranks: model.recompute=full and parallel.tp make long "
                "records fit",
                size,
            )
    sharded = [setting for setting in map(t.given, _SHARDED) if setting is not None]
    sharded = [setting for setting in sharded if not is_off(setting.value)]
    has_degrees = any(key in t.lines for key in _DEGREES)
    if (sharded or t.trainer == "verl") and not has_degrees:
        origin = t.origin(*sharded) or "verl shards by FSDP"
        note = f"{origin}: the planner chooses a layout that fits"
        t.recipes["parallel"] = OutputLine("auto", note, 0)


def translate_recomputation(t: Translation) -> None:
    """Set what is computed again. The planner chooses it with the layout."""
    granularity = t.take("recompute_granularity")
    nested = "actor.megatron.override_transformer_config.recompute_granularity"
    granularity = granularity or t.given(nested)
    switch, off = t.take(*_CHECKPOINTING), t.take("disable_gradient_checkpointing")
    vision = t.given("vit_gradient_checkpointing")
    if "parallel" in t.recipes:
        return
    if granularity is not None and not is_off(granularity.value):
        t.put("model.recompute", str(granularity.value), granularity)
        if granularity.value == "full":
            t.put("model.recompute_vision", True, vision or granularity)
        return
    is_on = (off is not None and not t.flag(off)) if switch is None else _is_on(t, switch)
    origin = switch or off
    if origin is not None and is_on:
        t.put("model.recompute", "full", origin)
        t.put(
            "model.recompute_vision", True if vision is None else t.flag(vision), vision or origin
        )


def _is_on(t: Translation, switch: Setting) -> bool:
    """Return whether activations are computed again; axolotl has names of ways to do it."""
    return str(switch.value) in ("unsloth", "offload", "offload_disk") or t.flag(switch)


def translate_shuffling(t: Translation) -> None:
    """Set data.shuffle. transformers shuffles rows even if a data set is not shuffled before."""
    off, rows = t.given("disable_shuffling"), t.given("train_dataloader_shuffle")
    sets = t.given("dataset_shuffle", "shuffle_dataset", "shuffle_merged_datasets")
    if off is not None and t.flag(off):
        t.put("data.shuffle", False, off)
    elif rows is not None and not t.flag(rows):
        t.put("data.shuffle", False, *([sets] if sets else []), rows)
