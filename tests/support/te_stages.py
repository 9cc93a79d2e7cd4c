# In .venv-te (make te-env): .venv-te/bin/python -m tests.support.te_stages < cases.json
"""Stages of models as Transformer Engine builds them, on the meta device, beside the weight map.

No GPU is needed: layers are built and never run. A world of ranks that only this process knows
stands for the job. test_transformer_engine.py reads the result.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_vlm.config import load_config
from megatron_vlm.distributed.cuda_stand_in import answer_cuda_calls
from megatron_vlm.distributed.device import Platform
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.errors import ConfigError
from megatron_vlm.family import family_of, read_config
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.hf.weight_map import Entry, name_table
from megatron_vlm.model.build import build_chunks, compute_dtype
from megatron_vlm.model.constraints import check_config

make_subgroups = dist.new_subgroups_by_enumeration


def pretend_to_have_gpu(device: Any) -> None:
    """Answer what Megatron-Core and Transformer Engine ask of CUDA while they build layers, which
    then lie on `device`."""
    answer_cuda_calls()
    cuda: Any = torch.cuda
    hopper = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="H100")
    cuda.is_available = lambda: True
    cuda.current_device = lambda: device
    cuda.get_device_properties = lambda *_: hopper
    cuda.get_device_capability = lambda *_: (hopper.major, hopper.minor)
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self


def compare_recipe(folder: str, recipe: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the differences of each stage, or the refusal of the recipe."""
    words = [f"model={recipe}", f"model.path={folder}", "model.backend=te", "model.compile=false"]
    words.append("model.fp32_weight_gradients=false")  # on the meta device nothing can be tried
    cfg, config = load_config([*words, "data.train=x", *arguments]), read_config(folder)
    family = family_of(config, folder)
    sizes = family.sizes_of(config)
    parallel = cfg.parallel
    world = parallel.tp * parallel.pp * parallel.ep
    dims = ParallelDims.create(parallel, world, sizes.text.num_layers)
    try:
        check_config(cfg, sizes, dims)
    except ConfigError as error:
        return {"refused": str(error)}
    table = name_table(sizes, cfg.model.backend, dims)
    stages = []
    for stage in range(dims.pp):
        rank = (stage + 1) * dims.tp * dims.dp - 1  # the last one of the stage
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        grid = RankGroups.create(dims, cfg.train.seed, 1)
        platform = Platform("cuda", torch.device("meta"), "fake", torch.bfloat16)
        chunks = build_chunks(cfg, family, config, sizes, grid, platform)
        wanted = {
            (entry.chunk, entry.our_name): local_shape(entry, sizes, grid)
            for entry in table
            if entry.stage == stage
        }
        dtype = compute_dtype(cfg, platform)
        stages.append(list(differences(chunks, wanted, dtype)) or len(wanted))
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return {"stages": stages}


def local_shape(entry: Entry, sizes: ModelSizes, grid: RankGroups) -> tuple[int, ...]:
    """Return the shape of what a rank would load from a checkpoint."""
    shapes = {tensor.name: tensor.shape for tensor in sizes.tensors}

    def read(name: str, ranges: Sequence[tuple[int, int] | None]) -> torch.Tensor:
        whole = torch.empty(shapes[name], device="meta")
        return whole[tuple(slice(*each) if each else slice(None) for each in ranges)]

    return tuple(entry.layout.load(read, entry.names, *grid.along(entry.layout.shard_group)).shape)


def differences(
    chunks: Sequence[torch.nn.Module],
    wanted: dict[tuple[int, str], tuple[int, ...]],
    dtype: torch.dtype,
) -> Iterator[str]:
    """Yield each difference between the parameters of a stage and the table."""
    found = {
        (number, name): param
        for number, chunk in enumerate(chunks)
        for name, param in chunk.named_parameters()
    }
    for key in sorted(wanted.keys() | found.keys()):
        if key not in found:
            yield f"missing: {key}"
        elif key not in wanted:
            yield f"left over: {key} {tuple(found[key].shape)}"
        elif tuple(found[key].shape) != wanted[key]:
            yield f"misshapen: {key} {tuple(found[key].shape)}, not {wanted[key]}"
        elif found[key].dtype is not dtype:
            yield f"of another dtype: {key} {found[key].dtype}"


def fake_subgroups(*ranks: Any, backend: str | None = None, **more: Any) -> Any:
    """Make groups of a world that only this process knows: gloo would look for their hosts."""
    return make_subgroups(*ranks, **more)


def main() -> None:
    dist.new_subgroups_by_enumeration = fake_subgroups
    pretend_to_have_gpu("meta")  # Transformer Engine compares the device with this word
    results = {name: compare_recipe(*case) for name, case in json.load(sys.stdin).items()}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
