"""Names in other trainers that concern reinforcement learning, and what is here instead."""

RL_NAMES = {
    "rl.reward=FILE.py:NAME is one function of a record and an answer: it returns a number, or a "
    "mapping with `reward` and further figures, and adds up several parts itself": (
        "reward_funcs reward_weights custom_reward_function reward_manager overlong_buffer"
    ),
    "there is no reward model: a function (rl.reward=FILE.py:NAME) may ask a server for one": (
        "reward_model reward_model_*"
    ),
    "no critic is trained: rl.advantage compares the answers to one prompt with each other": (
        "critic critic_warmup cliprange_value gamma lam critic_*"
    ),
    "the ratio is clipped at 1 - rl.clip_low and 1 + rl.clip_high: one value there is given for "
    "both here": "epsilon clip_ratio",
    "the ratio is clipped at 1 + rl.clip_high; with TRL's cispo the value is the largest ratio "
    "itself, which is 1 + rl.clip_high here": "epsilon_high",
    "the ratio has no second bound: rl.clip_low and rl.clip_high are all": "delta",
    "rl.kl_coef adds the KL to the initial model to the loss, by the estimate k3 (low_var_kl), "
    "and never to the reward; null does not load that model, 0 only reports the KL": (
        "use_kl_loss kl_loss_type use_kl_in_reward kl_ctrl"
    ),
    "GRPO's beta is rl.kl_coef (null does not load the initial model, 0 only reports the KL); "
    "there is no preference training": "beta",
    "each answer is learnt from once: rl.updates is the number of optimizer steps among which the "
    "train.global_batch_size prompts of a step are divided": (
        "num_iterations ppo_epochs ppo_mini_batch_size steps_per_generation generation_batch_size"
    ),
    "answers are drawn with rl.temperature, rl.top_k, rl.top_p and rl.max_new_tokens, and nothing "
    "else changes their probabilities": "min_p repetition_penalty do_sample",
    "rl.top_k=0 samples among all tokens, as -1 does there": "rollout.top_k",
    "engine.name=vllm starts vLLM in the Python environment of engine.python; engine.name=own is "
    "the trainer's own decoder": (
        "use_vllm vllm_mode rollout.name vllm_server_* vllm_group_* vllm_* sglang_*"
    ),
    "engine.options={NAME: VALUE} sets the EngineArgs of vLLM, such as gpu_memory_utilization; it "
    "belongs to engine.name=vllm": (
        "gpu_memory_utilization vllm_gpu_memory_utilization enforce_eager max_num_seqs "
        "enable_chunked_prefill engine_kwargs"
    ),
    "engine.devices lists the GPUs of each engine: an item such as '6,7' is one engine over two, "
    "and its tensor parallel size is 2": (
        "vllm_tensor_parallel_size rollout.tensor_model_parallel_size"
    ),
    "engine.max_len is the tokens of a row in an engine: a prompt with its images, and all "
    "answers": "vllm_max_model_len max_model_len",
    "engine.pictures and engine.videos are the most of each in a row": "limit_mm_per_prompt",
    "engines keep their memory while the trainer works: engine.options={gpu_memory_utilization: "
    "0.3} shares a GPU": "sleep_level free_cache_engine",
    "rl.advantage is grpo, rloo or dr_grpo; only grpo divides by the standard deviation": (
        "adv_estimator scale_rewards"
    ),
    "rl.aggregate is tokens (token-mean), sequences (the mean over answers of the mean over their "
    "tokens) or constant (divided by rl.max_new_tokens)": "loss_agg_mode",
    "rl.loss is ppo (also called vanilla), gspo (one ratio for each answer), cispo or "
    "importance_sampling": "loss_mode importance_sampling_level policy_loss",
    "rl.max_weight truncates the importance weight of each token of an engine; engine.name=own "
    "needs none": "rollout_is rollout_correction",
    "the reference of rl.kl_coef is the initial model, and it never changes": (
        "ref sync_ref_model ref_model_mixup_alpha ref_model_sync_steps"
    ),
    "rl.environment=FILE.py:CLASS is an episode of several turns, with tools of its own, and "
    "rl.turns the most answers in it": "multi_turn max_turns tools",
    "samples.jsonl and the report show rl.shown prompts of a step, with their answers": (
        "log_completions"
    ),
    "answers are scored in the micro-batches of training: train.micro_batch_tokens, or "
    "train.micro_batch_size": "log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz",
    "rl.dynamic_sampling replaces prompts whose answers all got the same reward, in at most "
    "rl.max_rounds rounds": "filter_groups",
    "every answer of a step is learnt from with its advantage, also one that was cut at "
    "rl.max_new_tokens": "mask_truncated_completions overlong_filter top_entropy_quantile",
}
# Everything below these names has the answer of the name: critic.optim.lr that of critic.
SECTIONS = (
    *("critic", "reward_model", "custom_reward_function", "val_kwargs", "engine_kwargs", "ref"),
    *("multi_turn", "kl_ctrl", "rollout_correction", "overlong_buffer", "policy_loss", "profiler"),
    *("override_config", "override_transformer_config", "override_optimizer_config"),
    *("ray_kwargs", "fsdp_config", "hydra"),
)
