"""Loading of weights: each rank reads from the safetensors shards only the slices that it holds."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import nn

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.errors import CheckpointError
from megatron_vlm.family.spec import SCORE
from megatron_vlm.hf.block_weight import BlockWeight
from megatron_vlm.hf.hf_checkpoint import FLOATS, HFCheckpoint
from megatron_vlm.hf.weight_map import Entry, Origin

_ROWS = 2**14  # number of rows to compare at a time


def check_tensors(source: HFCheckpoint) -> None:
    """Compare the shards' headers with config.json, and list every difference."""
    stored = (source.form_of(name).stored(name, x) for name, x in source.sizes.shapes.items())
    expected = dict(chain.from_iterable(each.items() for each in stored))
    names = source.sizes.names
    shapes = {name: info.shape for name, info in source.tensors.items()}
    if source.sizes.tied and names.head in shapes:  # some writers also store the tied head
        expected[names.head] = expected[names.embedding]
    # A checkpoint may lack tensors that are passed through, and have others of any shape.
    known = source.sizes.passthrough.keys() & source.passthrough.keys()
    shapes |= {name: source.passthrough[name].shape for name in known}
    expected |= {name: source.sizes.passthrough[name] for name in known}
    if SCORE in shapes.keys() - expected.keys():
        raise CheckpointError(
            "is the scalar head of a reward model, which writes no answers",
            place=str(source.path),
            key=SCORE,
            remedy="give train.objective=reward, or rl.reward=model:FOLDER, or another checkpoint",
        )
    lists = {
        "missing": [f"{name} {expected[name]}" for name in sorted(expected.keys() - shapes.keys())],
        "surplus": [f"{name} {shapes[name]}" for name in sorted(shapes.keys() - expected.keys())],
        "misshapen": [
            f"{name} is {shapes[name]}, config.json asks for {expected[name]}"
            for name in sorted(expected.keys() & shapes.keys())
            if shapes[name] != expected[name]
        ],
    }
    lists["of another type"] = [
        f"{name} is {source.tensors[name].dtype}, and only {', '.join(FLOATS)} can be trained: "
        "give the checkpoint in one of these, dequantized if it was quantized"
        for name in sorted(expected.keys() & source.tensors.keys())
        if source.tensors[name].dtype not in FLOATS
    ]
    if any(lists.values()):
        text = "\n".join(
            f"{len(names)} {kind}:\n  " + "\n  ".join(names)
            for kind, names in lists.items()
            if names
        )
        raise CheckpointError(
            f"the tensors do not fit config.json\n{text}", place=str(source.path), found=lists
        )


def check_tied(source: HFCheckpoint) -> None:
    """Check that a tied head that is also stored equals the embedding: otherwise transformers would
    not tie it. Both tensors are read in that case."""
    names = source.sizes.names
    if not source.sizes.tied or names.head not in source.tensors:
        return
    for start in range(0, source.sizes.text.vocab, _ROWS):
        rows = [(start, min(start + _ROWS, source.sizes.text.vocab))]
        head, embedding = (source.read(name, rows) for name in (names.head, names.embedding))
        if not torch.equal(head.float(), embedding.float()):
            raise CheckpointError(
                f"in config.json, but the stored {names.head} is not {names.embedding}",
                place=str(source.path),
                key="tie_word_embeddings",
                found=True,
                remedy="set tie_word_embeddings=false, or remove the tensor",
            )
    source.close()


def held_params(
    chunks: Sequence[nn.Module], table: Sequence[Entry], stage: int
) -> Mapping[Entry, nn.Parameter]:
    """Return this stage's entries in the order of the table, each with its parameter."""
    params = [dict(chunk.named_parameters()) for chunk in chunks]
    held = {e: params[e.chunk][e.our_name] for e in table if e.stage == stage}
    known = {id(param) for param in held.values()}
    unknown = [name for chunk in params for name in chunk if id(chunk[name]) not in known]
    assert not unknown, f"the name table lacks {unknown}"
    return held


def own_parameters(held: Mapping[Entry, nn.Parameter], cfg: Config) -> dict[Entry, nn.Parameter]:
    """Return the parameters that do not share their values with another model: those that learn,
    which get memory of their own, and those that the other model lacks. All others share their
    values."""
    own = {entry: param for entry, param in held.items() if not entry.is_frozen(cfg)}
    for entry, param in own.items():
        if entry.origin is not Origin.added:
            param.data = torch.empty_like(param)
    return own


def load_hf(
    held: Mapping[Entry, nn.Parameter],
    source: HFCheckpoint,
    grid: RankGroups,
    busy: Callable[[], None] = lambda: None,
) -> None:
    """Fill this rank's parameters from the checkpoint; parameters that only we have stay unchanged.
    `busy` is called after each, since a large model may take long.

    Sharded parameters are marked as such, which Megatron 0.16 does only while it initialises
    weights. Without the mark, all parts except that of TP rank 0 would be missing from the gradient
    norm.
    """
    for entry, param in held.items():
        if entry.layout.shard_group == "tp" and not hasattr(param, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(param, True, entry.layout.axis, 1)
        if entry.origin is Origin.added:
            continue
        rank, ranks = grid.along(entry.layout.shard_group)
        loaded = entry.layout.load(source.read, entry.names, rank, ranks)
        assert loaded.shape == param.shape, (entry.our_name, loaded.shape, param.shape)
        if isinstance(param, BlockWeight):
            param.codes.encode(loaded)
            stored = param.codes.scales_B
        else:
            with torch.no_grad():
                param.copy_(loaded)
            stored = param
        if not torch.isfinite(stored).all():  # checked in the dtype of training
            raise CheckpointError(
                "has values that are NaN or infinite: every loss would be, too",
                place=str(source.path),
                key=" or ".join(entry.names),
                remedy="use another checkpoint",
            )
        busy()
    source.close()
