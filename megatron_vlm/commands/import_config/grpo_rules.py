"""Learning from rewards: what verl, and TRL's GRPO with those that use it, have in common."""

from megatron_vlm.commands.import_config.source_settings import Setting
from megatron_vlm.commands.import_config.translation import Translation

# loss_type of TRL's GRPOConfig: our loss and aggregate.
_LOSSES = {
    "grpo": ("ppo", "sequences"),
    "bnpo": ("ppo", "tokens"),
    "dapo": ("ppo", "tokens"),
    "dr_grpo": ("ppo", "constant"),
    "cispo": ("cispo", "tokens"),
}
# Our advantage by that of the estimator, and by what scale_rewards divides it by.
_SCALED = {
    "grpo": {"true": "grpo", "group": "grpo", "false": "dr_grpo", "none": "dr_grpo"},
    "rloo": {"false": "rloo", "none": "rloo"},
}
_REWARDS = ("reward_funcs", "reward_model", "custom_reward_function.path")
REWARD_LINE = "rl.reward=FILE.py:NAME"


def translate_grpo(t: Translation) -> None:
    """Set rl.* of TRL's GRPO and RLOO, and of those that use them."""
    if not t.is_rl:
        return
    kind = t.take("loss_type") or Setting("loss_type", "dapo", is_default=True)
    our_loss, aggregate = t.choose(kind, _LOSSES)
    level = t.given("importance_sampling_level")
    if level is not None and str(level.value) == "sequence":
        our_loss = "gspo"
    t.put("rl.loss", our_loss, kind, level)
    t.put("rl.aggregate", aggregate, kind)
    _translate_advantage(t)
    weight = t.take("beta")
    if weight is not None and t.number(weight):
        t.copy_setting("rl.kl_coef", weight)
    t.copy_setting("rl.dynamic_sampling", t.switched_on("dynamic_sample"))
    translate_answers(t)
    translate_sampler(t, t.given("use_vllm"))


def _translate_advantage(t: Translation) -> None:
    """Set rl.advantage by what is subtracted from a reward and by what it is divided."""
    estimator, scaled = t.given("advantage_estimator"), t.named("scale_rewards")
    kind = t.method if estimator is None else t.choose(estimator, {each: each for each in _SCALED})
    note = f"the command is {kind}" if estimator is None else ""
    if scaled is not None:
        kind = t.choose(scaled, _SCALED[kind])
    t.put("rl.advantage", kind, estimator, scaled, note=note)


def translate_answers(t: Translation) -> None:
    """Set how answers are drawn and how they are learnt from."""
    for key, name in {
        "rl.samples": "num_generations",
        "rl.max_new_tokens": "max_completion_length",
        "engine.max_len": "vllm_max_model_len",
        "rl.temperature": "temperature",
        "rl.top_p": "top_p",
    }.items():
        t.copy(key, name)
    top = t.given("top_k")
    if top is not None:
        t.put("rl.top_k", max(0, t.whole(top)), top)
    one = t.given("epsilon")  # where there is one bound of the ratio, it is both of them
    for bound in ("low", "high"):
        t.copy_setting(f"rl.clip_{bound}", t.given(f"epsilon_{bound}") or one)
    again = t.given("num_iterations")
    if again is not None and t.whole(again) > 1:
        t.differ("each answer is learnt from once", again)
    t.skip("custom_reward_function.name")
    t.differ(
        f"a reward is a function score(record, answer): write one that calls yours, and give it "
        f"as {REWARD_LINE} (docs/rl.md)",
        *map(t.given, _REWARDS),
    )


def translate_sampler(t: Translation, engine: Setting | None) -> None:
    """Set engine.name by the setting that names an engine, or that turns vLLM on."""
    if engine is None:
        return
    if str(engine.value) == "vllm" or (engine.name.endswith("use_vllm") and t.flag(engine)):
        t.put("engine.name", "vllm", engine, note="needs engine.python: see the head of this file")
    elif not engine.name.endswith("use_vllm"):
        t.differ("vLLM is the only engine, and engine.name=own the trainer's own decoder", engine)
