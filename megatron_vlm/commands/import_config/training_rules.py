"""Training: its length, optimizer, learning rate, precision and seeds, and what is done between
steps."""

from dataclasses import replace

from megatron_vlm.commands.import_config.source_settings import Setting
from megatron_vlm.commands.import_config.translation import Translation, is_off
from megatron_vlm.config.data_sources import HELD_OUT, parse_sets
from megatron_vlm.config.evaluation_checks import epochs_text

_SCHEDULES = {
    **{"linear": "linear", "cosine": "cosine", "constant": "constant"},
    **{"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"},
    **{"cosine_warmup_with_min_lr": "cosine", "warmup_stable_decay": "wsd", "wsd": "wsd"},
}
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
_NO_FP16 = "fp16 is not trained: train.precision=auto is bf16 on a GPU"


def translate_length(t: Translation) -> None:
    """Set train.steps or train.epochs."""
    steps, epochs = t.positive("max_steps"), t.take("num_train_epochs")
    if steps is None:
        t.copy_setting("train.epochs", epochs)
    t.copy_setting("train.steps", steps)


def translate_optimizer(t: Translation) -> None:
    """Set the optimizer and its options."""
    muon, name = t.switched_on("use_muon"), t.given("optim")
    if muon is not None:
        t.put("optim.name", "muon", muon)
    elif name is not None:
        optimizer, states = t.choose(name, _OPTIMIZERS, "give adamw_torch or muon")
        t.put("optim.name", optimizer, name)
        if states != "fp32":
            t.put("optim.states", states, name)
        if str(name.value).startswith("paged") or "4bit" in str(name.value):
            t.differ("moments are on the GPU in 32 or 8 bits; optim.offload=1 frees it", name)
    for key, name_there in {
        "optim.weight_decay": "weight_decay",
        "optim.beta1": "adam_beta1",
        "optim.beta2": "adam_beta2",
        "optim.eps": "adam_epsilon",
        "optim.clip_grad": "max_grad_norm",
    }.items():
        t.copy(key, name_there)
    offload, share = t.switched_on("optimizer_cpu_offload"), t.given("optimizer_offload_fraction")
    if offload is not None:
        t.put("optim.offload", 1.0 if share is None else t.number(share), offload, share)


def translate_rate(t: Translation, default: float | None = None) -> None:
    """Set the learning rate and its schedule, as transformers has them. `default` is the
    command's own rate, where none is given."""
    rate = t.take("learning_rate")
    if default is not None and (rate is None or rate.is_default):
        rate = Setting("learning_rate", default, is_default=True)
    schedule = put_rate(t, rate)
    # The plain constant schedule of transformers has no warm-up.
    if schedule is not None and str(schedule.value).lower() == "constant":
        t.skip("warmup_ratio", "warmup_steps")
    else:
        put_warmup(t)


def put_rate(t: Translation, rate: Setting | None) -> Setting | None:
    """Set the learning rate, how it falls and to what. Return the setting of the schedule."""
    if rate is None:
        raise t.error(": the learning rate is not set", key="learning_rate", remedy="give it")
    t.put("optim.lr", t.number(rate), rate)
    schedule = t.take("lr_scheduler_type")
    if schedule is not None:
        chosen = t.choose(schedule, _SCHEDULES, "choose linear, cosine or constant")
        t.put("optim.schedule", chosen, schedule)
    _put_final_rate(t, t.number(rate))
    return schedule


def put_warmup(t: Translation) -> None:
    """Set the warm-up by its steps, or by its share of them."""
    steps, ratio = t.given("warmup_steps"), t.given("warmup_ratio")
    if steps is not None and (number := t.number(steps)) > 0:
        t.copy_setting("optim.warmup_ratio" if number < 1 else "optim.warmup_steps", steps)
    elif ratio is not None and t.number(ratio) > 0:
        t.copy_setting("optim.warmup_ratio", ratio)


def _put_final_rate(t: Translation, rate: float) -> None:
    lowest, ratio = t.given("min_lr"), t.given("min_lr_rate")
    more = t.given("lr_scheduler_kwargs")
    if lowest is not None and rate:
        t.put("optim.min_lr_ratio", _share(t.number(lowest), rate), lowest, note="/ the rate")
    elif ratio is not None:
        t.copy_setting("optim.min_lr_ratio", ratio)
    elif more is not None and rate and not is_off(more.value):
        names = t.mapping(more)
        values = {
            name: t.number(replace(more, name=f"{more.name}.{name}", value=names[name]))
            for name in ("min_lr_rate", "min_lr")
            if name in names
        }
        if "min_lr_rate" in values:
            t.put("optim.min_lr_ratio", values["min_lr_rate"], more)
        elif "min_lr" in values:
            t.put("optim.min_lr_ratio", _share(values["min_lr"], rate), more)
        if names.keys() - values:
            t.differ("only the final rate is taken from it: see optim.schedule", more)


def _share(lowest: float, rate: float) -> float:
    return float(f"{lowest / rate:.12g}")


def translate_precision(t: Translation) -> None:
    """Set train.precision, and say where fp16 is replaced."""
    named = t.given("torch_dtype") or t.given("dtype")
    for name in ("bf16", "pure_bf16", "bfloat16"):
        setting = t.given(name)
        if setting is not None and setting.value in ("auto", "full"):
            t.put("train.precision", "auto" if setting.value == "auto" else "bf16", setting)
        elif setting is not None and t.flag(setting):
            t.put("train.precision", "bf16", setting)
    half = t.given("fp16", "float16")
    if half is not None and t.flag(half):
        t.differ(_NO_FP16, half)
    elif named is not None and "train.precision" not in t.lines:
        if (precision := t.choose(named, _PRECISIONS)) is None:
            t.differ(_NO_FP16, named)
        else:
            t.put("train.precision", precision, named)


def translate_seeds(t: Translation) -> None:
    """Set the seeds. One seed of another trainer is that of the ranks and of the data."""
    seed, data = t.given("seed"), t.given("data_seed")
    t.copy_setting("train.seed", seed)
    if (seed := data or seed) is not None:
        t.copy_setting("data.seed", seed)
        t.differ("the order of the records is another one with the same seed", seed)


def translate_intervals(t: Translation) -> None:
    """Set when checkpoints, scores and lines are written."""
    _interval(t, "checkpoint", t.given("save_strategy"), "save_steps", "saves_per_epoch")
    strategy = t.given("eval_strategy", "evaluation_strategy")
    if t.has_held_out:
        _interval(t, "eval", strategy, "eval_steps", "evals_per_epoch")
        _translate_best(t)
    else:
        t.skip("eval_steps", "evals_per_epoch")
    lines = t.take("logging_steps")
    if lines is not None and t.number(lines) >= 1:
        t.copy_setting("log.every", lines)
    if t.copy("checkpoint.keep_last", "save_total_limit") is None:
        t.differ("the newest checkpoints are kept here, as many as checkpoint.keep_last=2 says")


def _interval(
    t: Translation, group: str, strategy: Setting | None, name: str, per_epoch: str
) -> None:
    key, steps, each = f"{group}.every", t.given(name), t.positive(per_epoch)
    how = "steps" if strategy is None else str(strategy.value).lower()
    if steps is None and (group == "checkpoint" or strategy is not None):
        steps = t.take(name)
    if each is not None:
        t.put(key, epochs_text(1 / t.number(each)), each, note="1 / that number")
    elif how in ("no", "false"):
        t.put(key, 0, strategy, note="only at the end")
    elif how == "epoch":
        t.put(key, epochs_text(1), strategy)
    elif steps is not None and 0 < t.number(steps) < 1:
        t.put(key, epochs_text(t.number(steps)), steps)
        t.differ("a share of all steps there, and of an epoch here", steps)
    elif steps is not None and t.number(steps) > 0:
        t.put(key, t.whole(steps), steps)


def _translate_best(t: Translation) -> None:
    best, metric = t.switched_on("load_best_model_at_end"), t.given("metric_for_best_model")
    patience = t.positive("early_stopping_patience")
    if best is None and patience is None:
        return
    if metric is not None and str(metric.value).removeprefix("eval_") != "loss":
        t.differ("checkpoint.best=SET/SCORE chooses the best checkpoint", best, patience)
        return
    held_out = t.lines.get("data.eval")
    name = HELD_OUT if held_out is None else parse_sets(held_out.value)[0].name
    t.put("checkpoint.best", f"{name}/loss", best, patience, metric)
    t.copy_setting("train.early_stopping", patience)
    if best is not None:
        t.put("checkpoint.export_from", "best", best)
