"""Numbers of a step: the global batch, the rows of a pass, and the GPUs that share them."""

import math

from megatron_vlm.commands.import_config.source_settings import Setting
from megatron_vlm.commands.import_config.translation import Translation

_PER_DEVICE = ("per_device_train_batch_size", "micro_batch_size")
_MODEL_PARALLEL = (
    ("tensor_model_parallel_size", "tensor_parallel_size"),
    ("pipeline_model_parallel_size",),
    ("context_parallel_size", "sequence_parallel_size"),
)
_SWIFT_BATCH = 16  # ms-swift accumulates up to this number of samples where it is not said


def find_gpu_count(t: Translation) -> None:
    """Find the number of GPUs: that of --gpus, or what the configuration says itself."""
    if t.gpus is not None:
        return
    per_node = t.variable("NPROC_PER_NODE") or t.given("trainer.n_gpus_per_node")
    nodes = t.variable("NNODES") or t.given("trainer.nnodes")
    devices = t.variable("CUDA_VISIBLE_DEVICES")
    if per_node is not None:
        t.gpus = t.whole(per_node) * (1 if nodes is None else t.whole(nodes))
    elif devices is not None:
        t.gpus = len([each for each in str(devices.value).split(",") if each.strip()])


def translate_batches(t: Translation) -> None:
    """Set train.global_batch_size and the size of a pass."""
    if t.trainer == "verl":
        _verl_batches(t)
    elif t.is_megatron:
        _megatron_batches(t)
    else:
        _device_batches(t)
    per_device = t.given("per_device_eval_batch_size", "eval_batch_size")
    if per_device is not None:
        replicas = _replicas(t)
        note = f"x {replicas} data parallel GPUs"
        t.put("eval.batch_size", t.whole(per_device) * replicas, per_device, note=note)


def _replicas(t: Translation) -> int:
    """Return how many GPUs have samples of their own; 1 if their number is not known."""
    gpus = t.gpus or 1
    for names in _MODEL_PARALLEL:
        size = t.given(*names)
        gpus //= max(1, 1 if size is None else t.whole(size))
    return max(1, gpus)


def _device_batches(t: Translation) -> None:
    """Multiply the batch of a device by accumulation and devices."""
    rows = t.take(*_PER_DEVICE)
    steps = t.take("gradient_accumulation_steps", "gradient_accumulation")
    replicas = _replicas(t)
    per_device = 1 if rows is None else t.whole(rows)
    count, how = 1, ""
    if steps is not None and t.trainer == "ms-swift" and not steps.line and t.method != "grpo":
        count = math.ceil(_SWIFT_BATCH / (per_device * replicas))
        how = f"accumulated up to {_SWIFT_BATCH} samples"
        steps = None
    elif steps is not None:
        count = t.whole(steps)
    samples = per_device * count * replicas
    origins = [each for each in (rows, steps) if each is not None]
    known = f"x {replicas} data parallel GPU{'s' * (replicas > 1)}"
    unknown = "for 1 GPU: give --gpus N for the batch of N"
    note = ", ".join(filter(None, (how, known if t.gpus else unknown)))
    if t.is_rl:
        _put_prompts(t, samples, count, origins, note)
    else:
        t.put("train.global_batch_size", samples, *origins, note=note)
    if rows is not None:
        t.put("train.micro_batch_size", per_device, rows)


def _put_prompts(
    t: Translation, completions: int, accumulated: int, origins: list[Setting], note: str
) -> None:
    """Set the prompts of a step, where the other trainer counts their answers."""
    answers = t.take("num_generations", "trl.num_generations")
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


def _megatron_batches(t: Translation) -> None:
    total, rows = t.take("global_batch_size"), t.take("micro_batch_size")
    if total is not None and t.is_rl:
        _put_prompts(t, t.whole(total), 1, [total], "prompts of a step")
    elif total is not None:
        t.put("train.global_batch_size", t.whole(total), total)
    if rows is not None:
        t.put("train.micro_batch_size", t.whole(rows), rows)


def _verl_batches(t: Translation) -> None:
    total, mini = t.take("data.train_batch_size"), t.take("actor.ppo_mini_batch_size")
    prompts = 1 if total is None else t.whole(total)
    if total is not None:
        t.put("train.global_batch_size", prompts, total, note="prompts of a step, as there")
    if mini is not None and t.whole(mini) < prompts:
        updates, rest = divmod(prompts, t.whole(mini))
        if rest:
            raise t.source.error(
                mini, f"does not divide data.train_batch_size={prompts}", remedy="change one"
            )
        t.put("rl.updates", updates, *([total] if total else []), mini)
    dynamic, tokens = t.given("actor.use_dynamic_bsz"), t.given("actor.ppo_max_token_len_per_gpu")
    rows = t.given("actor.ppo_micro_batch_size_per_gpu", "actor.ppo_micro_batch_size")
    if dynamic is not None and t.flag(dynamic) and tokens is not None:
        t.put("train.micro_batch_tokens", t.whole(tokens), dynamic, tokens)
    elif rows is not None:
        t.put("train.micro_batch_size", t.whole(rows), rows)
