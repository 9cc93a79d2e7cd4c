"""Keys of the configuration, with type, default and meaning: frozen dataclasses.

The comment after a key is its description in docs/configuration.md (scripts/make_config_docs.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, wraps
from typing import Any, Literal, get_type_hints

from omegaconf import MISSING

from megatron_vlm.config.bounds import (
    AboveZero,
    AboveZero32,
    Count,
    Decay,
    DraftTokens,
    FailedReward,
    FrameCount,
    Minutes,
    Natural,
    NonNegative,
    NsSteps,
    Port,
    Seed,
    Share,
    ShareAboveZero,
)
from megatron_vlm.config.data_sources import EvalSource, SourceSpec
from megatron_vlm.config.lora_base_types import BaseType
from megatron_vlm.config.objective_configs import (
    DistillConfig,
    EmbedConfig,
    ObjectiveName,
    PreferenceConfig,
    RerankConfig,
    RewardConfig,
)
from megatron_vlm.errors import ConfigError

# Value of engine.name and teacher.engine: the ranks themselves, and no engine.
OWN = "own"
HARNESS = "verifiers:"  # beginning of an environment that asks for its answers by itself
NAMED = ("openenv:", HARNESS)  # beginnings of environments that packages have
AGENT_URLS = ("http://", "https://")  # beginnings of an agent that is a server
Role = Literal["system", "user", "assistant", "tool"]
Interval = Count | str | None
Layers = list[Count] | Literal["auto"] | None
AttentionKernel = Literal["auto", "torch", "flash", "fa3", "fa4", "cudnn", "efficient", "math"]
Export = bool | Literal["adapter", "merged", "both"]
PolicyLoss = Literal["ppo", "importance_sampling", "gspo", "cispo"]
Advantage = Literal["grpo", "rloo", "dr_grpo", "none"]
Seen = Literal["off", "report", "vppo", "va_opd"]
HiddenPictures = Literal["grey", "patches", "pixelated"]
EvalScores = Literal["both", "reward", "loss"]
PlatformName = Literal["auto", "cuda", "cpu"]
AdjustLr = Literal["match_rms_adamw", "original"]
TrainScope = Literal["all_assistant", "last_assistant", "record"]


@dataclass(frozen=True)
class ModelConfig:
    """Checkpoint to train, the way it is computed, and the parts that learn."""

    path: str = MISSING  # Qwen3-VL, Qwen3.5 or Gemma 4: a folder, or ORG/NAME[@REVISION] (the Hub)
    backend: Literal["torch", "te"] = "torch"  # PyTorch with SDPA, or Transformer Engine
    delta_rule: Literal["auto", "torch", "fla"] = "auto"  # Qwen3.5; auto: fla on cuda if it runs
    attention: AttentionKernel = "auto"  # decoder's and tower's; auto: measured once on cuda
    compile: bool | None = None  # fuse a layer's small operations; null: on cuda with a compiler
    fp32_weight_gradients: bool | None = None  # never round the decoder's to bf16; null: on cuda
    recompute: Literal["none", "selective", "full"] = "none"  # decoder layers; full saves the most
    recompute_vision: bool = False  # recompute each block of the vision tower
    offload_activations: Share = 0.0  # share of decoder layers whose activations are in host memory
    share_images: bool = True  # TP ranks divide the images among them; false: each encodes all
    router_balance_loss: NonNegative = 0.0  # coefficient of the loss that balances experts; 0: off
    router_z_loss: NonNegative = 0.0  # coefficient of a loss that keeps router logits small; 0: off
    mtp: Literal["carry", "train"] = "carry"  # Qwen3.5's MTP head: copy it, or train it
    freeze_vision: bool = False  # freeze the vision tower without its mergers
    freeze_merger: bool = False  # freeze the projector and the DeepStack projectors
    freeze_language: bool = False  # freeze embedding, decoder and head


@dataclass(frozen=True)
class LoraConfig:
    """Adapters: small trainable matrices next to frozen weights. See docs/lora.md."""

    rank: Count = 0  # rank of the adapters; 0: no adapters, the weights themselves are trained
    alpha: AboveZero = 16.0  # the output of adapters is scaled by alpha / rank
    rslora: bool = False  # scale by alpha / sqrt(rank) instead
    dropout: Decay = 0.0  # dropout rate on the input of the adapters
    targets: tuple[str, ...] = ("attention", "mlp")  # parts, or names or patterns of linear layers
    train: tuple[str, ...] = ()  # parts trained in full: any of merger, vision, language
    path: str | None = None  # folder of an adapter to continue from, from this program or PEFT
    base: BaseType | None = None  # store frozen linear layers in 4 or 8 bits (QLoRA); null: do not


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of parallelism. The data parallel degree is the world size / (tp x pp)."""

    auto: tuple[str, ...] = ()  # keys that the planner chooses: parallel=auto; see docs/planning.md
    tp: Natural = 1  # tensor parallel: ranks that share each layer
    pp: Natural = 1  # pipeline parallel: number of stages
    ep: Natural = 1  # expert parallel: replicas that divide the experts of each layer
    virtual_stages: Natural = 1  # model chunks on each stage of an interleaved pipeline
    layers_per_stage: Layers = None  # e.g. [0, 12, 12, 12]; auto: the fastest; null: even
    distributed_optimizer: bool = True  # shard the optimizer state over the DP ranks
    overlap_grad_reduce: bool | None = None  # during the last backward pass; null: if DP > 1
    overlap_param_gather: bool | None = None  # as the next forward pass starts; null: if DP > 1


def _as_typed(settings: Any) -> str:
    """Return what differs from the defaults, as it is typed after KEY=."""
    values = ((item.name, item.default, getattr(settings, item.name)) for item in fields(settings))
    return f"{{{', '.join(f'{name}: {value}' for name, old, value in values if value != old)}}}"


@dataclass(frozen=True, repr=False)
class VideoLimits:
    """Video settings that replace the checkpoint's; null: as in the checkpoint."""

    fps: AboveZero32 | None = None  # frames sampled per second
    min_frames: Natural | None = None  # minimum frames of a video
    max_frames: FrameCount | None = None  # maximum frames of a video
    min_pixels: Natural | None = None  # minimum over resized frames
    max_pixels: Natural | None = None  # maximum over resized frames
    __repr__ = _as_typed


@dataclass(frozen=True)
class DataConfig:
    """Sources of records, and how a record becomes tokens and patches. See docs/data.md."""

    train: tuple[SourceSpec, ...] = ()  # a path or name, {path: ..., weight: ...}, or a list
    eval: tuple[EvalSource, ...] = ()  # as train, but each entry is a separate set; or {name: ...}
    split: AboveZero32 | None = None  # records of train to hold out: a share, or a count from 1 on
    columns: dict[str, Any] = field(default_factory=dict)  # {FIELD: COLUMN}: see docs/data.md
    roles: dict[str, Any] = field(default_factory=dict)  # {ROLE: its name in the data, or several}
    image_root: str | None = None  # folder of the images; null: folder of the file of records
    allow_http: bool = False  # fetch http(s) images, from public addresses only
    exif_orientation: bool = True  # rotate images by their EXIF orientation
    min_pixels: Natural | None = None  # minimum pixels of a resized image; null: as in checkpoint
    max_pixels: Natural | None = None  # maximum pixels of a resized image; null: as in checkpoint
    video: VideoLimits = VideoLimits()  # {NAME: VALUE} in place of the checkpoint's settings
    max_images: Natural | None = None  # maximum images of one record; null: no limit
    max_tokens: Natural = 8192  # maximum tokens of one record, images included
    truncation: Literal["error", "drop", "image_safe"] = "error"  # action for records above a limit
    train_on: TrainScope | tuple[Role, ...] = "all_assistant"  # messages that the loss covers
    special_tokens: Literal["refuse", "escape"] = "refuse"  # text that spells a special token
    add_tokens: tuple[str, ...] = ()  # texts to add to the tokenizer: the vocabulary grows
    ignore_keys: tuple[str, ...] = ()  # keys of records that are ignored, at every depth
    unknown_keys: Literal["warn", "refuse", "ignore"] = "warn"  # unknown keys: see docs/data.md
    lone_marks: Literal["refuse", "text"] = "refuse"  # <image> without an image in its record
    system: str | None = None  # system message of records that have none; null: as the template
    caption_prompt: str = ""  # question of records of an image and a text; empty: the image alone
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # variables of the chat template
    max_errors: Count = 0  # invalid records to skip at most; one more stops the run
    cache_dir: str | None = "~/.cache/megatron_vlm"  # folder of encoded text; null: no cache
    num_workers: Count = 2  # worker processes of each replica that decode ahead of the step
    prefetch: Natural = 2  # batches that each worker process keeps ready
    shuffle: bool = True  # false: keep the order of the files
    shuffle_window: Natural = 1000  # records of a stream that are shuffled together
    seed: Seed = 0  # seed of the order of records

    @property
    def is_stream(self) -> bool:
        """True if data.train streams; checks.py refuses sources of both kinds."""
        return any(spec.streaming for spec in self.train)


@dataclass(frozen=True, repr=False)
class MuonSettings:
    """Settings of Muon, with the names and defaults of torch.optim.Muon."""

    momentum: Decay = 0.95  # decay of the momentum
    nesterov: bool = True  # look ahead by the momentum
    ns_steps: NsSteps = 5  # Newton-Schulz steps of the orthogonalisation
    adjust_lr_fn: AdjustLr = "match_rms_adamw"  # factor of the rate by a matrix's shape
    __repr__ = _as_typed


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning rate schedule."""

    name: Literal["adamw", "muon"] = "adamw"  # muon: for matrices, AdamW for the rest; planning.md
    lr: NonNegative = 1e-5  # peak learning rate, after warm-up
    vision_lr: NonNegative | None = None  # learning rate of the vision tower, no mergers; null: lr
    merger_lr: NonNegative | None = None  # learning rate of the projectors; null: lr
    beta1: Decay = 0.9  # decay of the first moment
    beta2: Decay = 0.999  # decay of the second moment
    eps: ShareAboveZero = 1e-8  # added to the root of the second moment
    states: Literal["fp32", "bf16", "int8"] = "fp32"  # type of the moments
    offload: Share = 0.0  # share of the weights whose main weights and moments are in host memory
    muon_lr: AboveZero | None = None  # learning rate of Muon, peak; null: lr
    muon: MuonSettings = MuonSettings()  # {NAME: VALUE} of Muon, as torch.optim.Muon has them
    weight_decay: NonNegative = 0.0  # not applied to norms and biases
    clip_grad: NonNegative = 1.0  # maximum global norm of the gradients; 0: no clipping
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"  # wsd: warmup-stable-decay
    warmup_steps: Count = 0  # steps of linear warm-up, from 0 to lr
    warmup_ratio: Decay | None = None  # used if warmup_steps is 0: fraction of all steps
    min_lr_ratio: Share = 0.0  # final learning rate as a fraction of lr
    decay_ratio: Share = 0.1  # fraction of all steps over which wsd decays


@dataclass(frozen=True)
class TrainConfig:
    """Objective and length of training, and how a batch becomes a step."""

    objective: ObjectiveName = "sft"  # docs/preferences.md, distillation.md, embeddings.md
    steps: Natural | None = None  # optimizer steps; null: from train.epochs
    epochs: AboveZero32 = 1.0  # passes over the data; used if steps is null
    early_stopping: Natural | None = None  # evaluations without a better checkpoint.best, then stop
    early_stopping_delta: NonNegative = 0.0  # smallest change of the score that counts as better
    global_batch_size: Natural = 8  # samples of one step, over all data parallel ranks
    micro_batch_size: Natural = 1  # samples of one micro-batch; a pair of answers is one sample
    micro_batch_tokens: Natural | None = None  # instead: as many rows as fit, padding included
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 on cuda, fp32 on cpu
    seed: Seed = 0  # seed of the ranks' random generators; it has no effect without dropout
    on_nonfinite: Literal["skip", "stop"] = "skip"  # action if a loss or gradient is not finite
    max_nonfinite: Count = 10  # steps that may be skipped in a row; one more stops the run


@dataclass(frozen=True)
class EvalConfig:
    """Scores that are measured on data.eval during training."""

    every: Interval = None  # 500, or "0.5 epochs"; null: 30 minutes or 500 steps; 0: at the end
    batch_size: Natural = 8  # samples of one forward pass, over all data parallel ranks
    samples: Natural | None = None  # samples of each set; null: all
    generate: bool = False  # also measure the exact match of greedily generated answers
    metrics: tuple[str, ...] = ()  # more scores of generated answers: names, or FILE.py:NAME
    metric_timeout: AboveZero = 60.0  # maximum seconds of one call of a function in metrics
    candidates: str | tuple[str, ...] | None = None  # answers to rank, or a file with one per line
    recall_at: tuple[Natural, ...] = (1, 5, 10)  # k of recall@k and ndcg@k of embed and rerank
    answer_samples: Natural | None = None  # samples per set to generate or rank; null: eval.samples
    prefill: str = ""  # beginning of every answer; generation continues from there
    max_new_tokens: Natural = 32  # maximum tokens of one generated answer
    examples: Count = 12  # predictions shown in the report
    blind: bool = False  # also score with grey pictures: how many answers need the real ones


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints and exports of a run, and where it resumes."""

    every: Interval = None  # 500, or "0.5 epochs"; null: 30 minutes or 500 steps; 0: at the end
    resume: str = "auto"  # auto (the last complete one of this run) | never | a folder
    keep_last: Natural = 2  # number of newest checkpoints to keep
    keep_every: Natural | None = None  # steps; checkpoints at its multiples are never deleted
    best: str | None = None  # SET/SCORE of an evaluation, e.g. eval/loss; the best is also kept
    async_save: bool = True  # write while training continues
    export: Export = True  # Hugging Face folder at the end; for adapters: adapter, merged or both
    export_from: Literal["last", "best"] = "last"  # checkpoint that the export is of
    push: str | None = None  # ORG/NAME on the Hub to upload the export to, private if new


@dataclass(frozen=True)
class LogConfig:
    """Outputs for people. metrics.jsonl is always written."""

    every: Natural = 1  # steps between two printed lines
    trackers: tuple[str, ...] = ()  # wandb, tensorboard, trackio, mlflow, swanlab, or registered
    project: str = "megatron_vlm"  # project of the trackers, which is MLflow's experiment
    report: bool = True  # write report.html at the end
    profile_steps: list[Count] | None = None  # [first, last): rank 0 writes a torch.profiler trace


@dataclass(frozen=True)
class RlConfig:
    """Reinforcement learning: `megatron-vlm rl`. See docs/rl.md."""

    reward: str | None = None  # FILE.py:NAME or MODULE:NAME, a function; or model:FOLDER
    environment: str | None = None  # instead: an episode's class; openenv:URL; verifiers:ID
    agent: str | None = None  # instead: a program, or its URL, that asks the model; see docs/rl.md
    agent_timeout: AboveZero = 1800.0  # maximum seconds of an agent's episode
    max_concurrent: Natural = 64  # maximum episodes of agents at a time; the others wait
    turns: Natural = 8  # maximum answers in an episode of an environment or of an agent
    processes: Natural = 2  # processes that run rewards and environments, and as many for views
    timeout: AboveZero = 60.0  # maximum seconds of one call of a reward, environment or view
    failed_reward: FailedReward | None = None  # reward of a failed or late call; null: stop the run
    samples: Natural = 8  # answers to each prompt; train.global_batch_size counts prompts
    max_new_tokens: Natural = 512  # maximum tokens of one answer
    max_tokens: Natural = 16384  # maximum tokens of a row, beyond which an episode has no turn
    temperature: NonNegative = 1.0  # sampling temperature
    top_k: Count = 0  # sample among this many most likely tokens; 0: among all
    top_p: ShareAboveZero = 1.0  # sample among the most likely tokens, up to this total probability
    loss: PolicyLoss = "ppo"  # policy loss; with one update on own samples all but gspo are equal
    clip_low: ShareAboveZero | None = None  # the ratio is clipped at 1 - clip_low; null: by rl.loss
    clip_high: AboveZero | None = None  # the ratio is clipped at 1 + clip_high; null: by rl.loss
    advantage: Advantage = "grpo"  # estimator of the advantages; none: rewards are only reported
    aggregate: Literal["tokens", "sequences", "constant"] = "tokens"  # averaging of the loss
    kl_coef: NonNegative | None = None  # coefficient of KL to the initial model; null: not computed
    entropy_coef: NonNegative | None = None  # coefficient of the entropy; null: not computed
    dynamic_sampling: bool = False  # replace prompts whose answers all got the same reward
    max_rounds: Natural = 8  # maximum rounds of replacement; then the step has fewer prompts
    updates: Natural = 1  # optimizer steps among which the samples of a step are divided
    max_weight: AboveZero = 2.0  # maximum importance weight of an engine's token; see docs/rl.md
    mask_weight: list[NonNegative] | None = None  # [low, high]: no policy loss for other weights
    interrupt: bool = False  # update an engine's weights in the middle of its answers
    off_policy_steps: Count = 0  # steps whose samples engines draw in advance, during a step
    seen: Seen = "report"  # how far answers depend on pictures: a figure, or weights of the loss
    seen_tokens: ShareAboveZero = 0.2  # share of tokens that vppo and va_opd choose in a row
    seen_picture: HiddenPictures | None = None  # what hides pictures; null: by rl.seen
    replay_routing: bool = False  # send tokens to the experts that the engine chose for them
    eval_scores: EvalScores = "both"  # scores of data.eval: reward of an answer; supervised loss
    eval_temperature: NonNegative = 0.0  # temperature of the answers to data.eval; 0: greedy
    shown: Count = 4  # prompts of a step that samples.jsonl and the report show

    @property
    def has_harness(self) -> bool:
        """True if the harness of an environment asks for answers, as an agent does."""
        return (self.environment or "").startswith(HARNESS)


@dataclass(frozen=True)
class ServeConfig:
    """Service for the Tinker client: `megatron-vlm serve`. See docs/serve.md."""

    host: str = "127.0.0.1"  # address to listen at; any but loopback needs serve.keys
    port: Port = 8000  # port to listen at; 0: a free one
    keys: str | None = None  # file of API keys, from serve --add-client; null: loopback only
    name: str | None = None  # name of the model for clients; null: model.path
    url: str | None = None  # URL of the service for downloads; null: its address
    lora_alpha: AboveZero = 32.0  # adapters of clients are scaled by lora_alpha / rank
    max_rank: Natural = 128  # maximum rank of a client's adapter
    loaded: dict[str, Any] = field(default_factory=dict)  # models in memory: see docs/serve.md
    save_seconds: AboveZero = 300.0  # maximum seconds of work that a killed service has to repeat
    sampling_seconds: AboveZero = 2.0  # seconds per turn of the own sampler; the next one continues
    limits: dict[str, Any] = field(default_factory=dict)  # limits of requests: see docs/serve.md


@dataclass(frozen=True)
class EngineConfig:
    """Source of the answers of `rl` and `serve`. See docs/serving.md."""

    name: str = OWN  # own: the trainer's decoder; vllm, or an engine that a package registers
    python: str | None = None  # Python of the environment that has the engine
    devices: tuple[str, ...] = ()  # GPUs of each engine, such as "6" or "4,5"; (): one engine
    max_len: Natural | None = None  # tokens of a row; null: what a step of rl has; serve: 32768
    pictures: Natural | None = None  # maximum images per row; null: as in prompt, + 1 a turn
    videos: Count = 0  # maximum videos of a prompt
    draft_tokens: DraftTokens = 0  # tokens a round that the model's MTP head drafts
    options: dict[str, Any] = field(
        default_factory=dict
    )  # settings of this engine alone: EngineArgs of vLLM
    rows: Natural = 64  # rows per pass of the trainer's decoder, in each replica


@dataclass(frozen=True)
class TeacherConfig:
    """Teacher of train.objective=distill and of `rl`. See docs/distillation.md."""

    path: str | dict[str, Any] | None = None  # folder of score; rl: checkpoint, self, or by source
    view: str | None = None  # FILE.py:NAME: the messages that it sees in place of a record's prompt
    weights: Literal["initial", "live"] = "initial"  # weights of self: before the run, or each step
    top_k: Natural | None = None  # its top tokens to learn; null: all stored, rl: the drawn one
    coef: AboveZero = 1.0  # coefficient of the divergence from it in rl
    engine: str = OWN  # the ranks run it, or an engine by its engine.name, such as vllm
    devices: tuple[str, ...] = ()  # GPUs of each engine of a teacher, as engine.devices
    options: dict[str, Any] = field(default_factory=dict)  # as engine.options


@dataclass(frozen=True)
class LaunchConfig:
    """Processes to start where torchrun has not started any."""

    backend: Literal["local", "ray"] = "local"  # processes of this machine, or actors of a cluster
    processes: Natural | None = None  # null: one per GPU, or tp x pp on the CPU; ray: all that fit
    ray_address: str | None = None  # host:port or auto; null: RAY_ADDRESS, or a new cluster
    cpus_per_rank: NonNegative = 1.0  # CPUs that Ray reserves for each rank
    max_restarts: Count = 0  # restarts after a failure, from the last complete checkpoint
    timeout_minutes: Minutes = 10.0  # a rank that makes no progress for longer ends the job


@dataclass(frozen=True)
class Config:
    """Complete configuration. It never changes after `load_config`."""

    run: str = "runs/run"  # folder of metrics, checkpoints, report and export
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    embed: EmbedConfig = field(default_factory=EmbedConfig)
    rerank: RerankConfig = field(default_factory=RerankConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    rl: RlConfig = field(default_factory=RlConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    platform: PlatformName = "auto"  # auto: cuda, or the CPU if there is no GPU


# Keys whose value is a mapping, with the settings in it.
MAPPINGS: dict[str, Any] = {"data.video": VideoLimits, "optim.muon": MuonSettings}


@cache
def key_types(node: Any = Config, prefix: str = "") -> dict[str, Any]:
    """Return every key in dotted form, groups included, with its type, which is without bounds."""
    types: dict[str, Any] = {}
    kinds: dict[str, type] = get_type_hints(node)
    for name, kind in kinds.items():
        types[prefix + name] = dict if prefix + name in MAPPINGS else kind
        if is_dataclass(types[prefix + name]):
            types |= key_types(kind, f"{prefix}{name}.")
    return types


@cache
def setting_types() -> dict[str, Any]:
    """Return the types of every key, and of the settings in mappings: data.video.fps."""
    inner = (key_types(settings, f"{key}.") for key, settings in MAPPINGS.items())
    return {name: kind for types in (key_types(), *inner) for name, kind in types.items()}


def leaves() -> list[str]:
    """Return every key in dotted form that has a value, groups excluded."""
    return [key for key, kind in key_types().items() if not is_dataclass(kind)]


def get(cfg: Any, key: str) -> Any:
    """Return the value of a dotted key."""
    for name in key.split("."):
        cfg = getattr(cfg, name)
    return cfg


def check_of(errors_in: Callable[[Any], Iterator[ConfigError]]) -> Callable[[Any], None]:
    """Make a check of a configuration from the errors that are in it. The first one is raised, and
    its key gets its value; an error that shows no value is raised inside."""

    @wraps(errors_in)
    def check(cfg: Any) -> None:
        for error in errors_in(cfg):
            raise ConfigError(**error.fields() | {"found": get(cfg, error.key)})

    return check
