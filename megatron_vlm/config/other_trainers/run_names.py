"""Names in other trainers that concern the run: its figures, its processes and machines, and what
is here instead."""

_FIGURES = "log.tensorboard=true and log.wandb=PROJECT write elsewhere what metrics.jsonl has"
_ALWAYS = (
    "metrics.jsonl and the report always have loss, rate, gradient norm, tokens per second and "
    "memory; log.every is the number of steps between printed lines"
)
_REPORT = "the report of a run has its curves: log.report=true, or megatron-vlm report RUN"
_WANDB = (
    "log.wandb=PROJECT is the only setting of W&B here; its own variables, such as WANDB_ENTITY "
    "and WANDB_MODE, are read by wandb"
)
_NO_TRACKER = (
    "figures go to metrics.jsonl, the report, log.tensorboard=true and log.wandb=PROJECT, and to "
    "no other service"
)
_NAMED = "a run is named by its folder: run=runs/NAME"
_MACHINES = "several machines are started with torchrun, Slurm or Ray: docs/clusters.md"
_RAY = "launch=ray runs the ranks as actors of a Ray cluster: docs/clusters.md"
_BACKENDS = (
    "the processes communicate by NCCL on GPUs and gloo on a CPU, which platform=cpu chooses"
)
_REDUCTIONS = (
    "gradients are reduced by Megatron; parallel.overlap_grad_reduce=true does it during the "
    "backward pass"
)
_TIMEOUT = (
    "launch.timeout_minutes counts minutes: a rank that makes no progress for longer ends the job"
)
_PROFILE = (
    "log.profile_steps=[10,12] writes a trace of torch's profiler, and log.profile_ranks says on "
    "which ranks"
)
_SERVICE = (
    "vLLM serves what megatron-vlm export writes (docs/checkpoints.md); megatron-vlm serve is a "
    "service for the Tinker client"
)

RUN_SENTENCES = {
    _FIGURES: "report_to logging_dir tensorboard_dir logger use_tensorboard use_wandb "
    "log_with trackers tensorboard_queue_size tensorboard_log_interval",
    _ALWAYS: "log_throughput log_params_norm log_num_zeros_in_grad log_timers_to_tensorboard "
    "log_validation_ppl_to_tensorboard log_memory_to_tensorboard timing_log_level "
    "no_log_learning_rate_to_tensorboard log_learning_rate_to_tensorboard "
    "include_tokens_per_second include_tkps skip_memory_metrics log_on_each_node log_level "
    "log_level_replica disable_tqdm logging_level print_param_status log_world_size_to_tensorboard "
    "log_batch_size_to_tensorboard timing_log_option log_progress verbose",
    _REPORT: "plot_loss create_report",
    _WANDB: "wandb_entity wandb_mode wandb_watch wandb_log_model wandb_run_id wandb_save_dir "
    "wandb_api_key wandb_group wandb_tags",
    _NO_TRACKER: "use_swanlab use_comet use_mlflow use_trackio trackio clearml",
    _NAMED: "run_name default_hdfs_dir wandb_name wandb_run_name experiment_name wandb_exp_name "
    "exp_name",
    "settings of Hydra's own are not taken; the folder of a run is run=runs/NAME": "hydra",
    _MACHINES: "nnodes node_rank master_addr master_port num_nodes num_machines machine_rank "
    "main_process_ip main_process_port rdzv_endpoint rdzv_id rdzv_backend hostfile",
    _RAY: "ray_kwargs ray_wait_register_center_timeout ray_run_name ray_num_workers "
    "ray_storage_path resources_per_worker placement_strategy ray_init use_ray device_groups "
    "ray_init_kwargs",
    _BACKENDS: "ddp_backend distributed_backend use_cpu no_cuda trainer.device "
    "nccl_communicator_config_path",
    _REDUCTIONS: "local_ddp ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers "
    "ddp_static_graph find_unused_parameters",
    _TIMEOUT: "ddp_timeout nccl_timeout dist_timeout",
    "`--debug` after the command shows the traceback of an error": "debug",
    "memory is freed and garbage collected by PyTorch and Python": "torch_empty_cache_steps "
    "manual_gc manual_gc_interval empty_cache use_expandable_segments empty_unused_memory_level",
    _PROFILE: "profiler_steps profile profile_step_start profile_step_end use_pytorch_profiler "
    "profiler global_profiler profile_continuous_steps record_memory_history",
    _SERVICE: "served_model_name owned_by api_key server_name server_port eval_url base_url "
    "infer_backend stream max_batch_size lang share studio_title is_multimodal eval_num_proc",
    "an evaluation writes its scores and answers into run=runs/NAME": "eval_output_dir",
    "options of a Python program are not taken: a setting is KEY=VALUE": "ignore_args_error",
}
RUN_FAMILIES = {
    _NO_TRACKER: "swanlab_ comet_ mlflow_ trackio_ hf_mlflow_",
    _REDUCTIONS: "ddp_",
    _WANDB: "wandb_",
}
