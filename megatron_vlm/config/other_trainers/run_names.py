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
_PROFILE = "log.profile_steps=[10,12] writes a trace of torch's profiler, on rank 0"
_SERVICE = (
    "vLLM serves what megatron-vlm export writes (docs/deploy.md); megatron-vlm serve is a "
    "service for the Tinker client"
)

RUN_SENTENCES = {
    _FIGURES: "report_to tensorboard_dir logger",
    _ALWAYS: "log_throughput log_params_norm",
    _REPORT: "plot_loss",
    _WANDB: "wandb_entity wandb_watch wandb_log_model",
    _NAMED: "run_name wandb_name experiment_name wandb_exp_name",
    "settings of Hydra's own are not taken; the folder of a run is run=runs/NAME": "hydra",
    _MACHINES: "nnodes master_addr master_port",
    _RAY: "ray_kwargs",
    _BACKENDS: "ddp_backend distributed_backend trainer.device",
    _REDUCTIONS: "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers",
    _TIMEOUT: "ddp_timeout",
    "`--debug` after the command shows the traceback of an error": "debug",
    "memory is freed and garbage collected by PyTorch and Python": "manual_gc",
    _PROFILE: "profiler",
    _SERVICE: "infer_backend",
}
RUN_FAMILIES = {
    _NO_TRACKER: "swanlab_ comet_ mlflow_ trackio_ hf_mlflow_",
    _REDUCTIONS: "ddp_",
    _WANDB: "wandb_",
}
