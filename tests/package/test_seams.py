# .venv/bin/python -m pytest tests/package/test_seams.py
"""Foundations of later parts: a parameter of our own (an adapter), several chunks of the model on
one rank, and names that mean one thing."""

import ast
import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from megatron_vlm.checkpoint.rank_state import held_pieces, local_parts, shapes_of
from megatron_vlm.checkpoint.tensor_pieces import (
    PieceReader,
    make_index,
    rank_file,
    safetensors_chunks,
)
from megatron_vlm.family.spec import Part, TensorSpec
from megatron_vlm.hf.export_weights import gather_tensors
from megatron_vlm.hf.load_weights import held_params, load_hf
from megatron_vlm.hf.weight_map import WHOLE, Entry, Origin, columns, exported_names
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import layout
from tests.support.runs import call

PACKAGE = Path(__file__).parents[2] / "megatron_vlm"
ADAPTER = torch.arange(24.0).view(4, 6)
NORM = torch.arange(5.0)


def adapter_entry(chunk: int) -> Entry:
    spec = TensorSpec("adapter.weight", tuple(ADAPTER.shape), Part.decoder)
    return Entry("adapter", (spec,), columns(6), 0, Part.decoder, chunk, Origin.added)


def with_second_chunk(worker: MegatronWorker) -> SimpleNamespace:
    """Return the parts of a worker that checkpoints use.

    Chunk 0 is the real model. Chunk 1 has an adapter, which is cut over TP, and a norm that Hugging
    Face knows.
    """
    rank, ranks = worker.grid.along("tp")
    extra = nn.Module()
    extra.adapter = nn.Parameter(ADAPTER[:, rank * 6 // ranks : (rank + 1) * 6 // ranks].clone())
    extra.norm = nn.Parameter(NORM.clone())
    norm = Entry("norm", (TensorSpec("extra.norm", (5,), Part.decoder),), WHOLE, 0, Part.decoder, 1)
    chunks, table = [*worker.chunks, extra], [*worker.table, adapter_entry(1), norm]
    held = held_params(chunks, table, 0)
    for param in held.values():
        param.requires_grad_(False)  # untrained weights are written unchanged
    return SimpleNamespace(
        chunks=chunks,
        table=table,
        held=held,
        grid=worker.grid,
        optimizer=None,
        source=worker.source,
        cfg=worker.cfg,
    )


def write(worker: MegatronWorker, folder: Path) -> tuple[list[str], list[str]]:
    """Write this rank's file; return the names of the gathered tensors and those of an export."""
    extended = with_second_chunk(worker)
    pieces = list(held_pieces(extended, local_parts(extended), writing=True))
    rank = worker.grid.rank
    with open(folder / rank_file(rank), "wb") as file:
        for part in safetensors_chunks({piece.name: piece.data for piece in pieces}):
            file.write(part)
    places = [(piece.key, piece.place) for piece in pieces]
    (folder / f"{rank}.json").write_text(json.dumps(places))
    if rank == 0:
        (folder / "shapes.json").write_text(json.dumps(shapes_of(extended)))
    named = list(gather_tensors(extended.held, extended.table, extended.grid))
    return [name for name, _ in named], exported_names(extended.table)


def read(worker: MegatronWorker, folder: Path) -> list[list[float]]:
    """Fill this rank's extended model from the files of other layouts; return the new values."""
    extended = with_second_chunk(worker)
    for param in extended.held.values():
        param.data.fill_(-1)
    shapes = json.loads((folder / "shapes.json").read_text())
    files = sorted(folder.glob("[0-9]*.json"))
    places = [[(key, tuple(place)) for key, place in json.loads(f.read_text())] for f in files]
    reader = PieceReader(folder, make_index(shapes, places))
    pieces = list(held_pieces(extended, local_parts(extended), writing=False))
    reader.check([piece.key for piece in pieces], shapes_of(extended), "give another")
    for piece in pieces:
        reader.fill(piece)
    return [extended.chunks[1].adapter.tolist(), extended.chunks[1].norm.tolist()]


class _In:
    """A callable for the pool that carries its folder."""

    def __init__(self, function, folder: Path):
        self.function, self.folder = function, folder

    def __call__(self, worker):
        return self.function(worker, self.folder)


def test_what_is_ours_alone_is_kept_in_checkpoints_and_never_exported(pool, tiny, tmp_path):
    path = tiny()
    for gathered, names in pool.run(call, 2, path, layout(tp=2), _In(write, tmp_path)):
        assert gathered == names and "extra.norm" in names
        assert "adapter.weight" not in names
    assert pool.run(call, 1, path, layout(), _In(read, tmp_path)) == [
        [ADAPTER.tolist(), NORM.tolist()]
    ]
    halves = pool.run(call, 2, path, layout(tp=2), _In(read, tmp_path))
    assert [half[0] for half in halves] == [ADAPTER[:, :3].tolist(), ADAPTER[:, 3:].tolist()]


def loads_around_adapters(worker: MegatronWorker) -> list[float]:
    """Load a checkpoint that has no adapter, and return the adapter, which stays as it was."""
    chunk = nn.Module()
    chunk.adapter = nn.Parameter(ADAPTER.clone())
    entry = adapter_entry(0)
    load_hf(held_params([chunk], [entry], 0), worker.source, worker.grid)
    return chunk.adapter.flatten().tolist()


def test_loading_leaves_what_is_ours_alone(pool, tiny):
    case = layout()
    assert pool.run(call, 1, tiny(), case, loads_around_adapters) == [ADAPTER.flatten().tolist()]


# Modules that their folder gives a meaning, such as `commands.plan.page` or `family.qwen3_5.model`.
OF_EACH_FOLDER = {"__init__", "__main__", "command", "fields", "model", "page", "terminal"}


def test_one_name_means_one_thing():
    """No two modules and no two public classes, functions or constants of modules share a name."""
    modules, names = defaultdict(set), defaultdict(set)
    for file in PACKAGE.rglob("*.py"):
        where = str(file.relative_to(PACKAGE))
        if file.stem not in OF_EACH_FOLDER:
            modules[file.stem].add(where)
        for node in ast.parse(file.read_text()).body:
            for name in defined(node):
                if not name.startswith("_") and len(name) > 1:
                    names[name].add(where)
    for table in (modules, names):
        assert {name: files for name, files in table.items() if len(files) > 1} == {}


def defined(node: ast.stmt) -> list[str]:
    """Return the name of a class or function, or the names of the constants that are assigned."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if name.isupper()]


# They know settings of vLLM by themselves: benchmarks run its own server, model cards tell how to
# serve an export, and configurations of other trainers name it.
WITH_VLLM = ("engines/", "commands/bench/", "commands/import_config/", "hf/model_card.py")


def words_of(node: ast.AST) -> list[str]:
    """Return what code calls a thing by: names, modules, and texts that are a single word."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            return [name]
        case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)) if " " not in name:
            return [name]
        case ast.ImportFrom(module=str(module), names=aliases):
            return [module, *(alias.name for alias in aliases)]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
    return []


def test_only_engines_know_vllm():
    """Other code asks for an engine by its name. Messages to users may show it as an example."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        where = str(file.relative_to(PACKAGE))
        if not where.startswith(WITH_VLLM) and "other_trainers" not in where:
            tree = ast.parse(file.read_text())
            names = [name for node in ast.walk(tree) for name in words_of(node)]
            found[where] = [name for name in names if "vllm" in name.lower() and "=" not in name]
            found[where] += ["its file"] * ("vllm" in file.name)
    assert {where: names for where, names in found.items() if names} == {}
