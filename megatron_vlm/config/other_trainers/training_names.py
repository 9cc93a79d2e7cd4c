"""Names in other trainers of what concerns the optimizer, training, rewards and the run."""

TRAINING_NAMES = {
    "train.global_batch_size is the samples of a whole step, over all accumulation and all ranks; "
    "train.micro_batch_size is the rows of one pass": (
        "per_device_train_batch_size train_batch_size batch_size gradient_accumulation_steps"
    ),
    "no batch size is tried: megatron-vlm train --dry-run predicts the memory of "
    "train.micro_batch_size or train.micro_batch_tokens": "auto_find_batch_size",
    "eval.batch_size is the samples of one pass over all data parallel ranks": (
        "per_device_eval_batch_size eval_batch_size"
    ),
    'eval.every="0.5 epochs" is twice an epoch, and checkpoint.every is written in the same way': (
        "saves_per_epoch evals_per_epoch"
    ),
    "eval.metrics lists more scores of generated answers: names, or FILE.py:NAME": (
        "compute_metrics"
    ),
    'checkpoint.every and eval.every count steps, or epochs, as "0.5 epochs" does; without them '
    "it is every 30 minutes or 500 steps": "save_strategy eval_strategy do_eval logging_first_step",
    "train.precision is auto, bf16 or fp32; fp16 is not trained": (
        "bf16 fp16 tf32 torch_dtype dtype bfloat16"
    ),
    "optim.schedule is constant, linear, cosine or wsd": (
        "lr_scheduler_type lr_scheduler lr_decay_style lr_scheduler_kwargs"
    ),
    "optim.min_lr_ratio is a fraction of optim.lr": "min_lr",
    "the rate falls until the last step of train.steps or train.epochs; optim.decay_ratio is the "
    "part of the steps over which optim.schedule=wsd falls": "lr_decay_iters",
    "optim.name is adamw or muon, and their keys are in the group optim; optim.states=int8 keeps "
    "moments in 8 bits": (
        "optimizer optim_args optim_target_modules adamw override_optimizer_config"
    ),
    "main weights are fp32, and optim.states=bf16 or int8 makes moments smaller": (
        "use_precision_aware_optimizer"
    ),
    "optim.name=muon, optim=muon in short: Muon for matrices, AdamW for everything else": "muon",
    "supervised training has one loss, the cross-entropy of the supervised tokens; in "
    "reinforcement learning a recipe such as rl=dapo sets rl.loss, rl.advantage and rl.aggregate": (
        "loss_type enable_dft_loss enable_channel_loss use_reentrant"
    ),
    "the loss of a step is divided once, by the supervised tokens of its whole global batch, or "
    "by the sum of the weights in the records": (
        "average_tokens_across_devices include_num_input_tokens_seen"
    ),
    "no noise is added to embeddings or gradients": "neftune_noise_alpha",
    "data.seed decides the order of the records; train.seed has an effect with dropout and in "
    "reinforcement learning alone": "full_determinism",
    "checkpoint.resume is auto (the newest checkpoint of run), never, or a folder": (
        "resume_from_checkpoint overwrite_output_dir ignore_data_skip load no_load_optim "
        "no_load_rng finetune"
    ),
    "a run goes on in its own folder: run=runs/NAME, without a date added": "add_version",
    "megatron-vlm eval FOLDER scores a checkpoint without training; in training it is eval.every": (
        "val_before_train"
    ),
    "a checkpoint has weights, optimizer and progress, and run=runs/NAME resumes with all of "
    "them; the export at the end (checkpoint.export) has the weights alone": (
        "save_only_model no_save_optim no_save_rng save_on_each_node ckpt_format save_safetensors"
    ),
    "checkpoint.best=SET/SCORE keeps the best checkpoint, and checkpoint.export_from says whether "
    "the export is of it": "load_best_model_at_end metric_for_best_model greater_is_better",
    "train.early_stopping is the number of evaluations without a better checkpoint.best after "
    "which a run stops, and train.early_stopping_delta the smallest change that counts": (
        "early_stopping_patience"
    ),
    "checkpoint.push=ORG/NAME uploads the export at the end; a new repository is private, and the "
    "token comes from HF_TOKEN or `hf auth login`": (
        "push_to_hub hub_token hub_private_repo hub_strategy hub_*"
    ),
    "megatron-vlm train learns answers, and with train.objective=dpo, kto or reward preferences; "
    "megatron-vlm rl learns from rewards": (
        "stage do_train rlhf_type task_type num_labels problem_type"
    ),
    "megatron-vlm eval RUN --predictions FILE writes the answers to a data set": "do_predict",
    "train.objective is sft, dpo, ipo, kto, orpo, simpo or cpo, preference.losses and "
    "preference.beta choose the loss, and preference.reference says where the reference is from: "
    "see docs/preferences.md": "ref_model reference_free dpo_* kto_* orpo_* pref_* cpo_*",
    "preference.losses=[sigmoid,sft] preference.loss_weights=[1,0.2] adds the cross-entropy of "
    "chosen answers to dpo, and preference.sft_coef weighs it in orpo, simpo and cpo": (
        "rpo_alpha cpo_alpha pref_ftx"
    ),
    "dpo compares sums of log-probs with the reverse KL divergence, every pair with the same "
    "weight": "f_divergence_type",
    "preference.reference=keep computes the log-probs of the reference once, before the first "
    "step, and stores them in data.cache_dir": "precompute_ref_log_probs",
    "preference.desirable_weight and preference.undesirable_weight weigh the labels of kto": (
        "kto_chosen_weight"
    ),
    "eval.generate=true asks for a greedy answer to each record, of at most eval.max_new_tokens "
    "tokens; loss and token accuracy are always measured": "val_kwargs",
    "log.trackers=[wandb,tensorboard] log the figures elsewhere, too": (
        "report_to tensorboard_dir logger"
    ),
    "metrics.jsonl and the report always have loss, rate, gradient norm, tokens per second and "
    "memory; log.every is the number of steps between printed lines": (
        "log_throughput log_params_norm"
    ),
    "the report of a run has its curves: log.report=true, or megatron-vlm report RUN": "plot_loss",
    "log.trackers and log.project are the only settings of trackers here; they read their own "
    "variables, such as WANDB_ENTITY, MLFLOW_TRACKING_URI and SWANLAB_MODE": (
        "wandb_entity wandb_watch wandb_log_model wandb_* use_swanlab swanlab_* mlflow_* trackio_* "
        "hf_mlflow_*"
    ),
    "a run is named by its folder: run=runs/NAME": (
        "run_name wandb_name experiment_name wandb_exp_name"
    ),
    "settings of Hydra's own are not taken; the folder of a run is run=runs/NAME": "hydra",
    "several machines are started with torchrun, Slurm or Ray: docs/clusters.md": (
        "nnodes master_addr master_port"
    ),
    "launch=ray runs the ranks as actors of a Ray cluster: docs/clusters.md": "ray_kwargs",
    "the processes communicate by NCCL on GPUs and gloo on a CPU, which platform=cpu chooses": (
        "ddp_backend distributed_backend trainer.device"
    ),
    "gradients are reduced by Megatron; parallel.overlap_grad_reduce=true does it during the "
    "backward pass": "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_*",
    "launch.timeout_minutes counts minutes: a rank that makes no progress for longer ends the "
    "job": "ddp_timeout",
    "`--debug` after the command shows the traceback of an error": "debug",
    "memory is freed and garbage collected by PyTorch and Python": "manual_gc",
    "log.profile_steps=[10,12] writes a trace of torch's profiler, on rank 0": "profiler",
    "vLLM serves what megatron-vlm export writes (docs/deploy.md); megatron-vlm serve is a "
    "service for the Tinker client": "infer_backend",
    "figures go to metrics.jsonl, the report and the trackers of log.trackers; a package may add "
    "one": "comet_*",
    # Reinforcement learning.
    "rl.reward=FILE.py:NAME is one function of a record and an answer: it returns a number, or a "
    "mapping with `reward` and further figures, and adds up several parts itself": (
        "reward_funcs reward_weights custom_reward_function reward_manager overlong_buffer"
    ),
    "rl.reward=model:FOLDER is an export of a run with train.objective=reward; the ranks run it": (
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
