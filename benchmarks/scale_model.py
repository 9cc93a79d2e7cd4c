"""Durations of a simulated step and of a simulated checkpoint; see simulate_scale.py.

Suffixes: G micro-batches, S pipeline stages, I images, R rows. Times are seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLMoeConfig

from megatron_vlm.config.schema import ParallelConfig
from megatron_vlm.data.batches.balance import Plan, RowSize
from megatron_vlm.data.batches.cost import WorkModel
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.family.qwen3_vl.dense import sizes_of
from megatron_vlm.family.qwen3_vl.moe import moe_sizes_of
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.planner.hardware import all_to_all
from megatron_vlm.planner.pipeline_time import one_f_one_b


@dataclass(frozen=True)
class Machine:
    """The assumed machine: every number is an assumption. Bytes and operations are per second."""

    peak_flops: float = 989e12  # peak of a GPU, bf16 (device.py: H100)
    utilisation: float = 0.45  # share of the peak within a micro-batch, TP's reductions included
    layer_s: float = 0.3e-3  # minimum time of a layer's forward, even with few tokens
    link: float = 350e9  # from a GPU to others of its machine: NVLink
    network: float = 40e9  # from a GPU to other machines: 400 Gb/s, 80 % used
    hop_s: float = 5e-6  # each hop of a ring
    gpus: int = 8  # GPUs in a machine
    to_host: float = 5e9  # from a GPU into pageable memory
    files: float = 200e9  # the file system, from all machines together
    files_machine: float = 5e9  # the file system, from one machine that verifies digests
    creates: float = 20e3  # files created in one folder, all ranks together
    stat_s: float = 0.2e-3  # look-up of a file by one rank
    save_every_s: float = 1800.0


@dataclass(frozen=True)
class Setup:
    """A model and its layout."""

    name: str
    config: Qwen3VLConfig | Qwen3VLMoeConfig
    tp: int
    layers_S: tuple[int, ...]  # decoder layers of each stage
    tokens: int  # train.micro_batch_tokens

    @property
    def gpus(self) -> int:
        """The number of GPUs of one replica."""
        return self.tp * len(self.layers_S)

    @cached_property
    def sizes(self) -> ModelSizes:
        if isinstance(self.config, Qwen3VLMoeConfig):
            return moe_sizes_of(self.config)
        return sizes_of(self.config)

    @cached_property
    def parameters(self) -> "Parameters":
        with torch.device("meta"):
            model = Qwen3VLForConditionalGeneration(self.config)
        counts = {name: param.numel() for name, param in model.named_parameters()}

        def of(part: str) -> int:
            return sum(count for name, count in counts.items() if part in name)

        layers = of("language_model.layers")
        return Parameters(of(".visual."), layers, of("embed_tokens"), of("lm_head"))


@dataclass(frozen=True)
class Parameters:
    """Number of values in each part; norms outside the layers are left out."""

    tower: int
    layers: int  # all layers of the decoder
    embedding: int
    head: int

    @property
    def total(self) -> int:
        return self.tower + self.layers + self.embedding + self.head

    def of_gpu(self, setup: Setup, tower_over_tp: bool = False) -> list[float]:
        """Return the number of values on a GPU of each stage. The tower is whole on every TP
        rank."""
        held = [self.layers * n / sum(setup.layers_S) / setup.tp for n in setup.layers_S]
        held[0] += self.tower / (setup.tp if tower_over_tp else 1) + self.embedding / setup.tp
        held[-1] += self.head / setup.tp
        return held


def make_setup(name: str, sizes: tuple[int, int, int, int], tp: int, pp: int, n: int) -> Setup:
    """Return a setup with sizes as in the models' config.json: layers, width, width of the MLP,
    heads."""
    layers, hidden, intermediate, heads = sizes
    text = _text(layers, hidden, heads, 8) | dict(intermediate_size=intermediate)
    config = Qwen3VLConfig(text_config=text, vision_config=dict(out_hidden_size=hidden))
    dims = ParallelDims.create(ParallelConfig(tp=tp, pp=pp), tp * pp, layers)
    return Setup(name, config, tp, dims.layers_per_stage, n)


def make_moe_setup(name: str, sizes: tuple[int, int, int, int], pp: int, n: int) -> Setup:
    """Return a setup with experts. Sizes: layers, width, width of an expert, heads. There are 128
    experts, and each token goes to 8."""
    layers, hidden, width, heads = sizes
    text = _text(layers, hidden, heads, 4) | dict(moe_intermediate_size=width)
    text |= dict(num_experts=128, num_experts_per_tok=8, tie_word_embeddings=False)
    config = Qwen3VLMoeConfig(text_config=text, vision_config=dict(out_hidden_size=hidden))
    dims = ParallelDims.create(ParallelConfig(pp=pp), pp, layers)
    return Setup(name, config, 1, dims.layers_per_stage, n)


def _text(layers: int, hidden: int, heads: int, kv_heads: int) -> dict[str, int]:
    return dict(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        vocab_size=151936,
    )


@dataclass(frozen=True)
class Rows:
    """Synthetic rows. `pairs` counts pairs of patches within an image."""

    tokens_R: np.ndarray
    supervised_R: np.ndarray
    patches_R: np.ndarray
    pairs_R: np.ndarray

    def sizes(self, work: WorkModel) -> list[RowSize]:
        columns = (self.tokens_R, self.supervised_R, self.patches_R, self.pairs_R)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [work.row_size(*row) for row in rows]


def draw_rows(count: int, seed: int = 0, most_tokens: int = 8192) -> Rows:
    """Draw rows. A fifth are text only; half of the rest have one image, and few have up to 47.
    Images beyond the token limit are cut off, as data.truncation=image_safe does."""
    rng = np.random.default_rng(seed)
    images_R = np.where(rng.random(count) < 0.2, 0, rng.zipf(1.6, count).clip(1, 47))
    text_R = rng.lognormal(np.log(200), 0.8, count).astype(np.int64).clip(16, 4096)
    row_I = np.repeat(np.arange(count), images_R)
    # A token covers 32 x 32 pixels.
    tokens_I = rng.integers(4, 32, len(row_I)) * rng.integers(4, 32, len(row_I))
    ends_I = np.cumsum(tokens_I)
    before_R = np.concatenate([[0], ends_I])[np.cumsum(images_R) - images_R]
    tokens_I[ends_I - before_R[row_I] + text_R[row_I] > most_tokens] = 0
    seen_R, pairs_R = (np.bincount(row_I, tokens_I**k, count).astype(np.int64) for k in (1, 2))
    return Rows(text_R + seen_R, text_R * 2 // 5, 4 * seen_R, 16 * pairs_R)


def forward_seconds(
    groups: Sequence[Sequence[int]], rows: Rows, setup: Setup, machine: Machine
) -> np.ndarray:
    """Return seconds [G, S]. The decoder computes padding, too; the tower and the head do not."""
    work = WorkModel.from_sizes(setup.sizes)
    flat, counts_G = np.concatenate(groups), np.array([len(group) for group in groups])
    starts_G = np.cumsum(counts_G) - counts_G
    longest_G = np.maximum.reduceat(rows.tokens_R[flat], starts_G)
    supervised_G, patches_G, pairs_G = (
        np.add.reduceat(column[flat], starts_G)
        for column in (rows.supervised_R, rows.patches_R, rows.pairs_R)
    )
    pairs_of_tokens_G = longest_G * (longest_G + 1) // 2
    decoder_G = counts_G * (work.per_token * longest_G + work.per_token_pair * pairs_of_tokens_G)
    speed = machine.peak_flops * machine.utilisation * setup.tp
    layers_S = np.array(setup.layers_S)
    least_G1 = np.maximum(decoder_G / layers_S.sum() / speed, machine.layer_s)[:, None]
    seconds_GS = least_G1 * layers_S
    vision_G = (work.per_patch * patches_G + work.per_patch_pair * pairs_G) / speed
    depth = setup.config.vision_config.depth
    seconds_GS[:, 0] += np.maximum(vision_G, depth * machine.layer_s * (patches_G > 0))
    seconds_GS[:, -1] += work.per_supervised * supervised_G / speed
    return seconds_GS


def bubble(forward_GS: np.ndarray) -> float:
    """Return idle time as a share of busy time; (pp - 1) / m if all micro-batches cost the same."""
    stages = forward_GS.shape[1]
    return one_f_one_b(forward_GS, 2 * forward_GS) * stages / (3 * forward_GS.sum()) - 1


def replica_seconds(plan: Plan, rows: Rows, setup: Setup, machine: Machine) -> list[float]:
    """Return the seconds of forward and backward on each data parallel rank; a backward takes as
    long as two forwards."""
    groups = [group for share in plan for group in share]
    ends = np.cumsum([len(share) for share in plan])[:-1]
    parts = np.split(forward_seconds(groups, rows, setup, machine), ends)
    if len(setup.layers_S) == 1:
        return [3 * float(part.sum()) for part in parts]
    return [one_f_one_b(part, 2 * part) for part in parts]


@dataclass(frozen=True)
class Exchange:
    """Gradients and weights over DP, once a step, on the stage that has the largest number of
    values."""

    values: int  # values on a GPU
    reduce_s: float  # reduce-scatter, fp32
    gather_s: float  # all-gather of the updated weights, bf16
    bucket: int  # values reduced at once with overlap_grad_reduce
    overlapped_s: float  # part of the reduction that then remains, at best


def exchange(setup: Setup, ranks: int, machine: Machine, backward_s: float = 0.0) -> Exchange:
    """Compute the exchange with rings over `ranks`. Only the backward of the last micro-batch, of
    `backward_s`, hides communication; gradients that are complete last are sent last."""
    values = int(max(setup.parameters.of_gpu(setup)))

    def ring(size: float) -> float:
        return (ranks - 1) / ranks * size / machine.network + (ranks - 1) * machine.hop_s

    # megatron-core 0.16.1, DistributedDataParallel.__init__: larger buckets for more ranks.
    bucket = min(values, max(40_000_000, 1_000_000 * ranks))
    reduce_s = ring(4 * values)
    left = min(reduce_s, max(ring(4 * bucket), reduce_s - backward_s))
    return Exchange(values, reduce_s, ring(2 * values), bucket, left)


@dataclass(frozen=True)
class Travel:
    """Tokens on their way to experts and back in a step, on a GPU of the stage with most layers."""

    inside: float  # bytes sent within the machine
    outside: float  # bytes sent to other machines
    seconds: float
    compute_s: float  # forwards and backwards, mean of all replicas
    waiting_s: float  # wait for the longest micro-batch of the replicas that share experts


def travel(plan: Plan, rows: Rows, setup: Setup, machine: Machine) -> Travel:
    """Compute the all-to-all of experts. Each replica of the plan is an expert parallel rank. Every
    token goes to each of its experts in bf16, and comes back; the same happens in the backward.
    Padding stays."""
    text, stages = setup.sizes.text, len(setup.layers_S)
    # The last one of equal stages does not have the tower.
    stage = max(range(stages), key=lambda s: (setup.layers_S[s], s))
    assert text.experts is not None
    ranks, passes = len(plan), 4 * setup.layers_S[stage]
    tokens = float(rows.tokens_R.sum()) / ranks
    size = passes * tokens * text.experts.top_k * text.hidden * 2
    inside, outside = all_to_all(size, ranks, machine.gpus)
    depth = max(len(share) for share in plan)
    seconds = max(inside / machine.link, outside / machine.network) + passes * depth * machine.hop_s
    forward_GR = np.zeros((depth, ranks))
    for rank, share in enumerate(plan):
        if share:
            forward_GR[: len(share), rank] = forward_seconds(share, rows, setup, machine)[:, stage]
    compute_s = 3 * float(forward_GR.sum(0).mean())
    waiting_s = 3 * float(forward_GR.max(1).sum()) - compute_s
    return Travel(inside, outside, seconds, compute_s, waiting_s)


@dataclass(frozen=True)
class Traffic:
    """A checkpoint as checkpoint/ writes and reads it: fp32 weights and both moments."""

    files: int
    total: int  # bytes
    largest: float  # bytes of a rank
    stop_sync: float  # seconds for which training stops
    stop_async: float
    write: float  # write in the background
    find: float  # resume: rank 0 looks up every file, then all ranks verify a share each
    read: float  # resume: bytes that leave the file system afterwards
    resume: float  # both together

    def lost(self, machine: Machine) -> tuple[float, float]:
        """Return the share of time lost: synchronous, asynchronous."""
        stops = (self.stop_sync, self.stop_async)
        return tuple(s / (s + machine.save_every_s) for s in stops)  # type: ignore[return-value]


def checkpoint(setup: Setup, ranks: int, machine: Machine) -> Traffic:
    """Compute a checkpoint. Optimizer state is sharded over `ranks`; each process writes one file.
    To resume, every process reads its share of the moments and all weights of its TP and PP part,
    but the page cache of a machine serves data that several of its processes read."""
    files, total = ranks * setup.gpus, 12 * setup.parameters.total
    machines = max(1, files // machine.gpus)
    speed = min(machine.files, machines * machine.files_machine)
    # TP ranks take turns with the tower, because all of them have it.
    largest = 12 * max(setup.parameters.of_gpu(setup, tower_over_tp=True)) / ranks
    write = total / speed + files / machine.creates
    finish = files * machine.stat_s  # rank 0 looks up every file before the rename; all wait
    find = finish + total / speed
    # Each machine reads the weights of a stage once.
    weights = 4 * setup.parameters.total / len(setup.layers_S)
    read = total + machines * weights + total * 2 // 3
    return Traffic(
        files,
        total,
        largest,
        write + finish,
        largest / machine.to_host + finish,
        write,
        find,
        read,
        find + read / speed,
    )
