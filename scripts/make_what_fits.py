"""The tables of docs/what-fits.md: which Qwen3-VL fits on which GPUs, by the planner's estimate.

    python scripts/make_what_fits.py

It rewrites the part of that page between its marks, in a few minutes. tests/test_what_fits.py fails
if the part is outdated.
"""

import sys
from pathlib import Path

from transformers import Qwen3VLConfig, Qwen3VLMoeConfig

from megatron_vlm import Config
from megatron_vlm.config.schema import LoraConfig, ModelConfig, TrainConfig
from megatron_vlm.config.trainable import USUAL
from megatron_vlm.distributed.device import PEAK_FLOPS_BF16
from megatron_vlm.family.qwen3_vl import moe
from megatron_vlm.family.qwen3_vl.dense import sizes_of
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.planner.hardware import gpu
from megatron_vlm.planner.row_sizes import assumed_mix
from megatron_vlm.planner.search import Cluster, search

PAGE = Path(__file__).parent.parent / "docs" / "what-fits.md"
BEGIN, END = "<!-- fits begin -->\n", "<!-- fits end -->\n"
CARDS = (24, 48, 80, 141)  # GiB
COUNTS, COUNTS_OF_EXPERTS = (1, 2, 4, 8), (4, 8, 16, 32)
KINDS = ("all trained", "tower frozen", "adapters")
_SMALL_TOWER = dict(depth=24, hidden_size=1024, intermediate_size=4096, num_heads=16)
_TOWER = dict(depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16)
_MARKS = {24: [5, 11, 17], 27: [8, 16, 24]}
# Layers, width, width of the MLP, heads, tied, tower, as in the config.json of each model.
MODELS = {
    "2B": (28, 2048, 6144, 16, True, _SMALL_TOWER),
    "4B": (36, 2560, 9728, 32, True, _SMALL_TOWER),
    "8B": (36, 4096, 12288, 32, False, _TOWER),
    "32B": (64, 5120, 25600, 64, False, _TOWER),
}
# Layers, width, width of an expert, heads. There are 128 experts, and each token goes to 8.
WITH_EXPERTS = {"30B-A3B": (48, 2048, 768, 32)}
_SHORT = {
    ("none", False): "",
    ("none", True): ", V",
    ("full", False): ", D",
    ("full", True): ", DV",
}


def sizes_of_model(name: str) -> ModelSizes:
    """Return the sizes from the config.json that a model of this size has."""
    if name in WITH_EXPERTS:
        return _sizes_with_experts(*WITH_EXPERTS[name])
    layers, hidden, ffn, heads, tied, tower = MODELS[name]
    return sizes_of(
        Qwen3VLConfig(
            text_config=dict(
                num_hidden_layers=layers,
                hidden_size=hidden,
                intermediate_size=ffn,
                num_attention_heads=heads,
                num_key_value_heads=8,
                head_dim=128,
                vocab_size=151936,
            ),
            vision_config=dict(
                **tower, out_hidden_size=hidden, deepstack_visual_indexes=_MARKS[tower["depth"]]
            ),
            tie_word_embeddings=tied,
        )
    )


def _sizes_with_experts(layers: int, hidden: int, width: int, heads: int) -> ModelSizes:
    return moe.moe_sizes_of(
        Qwen3VLMoeConfig(
            text_config=dict(
                num_hidden_layers=layers,
                hidden_size=hidden,
                moe_intermediate_size=width,
                num_experts=128,
                num_experts_per_tok=8,
                num_attention_heads=heads,
                num_key_value_heads=4,
                head_dim=128,
                vocab_size=151936,
                tie_word_embeddings=False,
            ),
            vision_config=dict(
                **_TOWER, out_hidden_size=hidden, deepstack_visual_indexes=_MARKS[27]
            ),
        )
    )


def cell(sizes: ModelSizes, kind: str, count: int, card: int) -> str:
    """Return the fastest layout that fits, or the memory that the leanest layout needs."""
    cfg = Config(
        model=ModelConfig(path="", freeze_vision=kind == "tower frozen"),
        lora=USUAL if kind == "adapters" else LoraConfig(),
        train=TrainConfig(global_batch_size=64, micro_batch_tokens=8192, precision="bf16"),
    )
    machine = gpu("H100", PEAK_FLOPS_BF16["H100"])
    mix = assumed_mix(sizes, cfg.data.max_tokens)
    results = search(cfg, sizes, mix, Cluster(count, card * 2**30, machine))
    if results.leanest is not None:
        return f"needs {results.leanest.need / 2**30:.0f}"
    best = results.fitting[0]
    dims, model = best.dims, best.cfg.model
    degrees = (("TP", dims.tp), ("PP", dims.pp), ("EP", dims.ep), ("DP", dims.dp))
    words = " ".join(f"{name}{degree}" for name, degree in degrees if degree > 1) or "1"
    mode = _SHORT[model.recompute, model.recompute_vision]
    return f"**{words}{mode}** {best.need / 2**30:.0f}"


def line(name: str, kind: str, count: int) -> str:
    """Return one line of a model's table."""
    sizes = sizes_of_model(name)
    cells = [cell(sizes, kind, count, card) for card in CARDS]
    return f"| {name}, {count} GPU{'s' * (count > 1)}, {kind} | {' | '.join(cells)} |"


def configurations(name: str) -> list[tuple[str, str, int]]:
    """Return the arguments of `line` for each line of a model's table."""
    counts = COUNTS_OF_EXPERTS if name in WITH_EXPERTS else COUNTS
    return [(name, kind, count) for kind in KINDS for count in counts]


def tables() -> str:
    """Return a table for each model."""
    parts = []
    for name in (*MODELS, *WITH_EXPERTS):
        lines = [f"| {name} | {' | '.join(f'{card} GiB' for card in CARDS)} |", "|---" * 5 + "|"]
        lines += [line(*configuration) for configuration in configurations(name)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def with_tables(page: str, text: str) -> str:
    """Return the page with new tables."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end
    return f"{before}{begin}\n{text}\n{end}{after}"


def main() -> int:
    """Rewrite the page."""
    PAGE.write_text(with_tables(PAGE.read_text(), tables()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
