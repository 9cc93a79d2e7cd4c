"""Reinforcement learning: the settings of verl, TRL, ms-swift and axolotl for GRPO and its kin."""

from megatron_vlm.commands.import_config.source_settings import Setting
from megatron_vlm.commands.import_config.translation import Translation

_NO_CRITIC = "no critic is trained; grpo and rloo compare the answers to a prompt"
_ADVANTAGES = {"grpo": "grpo", "rloo": "rloo", "grpo_passk": None, "dr_grpo": "dr_grpo"}
_AGGREGATES = {
    **{"token-mean": "tokens", "seq-mean-token-mean": "sequences"},
    "seq-mean-token-sum-norm": "constant",
}
_LOSSES = {"vanilla": "ppo", "ppo": "ppo", "gspo": "gspo", "cispo": "cispo"}
# loss_type of TRL's GRPOConfig: our recipe's advantage, loss and aggregate.
_TRL_LOSSES = {
    "grpo": ("ppo", "sequences"),
    "bnpo": ("ppo", "tokens"),
    "dapo": ("ppo", "tokens"),
    "dr_grpo": ("ppo", "constant"),
    "cispo": ("cispo", "tokens"),
}
_SAMPLES = ("rollout.n", "num_generations", "trl.num_generations")
_ANSWER = ("data.max_response_length", "max_completion_length", "trl.max_completion_length")
_REWARDS = (
    *("reward_funcs", "reward_model", "custom_reward_function.path", "trl.reward_funcs"),
    "reward.custom_reward_function.path",
)
REWARD_LINE = "rl.reward=FILE.py:NAME"


def translate_rl(t: Translation) -> None:
    """Set rl.*, for a run that learns from rewards."""
    if not t.is_rl:
        return
    if t.trainer == "verl":
        _verl_algorithm(t)
    else:
        _trl_algorithm(t)
    for key, names in {
        "rl.samples": _SAMPLES,
        "rl.max_new_tokens": _ANSWER,
        "rl.engine_max_len": ("rollout.max_model_len", "vllm_max_model_len"),
    }.items():
        setting = t.take(*names)
        if setting is not None:
            t.put(key, t.whole(setting), setting)
    for key, names in {
        "rl.temperature": ("rollout.temperature", "temperature", "trl.temperature"),
        "rl.top_p": ("rollout.top_p", "top_p", "trl.top_p"),
    }.items():
        t.copy_number(key, *names)
    top = t.given("rollout.top_k", "top_k")
    if top is not None:
        t.put("rl.top_k", max(0, t.whole(top)), top)
    _translate_sampler(t)
    _translate_reward(t)


def _verl_algorithm(t: Translation) -> None:
    estimator = t.take("algorithm.adv_estimator")
    if estimator is not None:
        advantage = t.choose(estimator, _ADVANTAGES, _NO_CRITIC)
        if advantage is None:
            raise t.source.error(estimator, "has no counterpart here", remedy=_NO_CRITIC)
        scaled = t.take("algorithm.norm_adv_by_std_in_grpo")
        if advantage == "grpo" and scaled is not None and not t.flag(scaled):
            t.put("rl.advantage", "dr_grpo", estimator, scaled)
        else:
            t.put("rl.advantage", advantage, estimator)
    loss = t.take("actor.policy_loss.loss_mode")
    if loss is not None:
        t.put("rl.loss", t.choose(loss, _LOSSES), loss)
    mean = t.take("actor.loss_agg_mode")
    if mean is not None:
        t.put("rl.aggregate", t.choose(mean, _AGGREGATES), mean)
    _clip(t, "actor.clip_ratio", "actor.clip_ratio_low", "actor.clip_ratio_high")
    _verl_penalties(t)
    epochs = t.given("actor.ppo_epochs")
    if epochs is not None and t.whole(epochs) > 1:
        t.differ("each answer is learnt from once", epochs)


def _verl_penalties(t: Translation) -> None:
    """Set the coefficients of the KL and of the entropy."""
    uses, weight = t.take("actor.use_kl_loss"), t.take("actor.kl_loss_coef")
    if uses is not None and t.flag(uses) and weight is not None:
        t.put("rl.kl_coef", t.number(weight), uses, weight)
    kind = t.given("actor.kl_loss_type")
    if kind is not None and str(kind.value) not in ("low_var_kl", "k3"):
        t.differ("the KL of the loss is estimated by k3 (low_var_kl)", kind)
    in_reward = t.given("algorithm.use_kl_in_reward")
    if in_reward is not None and t.flag(in_reward):
        t.differ("the KL is no part of a reward: rl.kl_coef adds it to the loss", in_reward)
    entropy = t.given("actor.entropy_coeff")
    if entropy is not None and t.number(entropy):
        t.put("rl.entropy_coef", t.number(entropy), entropy)


def _trl_algorithm(t: Translation) -> None:
    if t.method == "rloo":
        t.put("rl.advantage", "rloo", note="the command is rloo")
    kind = t.given("loss_type", "trl.loss_type")
    default = Setting("loss_type", "grpo" if t.trainer == "ms-swift" else "dapo")
    loss, aggregate = t.choose(kind or default, _TRL_LOSSES)
    level = t.given("importance_sampling_level")
    if level is not None and str(level.value) == "sequence":
        loss = "gspo"
    t.put("rl.loss", loss, kind or default, *([level] if level else []))
    t.put("rl.aggregate", aggregate, kind or default)
    scaled = t.given("scale_rewards", "trl.scale_rewards")
    if scaled is not None and str(scaled.value).lower() in ("false", "none"):
        t.put("rl.advantage", "dr_grpo", scaled)
    _clip(t, "epsilon", "epsilon", "epsilon_high")
    weight = t.given("beta", "trl.beta")
    if t.trainer == "ms-swift" and weight is None:
        weight = Setting("beta", 0.04)
    if weight is not None and t.number(weight):
        t.put("rl.kl_coef", t.number(weight), weight)
    dynamic = t.given("dynamic_sample")
    if dynamic is not None and t.flag(dynamic):
        t.put("rl.dynamic_sampling", True, dynamic)
    again = t.given("num_iterations", "trl.num_iterations")
    if again is not None and t.whole(again) > 1:
        t.differ("each answer is learnt from once", again)


def _clip(t: Translation, both: str, low: str, high: str) -> None:
    """Set the bounds of the ratio. Where there is only one, it is both of them."""
    one = t.given(both)
    for key, name in (("rl.clip_low", low), ("rl.clip_high", high)):
        setting = t.given(name) or one
        if setting is not None:
            t.put(key, t.number(setting), setting)


def _translate_sampler(t: Translation) -> None:
    name, uses = t.given("rollout.name"), t.given("use_vllm", "trl.use_vllm")
    if (name is not None and str(name.value) == "vllm") or t.flag(uses):
        origin = name or uses
        assert origin is not None
        t.put("rl.sampler", "vllm", origin, note="needs rl.engine: see the head of this file")
    elif name is not None:
        t.differ("vLLM is the only engine, and rl.sampler=own the trainer's own decoder", name)


def _translate_reward(t: Translation) -> None:
    found = [setting for setting in map(t.given, _REWARDS) if setting is not None]
    t.given("custom_reward_function.name", "reward.custom_reward_function.name")
    t.differ(
        f"a reward is a function score(record, answer): write one that calls yours, and give it "
        f"as {REWARD_LINE} (docs/rl.md)",
        *found,
    )
