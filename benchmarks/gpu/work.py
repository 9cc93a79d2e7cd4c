"""The models and rows for measurements of speed, and the choice of those that a device can hold."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_vlm import Config, Row
from megatron_vlm.config.schema import ModelConfig
from megatron_vlm.data.batches.balance import WorkModel
from megatron_vlm.data.tokens.row import IGNORE
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.family import family_of
from megatron_vlm.family.qwen.tiny import tiny_config, train_tokenizer, write_processor
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.family.tiny import TinySpec
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.memory import USABLE, stage_memory
from megatron_vlm.planner.row_sizes import BatchSizes

SHARD = 2**31  # values in a file
BF16 = 2  # bytes


@dataclass(frozen=True)
class Work:
    """A model, and the rows of a step, which are one micro-batch."""

    name: str
    spec: TinySpec
    rows: int = 4
    tokens: int = 2048
    side: int = 64  # patches along a side of a picture
    supervised: int = 512
    steps: int = 4

    @property
    def row(self) -> BatchSizes:
        """Sizes of each of the rows, for the planner."""
        patches = self.side**2
        return BatchSizes(1, self.tokens, self.supervised, patches, patches, patches**2)


QWEN3_VL_8B = TinySpec(
    layers=36,
    hidden=4096,
    intermediate=12288,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=151_936,
    vision_depth=27,
    vision_hidden=1152,
    vision_heads=16,
    vision_intermediate=4304,
)
QWEN3_VL_4B = replace(
    QWEN3_VL_8B,
    hidden=2560,
    intermediate=9728,
    tied=True,
    vision_depth=24,
    vision_hidden=1024,
    vision_intermediate=4096,
)
QWEN3_VL_2B = replace(QWEN3_VL_4B, layers=28, hidden=2048, intermediate=6144, heads=16)
STACKS = [
    Work(f"{layers} of the 36 layers of Qwen3-VL 8B", replace(QWEN3_VL_8B, layers=layers))
    for layers in (12, 8, 4)
]
WHOLES = [
    Work("Qwen3-VL 4B", QWEN3_VL_4B),
    Work("Qwen3-VL 2B", QWEN3_VL_2B),
    Work("Qwen3-VL 2B, two rows", QWEN3_VL_2B, rows=2),
    Work("Qwen3-VL 2B, one row", QWEN3_VL_2B, rows=1),
]
QWEN3_5_9B = replace(
    QWEN3_VL_8B,
    family="qwen3_5",
    heads=16,
    kv_heads=4,
    head_dim=256,
    vocab=248_320,
    linear_key_heads=16,
    linear_value_heads=32,
    linear_key_dim=128,
    linear_value_dim=128,
)
HYBRIDS = [
    Work(f"{layers} of the 32 layers of Qwen3.5 9B", replace(QWEN3_5_9B, layers=layers), rows=rows)
    for layers, rows in ((8, 4), (4, 4), (4, 2), (4, 1))
]
DRY = Work("tiny", TinySpec(), rows=2, tokens=64, side=8, supervised=16, steps=2)
DRY_HYBRID = replace(DRY, spec=TinySpec(family="qwen3_5", head_dim=64))


def _sizes_of(config: Any) -> ModelSizes:
    return family_of(config, "").sizes_of(config)


def largest(works: Sequence[Work], memory: int) -> Work | None:
    """Return the first work that a device with this many bytes can train without recomputation."""
    return next((work for work in works if needs(work, "none") <= USABLE * memory), None)


def needs(work: Work, recompute: str) -> int:
    """Return the bytes that the planner estimates."""
    sizes = _sizes_of(tiny_config(work.spec, train_tokenizer(512)))
    cfg = Config(model=ModelConfig(path="", recompute=recompute))  # type: ignore[arg-type]
    dims = ParallelDims.create(cfg.parallel, 1, sizes.text.num_layers)
    batch = BatchSizes.from_rows([work.row] * work.rows)
    return stage_memory(ModelLayout(cfg, sizes, dims, BF16), 0, [batch]).total


def write_random(folder: Path, spec: TinySpec, device: str) -> None:
    """Write a random checkpoint of these sizes in bf16. The device draws it, because the host would
    take minutes."""
    folder.mkdir(parents=True)
    tokenizer = train_tokenizer(min(spec.vocab, 512))
    config = tiny_config(spec, tokenizer)
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_processor(folder, spec)
    shards: list[dict[str, Tensor]] = [{}]
    for tensor in _sizes_of(config).tensors:
        if sum(value.numel() for value in shards[-1].values()) > SHARD:
            shards.append({})
        values = 0.02 * torch.randn(tensor.shape, device=device)
        if len(tensor.shape) == 1 and tensor.name.endswith("weight"):
            values += 1  # a norm
        shards[-1][tensor.name] = values.bfloat16().cpu()
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, name)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def make_rows(work: Work, path: Path) -> list[Row]:
    """Return rows of text around a picture, whose patches are bytes as those of the loader."""
    config = json.loads((path / "config.json").read_text())
    picture = work.side**2 // 4
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(work.rows):
        ids = torch.randint(0, 250, (work.tokens,), generator=generator)
        ids[8] = config["vision_start_token_id"]
        ids[9 : 9 + picture] = config["image_token_id"]
        labels = torch.full_like(ids, IGNORE)
        labels[-work.supervised :] = ids[-work.supervised :]
        values = 3 * work.spec.patch_size**2
        patches = torch.randint(
            0, 256, (work.side**2, values), generator=generator, dtype=torch.uint8
        )
        grid = torch.tensor([[1, work.side, work.side]])
        rows.append(Row(ids, labels, patches, grid))
    return rows


def flops(work: Work, path: Path) -> float:
    """Return the operations of a step: three times the forward of decoder, head and last MLP on
    supervised tokens, and tower. Recomputation and padding are not counted."""
    from transformers import AutoConfig

    model, row = WorkModel.from_sizes(_sizes_of(AutoConfig.from_pretrained(path))), work.row
    of_row = model.row((row.tokens,), row.supervised, row.patches, row.patch_pairs)
    return 3.0 * work.rows * of_row
