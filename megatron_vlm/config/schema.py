"""Every key of the configuration, with its type, default and meaning: frozen dataclasses."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass(frozen=True)
class ModelConfig:
    """Which checkpoint, computed how, and which of its parts learn."""

    path: str = MISSING  # folder of a Hugging Face Qwen3-VL checkpoint
    backend: str = "torch"  # core attention and layers: torch (SDPA) | te (Transformer Engine)
    recompute: str = "none"  # decoder activations: none | selective (attention) | full
    recompute_vision: bool = False  # recompute each block of the vision tower
    share_images: bool = True  # TP ranks share out the images instead of each encoding all
    freeze_vision: bool = False  # the vision tower without its mergers
    freeze_merger: bool = False  # the projector and the DeepStack projectors
    freeze_language: bool = False  # embedding, decoder and head


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of parallelism; data parallelism is what is left of the world size."""

    tp: int = 1  # tensor parallel: ranks that share each layer
    pp: int = 1  # pipeline stages
    ep: int = 1  # only 1: MoE models are refused
    cp: int = 1  # only 1: see constraints.py
    sequence_parallel: bool = False  # only false: see constraints.py
    layers_per_stage: list[int] | None = None  # e.g. [0, 12, 12, 12]; null: balanced
    distributed_optimizer: bool = True  # shard optimizer state over the DP ranks
    overlap_grad_reduce: bool = False  # reduce gradients while the last backward still runs


@dataclass(frozen=True)
class DataConfig:
    """Where records come from, and how each becomes tokens and patches. See docs/data.md."""

    train: Any = None  # a path or name, {path: ..., weight: ...}, or a list of those
    eval: Any = None  # the same, each a set of its own; or {name: ...}
    image_root: str | None = None  # images lie inside; null: the folder of the file that names them
    allow_http: bool = False  # fetch http(s) images, from public addresses only
    exif_orientation: bool = True  # turn pictures as their camera says
    min_pixels: int | None = None  # of a resized image; null: as the checkpoint says
    max_pixels: int | None = None
    max_images: int | None = None  # of one record
    max_tokens: int = 8192  # of one record, images included
    truncation: str = "error"  # error | drop | image_safe: a record beyond the two limits
    train_on: Any = "all_assistant"  # all_assistant | last_assistant | record | [roles]
    special_tokens: str = "refuse"  # refuse | escape: text that spells a special token
    on_error: str = "raise"  # raise | skip: a record that is wrong
    max_errors: int = 100  # skipped records after which the run stops all the same
    cache_dir: str | None = "~/.cache/megatron_vlm"  # encoded text; null: none is kept
    num_workers: int = 2  # processes of each replica that decode ahead of the step
    prefetch: int = 2  # batches ahead, for each of them
    shuffle: bool = True  # false: the order of the files
    shuffle_window: int = 1000  # records of a stream that are shuffled together
    seed: int = 0  # of the order


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = 1e-5  # the highest, after warm-up
    vision_lr: float | None = None  # of the vision tower without its mergers; null: lr
    merger_lr: float | None = None  # of the projectors; null: lr
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.999  # and of the second
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.0  # not applied to norms and biases
    vision_weight_decay: float | None = None  # null: weight_decay
    merger_weight_decay: float | None = None
    clip_grad: float = 1.0  # global norm; 0 turns clipping off
    schedule: str = "cosine"  # constant | linear | cosine | wsd (warm up, stay, decay)
    warmup_steps: int = 0  # from 0 up to lr
    min_lr_ratio: float = 0.0  # where the schedule ends, as a part of lr
    decay_ratio: float = 0.1  # part of all steps that wsd decays over


@dataclass(frozen=True)
class TrainConfig:
    """How long, and how a batch becomes a step."""

    steps: int | None = None  # null: train.epochs
    epochs: float = 1.0  # where steps is null
    global_batch_size: int = 8  # samples of one step, over all data parallel ranks
    micro_batch_size: int = 1  # rows in one micro-batch
    micro_batch_tokens: int | None = None  # instead: as many rows as make so many tokens, padded
    precision: str = "auto"  # auto (bf16 on cuda, fp32 on cpu) | fp32 | bf16
    seed: int = 0  # of every random generator but the order of samples
    on_nonfinite: str = "skip"  # skip | stop: a loss or gradient that is not a number
    max_nonfinite: int = 10  # skipped steps in a row after which the run stops all the same
    packing: bool = False  # only false: see constraints.py


@dataclass(frozen=True)
class EvalConfig:
    """What is measured while training, on data.eval."""

    every: int | None = None  # steps; null: at the end alone
    batch_size: int = 8  # samples of one forward, over all data parallel ranks
    samples: int | None = None  # of each set; null: all
    generate: bool = False  # also exact match of greedily generated answers
    candidates: Any = None  # also rank these answers: a list, or a file with one in each line
    answer_samples: int | None = None  # of each set, to generate or rank; null: `samples`
    prefill: str = ""  # what every answer begins with; generation goes on from there
    max_new_tokens: int = 32
    examples: int = 12  # predictions kept for the report


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept of a run, and where it goes on."""

    every: int | None = None  # steps; null: at the end alone
    resume: str = "auto"  # auto (the newest complete one of this run) | never | a folder
    keep_last: int = 2  # newest checkpoints
    keep_every: int | None = None  # steps: those are kept for good
    best: str | None = None  # SET/SCORE of an evaluation, e.g. eval/loss; the best is kept too
    async_save: bool = True  # write while training goes on
    export: bool = True  # write a Hugging Face checkpoint at the end


@dataclass(frozen=True)
class LogConfig:
    """What a person sees. metrics.jsonl is always written."""

    every: int = 1  # steps between two lines
    tensorboard: bool = False  # events in RUN/tensorboard
    wandb: str | None = None  # a project's name
    report: bool = True  # report.html at the end
    profile_steps: list[int] | None = None  # [first, last): a torch.profiler trace
    profile_ranks: list[int] = field(default_factory=lambda: [0])  # that write one each


@dataclass(frozen=True)
class LaunchConfig:
    """How processes start where torchrun has not started them."""

    backend: str = "local"  # local (processes of this machine) | ray (actors of a cluster)
    processes: int | None = None  # null: a GPU each, or tp x pp on the CPU; with ray all that fit
    ray_address: str | None = None  # host:port, auto; null: RAY_ADDRESS, or one of its own
    cpus_per_rank: float = 1.0  # that Ray sets aside
    max_restarts: int = 0  # after a failure, from the last complete checkpoint
    timeout_minutes: float = 10.0  # a rank that stands still for longer ends the job


@dataclass(frozen=True)
class Config:
    """All of it. Never changed after `load_config`."""

    run: str = "runs/run"  # folder of metrics, checkpoints, report and export
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    platform: str = "auto"  # auto | cuda | cpu
