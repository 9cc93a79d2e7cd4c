"""Names in other trainers that concern reinforcement learning, and what is here instead."""

_REWARD = (
    "rl.reward=FILE.py:NAME is one function of a record and an answer: it returns a number, or a "
    "mapping with `reward` and further figures, and adds up several parts itself"
)
_REWARD_MODEL = (
    "there is no reward model: a function (rl.reward=FILE.py:NAME) may ask a server for one"
)
_NO_CRITIC = "no critic is trained: rl.advantage compares the answers to one prompt with each other"
_CLIP = (
    "the ratio is clipped at 1 - rl.clip_low and 1 + rl.clip_high: one value there is given for "
    "both here"
)
_CLIP_HIGH = (
    "the ratio is clipped at 1 + rl.clip_high; with TRL's cispo the value is the largest ratio "
    "itself, which is 1 + rl.clip_high here"
)
_KL = (
    "rl.kl_coef adds the KL to the initial model to the loss, by the estimate k3 (low_var_kl), and "
    "never to the reward; null does not load that model, 0 only reports the KL"
)
_BETA = (
    "GRPO's beta is rl.kl_coef (null does not load the initial model, 0 only reports the KL); "
    "there is no preference training"
)
_UPDATES = (
    "each answer is learnt from once: rl.updates is the number of optimizer steps among which the "
    "train.global_batch_size prompts of a step are divided"
)
_SAMPLING = (
    "answers are drawn with rl.temperature, rl.top_k, rl.top_p and rl.max_new_tokens, and nothing "
    "else changes their probabilities"
)
_SAMPLER = (
    "rl.sampler=vllm starts vLLM in the Python environment of rl.engine; rl.sampler=own is the "
    "trainer's own decoder"
)
_ENGINE = (
    "rl.engine_options={NAME: VALUE} sets the EngineArgs of vLLM, such as gpu_memory_utilization; "
    "it belongs to rl.sampler=vllm"
)
_ENGINE_GPUS = (
    "rl.engine_gpus lists the GPUs of each engine: an item such as '6,7' is one engine over two, "
    "and its tensor parallel size is 2"
)
_ADVANTAGE = "rl.advantage is grpo, rloo or dr_grpo; only grpo divides by the standard deviation"
_AGGREGATE = (
    "rl.aggregate is tokens (token-mean), sequences (the mean over answers of the mean over their "
    "tokens) or constant (divided by rl.max_new_tokens)"
)
_POLICY_LOSS = (
    "rl.loss is ppo (also called vanilla), gspo (one ratio for each answer), cispo or "
    "importance_sampling"
)
_WEIGHTS = (
    "rl.max_weight truncates the importance weight of each token of an engine; rl.sampler=own "
    "needs none"
)
_REFERENCE = "the reference of rl.kl_coef is the initial model, and it never changes"
_TURNS = (
    "rl.environment=FILE.py:CLASS is an episode of several turns, with tools of its own, and "
    "rl.turns the most answers in it"
)
_SHOWN = "samples.jsonl and the report show rl.shown prompts of a step, with their answers"
_OFF_POLICY = (
    "rl.off_policy_steps=1 lets the engines of rl.sampler=vllm draw the next step's answers during "
    "a step; 0 waits for them"
)
_SCORING = (
    "answers are scored in the micro-batches of training: train.micro_batch_tokens, or "
    "train.micro_batch_size"
)
_SAME_GROUP = (
    "rl.dynamic_sampling replaces prompts whose answers all got the same reward, in at most "
    "rl.max_rounds rounds"
)
_ALL_ANSWERS = (
    "every answer of a step is learnt from with its advantage, also one that was cut at "
    "rl.max_new_tokens"
)
_FORMAT = "rl.max_tokens limits an episode, and rl.max_new_tokens one answer of it"

RL_SENTENCES = {
    _REWARD: "reward_funcs reward_weights reward_func reward_function custom_reward_function "
    "reward_manager launch_reward_fn_async multi_objective_aggregation reward_fn compute_score "
    "cosine_min_len_value_wrong soft_max_length repetition_n_grams overlong_buffer "
    "reward_kwargs use_reward_loop reward_model_plugin",
    _REWARD_MODEL: "reward_model reward_adapters reward_model_type reward_model_revision "
    "reward_model_adapters reward_model_quantization_bit",
    _NO_CRITIC: "critic critic_warmup value_model vf_coef cliprange_value gamma lam "
    "value_clip gae_lambda critic_lr whiten_rewards horizon target_kl kl_target",
    _CLIP: "epsilon clip_ratio cliprange clip_range eps_clip",
    _CLIP_HIGH: "epsilon_high eps_clip_high",
    "the ratio has no second bound: rl.clip_low and rl.clip_high are all": "delta clip_ratio_c "
    "dual_clip",
    _KL: "use_kl_loss kl_loss_type use_kl_in_reward kl_in_reward kl_penalty kl_ctrl "
    "use_bias_correction_kl init_kl_coef kl_estimator adap_kl_ctrl ppo_target",
    _BETA: "beta",
    _UPDATES: "num_iterations ppo_epochs num_ppo_epochs ppo_mini_batch_size steps_per_generation "
    "generation_batch_size num_mini_batches num_sample_generations ppo_buffer_size actor.shuffle "
    "gen_batch_size local_rollout_forward_batch_size rollout_batch_size",
    _SAMPLING: "min_p repetition_penalty generation_kwargs presence_penalty frequency_penalty "
    "generation_config do_sample ignore_eos missing_eos_penalty stop_words stop "
    "structured_outputs_regex logprobs max_logprobs length_penalty "
    "skip_special_tokens top_logprobs",
    "rl.top_k=0 samples among all tokens, as -1 does there": "rollout.top_k",
    _SAMPLER: "use_vllm vllm_mode rollout.name rollout.mode use_transformers_paged "
    "cache_implementation hybrid_engine infer_engine use_lmdeploy rollout_backend vllm_model_impl",
    _ENGINE: "gpu_memory_utilization vllm_gpu_memory_utilization vllm_enforce_eager "
    "vllm_max_lora_rank vllm_max_num_seqs vllm_enable_prefix_caching rollout.dtype enforce_eager "
    "max_num_seqs max_num_batched_tokens enable_chunked_prefill enable_prefix_caching swap_space "
    "disable_custom_all_reduce engine_kwargs load_format disable_log_stats cudagraph_capture_sizes "
    "session_len cache_max_entry_count quant_policy vision_batch_size max_lora_rank "
    "mm_processor_cache_gb rollout.expert_parallel_size skip_tokenizer_init",
    "engines get the new weights tensor by tensor, after each step": "layered_summon "
    "update_weights_bucket_megabytes weight_sync_backend",
    _ENGINE_GPUS: "vllm_tensor_parallel_size rollout.tensor_model_parallel_size "
    "rollout_num_gpus rollout_tp rollout.data_parallel_size vllm_data_parallel_size",
    "rl.engine_max_len is the tokens of a row in an engine: a prompt with its images, and all "
    "answers": "vllm_max_model_len max_model_len vllm_max_model_length max_model_length",
    "rl.engine_pictures and rl.engine_videos are the most of each in a row": (
        "limit_mm_per_prompt vllm_limit_mm_per_prompt"
    ),
    "engines keep their memory while the trainer works: rl.engine_options="
    "{gpu_memory_utilization: 0.3} shares a GPU": "vllm_enable_sleep_mode sleep_level "
    "free_cache_engine multi_stage_wake_up vllm_sleep_level move_model_batches",
    _ADVANTAGE: "adv_estimator advantage_estimator scale_rewards norm_adv_by_std_in_grpo "
    "normalize_advantages num_repeat_for_baseline normalize_advantage ppo_score_norm",
    _AGGREGATE: "loss_agg_mode loss_aggregation loss_scale_factor",
    _POLICY_LOSS: "loss_mode importance_sampling_level policy_loss policy_loss_fn "
    "sapo_temperature_neg sapo_temperature_pos clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio "
    "ppo_kl_coef tau_pos tau_neg",
    _WEIGHTS: "vllm_importance_sampling_correction vllm_importance_sampling_mode "
    "vllm_importance_sampling_cap rollout_is rollout_is_threshold rollout_is_level "
    "rollout_is_threshold_lower rollout_correction rollout_importance_sampling_mode "
    "rollout_importance_sampling_threshold off_policy_mask_threshold "
    "off_policy_sequence_mask_delta rollout_rs rollout_rs_threshold bypass_mode",
    _REFERENCE: "ref sync_ref_model ref_model_mixup_alpha ref_model_sync_steps ref_policy "
    "reference_model ref_model_path",
    _TURNS: "multi_turn max_tool_calling_iterations max_turns multi_turn_scheduler "
    "environment_factory max_assistant_turns max_user_turns tool_config_path tools num_env gym_env "
    "use_gym_env max_tool_response_length max_parallel_calls rollout_func "
    "tool_response_truncate_side interaction_config_path agent",
    _SHOWN: "log_completions num_completions_to_print log_unique_prompts log_multimodal "
    "rollout_data_dir log_entropy trace completion_length_limit_scope",
    _OFF_POLICY: "async_generate staleness_threshold async_training rollout_mode max_staleness "
    "trigger_parameter_sync_step partial_rollout",
    _SCORING: "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu "
    "log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu calculate_log_probs "
    "forward_max_token_len_per_gpu forward_micro_batch_size_per_gpu",
    _SAME_GROUP: "max_resample_times max_num_gen_batches filter_groups",
    _ALL_ANSWERS: "mask_truncated_completions over_sample_rate overlong_filter "
    "top_entropy_quantile entropy_from_logits_with_chunking entropy_checkpointing pf_ppo "
    "use_pf_ppo reweight_method weight_pow rollout_sample_limit",
    _FORMAT: "max_episode_length max_total_tokens max_response_tokens",
}
RL_FAMILIES = {
    _SAMPLER: "vllm_server_ vllm_group_ vllm_ sglang_",
    _NO_CRITIC: "critic_",
    _REWARD_MODEL: "reward_model_",
}
# Everything below these names has the answer of the name: critic.optim.lr that of critic.
SECTIONS = (
    *(
        "critic",
        "reward_model",
        "custom_reward_function",
        "val_kwargs",
        "custom_cls",
        "engine_kwargs",
    ),
    *("multi_turn", "ref", "kl_ctrl", "agent", "trace", "rollout_correction", "overlong_buffer"),
    *("policy_loss", "override_config", "override_transformer_config", "override_ddp_config"),
    *("override_optimizer_config", "override_mcore_model_config", "profiler", "global_profiler"),
    *("ray_kwargs", "wrap_policy", "hydra", "fsdp_config", "bnb_config_kwargs"),
)
