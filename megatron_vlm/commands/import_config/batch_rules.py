"""Numbers of a step: the global batch, the rows of a pass, and the GPUs that share them."""

from megatron_vlm.commands.import_config.source_settings import Setting
from megatron_vlm.commands.import_config.translation import Translation

_MODEL_PARALLEL = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
)


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
    origins = [each for each in (rows, steps) if each is not None]
    known = f"x {replicas(t)} data parallel GPU{'s' * (replicas(t) > 1)}"
    unknown = "for 1 GPU: give --gpus N for the batch of N"
    note = ", ".join(filter(None, (how, known if t.gpus else unknown)))
    if t.is_rl:
        put_prompts(t, samples, count, origins, note)
    else:
        t.put("train.global_batch_size", samples, *origins, note=note)
    if rows is not None:
        t.put("train.micro_batch_size", per_device, rows)


def translate_evaluation_batch(t: Translation) -> None:
    """Set eval.batch_size, which counts the rows of all GPUs."""
    per_device = t.given("per_device_eval_batch_size")
    if per_device is not None:
        note = f"x {replicas(t)} data parallel GPUs"
        t.put("eval.batch_size", t.whole(per_device) * replicas(t), per_device, note=note)


def put_prompts(
    t: Translation, completions: int, accumulated: int, origins: list[Setting], note: str
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
        origins = [*origins, per_generation]
    prompts, rest = divmod(completions, count)
    if rest or not prompts:
        raise t.error(
            f": {completions} answers of a step are no multiple of the {count} answers to a prompt",
            key="num_generations",
            found=count,
            remedy="give --gpus N, or change one of them",
        )
    note = f"{completions} answers, {count} to a prompt; {note}"
    t.put("train.global_batch_size", prompts, *origins, note=note)
    if updates > 1 and per_generation is not None:
        t.put("rl.updates", updates, per_generation)
