"""What a step trains on this GPU: a step of each objective against fp64, a checkpoint and its
resume bit for bit, and codes of 4 and 8 bits that are those of the CPU.

Shapes: W weights, B blocks of them, N supervised tokens."""

import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu.parity import leave
from gpu.step import Figures
from torch import Tensor

from megatron_vlm import MegatronWorker, Row
from megatron_vlm.checkpoint.save_load import load, save
from megatron_vlm.commands.demo.tiny_model import write_tiny
from megatron_vlm.config.lora_base_types import WEIGHTS_PER_BLOCK
from megatron_vlm.data.tokens.row import IGNORE
from megatron_vlm.family.tiny import TinySpec
from megatron_vlm.hf.block_weight import BlockCodes
from megatron_vlm.training.adamw import Int8Moment
from tests.model.test_parity import layout
from tests.support.batches import MIXED, SHALLOW, make_rows
from tests.support.reference import exact_delta_nets, grads_of, load_reference, row_logits
from tests.support.runs import Case, collect_grads
from tests.training import test_losses, test_preferences, test_retrieval

# fp32 against fp64, as the tests do on the CPU. Gradients below this share of the largest one are
# nothing but rounding, and are compared with it.
BOUND, LEAST_SHARE = 2e-5, 1e-4
VOCAB, BETA = 512, 0.3  # of distillation
CODED = 64 * WEIGHTS_PER_BLOCK
# Training that is resumed, with everything that a checkpoint may hold.
RESUMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen3-VL": ({"precision": "bf16"}, {}),
    "moments in int8": ({"precision": "bf16"}, {"states": "int8"}),
    "optimizer in host memory": ({"precision": "bf16"}, {"offload": 1.0}),
    "Muon": ({"precision": "fp32"}, {"name": "muon"}),
}


def objectives(figures: Figures) -> None:
    """Compare loss and gradients of a step of DPO, distillation and embeddings with transformers in
    fp64 on the CPU."""
    folder = figures.scratch / "objectives"
    paths = [str(folder / f"model-{seed}") for seed in (0, 1)]
    for seed, path in enumerate(paths):
        write_tiny(path, TinySpec(**SHALLOW, seed=seed))
    case = replace(layout(), platform=figures.platform, train={"precision": "fp32"})
    for name, compare in {"DPO": _dpo, "distillation": _distil, "embeddings": _embed}.items():
        found, (loss, grads) = compare(paths[0], paths[1], case, folder)
        leave()
        largest = max(float(grad.norm()) for grad in grads.values())
        errors = {"loss": abs(found[0] - loss) / abs(loss)}
        for key, grad in grads.items():
            scale = max(float(grad.norm()), LEAST_SHARE * largest)
            errors[key] = float((found[1][key].cpu() - grad).norm()) / scale
        worst = max(errors, key=errors.__getitem__)
        figures.check(f"{name} (worst: {worst})", errors[worst], BOUND)


Result = tuple[float, Mapping[str, Tensor]]  # a loss, and its gradients by name


def _write(file: Path, records: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def _exact(path: str, loss_of: Callable[[Any], Any]) -> Result:
    """Return the loss by transformers' model in fp64, and its gradients."""
    with exact_delta_nets():  # also keeps fp64 where log-probs would be fp32
        model = load_reference(path, torch.float64)
        loss = loss_of(model)
        if isinstance(loss, Tensor):
            loss.backward()
        return float(loss), grads_of(model.named_parameters())


def _dpo(initial: str, policy: str, case: Case, folder: Path) -> tuple[Result, Result]:
    """Pairs, and a policy that differs from the reference."""
    trial, data = test_preferences.SIGMOID, _write(folder / "pairs.jsonl", test_preferences.pairs())
    cfg = trial.config(initial, case, data)
    step = test_preferences.step_of(initial, cfg, policy, None)

    def loss_of(model: Any) -> float:  # it has called the backward
        reference = load_reference(initial, torch.float64).eval()
        return float(test_preferences.expected(trial, cfg, model, reference))

    return (step.loss, step.grads), _exact(policy, loss_of)


def _distil(path: str, teacher: str, case: Case, folder: Path) -> tuple[Result, Result]:
    """The JSD from the likeliest tokens of a teacher near the model."""
    rows, generator = make_rows(MIXED, VOCAB, 0), torch.Generator().manual_seed(8)
    model = load_reference(path, torch.float32)
    with torch.no_grad():
        rows = [test_losses.with_teacher(row, row_logits(model, row), generator) for row in rows]
    worker = MegatronWorker(case.config(path))
    metrics = worker.forward_backward(rows, loss="distill", beta=BETA)
    found = metrics.loss, collect_grads(worker)
    plain = test_losses.plain_distill(BETA, 1.0, 0.0)

    def loss_of(model: Any) -> Tensor:
        losses = [_divergences(model, row, plain) for row in rows]
        return torch.cat(losses).mean()

    return found, _exact(path, loss_of)


def _divergences(model: Any, row: Row, plain: Callable[..., tuple[Tensor, Any]]) -> Tensor:
    picked_N = (row.labels_S[1:] != IGNORE).nonzero()[:, 0]
    logits_NV = row_logits(model, row)[picked_N]
    labels_N1 = row.ids_S[1 + picked_N, None]
    log_probs_N = logits_NV.log_softmax(-1).gather(-1, labels_N1)[:, 0]
    teacher = {"teacher_ids": row.teacher_ids_NJ, "teacher_log_probs": row.teacher_log_probs_NR}
    loss_N, _report = plain(log_probs_N, log_probs_N, {"logits": logits_NV, **teacher})
    return loss_N


def _embed(path: str, other: str, case: Case, folder: Path) -> tuple[Result, Result]:
    """Queries and documents, against each other."""
    trial = test_retrieval.TRIALS["embed"]
    data = _write(folder / "documents.jsonl", test_retrieval.records())
    case = replace(case, train={**case.train, "micro_batch_size": 1})
    cfg = trial.config(path, case, data)
    step = test_retrieval.step_of(path, cfg)
    examples = test_retrieval.rows_of_data(path, cfg)

    def loss_of(model: Any) -> Tensor:
        loss: Tensor = test_retrieval.embed_reference(model, examples, cfg)
        return loss

    return (step.loss, step.grads), _exact(path, loss_of)


def checkpoint(figures: Figures) -> None:
    """Save a worker after two steps, load it into another one and save that: every file has the
    same bytes. The step after that has the loss of the step without a break."""
    for name, (train, optim) in RESUMED.items():
        folder = figures.scratch / f"checkpoint of {name}"
        path = str(folder / "model")
        write_tiny(path, TinySpec(**SHALLOW))
        case = Case(platform=figures.platform, train=train, optim={"lr": 1e-3, **optim})
        rows, progress = make_rows(MIXED, VOCAB, 0), {"step": 2}
        worker = MegatronWorker(case.config(path))
        for _ in range(2):
            worker.forward_backward(rows)
            worker.optim_step()
        save(worker, folder / "first", progress).finish()
        without_break = worker.forward_backward(rows).loss
        leave()
        worker = MegatronWorker(case.config(path))
        load(worker, folder / "first")
        save(worker, folder / "second", progress).finish()
        resumed = worker.forward_backward(rows).loss
        leave()
        differing = [
            file.name
            for file in (folder / "first").glob("*.safetensors")
            if file.read_bytes() != (folder / "second" / file.name).read_bytes()
        ]
        figures.check(f"{name}: files that differ after a load", len(differing), 0)
        figures.check(f"{name}: loss after a resume", abs(resumed - without_break), 0)


def blocks(figures: Figures) -> None:
    """Compare codes of 4 and 8 bits that this device computes with the CPU's, bit for bit, and
    those of 4 bits with bitsandbytes' kernels."""
    generator = torch.Generator().manual_seed(0)
    blocks_BW = torch.randn(CODED // WEIGHTS_PER_BLOCK, WEIGHTS_PER_BLOCK, generator=generator)
    scales_B1 = torch.randn(len(blocks_BW), 1, generator=generator).exp()
    weights_W = (scales_B1 * blocks_BW).flatten()
    device, cpu = torch.device(figures.platform), torch.device("cpu")
    for base in ("nf4", "int8"):
        here, there = (BlockCodes.empty(base, CODED, each) for each in (device, cpu))  # type: ignore[arg-type]
        for codes in (here, there):
            codes.encode(weights_W)
        _same(figures, f"{base}: codes that differ from the CPU's", here.codes_K, there.codes_K)
        _same(figures, f"{base}: scales that differ", here.scales_B, there.scales_B)
        decoded = [each.decode(torch.bfloat16) for each in (here, there)]
        _same(figures, f"{base}: values that differ", *decoded)
    _moments(figures, weights_W, device)
    _bitsandbytes(figures, weights_W, device)


def _same(figures: Figures, key: str, one: Tensor, other: Tensor) -> None:
    figures.check(key, int((one.cpu() != other.cpu()).sum()), 0)


def _moments(figures: Figures, weights_W: Tensor, device: torch.device) -> None:
    """Compare the codes of both moments in 8 bits."""
    noise = torch.rand(CODED, generator=torch.Generator().manual_seed(1))
    for is_root, values in ((False, weights_W), (True, weights_W.square())):
        codes = []
        for where in (device, torch.device("cpu")):
            moment = Int8Moment(CODED, is_root, where)
            moment.write(0, values.to(where), noise.to(where))
            codes.append(moment)
        name = "second" if is_root else "first"
        key = f"int8 {name} moments: codes that differ from the CPU's"
        _same(figures, key, codes[0].codes_W, codes[1].codes_W)


def _bitsandbytes(figures: Figures, weights_W: Tensor, device: torch.device) -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        figures.say("bitsandbytes", "not run: it is not installed")
        return
    functional = importlib.import_module("bitsandbytes.functional")
    given = {"blocksize": WEIGHTS_PER_BLOCK, "quant_type": "nf4", "compress_statistics": False}
    codes, state = functional.quantize_4bit(weights_W.to(device), **given)
    ours = BlockCodes.empty("nf4", CODED, device)
    ours.encode(weights_W)
    _same(figures, "nf4: codes that differ from bitsandbytes'", ours.codes_K, codes.flatten())
    _same(figures, "nf4: scales that differ from bitsandbytes'", ours.scales_B, state.absmax)
