"""Course of a run: length, optimizer, learning rate, precision, seeds, and what is done between
steps."""

from megatron_vlm.commands.import_config.source_settings import Setting
from megatron_vlm.commands.import_config.translation import Translation, is_off
from megatron_vlm.config.data_sources import HELD_OUT, parse_sets

_RATE = ("learning_rate", "lr", "actor.optim.lr")
_SCHEDULES = {
    **{"linear": "linear", "cosine": "cosine", "constant": "constant"},
    **{"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"},
    **{"cosine_warmup_with_min_lr": "cosine", "warmup_stable_decay": "wsd", "wsd": "wsd"},
}
_SCHEDULE = (
    *("lr_scheduler_type", "lr_scheduler", "lr_decay_style"),
    *("actor.optim.lr_scheduler_type", "actor.optim.warmup_style", "actor.optim.lr_decay_style"),
)
_EIGHT_BITS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit")
_OPTIMIZERS = {
    **dict.fromkeys(
        ("adamw", "adam", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"),
        ("adamw", "fp32"),
    ),
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw"), ("adamw", "fp32")),
    **dict.fromkeys(_EIGHT_BITS, ("adamw", "int8")),
    "adamw_torch_4bit": ("adamw", "int8"),
    "muon": ("muon", "fp32"),
}
_PRECISIONS = {
    **{"bfloat16": "bf16", "bf16": "bf16", "float32": "fp32", "fp32": "fp32", "auto": "auto"},
    **{"float16": None, "fp16": None},
}


def translate_length(t: Translation) -> None:
    """Set train.steps or train.epochs."""
    steps = t.given("max_steps", "train_iters", "trainer.total_training_steps")
    epochs = t.take("num_train_epochs", "num_epochs", "max_epochs", "trainer.total_epochs")
    if steps is not None and t.number(steps) > 0:
        t.put("train.steps", t.whole(steps), steps)
    elif epochs is not None:
        t.put("train.epochs", t.number(epochs), epochs)


def translate_optimizer(t: Translation) -> None:
    """Set the optimizer, its rate and its schedule."""
    _translate_rate(t)
    muon = t.given("use_muon")
    name = t.given("optim", "optimizer", "actor.optim.optimizer")
    if muon is not None and t.flag(muon):
        t.put("optim.name", "muon", muon)
    elif name is not None:
        optimizer, states = t.choose(name, _OPTIMIZERS, "give adamw_torch or muon")
        t.put("optim.name", optimizer, name)
        if states != "fp32":
            t.put("optim.states", states, name)
        if str(name.value).startswith("paged") or "4bit" in str(name.value):
            t.differ("moments are on the GPU in 32 or 8 bits; optim.offload=1 frees it", name)
    for key, names in {
        "optim.weight_decay": ("weight_decay", "actor.optim.weight_decay"),
        "optim.beta1": ("adam_beta1",),
        "optim.beta2": ("adam_beta2",),
        "optim.eps": ("adam_epsilon", "adam_eps"),
        "optim.clip_grad": ("max_grad_norm", "clip_grad", "actor.grad_clip"),
        "optim.vision_lr": ("vit_lr",),
        "optim.merger_lr": ("aligner_lr",),
    }.items():
        t.copy_number(key, *names)
    nested = "actor.optim.override_optimizer_config."
    offload = t.given("optimizer_cpu_offload", f"{nested}optimizer_cpu_offload")
    share = t.given("optimizer_offload_fraction", f"{nested}optimizer_offload_fraction")
    if t.flag(offload) and offload is not None:
        value = 1.0 if share is None else t.number(share)
        t.put("optim.offload", value, offload, *([share] if share else []))


def _translate_rate(t: Translation) -> None:
    rate = t.given(*_RATE)
    if t.trainer == "ms-swift" and rate is None:
        rate = Setting("learning_rate", 1e-4 if t.has_lora else 1e-5)
    elif t.trainer == "trl" and t.method != "sft" and rate is None:
        rate = Setting("learning_rate", 1e-6)
    rate = rate or t.take(*_RATE)
    if rate is None:
        raise t.error(": the learning rate is not set", key="learning_rate", remedy="give it")
    t.put("optim.lr", t.number(rate), rate)
    schedule = t.take(*_SCHEDULE)
    warms_up = True
    if schedule is not None:
        chosen = t.choose(schedule, _SCHEDULES, "choose linear, cosine or constant")
        t.put("optim.schedule", chosen, schedule)
        # The plain constant schedule of transformers has no warm-up.
        is_plain = str(schedule.value).lower() == "constant"
        warms_up = not is_plain or t.trainer == "verl" or t.is_megatron
    elif t.trainer == "verl":
        t.put("optim.schedule", "constant", note="the default of verl")
    if warms_up:
        _translate_warmup(t)
    else:
        t.given("warmup_ratio", "warmup_steps")
    _translate_final_rate(t, t.number(rate))


def _translate_warmup(t: Translation) -> None:
    steps = t.given(
        "warmup_steps", "lr_warmup_iters", "lr_warmup_steps", "actor.optim.lr_warmup_steps"
    )
    ratio = t.given("warmup_ratio", "lr_warmup_fraction", "actor.optim.lr_warmup_steps_ratio")
    if steps is not None and t.number(steps) > 0:
        value = t.number(steps)
        if value < 1:
            t.put("optim.warmup_ratio", value, steps)
        else:
            t.put("optim.warmup_steps", t.whole(steps), steps)
    elif ratio is not None and t.number(ratio) > 0:
        t.put("optim.warmup_ratio", t.number(ratio), ratio)
    elif t.trainer == "axolotl" and steps is None and ratio is None:
        note = "axolotl warms up over 3 % of the steps where nothing is set, and at most 100"
        t.put("optim.warmup_ratio", 0.03, note=note)


def _translate_final_rate(t: Translation, rate: float) -> None:
    lowest, ratio = t.given("min_lr"), t.given("cosine_min_lr_ratio", "actor.optim.min_lr_ratio")
    more = t.given("lr_scheduler_kwargs")
    if lowest is not None and rate:
        t.put("optim.min_lr_ratio", _share(t.number(lowest), rate), lowest, note="/ the rate")
    elif ratio is not None:
        t.put("optim.min_lr_ratio", t.number(ratio), ratio)
    elif more is not None and isinstance(more.value, dict) and rate:
        names = more.value
        if "min_lr_rate" in names:
            t.put("optim.min_lr_ratio", float(names["min_lr_rate"]), more)
        elif "min_lr" in names:
            t.put("optim.min_lr_ratio", _share(float(names["min_lr"]), rate), more)
        else:
            t.differ("only the final rate is taken from it: see optim.schedule", more)


def _share(lowest: float, rate: float) -> float:
    return float(f"{lowest / rate:.12g}")


def translate_precision(t: Translation) -> None:
    """Set train.precision, and say where fp16 is replaced."""
    named = t.given("torch_dtype", "dtype")
    for name in ("bf16", "pure_bf16", "bfloat16"):
        setting = t.given(name)
        if setting is not None and setting.value in ("auto", "full"):
            t.put("train.precision", "auto" if setting.value == "auto" else "bf16", setting)
        elif setting is not None and t.flag(setting):
            t.put("train.precision", "bf16", setting)
    half = t.given("fp16", "float16")
    if half is not None and t.flag(half):
        t.differ("fp16 is not trained: train.precision=auto is bf16 on a GPU", half)
    elif named is not None and "train.precision" not in t.lines:
        precision = t.choose(named, _PRECISIONS)
        if precision is None:
            t.differ("fp16 is not trained: train.precision=auto is bf16 on a GPU", named)
        else:
            t.put("train.precision", precision, named)


def translate_seeds(t: Translation) -> None:
    """Set the seeds. One seed of another trainer is that of the ranks and of the data."""
    seed, data = t.given("seed", "actor.data_loader_seed"), t.given("data_seed", "data.seed")
    if seed is not None:
        t.put("train.seed", t.whole(seed), seed)
    if (seed := data or seed) is not None:
        t.put("data.seed", t.whole(seed), seed)
        t.differ("the order of the records is another one with the same seed", seed)


def translate_intervals(t: Translation) -> None:
    """Set when checkpoints, scores and lines are written."""
    _interval(
        t,
        "checkpoint",
        ("save_strategy",),
        ("save_steps", "save_interval", "trainer.save_freq"),
        "saves_per_epoch",
    )
    has_sets = "data.eval" in t.lines or "data.split" in t.lines
    strategies, counts = ("eval_strategy", "evaluation_strategy"), ("eval_steps", "eval_interval")
    if has_sets:
        _interval(t, "eval", strategies, (*counts, "trainer.test_freq"), "evals_per_epoch")
        _translate_best(t)
    else:
        for name in (*strategies, *counts, "trainer.test_freq", "evals_per_epoch"):
            t.given(name)
    lines = t.take("logging_steps", "log_interval")
    if lines is not None and t.number(lines) >= 1:
        t.put("log.every", t.whole(lines), lines)
    kept = t.given("save_total_limit", "trainer.max_actor_ckpt_to_keep")
    if kept is not None:
        t.put("checkpoint.keep_last", t.whole(kept), kept)
    else:
        t.differ("the newest checkpoints are kept here, as many as checkpoint.keep_last=2 says")


def _interval(
    t: Translation,
    group: str,
    strategies: tuple[str, ...],
    counts: tuple[str, ...],
    per_epoch: str,
) -> None:
    strategy, steps, each = t.given(*strategies), t.given(*counts), t.given(per_epoch)
    how = "steps" if strategy is None else str(strategy.value).lower()
    if each is not None and t.number(each) > 0:
        t.put(f"{group}.every_epochs", 1 / t.number(each), each, note="1 / that number")
        return
    if how in ("no", "false") and strategy is not None:
        t.put(f"{group}.every", 0, strategy, note="only at the end")
        return
    if strategy is not None and how == "epoch":
        t.put(f"{group}.every_epochs", 1.0, strategy)
        return
    steps = steps or (t.take(*counts) if group == "checkpoint" or strategy is not None else None)
    if steps is None or t.number(steps) <= 0:
        return
    if t.number(steps) < 1:
        t.put(f"{group}.every_epochs", t.number(steps), steps)
        t.differ("a share of all steps there, and of an epoch here", steps)
    else:
        t.put(f"{group}.every", t.whole(steps), steps)


def _translate_best(t: Translation) -> None:
    best, metric = t.given("load_best_model_at_end"), t.given("metric_for_best_model")
    if best is None or not t.flag(best):
        return
    name = "loss" if metric is None else str(metric.value).removeprefix("eval_")
    sets = [HELD_OUT]
    if "data.eval" in t.lines:
        sets = [each.name for each in parse_sets(t.lines["data.eval"].value)]
    if name != "loss" or is_off(best.value):
        t.differ("checkpoint.best=SET/SCORE chooses the best checkpoint", best)
        return
    t.put("checkpoint.best", f"{sets[0]}/loss", best, *([metric] if metric else []))
    t.put("checkpoint.export_from", "best", best)
