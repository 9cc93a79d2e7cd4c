"""Names in other trainers that concern the optimizer and the course of training, and what is here
instead."""

_BATCH = (
    "train.global_batch_size is the samples of a whole step, over all accumulation and all ranks; "
    "train.micro_batch_size is the rows of one pass"
)
_STEPS = (
    "checkpoint.every, eval.every and log.every count steps, checkpoint.every_epochs and "
    "eval.every_epochs epochs; without them it is every 30 minutes or 500 steps"
)
_PRECISION = "train.precision is auto, bf16 or fp32; fp16 is not trained"
_SCHEDULE = "optim.schedule is constant, linear, cosine or wsd"
_ADAMW = (
    "optim.name is adamw or muon, and their keys are in the group optim; optim.states=int8 keeps "
    "moments in 8 bits"
)
_LOSS = (
    "supervised training has one loss, the cross-entropy of the supervised tokens; in "
    "reinforcement learning a recipe such as rl=dapo sets rl.loss, rl.advantage and rl.aggregate"
)
_MEAN = (
    "the loss of a step is divided once, by the supervised tokens of its whole global batch, or by "
    "the sum of the weights in the records"
)
_RESUME = "checkpoint.resume is auto (the newest checkpoint of run), never, or a folder"
_CHECKPOINT = (
    "a checkpoint has weights, optimizer and progress, and run=runs/NAME resumes with all of them; "
    "the export at the end (checkpoint.export) has the weights alone"
)
_STOPS = (
    "a run that gets SIGTERM or SIGUSR1 saves and ends, and resumes when it is started again; "
    "train.steps or train.epochs says when it is complete"
)
_BEST = (
    "checkpoint.best=SET/SCORE keeps the best checkpoint, and checkpoint.export_from says "
    "whether the export is of it"
)
_STOP_EARLY = (
    "train.early_stopping is the number of evaluations without a better checkpoint.best after "
    "which a run stops, and train.early_stopping_delta the smallest change that counts"
)
_EPOCHS = (
    "eval.every_epochs and checkpoint.every_epochs are the epochs from one to the next: "
    "eval.every_epochs=0.5 is twice an epoch"
)
_EXPORT = (
    "checkpoint.export=true writes a Hugging Face folder at the end, and megatron-vlm export does "
    "it for any checkpoint"
)
_PUSH = (
    "checkpoint.push=ORG/NAME uploads the export at the end; a new repository is private, and the "
    "token comes from HF_TOKEN or `hf auth login`"
)
_SUPERVISED = (
    "megatron-vlm train learns answers, and with train.objective=dpo or kto preferences; "
    "megatron-vlm rl learns from rewards"
)
_PREFERENCES = (
    "train.objective is sft, dpo, ipo, kto, orpo, simpo or cpo, preference.losses and "
    "preference.beta choose the loss, and train.reference says where the reference is from: see "
    "docs/preferences.md"
)
_PREFERENCE_SFT = (
    "preference.losses=[sigmoid,sft] preference.loss_weights=[1,0.2] adds the cross-entropy of "
    "chosen answers to dpo, and preference.sft_coef weighs it in orpo, simpo and cpo"
)
_DPO_PLAIN = (
    "dpo compares sums of log-probs with the reverse KL divergence, every pair with the same weight"
)
_KEPT_REFERENCE = (
    "train.reference=keep computes the log-probs of the reference once, before the first step, and "
    "stores them in data.cache_dir"
)
_NO_REWARD_MODEL = (
    "no reward model is trained: megatron-vlm train learns from preferences directly "
    "(train.objective=dpo), and megatron-vlm rl takes a function as its reward"
)
_EVALUATION = (
    "eval.generate=true asks for a greedy answer to each record, of at most eval.max_new_tokens "
    "tokens; loss and token accuracy are always measured"
)
_REPRODUCIBLE = (
    "data.seed decides the order of the records; train.seed has an effect with dropout and in "
    "reinforcement learning alone"
)
_NONFINITE = (
    "train.on_nonfinite=skip leaves out steps whose loss or gradient is not finite; a loss that "
    "rises stops nothing"
)

TRAINING_SENTENCES = {
    _BATCH: "per_device_train_batch_size train_batch_size batch_size gradient_accumulation_steps "
    "per_gpu_train_batch_size gradient_accumulation accumulate_grad_batches "
    "train_micro_batch_size_per_gpu rampup_batch_size ppo_micro_batch_size",
    "no batch size is tried: megatron-vlm train --dry-run predicts the memory of "
    "train.micro_batch_size or train.micro_batch_tokens": "auto_find_batch_size gpu_memory_limit",
    "eval.batch_size is the samples of one pass over all data parallel ranks": (
        "per_device_eval_batch_size eval_batch_size val_batch_size eval_accumulation_steps "
        "eval_micro_batch_size"
    ),
    _EPOCHS: "saves_per_epoch evals_per_epoch",
    "eval.metrics lists more scores of generated answers: names, or FILE.py:NAME": "metric "
    "compute_metrics eval_metric",
    _STEPS: "save_strategy eval_strategy evaluation_strategy logging_strategy do_eval "
    "eval_delay "
    "save_first_step logging_first_step start_eval",
    _PRECISION: "bf16 fp16 tf32 torch_dtype dtype mixed_precision params_dtype bfloat16 float16 "
    "pure_bf16 bf16_full_eval fp16_full_eval half_precision_backend infer_dtype loss_scale_window "
    "initial_loss_scale min_loss_scale hysteresis",
    _SCHEDULE: "lr_scheduler_type lr_scheduler lr_decay_style scheduler lr_scheduler_kwargs "
    "warmup_style num_cycles lr_quadratic_warmup lr_div_factor lr_wsd_decay_style",
    "optim.min_lr_ratio is a fraction of optim.lr": "min_lr min_learning_rate final_lr",
    "the rate falls until the last step of train.steps or train.epochs; optim.decay_ratio is the "
    "part of the steps over which optim.schedule=wsd falls": "lr_decay_iters lr_decay_samples "
    "lr_decay_steps cosine_constant_lr_ratio lr_wsd_decay_iters lr_decay_ratio",
    "optim.warmup_steps counts steps, not samples": "lr_warmup_samples",
    "the warm-up begins at 0": "lr_warmup_init init_lr",
    "train.steps counts steps, and train.epochs passes over the data": "train_samples "
    "total_train_samples",
    _ADAMW: "optimizer optim_type optim_args optim_target_modules optimizer_name adam_beta3 "
    "adam_epsilon2 sgd_momentum adamw use_adam_mini decoupled_weight_decay "
    "override_optimizer_config optimizer_impl torchdistx_path optimizer_type optim_per_parameter "
    "optim.betas",
    "main weights are fp32, and optim.states=bf16 or int8 makes moments smaller": ""
    "use_precision_aware_optimizer main_params_dtype exp_avg_dtype exp_avg_sq_dtype",
    "weight decay is constant over the run: optim.weight_decay": "start_weight_decay "
    "end_weight_decay weight_decay_incr_style",
    "optim.vision_lr and optim.merger_lr are the only rates beside optim.lr": "lr_scale_groups "
    "lr_groups embedding_lr embedding_lr_scale no_decay_cond lr_mult head_lr_mult",
    "optim.name=muon, optim=muon in short: Muon for matrices, AdamW for everything else": ""
    "muon use_muon",
    "Newton-Schulz is torch's: in bf16 on a GPU, of whole matrices, with torch's coefficients": ""
    "muon_fp32_matmul_prec muon_tp_mode muon_split_qkv muon_extra_scale_factor",
    "optim.muon_adjust_lr_fn is match_rms_adamw or original": "muon_scale_mode",
    _LOSS: "loss_type label_smoothing_factor enable_dft_loss use_dft_loss use_asft_loss "
    "use_eaft_loss dft_loss enable_channel_loss loss_function use_reentrant acc_strategy "
    "compute_accuracy",
    _MEAN: "average_tokens_across_devices calculate_per_token_loss num_items_in_batch "
    "include_num_input_tokens_seen use_token_weighted_loss",
    "no noise is added to embeddings or gradients": "neftune_noise_alpha neftune noise_alpha",
    _REPRODUCIBLE: "full_determinism deterministic_mode use_deterministic_algorithms deterministic "
    "non_deterministic",
    _NONFINITE: "loss_watchdog_threshold loss_watchdog_patience logging_nan_inf_filter "
    "check_for_nan_in_loss_and_grad rerun_mode check_for_spiky_loss "
    "no_check_for_nan_in_loss_and_grad",
    _RESUME: "resume_from_checkpoint overwrite_output_dir ignore_data_skip load resume_mode "
    "resume_from_path auto_resume_from_checkpoints resume_only_model resume_from resume_path "
    "no_load_optim no_load_rng finetune load_data_args "
    "restore_callback_states_from_checkpoint exit_on_missing_checkpoint "
    "pretrained_checkpoint ckpt_step load_contents use_checkpoint_args "
    "use_checkpoint_opt_param_scheduler override_opt_param_scheduler no_load_scheduler",
    "a run goes on in its own folder: run=runs/NAME, without a date added": "add_version",
    _STOPS: "exit_duration_in_mins exit_interval esi_redundant_time exit_signal_handler "
    "max_train_seconds",
    "megatron-vlm eval FOLDER scores a checkpoint without training; in training it is eval.every": (
        "eval_on_start val_before_train eval_at_start val_only do_validation"
    ),
    _CHECKPOINT: "save_only_model no_save_optim no_save_rng save_on_each_node ckpt_format "
    "auto_detect_ckpt_format save_safetensors safe_serialization enable_jit_checkpoint "
    "save_contents checkpoint.contents ckpt_fully_parallel_save ckpt_fully_parallel_load "
    "ckpt_assume_constant_structure dist_ckpt_format save_hf_model save_retain_interval "
    "mcore_model dist_ckpt_strictness",
    "checkpoint.async_save, which is on, writes while training continues": (
        "use_persistent_ckpt_worker async_checkpoint use_async_save"
    ),
    "checkpoint.keep_last is how many of the newest checkpoints stay; checkpoint.keep_every keeps "
    "more for good": "remove_previous_ckpt_in_save del_local_ckpt_after_load "
    "create_checkpoint_symlink max_critic_ckpt_to_keep save_total_limit_best",
    _BEST: "load_best_model_at_end metric_for_best_model greater_is_better best_metric "
    "save_best best_model_metric",
    _STOP_EARLY: "early_stopping_patience early_stopping_steps early_stop_patience "
    "early_stopping_threshold early_stop_interval early_stopping use_early_stopping",
    _EXPORT: "export_dir export_size export_device export_legacy_format max_shard_size to_mcore "
    "to_hf export_hub_model_id exist_ok save_hf_format output_format commit_message",
    _PUSH: "push_to_hub hub_token hub_private_repo hub_strategy hub_always_push hub_revision "
    "hf_hub_token ms_hub_token om_hub_token hf_use_auth_token hub_repo log_completions_hub_repo "
    "use_auth_token",
    _SUPERVISED: "stage do_train rlhf_type task task_type num_labels problem_type trainer_cls "
    "do_rlhf job_type",
    "megatron-vlm eval RUN --predictions FILE writes the answers to a data set": "do_predict "
    "result_path output_predictions",
    _PREFERENCES: "ref_model ref_model_init_kwargs ref_adapter_name reference_free "
    "force_use_ref_model ref_model_adapters ref_model_type ref_model_revision "
    "orpo_alpha calculate_kl rl_beta ref_load ref_adapter_load ref_adapters ref_mcore_model "
    "ref_mcore_adapter ref_model_quantization_bit max_prompt_and_completion_length",
    _PREFERENCE_SFT: "rpo_alpha cpo_alpha pref_ftx nll_alpha",
    _DPO_PLAIN: "f_divergence_type f_alpha_divergence_coef ld_alpha use_weighting",
    _KEPT_REFERENCE: "precompute_ref_log_probs precompute_ref_batch_size use_logits_to_keep",
    "preference.desirable_weight and preference.undesirable_weight weigh the labels of kto": (
        "kto_chosen_weight kto_rejected_weight"
    ),
    _NO_REWARD_MODEL: "rejected_loss_weight center_rewards_coefficient process_reward_model",
    _EVALUATION: "prediction_loss_only include_for_metrics batch_eval_metrics "
    "eval_num_beams num_beams eval_do_concat_batches eval_use_gather_object eval_table_size "
    "do_causal_lm_eval eval_causal_lm_metrics num_generations_eval val_kwargs "
    "eval_generation_config eval_use_evalscope eval_dataset_args "
    "log_val_generations validation_data_dir",
}
TRAINING_FAMILIES = {
    _PREFERENCES: "dpo_ kto_ orpo_ pref_ cpo_",
    _PUSH: "hub_",
}
