"""The table of docs/what-fits.md for one machine: what to set for each model, card and way of
training, the tokens per second to expect, and the longest row. All of it is the planner's estimate.
make_what_fits.py writes it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_vlm import Config, ConfigError
from megatron_vlm.config.schema import LoraConfig, ModelConfig, TrainConfig
from megatron_vlm.config.trainable import USUAL
from megatron_vlm.distributed.device import CARDS
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.planner.advice import fitting_sets
from megatron_vlm.planner.hardware import gpu
from megatron_vlm.planner.memory_switches import with_keys
from megatron_vlm.planner.row_sizes import BatchSizes, RowSample, assumed_mix
from megatron_vlm.planner.search import Cluster, search

ROWS_OF_STEP = 32
LENGTHS = tuple(2**power for power in range(11, 19))  # 2k to 256k tokens
WAYS = {
    "all trained": LoraConfig(),
    "adapters": USUAL,
    "adapters, nf4 base": replace(USUAL, base="nf4"),
}
_LETTERS: Mapping[str, Mapping[object, str]] = {
    "optim.states": {"bf16": "S16", "int8": "S8"},
    "optim.offload": {0.5: "H0.5", 1.0: "H"},
    "model.offload_activations": {0.5: "A0.5", 1.0: "A"},
}


@dataclass(frozen=True)
class MachineKind:
    """GPUs of one machine, and its host memory in GiB."""

    name: str
    card: str
    gpus: int
    memory: int
    host_memory: int

    @property
    def cluster(self) -> Cluster:
        """The machine for the planner."""
        machine = gpu(self.card, CARDS[self.card].peak)
        return Cluster(self.gpus, self.memory * 2**30, machine, self.host_memory * 2.0**30)


MACHINES = (
    MachineKind("24 GiB", "RTX 4090", 1, 24, 128),
    MachineKind("48 GiB", "L40S", 1, 48, 128),
    MachineKind("80 GiB", "H100", 1, 80, 256),
    MachineKind("141 GiB", "H200", 1, 141, 256),
    MachineKind("8 x 80 GiB", "H100", 8, 80, 2048),
)


def machine_line(name: str, sizes: ModelSizes, way: str) -> str:
    """Return one line of the table."""
    cells = [_cell(sizes, way, machine) for machine in MACHINES]
    return f"| {name}, {way} | {' | '.join(cells)} |"


def _cell(sizes: ModelSizes, way: str, machine: MachineKind) -> str:
    train = TrainConfig(global_batch_size=ROWS_OF_STEP, micro_batch_tokens=8192, precision="bf16")
    cfg = Config(model=ModelConfig(path=""), lora=WAYS[way], train=train)
    mix = assumed_mix(sizes, cfg.data.max_tokens)
    try:
        best = fitting_sets(cfg, sizes, mix, machine.cluster)[0]
    except ConfigError:
        return "no"
    candidate, model = best.best, best.best.cfg.model
    letters = [_LETTERS[key][value] for key, value in best.switches.items()]
    letters += ["D"] * (model.recompute == "full") + ["V"] * model.recompute_vision
    words = " ".join(filter(None, (layout_words(candidate.dims), *letters))) or "-"
    return f"{_rounded(candidate.tokens_per_s)}/s, {_longest(cfg, sizes, machine)}: {words}"


def layout_words(dims: ParallelDims) -> str:
    """Return the degrees above 1, such as TP2 DP4."""
    degrees = (("TP", dims.tp), ("PP", dims.pp), ("EP", dims.ep), ("DP", dims.dp))
    return " ".join(f"{name}{degree}" for name, degree in degrees if degree > 1)


def _rounded(value: float) -> str:
    """Return two digits of a number."""
    return f"{float(f'{value:.2g}'):,.0f}"


def _longest(cfg: Config, sizes: ModelSizes, machine: MachineKind) -> str:
    """Return the longest row that fits if every switch is on that changes no bit."""
    keys = ["model.offload_activations", *["optim.offload"] * (not cfg.lora.rank)]
    cfg = with_keys(cfg, dict.fromkeys(keys, 1.0))
    longest = 0
    for tokens in LENGTHS:
        train = replace(cfg.train, micro_batch_tokens=tokens, global_batch_size=machine.gpus)
        trial = replace(cfg, train=train)
        if not search(trial, sizes, _rows_of(tokens, sizes), machine.cluster).fitting:
            break
        longest = tokens
    return f"{longest // 1024}k" if longest else "short"


def _rows_of(tokens: int, sizes: ModelSizes) -> RowSample:
    """Return rows of this length. Half of it is text, of which a third is trained, and half are
    pictures of a megapixel."""
    patches = sizes.vision.megapixel
    count = max(1, tokens // 2 // (patches // sizes.vision.merge**2))
    row = BatchSizes(
        1, tokens, tokens // 6, count * patches, patches, patch_pairs=count * patches**2
    )
    return RowSample((row,) * 8, "")
