"""verl: `python -m verl.trainer.main_ppo` with KEY=VALUE, or a YAML file with its sections."""

from typing import Any

from megatron_vlm.commands.import_config.data_rules import put_columns, put_sets, translate_split
from megatron_vlm.commands.import_config.grpo_rules import translate_answers, translate_sampler
from megatron_vlm.commands.import_config.hugging_face import SHARED_RULES
from megatron_vlm.commands.import_config.model_rules import LAYERS, matched_layers, put_adapters
from megatron_vlm.commands.import_config.run_rules import DEGREES, find_gpu_count
from megatron_vlm.commands.import_config.training_rules import put_rate, put_warmup
from megatron_vlm.commands.import_config.translation import OutputLine, Trainer, Translation

_NO_CRITIC = "no critic is trained; grpo and rloo compare the answers to a prompt"
_ADVANTAGES = {"grpo": "grpo", "rloo": "rloo", "dr_grpo": "dr_grpo"}
_AGGREGATES = {
    **{"token-mean": "tokens", "seq-mean-token-mean": "sequences"},
    "seq-mean-token-sum-norm": "constant",
}
_LOSSES = {"vanilla": "ppo", "ppo": "ppo", "gspo": "gspo", "cispo": "cispo"}


def _translate_other_file(t: Translation) -> None:
    """Say that Hydra's --config-name chooses defaults which are not read."""
    for name in ("config_path", "config_name"):
        if (setting := t.given(name)) is not None:
            t.differ("defaults of that file are not read: import it as well, and compare", setting)


def _translate_adapters(t: Translation) -> None:
    rank, excluded = t.positive("lora_rank"), t.given("model.exclude_modules")
    if rank is None:
        return
    hidden = [] if excluded is None else matched_layers(t, excluded)
    if excluded is not None and set(hidden) & set(LAYERS.values()):
        raise t.source.error(
            excluded, "leaves out layers of the decoder", remedy="name those to adapt instead"
        )
    put_adapters(t, rank, hidden, excluded)


def _translate_data(t: Translation) -> None:
    put_sets(t, "data.train_files", "data.val_files", t.words)
    names = {"images": "image_key", "videos": "video_key", "prompt": "prompt_key"}
    given = {field: t.given(f"data.{name}") for field, name in names.items()}
    columns = {field: each for field, each in given.items() if each and each.value != field}
    if columns:
        put_columns(
            t, {field: str(each.value) for field, each in columns.items()}, *columns.values()
        )
    translate_split(t)


def _translate_batches(t: Translation) -> None:
    total, mini = t.take("data.train_batch_size"), t.take("actor.ppo_mini_batch_size")
    prompts = 1 if total is None else t.whole(total)
    if total is not None:
        t.put("train.global_batch_size", prompts, total, note="prompts of a step, as there")
    if mini is not None and 0 < t.whole(mini) < prompts:
        updates, rest = divmod(prompts, t.whole(mini))
        if rest:
            raise t.source.error(
                mini, f"does not divide data.train_batch_size={prompts}", remedy="change one"
            )
        t.put("rl.updates", updates, total, mini)
    dynamic, tokens = t.given("actor.use_dynamic_bsz"), t.given("actor.ppo_max_token_len_per_gpu")
    rows = t.given("actor.ppo_micro_batch_size_per_gpu", "actor.ppo_micro_batch_size")
    if dynamic is not None and t.flag(dynamic) and tokens is not None:
        t.put("train.micro_batch_tokens", t.whole(tokens), dynamic, tokens)
    else:
        t.copy_setting("train.micro_batch_size", rows)


def _translate_rate(t: Translation) -> None:
    if put_rate(t, t.take("learning_rate")) is None:
        t.put("optim.schedule", "constant", note="the default of verl")
    put_warmup(t)


def _translate_algorithm(t: Translation) -> None:
    estimator = t.take("algorithm.adv_estimator")
    scaled = t.take("algorithm.norm_adv_by_std_in_grpo")
    if estimator is None:  # it is set to null
        raise t.error("is not set", key="algorithm.adv_estimator", remedy=_NO_CRITIC)
    advantage = t.choose(estimator, _ADVANTAGES, _NO_CRITIC)
    if advantage == "grpo" and scaled is not None and not t.flag(scaled):
        t.put("rl.advantage", "dr_grpo", estimator, scaled)
    else:
        t.put("rl.advantage", advantage, estimator)
    for key, name, table in (
        ("rl.loss", "actor.policy_loss.loss_mode", _LOSSES),
        ("rl.aggregate", "actor.loss_agg_mode", _AGGREGATES),
    ):
        if (setting := t.take(name)) is not None:
            t.put(key, t.choose(setting, table), setting)
    drawn = t.switched_on("rollout.val_kwargs.do_sample")  # else greedy, as here
    warmth = t.given("rollout.val_kwargs.temperature")
    t.copy_setting("rl.eval_temperature", warmth if drawn else None)
    _translate_penalties(t)
    translate_answers(t)
    translate_sampler(t, t.given("rollout.name"))


def _translate_penalties(t: Translation) -> None:
    uses, weight = t.take("actor.use_kl_loss"), t.take("actor.kl_loss_coef")
    if uses is not None and t.flag(uses) and weight is not None:
        t.put("rl.kl_coef", t.number(weight), uses, weight)
    kind = t.given("actor.kl_loss_type")
    if kind is not None and str(kind.value) not in ("low_var_kl", "k3"):
        t.differ("the KL of the loss is estimated by k3 (low_var_kl)", kind)
    if (in_reward := t.switched_on("algorithm.use_kl_in_reward")) is not None:
        t.differ("the KL is no part of a reward: rl.kl_coef adds it to the loss", in_reward)
    entropy = t.given("actor.entropy_coeff")
    if entropy is not None and t.number(entropy):
        t.copy_setting("rl.entropy_coef", entropy)


def _translate_run(t: Translation) -> None:
    """Set the folder where it has only a name, and a fresh start."""
    name, mode = t.given("trainer.experiment_name"), t.given("trainer.resume_mode")
    if "run" not in t.lines and name is not None:
        t.put("run", f"runs/{name.value}", name)
    if mode is not None and str(mode.value) == "disable":
        t.put("checkpoint.resume", "never", mode)


def _translate_sharding(t: Translation) -> None:
    """Let the planner choose a layout if the run does not have one of Megatron's."""
    if all(t.given(name) is None for name in DEGREES.values()):
        note = "verl shards by FSDP: the planner chooses a layout that fits"
        t.recipes["parallel"] = OutputLine("auto", note, 0)


_OPTIM, _MEGATRON = "actor.optim.", "actor.megatron."
_OFFLOAD = f"{_OPTIM}override_optimizer_config."
_DEFAULTS: dict[str, Any] = {
    **{"actor.ppo_mini_batch_size": 256, "actor.optim.lr": 1e-6, "actor.optim.weight_decay": 0.01},
    **{"actor.clip_ratio": 0.2, "actor.loss_agg_mode": "token-mean", "actor.use_kl_loss": False},
    **{"actor.policy_loss.loss_mode": "vanilla", "actor.kl_loss_coef": 0.001, "rollout.n": 1},
    **{"rollout.temperature": 1.0, "model.enable_gradient_checkpointing": True},
    **{"model.lora_alpha": 16, "model.target_modules": "all-linear", "trainer.total_epochs": 30},
    **{"data.train_batch_size": 1024, "data.max_prompt_length": 512, "data.truncation": "error"},
    **{"data.max_response_length": 512, "algorithm.adv_estimator": "gae"},
    "algorithm.norm_adv_by_std_in_grpo": True,
}
VERL = Trainer(
    title="verl",
    own_names="actor_rollout_ref algorithm critic custom_reward_function trainer",
    defaults=_DEFAULTS,
    names={
        **{"model_name_or_path": "model.path", "max_length": "data.max_prompt_length"},
        **{"truncation_strategy": "data.truncation", "nproc_per_node": "trainer.n_gpus_per_node"},
        **{"nnodes": "trainer.nnodes", "lora_rank": "model.lora_rank"},
        **{"lora_alpha": "model.lora_alpha", "target_modules": "model.target_modules"},
        **{"learning_rate": f"{_OPTIM}lr", "weight_decay": f"{_OPTIM}weight_decay"},
        "lr_scheduler_type": f"{_OPTIM}lr_scheduler_type {_OPTIM}warmup_style "
        f"{_OPTIM}lr_decay_style",
        **{"warmup_steps": f"{_OPTIM}lr_warmup_steps", "optim": f"{_OPTIM}optimizer"},
        "warmup_ratio": f"{_OPTIM}lr_warmup_steps_ratio",
        **{"min_lr_rate": f"{_OPTIM}min_lr_ratio", "max_grad_norm": "actor.grad_clip"},
        "optimizer_cpu_offload": f"{_OFFLOAD}optimizer_cpu_offload",
        "optimizer_offload_fraction": f"{_OFFLOAD}optimizer_offload_fraction",
        **{"seed": "actor.data_loader_seed", "data_seed": "data.seed"},
        **{"num_train_epochs": "trainer.total_epochs", "max_steps": "trainer.total_training_steps"},
        **{"save_steps": "trainer.save_freq", "eval_steps": "trainer.test_freq"},
        "save_total_limit": "trainer.max_actor_ckpt_to_keep",
        **{"output_dir": "trainer.default_local_dir", "report_to": "trainer.logger"},
        "resume_from_checkpoint": "trainer.resume_from_path",
        "gradient_checkpointing": "model.enable_gradient_checkpointing",
        "recompute_granularity": f"{_MEGATRON}override_transformer_config.recompute_granularity",
        "tensor_model_parallel_size": f"{_MEGATRON}tensor_model_parallel_size",
        "pipeline_model_parallel_size": f"{_MEGATRON}pipeline_model_parallel_size",
        "expert_model_parallel_size": f"{_MEGATRON}expert_model_parallel_size",
        "context_parallel_size": f"{_MEGATRON}context_parallel_size",
        "sequence_parallel_size": "actor.ulysses_sequence_parallel_size",
        **{"num_generations": "rollout.n", "max_completion_length": "data.max_response_length"},
        **{"vllm_max_model_len": "rollout.max_model_len", "temperature": "rollout.temperature"},
        **{"top_p": "rollout.top_p", "top_k": "rollout.top_k", "epsilon": "actor.clip_ratio"},
        **{"epsilon_low": "actor.clip_ratio_low", "epsilon_high": "actor.clip_ratio_high"},
        "num_iterations": "actor.ppo_epochs",
        "custom_reward_function.path": "reward.custom_reward_function.path",
        "custom_reward_function.name": "reward.custom_reward_function.name",
    },
    rules=(
        *(find_gpu_count, _translate_other_file, _translate_adapters, _translate_data),
        *(_translate_batches, _translate_rate, _translate_sharding, *SHARED_RULES),
        *(_translate_algorithm, _translate_run),
    ),
    task="grpo",
)
