"""The run itself: its GPUs and their batch, the folder, the layout, what is computed again, and the
figures."""

from collections.abc import Sequence

from megatron_vlm.commands.import_config.source_settings import Setting
from megatron_vlm.commands.import_config.translation import OutputLine, Translation, is_off

_SHARDED = ("deepspeed", "fsdp", "fsdp_config", "deepspeed_config")
DEGREES = {
    "parallel.tp": "tensor_model_parallel_size",
    "parallel.pp": "pipeline_model_parallel_size",
    "parallel.ep": "expert_model_parallel_size",
}
_MODEL_PARALLEL = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
)
_WAYS_TO_RECOMPUTE = ("unsloth", "offload", "offload_disk")  # as axolotl has them
_HF_PROJECT = "huggingface"  # transformers' project for W&B and Trackio
# Trackers of both, and the settings and variables that name a project in them.
_PROJECTS = {
    "tensorboard": (),
    "wandb": ("wandb_project", "WANDB_PROJECT"),
    "trackio": ("trackio_project_name", "TRACKIO_PROJECT"),
    "mlflow": ("mlflow_experiment_name", "MLFLOW_EXPERIMENT_NAME"),
    "swanlab": ("swanlab_project", "SWANLAB_PROJECT"),
}


def translate_folder(t: Translation) -> None:
    """Set run, and where a run goes on."""
    t.copy("run", "output_dir")
    path = t.given("resume_from_checkpoint")
    if path is not None and str(path.value).lower() not in ("true", "false", "auto"):
        t.differ(
            "checkpoints of other trainers are not resumed: give model.path the folder that they "
            "export, or lora.path that of their adapter",
            path,
        )
    _translate_trackers(t)


def _translate_trackers(t: Translation) -> None:
    """Set the trackers, and the first project that one of them is given."""
    setting, project = t.take("report_to"), t.given("trainer.project_name", "project")
    words = [] if setting is None else t.words(setting)
    names = [word.lower().strip("[]'\" ") for word in words]
    names += ["tensorboard", "wandb"] * ("all" in names)
    found: dict[str, Setting | None] = {}
    for name, places in _PROJECTS.items():
        given = [each for place in places if (each := t.given(place)) is not None]
        switch = t.switched_on(f"use_{name}")
        # swanlab_project may be set where SwanLab is not used.
        if name in names or switch is not None or (given and name != "swanlab"):
            found[name] = setting if name in names else switch or given[0]
            variables = [each for place in places if (each := t.variable(place)) is not None]
            project = project or next(iter([*given, *variables]), None)
    if found:
        origins = [*found.values()]
        once = [each for place, each in enumerate(origins) if each not in origins[:place]]
        t.put("log.trackers", tuple(found), *once)
    if project is not None:
        t.copy_setting("log.project", project)
    elif not found.keys().isdisjoint(("wandb", "trackio")):
        t.put("log.project", _HF_PROJECT, setting)
    known = (*_PROJECTS, "all", "console")
    if others := [name for name in names if name not in known and not is_off(name)]:
        t.differ(
            f"{', '.join(others)}: not a tracker of log.trackers, which a package may add", setting
        )


def translate_layout(t: Translation) -> None:
    """Set the degrees of parallelism, or let the planner choose them where others shard the
    weights over all GPUs."""
    found = {key: t.given(name) for key, name in DEGREES.items()}
    degrees = {key: setting for key, setting in found.items() if setting is not None}
    for key, setting in degrees.items():
        t.copy_setting(key, setting)
    for name in ("context_parallel_size", "sequence_parallel_size"):
        if (size := t.given(name)) is not None and t.number(size) > 1:
            t.differ(
                "no sequence is cut over ranks: model.recompute=full and parallel.tp make long "
                "records fit",
                size,
            )
    sharded = [each for each in map(t.given, _SHARDED) if each and not is_off(each.value)]
    tp, pp, ep = (t.lines[key].value if key in t.lines else 1 for key in DEGREES)
    note = "the planner chooses a layout that fits"
    if (t.gpus and t.gpus % max(1, tp * pp * ep)) or (not t.gpus and ep > 1 and tp > 1):
        note = f"experts divide data parallel ranks here, which takes TP x PP x EP GPUs; {note}"
        sharded = [*degrees.values()]
        for key in degrees:
            del t.lines[key]
    elif not sharded or degrees:
        return
    t.recipes["parallel"] = OutputLine("auto", f"{t.origin(*sharded)}: {note}", 0)


def translate_recomputation(t: Translation) -> None:
    """Set what is computed again. The planner chooses it with the layout."""
    granularity = t.take("recompute_granularity")
    switch, off = t.take("gradient_checkpointing"), t.take("disable_gradient_checkpointing")
    vision = t.given("vit_gradient_checkpointing")
    if "parallel" in t.recipes:
        return
    if granularity is not None and not is_off(granularity.value):
        t.put("model.recompute", str(granularity.value), granularity)
        if granularity.value == "full":
            t.put("model.recompute_vision", True, vision or granularity)
        return
    if switch is not None:
        is_on = str(switch.value) in _WAYS_TO_RECOMPUTE or t.flag(switch)
    else:
        is_on = off is not None and not t.flag(off)
    if is_on:
        t.put("model.recompute", "full", switch or off)
        is_vision = vision is None or t.flag(vision)
        t.put("model.recompute_vision", is_vision, vision or switch or off)


def translate_shuffling(t: Translation) -> None:
    """Set data.shuffle. transformers shuffles rows even if a data set is not shuffled before."""
    off, rows = t.given("disable_shuffling"), t.given("train_dataloader_shuffle")
    sets = t.given("dataset_shuffle", "shuffle_dataset", "shuffle_merged_datasets")
    if off is not None and t.flag(off):
        t.put("data.shuffle", False, off)
    elif rows is not None and not t.flag(rows):
        t.put("data.shuffle", False, sets, rows)


def find_gpu_count(t: Translation, counts_devices: bool = True) -> None:
    """Find the number of GPUs: that of --gpus, or what the command or the configuration says."""
    processes, per_node = t.given("num_processes"), t.given("nproc_per_node")
    nodes = t.given("nnodes") or t.variable("NNODES")
    per_node = per_node or t.variable("NPROC_PER_NODE")
    devices = t.variable("CUDA_VISIBLE_DEVICES")
    if t.gpus is not None or t.source.processes is not None:
        t.gpus = t.gpus or t.source.processes
    elif processes is not None:
        t.gpus = t.whole(processes)
    elif per_node is not None:
        t.gpus = t.whole(per_node) * (1 if nodes is None else t.whole(nodes))
    elif devices is not None and counts_devices:
        t.gpus = len([each for each in str(devices.value).split(",") if each.strip()])


def translate_device_batches(t: Translation) -> None:
    """Multiply the batch of a device by accumulation and devices."""
    put_device_batches(t, t.take("gradient_accumulation_steps"))


def replicas(t: Translation) -> int:
    """Return how many GPUs have samples of their own; 1 if their number is not known."""
    gpus = t.gpus or 1
    for name in _MODEL_PARALLEL:
        size = t.given(name)
        gpus //= max(1, 1 if size is None else t.whole(size))
    return max(1, gpus)


def put_device_batches(
    t: Translation, steps: Setting | None, count: int | None = None, how: str = ""
) -> None:
    """Set the batch of all devices. `steps`: the setting of accumulation; without one, `count` and
    the words that say where it comes from."""
    rows = t.take("per_device_train_batch_size")
    per_device = 1 if rows is None else t.whole(rows)
    count = count or (1 if steps is None else t.whole(steps))
    samples = per_device * count * replicas(t)
    known = f"x {replicas(t)} data parallel GPU{'s' * (replicas(t) > 1)}"
    unknown = "for 1 GPU: give --gpus N for the batch of N"
    note = ", ".join(filter(None, (how, known if t.gpus else unknown)))
    if t.is_rl:
        put_prompts(t, samples, count, [rows, steps], note)
    else:
        t.put("train.global_batch_size", samples, rows, steps, note=note)
    t.copy_setting("train.micro_batch_size", rows)


def translate_evaluation_batch(t: Translation) -> None:
    """Set eval.batch_size, which counts the rows of all GPUs."""
    per_device = t.given("per_device_eval_batch_size")
    if per_device is not None and t.has_held_out:
        note = f"x {replicas(t)} data parallel GPUs"
        t.put("eval.batch_size", t.whole(per_device) * replicas(t), per_device, note=note)


def put_prompts(
    t: Translation, completions: int, accumulated: int, origins: Sequence[Setting | None], note: str
) -> None:
    """Set the prompts of a step, where the other trainer counts their answers."""
    answers = t.take("num_generations")
    count = 8 if answers is None else t.whole(answers)
    per_generation = t.given("steps_per_generation")
    updates = 1
    if per_generation is not None:
        updates, rest = divmod(t.whole(per_generation), accumulated)
        completions *= max(1, updates)
        if rest or not updates:
            raise t.source.error(
                per_generation,
                f"is no multiple of the {accumulated} accumulated passes of a step",
                remedy="change one of them",
            )
    prompts, rest = divmod(completions, count)
    if rest or not prompts:
        raise t.error(
            f": {completions} answers of a step are no multiple of the {count} answers to a prompt",
            key="num_generations",
            found=count,
            remedy="give --gpus N, or change one of them",
        )
    note = f"{completions} answers, {count} to a prompt; {note}"
    t.put("train.global_batch_size", prompts, *origins, per_generation, note=note)
    if updates > 1:
        t.put("rl.updates", updates, per_generation)
