"""Every key of the configuration, with its type, default and meaning: frozen dataclasses.

The comment after a key is its description in docs/configuration.md (scripts/make_config_docs.py).
"""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from omegaconf import MISSING

from megatron_vlm.config.data_sources import EvalSource, SourceSpec

Role = Literal["system", "user", "assistant", "tool"]
Layers = list[int] | Literal["auto"] | None
AttentionKernel = Literal["auto", "flash", "efficient", "cudnn", "math"]
Export = bool | Literal["adapter", "merged", "both"]
PolicyLoss = Literal["ppo", "importance_sampling", "gspo", "cispo"]
PlatformName = Literal["auto", "cuda", "cpu"]
TrainScope = Literal["all_assistant", "last_assistant", "record"]


@dataclass(frozen=True)
class ModelConfig:
    """Which checkpoint is trained, how it is computed, and which of its parts learn."""

    path: str = MISSING  # a Qwen3-VL checkpoint: folder, or ORG/NAME[@REVISION] on the Hub
    backend: Literal["torch", "te"] = "torch"  # PyTorch with SDPA, or Transformer Engine
    attention: AttentionKernel = "auto"  # the kernel to try first; auto: measured once on cuda
    compile: bool | None = None  # fuse a layer's small operations; null: on cuda, with a compiler
    fp32_weight_gradients: bool | None = None  # decoder's, never rounded to bf16; null: on cuda
    recompute: Literal["none", "selective", "full"] = "none"  # decoder layers; full saves most
    recompute_vision: bool = False  # recompute each block of the vision tower
    share_images: bool = True  # TP ranks divide the images among them; false: each encodes all
    router_balance_loss: float = 0.0  # coefficient of the loss that balances experts; 0: none
    router_z_loss: float = 0.0  # coefficient of the loss that keeps routers' logits small; 0: none
    freeze_vision: bool = False  # the vision tower without its mergers
    freeze_merger: bool = False  # the projector and the DeepStack projectors
    freeze_language: bool = False  # embedding, decoder and head


@dataclass(frozen=True)
class LoraConfig:
    """Adapters: small matrices that learn beside weights that do not. See docs/lora.md."""

    rank: int = 0  # of the adapters; 0: there are none, and the weights themselves learn
    alpha: float = 16.0  # what adapters add is scaled by alpha / rank
    rslora: bool = False  # scaled by alpha / sqrt(rank) instead
    dropout: float = 0.0  # of what goes into the adapters
    targets: tuple[str, ...] = ("attention", "mlp")  # parts, or names or patterns of linear layers
    train: tuple[str, ...] = ()  # of merger, vision, language: trained whole beside the adapters
    init: Literal["kaiming", "gaussian"] = "kaiming"  # of A, as PEFT draws it; B begins at zero
    path: str | None = None  # folder of an adapter to continue from, of this program or of PEFT


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of parallelism; the data parallel degree is what remains of the world size."""

    tp: int = 1  # tensor parallel: ranks that share each layer
    pp: int = 1  # pipeline stages
    ep: int = 1  # expert parallel: so many replicas share out the experts of each layer
    cp: int = 1  # context parallel; must be 1: see docs/parallelism.md
    sequence_parallel: bool = False  # must be false: see docs/parallelism.md
    virtual_stages: int = 1  # chunks of each stage, of an interleaved pipeline
    layers_per_stage: Layers = None  # e.g. [0, 12, 12, 12]; auto: what is fastest; null: even
    distributed_optimizer: bool = True  # shard the optimizer state over the DP ranks
    overlap_grad_reduce: bool = False  # reduce gradients while the last backward pass still runs
    overlap_param_gather: bool = False  # gather new weights while the next forward pass begins


@dataclass(frozen=True)
class DataConfig:
    """Where records come from, and how each becomes tokens and patches. See docs/data.md."""

    train: tuple[SourceSpec, ...] = ()  # a path or name, {path: ..., weight: ...}, or a list
    eval: tuple[EvalSource, ...] = ()  # the same, each entry a set of its own; or {name: ...}
    image_root: str | None = None  # folder of the images; null: that of the file that names them
    allow_http: bool = False  # fetch http(s) images, from public addresses only
    exif_orientation: bool = True  # turn pictures as their EXIF orientation says
    min_pixels: int | None = None  # of a resized image; null: as in the checkpoint
    max_pixels: int | None = None  # of a resized image; null: as in the checkpoint
    video_fps: float | None = None  # frames taken of each second; null: as in the checkpoint
    video_min_frames: int | None = None  # taken of a video; null: as in the checkpoint
    video_max_frames: int | None = None  # taken of a video; null: as in the checkpoint
    video_min_pixels: int | None = None  # of all resized frames; null: as in the checkpoint
    video_max_pixels: int | None = None  # of all resized frames; null: as in the checkpoint
    max_images: int | None = None  # of one record; null: no limit
    max_tokens: int = 8192  # of one record, images included
    truncation: Literal["error", "drop", "image_safe"] = "error"  # of records above a limit
    train_on: TrainScope | tuple[Role, ...] = "all_assistant"  # messages that carry loss
    special_tokens: Literal["refuse", "escape"] = "refuse"  # text that spells a special token
    add_tokens: tuple[str, ...] = ()  # of text, new to the tokenizer: the vocabulary grows
    ignore_keys: tuple[str, ...] = ()  # of records, at every depth: as if they were not there
    unknown_keys: Literal["warn", "refuse", "ignore"] = "warn"  # of records: see docs/data.md
    lone_marks: Literal["refuse", "text"] = "refuse"  # <image> without an image in its record
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # variables of the chat template
    on_error: Literal["raise", "skip"] = "raise"  # what to do about a wrong record
    max_errors: int = 100  # skipped records; one more stops the run
    cache_dir: str | None = "~/.cache/megatron_vlm"  # of encoded text; null: none is kept
    num_workers: int = 2  # processes of each replica that decode ahead of the step
    prefetch: int = 2  # batches that each of these processes keeps ready
    shuffle: bool = True  # false: records come in the order of the files
    shuffle_window: int = 1000  # records of a stream that are shuffled together
    seed: int = 0  # of the order of records


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = 1e-5  # peak, after warm-up
    vision_lr: float | None = None  # of the vision tower without its mergers; null: lr
    merger_lr: float | None = None  # of the projectors; null: lr
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.999  # decay of the second moment
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.0  # not applied to norms and biases
    vision_weight_decay: float | None = None  # null: weight_decay
    merger_weight_decay: float | None = None  # null: weight_decay
    clip_grad: float = 1.0  # global norm; 0 turns clipping off
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"  # wsd: warmup-stable-decay
    warmup_steps: int = 0  # linear, from 0 to lr
    warmup_ratio: float | None = None  # used where warmup_steps is 0: the part of all steps
    min_lr_ratio: float = 0.0  # where the schedule ends, as a fraction of lr
    decay_ratio: float = 0.1  # fraction of all steps over which wsd decays


@dataclass(frozen=True)
class TrainConfig:
    """How long to train, and how a batch becomes a step."""

    steps: int | None = None  # null: train.epochs
    epochs: float = 1.0  # used where steps is null
    global_batch_size: int = 8  # samples of one step, over all data parallel ranks
    micro_batch_size: int = 1  # rows of one micro-batch
    micro_batch_tokens: int | None = None  # instead: as many rows as fit, padding included
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 on cuda, fp32 on cpu
    seed: int = 0  # of the random generators of the ranks; without dropout nothing draws from them
    on_nonfinite: Literal["skip", "stop"] = "skip"  # a step whose loss or gradient is not finite
    max_nonfinite: int = 10  # skipped steps in a row; one more stops the run
    packing: bool = False  # must be false: see docs/parallelism.md


@dataclass(frozen=True)
class EvalConfig:
    """What is measured on data.eval during training."""

    every: int | None = None  # steps; null: only at the end
    batch_size: int = 8  # samples of one forward pass, over all data parallel ranks
    samples: int | None = None  # of each set; null: all
    generate: bool = False  # also measure the exact match of greedily generated answers
    candidates: str | tuple[str, ...] | None = None  # answers to rank; or a file with one per line
    answer_samples: int | None = None  # of each set, to generate or rank; null: eval.samples
    prefill: str = ""  # how every answer begins; generation continues from there
    max_new_tokens: int = 32  # of one generated answer
    examples: int = 12  # predictions shown in the report


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept of a run, and where it resumes."""

    every: int | None = None  # steps; null: only at the end
    resume: str = "auto"  # auto (the one this run completed last) | never | a folder
    keep_last: int = 2  # number of newest checkpoints to keep
    keep_every: int | None = None  # steps; checkpoints at multiples of it are never deleted
    best: str | None = None  # SET/SCORE of an evaluation, e.g. eval/loss; the best is also kept
    async_save: bool = True  # write while training continues
    export: Export = True  # a Hugging Face folder at the end; of adapters: these, merged, or both
    push: str | None = None  # ORG/NAME: upload it to the Hub, private where the name is new


@dataclass(frozen=True)
class LogConfig:
    """What people see. metrics.jsonl is always written."""

    every: int = 1  # steps between two printed lines
    tensorboard: bool = False  # events in RUN/tensorboard
    wandb: str | None = None  # name of a Weights & Biases project
    report: bool = True  # report.html at the end
    profile_steps: list[int] | None = None  # [first, last): write a torch.profiler trace
    profile_ranks: list[int] = field(default_factory=lambda: [0])  # each writes a trace of its own


@dataclass(frozen=True)
class RlConfig:
    """Learning from samples: `megatron-vlm rl`. See docs/rl.md."""

    reward: str | None = None  # FILE.py:NAME or MODULE:NAME: a function of a record and an answer
    environment: str | None = None  # instead: the class of an episode with several turns
    turns: int = 8  # answers in an episode of an environment, at most
    processes: int = 2  # that rewards and environments run in
    timeout: float = 60.0  # seconds that one call of them may take
    failed_reward: float | None = None  # of a call that fails or takes longer; null: stop the run
    samples: int = 8  # answers to each prompt; train.global_batch_size counts prompts
    max_new_tokens: int = 512  # of one answer
    max_tokens: int = 16384  # of an episode: an environment is not asked beyond
    temperature: float = 1.0  # of the samples
    top_k: int = 0  # sample among so many of the likeliest tokens; 0: among all
    top_p: float = 1.0  # sample among the likeliest tokens whose probabilities add up to this
    loss: PolicyLoss = "ppo"  # of a token; with one update on own samples all but gspo are alike
    clip_low: float | None = None  # the ratio is clipped at 1 - this; null: as the loss has it
    clip_high: float | None = None  # and at 1 + this
    advantage: Literal["grpo", "rloo", "dr_grpo"] = "grpo"  # what rewards are compared with
    aggregate: Literal["tokens", "sequences", "constant"] = "tokens"  # what is averaged over
    kl_coef: float | None = None  # of the KL to the initial model; null: it is not computed
    entropy_coef: float | None = None  # of the entropy; null: it is not computed
    dynamic_sampling: bool = False  # prompts whose answers all got the same are replaced by others
    max_rounds: int = 8  # of asking for others; then the step has fewer prompts
    updates: int = 1  # optimizer steps that the samples of a step are divided among
    sampler: Literal["own", "vllm"] = "own"  # the trainer's own decoder, or an engine beside it
    sampler_rows: int = 64  # of one pass of our own, in each replica
    max_weight: float = 2.0  # of a token whose log-prob an engine had too low; see docs/rl.md
    off_policy_steps: int = 0  # 1: an engine draws the next step's samples during a step
    engine: str | None = None  # Python of the environment that has vLLM
    engine_gpus: tuple[str, ...] = ()  # of each engine, such as "6" or "4,5"; (): one engine
    engine_max_len: int | None = None  # tokens of a row; null: data.max_tokens + max_new_tokens
    engine_pictures: int | None = None  # of a row, at most; null: of a prompt, and one each turn
    engine_videos: int = 0  # of a row, at most
    engine_options: dict[str, Any] = field(default_factory=dict)  # more of vLLM's EngineArgs
    shown: int = 4  # prompts of a step that samples.jsonl and the report show


@dataclass(frozen=True)
class ServeConfig:
    """A service for the Tinker client: `megatron-vlm serve`. See docs/serve.md."""

    host: str = "127.0.0.1"  # address to listen at; beyond loopback serve.keys is needed
    port: int = 8000  # 0: one that is free
    keys: str | None = None  # file of API keys, from megatron-vlm serve-key; null: loopback alone
    name: str | None = None  # what clients call the model; null: model.path
    url: str | None = None  # where clients reach the service, for downloads; null: its address
    lora_alpha: float = 32.0  # adapters of clients are scaled by this / rank
    max_rank: int = 128  # of a client's adapters
    adapters: int = 8  # models with adapters in memory; others wait on disk
    full_models: int = 1  # models trained as a whole in memory; 0: clients get adapters alone
    snapshots: int = 8  # adapters in memory that are sampled from
    full_snapshots: int = 1  # whole models, likewise
    save_seconds: float = 300.0  # of work that a service that was killed has to do again, at most
    sampler: Literal["own", "vllm"] = "own"  # the trainer's own decoder, or an engine beside it
    sampler_rows: int = 64  # samples of one pass of our own, in each replica
    sampling_seconds: float = 2.0  # of a turn of our own; what is under way goes on in the next
    engine: str | None = None  # Python of the environment that has vLLM
    engine_gpus: tuple[str, ...] = ()  # of each engine, such as "6" or "4,5"; (): one engine
    engine_max_len: int | None = None  # tokens of a prompt and its answer; null: 32768 at most
    engine_options: dict[str, Any] = field(default_factory=dict)  # more of vLLM's EngineArgs
    limits: dict[str, Any] = field(default_factory=dict)  # of requests: see docs/serve.md


@dataclass(frozen=True)
class LaunchConfig:
    """How processes are started where torchrun has not started them."""

    backend: Literal["local", "ray"] = "local"  # processes of this machine, or actors of a cluster
    processes: int | None = None  # null: one per GPU, or tp x pp on the CPU; ray: all that fit
    ray_address: str | None = None  # host:port or auto; null: RAY_ADDRESS, or a new cluster
    cpus_per_rank: float = 1.0  # reserved by Ray
    max_restarts: int = 0  # after a failure, from the last complete checkpoint
    timeout_minutes: float = 10.0  # a rank that makes no progress for longer ends the job


@dataclass(frozen=True)
class Config:
    """All of it. Never changed after `load_config`."""

    run: str = "runs/run"  # folder of metrics, checkpoints, report and export
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    rl: RlConfig = field(default_factory=RlConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    platform: PlatformName = "auto"  # auto: cuda, and the CPU only where there is no GPU


def key_types(node: Any = Config, prefix: str = "") -> dict[str, Any]:
    """Every key in dotted form, groups included, with its type."""
    found = {}
    for item in fields(node):
        found[prefix + item.name] = item.type
        if is_dataclass(item.type):
            found |= key_types(item.type, f"{prefix}{item.name}.")
    return found


def leaves() -> list[str]:
    """Every key in dotted form that has a value of its own."""
    return [key for key, kind in key_types().items() if not is_dataclass(kind)]


def get(cfg: Any, key: str) -> Any:
    """The value of a dotted key."""
    for name in key.split("."):
        cfg = getattr(cfg, name)
    return cfg
