"""The table of docs/what-fits.md: which model fits on which machine, by the planner's estimate.

    python scripts/make_what_fits.py

It rewrites the part of that page between the marks, in half an hour, and first the config.json
beside each recipe whose sizes it has, by which `megatron-vlm plan` knows them.
tests/planner/test_what_fits.py fails if a line is outdated.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from machine_tables import MACHINES, WAYS, machine_line
from transformers import (
    Gemma4Config,
    PretrainedConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from megatron_vlm.config import config_dir
from megatron_vlm.family import family_of
from megatron_vlm.family.spec import ModelSizes

PAGE = Path(__file__).parent.parent / "docs" / "what-fits.md"
_SMALLEST_TOWER = dict(depth=12, hidden_size=768, intermediate_size=3072, num_heads=12)
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
WITH_EXPERTS = {"30B-A3B": (48, 2048, 768, 32), "235B-A22B": (94, 4096, 1536, 64)}
# Layers, width, width of the MLP, heads, heads of keys and values, value heads of the delta nets,
# tied, tower. The 27B of Qwen3.6 and 3.8 have these sizes as well.
QWEN3_5 = {
    "Qwen3.5-0.8B": (24, 1024, 3584, 8, 2, 16, True, _SMALLEST_TOWER),
    "Qwen3.5-2B": (24, 2048, 6144, 8, 2, 16, True, _SMALL_TOWER),
    "Qwen3.5-4B": (32, 2560, 9216, 16, 4, 32, True, _SMALL_TOWER),
    "Qwen3.5-9B": (32, 4096, 12288, 16, 4, 32, False, _TOWER),
    "Qwen3.5-27B": (64, 5120, 17408, 24, 4, 48, False, _TOWER),
}
# Layers, width, experts, experts of a token, width of an expert, heads, value heads of the delta
# nets. Qwen3.6-35B-A3B has these sizes as well.
QWEN3_5_WITH_EXPERTS = {
    "Qwen3.5-35B-A3B": (40, 2048, 256, 8, 512, 16, 32),
    "Qwen3.5-122B-A10B": (48, 3072, 256, 8, 1024, 32, 64),
    "Qwen3.5-397B-A17B": (60, 4096, 512, 10, 1024, 32, 64),
}
# Layers, width, width of the MLP, heads, heads of keys and values, such heads of full attention,
# experts. Each token goes to 8 experts of a width of 704.
GEMMA4 = {
    "Gemma 4 31B": (60, 5376, 21504, 32, 16, 4, 0),
    "Gemma 4 26B-A4B": (30, 2816, 2112, 16, 8, 2, 128),
}
RECIPES = {
    **{f"qwen3_vl_{size.lower()}": size for size in MODELS},
    **{f"qwen3_vl_{size.lower().replace('-', '_')}": size for size in WITH_EXPERTS},
    **{name.lower().replace(".", "_").replace("-", "_"): name for name in QWEN3_5},
    **{f"qwen3_{version}_27b": "Qwen3.5-27B" for version in (6, 8)},
    **{name.lower().replace(".", "_").replace("-", "_"): name for name in QWEN3_5_WITH_EXPERTS},
    "qwen3_6_35b_a3b": "Qwen3.5-35B-A3B",
    **{"gemma4_31b": "Gemma 4 31B", "gemma4_26b_a4b": "Gemma 4 26B-A4B"},
}
LARGEST = ("235B-A22B", "Qwen3.5-122B-A10B", "Qwen3.5-397B-A17B")  # take minutes, so no line
SIZES = (*MODELS, *WITH_EXPERTS, *QWEN3_5, *QWEN3_5_WITH_EXPERTS, *GEMMA4)
NAMES = [name for name in SIZES if name not in LARGEST]


def sizes_of_model(name: str) -> ModelSizes:
    """Return the sizes from the config.json that a model of this size has."""
    config = config_of_model(name)
    return family_of(config, name).sizes_of(config)


def config_of_model(name: str) -> PretrainedConfig:
    """Return the config.json of a model of this size."""
    if name in WITH_EXPERTS:
        return _qwen3_vl_moe_config(*WITH_EXPERTS[name])
    if name in QWEN3_5:
        return qwen3_5_config(*QWEN3_5[name])
    if name in QWEN3_5_WITH_EXPERTS:
        return qwen3_5_moe_config(*QWEN3_5_WITH_EXPERTS[name])
    if name in GEMMA4:
        return gemma4_config(*GEMMA4[name])
    layers, hidden, ffn, heads, tied, tower = MODELS[name]
    return Qwen3VLConfig(
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


def _qwen3_vl_moe_config(layers: int, hidden: int, width: int, heads: int) -> Qwen3VLMoeConfig:
    return Qwen3VLMoeConfig(
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
        vision_config=dict(**_TOWER, out_hidden_size=hidden, deepstack_visual_indexes=_MARKS[27]),
    )


def qwen3_5_config(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    value_heads: int,
    tied: bool,
    tower: dict[str, int],
) -> Qwen3_5Config:
    """Return the config.json of a dense Qwen3.5."""
    return Qwen3_5Config(
        text_config=dict(
            num_hidden_layers=layers,
            hidden_size=hidden,
            intermediate_size=ffn,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            linear_num_value_heads=value_heads,
            tie_word_embeddings=tied,
        ),
        vision_config=dict(**tower, out_hidden_size=hidden),
        tie_word_embeddings=tied,
    )


def qwen3_5_moe_config(
    layers: int, hidden: int, experts: int, top_k: int, width: int, heads: int, value_heads: int
) -> Qwen3_5MoeConfig:
    """Return the config.json of a Qwen3.5 with experts. The shared expert has the width of the
    others."""
    return Qwen3_5MoeConfig(
        text_config=dict(
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_experts=experts,
            num_experts_per_tok=top_k,
            moe_intermediate_size=width,
            shared_expert_intermediate_size=width,
            num_attention_heads=heads,
            num_key_value_heads=2,
            linear_num_value_heads=value_heads,
        ),
        vision_config=dict(**_TOWER, out_hidden_size=hidden),
    )


def gemma4_config(
    layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, of_full: int, experts: int
) -> Gemma4Config:
    """Return the config.json of a Gemma 4. Every sixth layer has full attention."""
    of_experts = dict(num_experts=experts, top_k_experts=8, moe_intermediate_size=704)
    return Gemma4Config(
        text_config=dict(
            num_hidden_layers=layers,
            hidden_size=hidden,
            intermediate_size=ffn,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            num_global_key_value_heads=of_full,
            head_dim=256,
            global_head_dim=512,
            sliding_window=1024,
            attention_k_eq_v=True,
            use_bidirectional_attention="vision",
            final_logit_softcapping=30.0,
            vocab_size=262144,
            max_position_embeddings=262144,
            hidden_size_per_layer_input=0,
            num_kv_shared_layers=0,
            enable_moe_block=experts > 0,
            **(of_experts if experts else {}),
        ),
        vision_config=dict(
            num_hidden_layers=27,
            hidden_size=1152,
            intermediate_size=4304,
            num_attention_heads=16,
            num_key_value_heads=16,
            head_dim=72,
            standardize=True,
        ),
        tie_word_embeddings=True,
    )


def machine_lines() -> Iterator[tuple[str, str]]:
    """Yield the model and the way of training of each line of the table for one machine."""
    for name in NAMES:
        for way in WAYS:
            yield name, way


def table_of_machines() -> str:
    """Return the table for one machine."""
    lines = [f"| | {' | '.join(machine.name for machine in MACHINES)} |"]
    lines.append("|---" * (len(MACHINES) + 1) + "|")
    lines += [machine_line(name, sizes_of_model(name), way) for name, way in machine_lines()]
    return "\n".join(lines) + "\n"


def with_part(page: str, mark: str, text: str) -> str:
    """Return the page with a new text between two marks."""
    before, begin, rest = page.partition(f"<!-- {mark} begin -->\n")
    _, end, after = rest.partition(f"<!-- {mark} end -->\n")
    assert begin and end
    return f"{before}{begin}\n{text}\n{end}{after}"


def write_configs() -> None:
    """Write the config.json of each recipe whose sizes are known."""
    for recipe, name in RECIPES.items():
        folder = config_dir() / "model" / recipe
        folder.mkdir(exist_ok=True)
        config = config_of_model(name).to_diff_dict()
        del config["transformers_version"]
        (folder / "config.json").write_text(json.dumps(config, sort_keys=True) + "\n")


def main() -> int:
    """Rewrite the files and the page."""
    write_configs()
    PAGE.write_text(with_part(PAGE.read_text(), "machines", table_of_machines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
