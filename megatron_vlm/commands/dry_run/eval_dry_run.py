"""`megatron-vlm eval --dry-run`: the checkpoint, the sets and the layout of an evaluation."""

from pathlib import Path

from rich.console import Console

from megatron_vlm.commands.dry_run.command import open_held_out, plan_model
from megatron_vlm.config.evaluation_checks import answer_metrics, loss_scores, metric_name
from megatron_vlm.config.schema import Config
from megatron_vlm.io.printable import escape_controls, size_text
from megatron_vlm.planner.memory import USABLE
from megatron_vlm.planner.parameters import count
from megatron_vlm.report.run_overview import aligned_lines, epoch_tokens
from megatron_vlm.run.evaluation.evaluate import read_candidates


def eval_dry_run(
    cfg: Config,
    checkpoint: Path | None,
    predictions: str | None,
    gpus: int | None = None,
    memory: str | None = None,
) -> int:
    """Print what `eval` would do; raise the errors that would end it."""
    console = Console(highlight=False)
    model = plan_model(cfg, console, gpus, memory)
    dims, target = model.dims, model.target
    scores = loss_scores(cfg)
    if cfg.eval.candidates is not None:
        scores.append(f"ranking of {len(read_candidates(cfg.eval.candidates)):,} candidates")
    if metrics := answer_metrics(cfg):
        names = ", ".join(map(metric_name, metrics))
        scores.append(f"{names} of answers of at most {cfg.eval.max_new_tokens:,} tokens")
    if cfg.eval.blind:
        scores.append("all of them again with grey pictures")
    counts = [count(model.layout, stage) for stage in range(dims.pp)]
    weights = [each.weight_bytes(cfg.lora.base, model.layout.itemsize) for each in counts]
    of = f", of {target.available}" if target.available else ""
    rows = {
        "model": cfg.model.path if checkpoint is None else str(checkpoint),
        "device": target.words(cfg),
        "layout": f"tp={dims.tp} pp={dims.pp} dp={dims.dp} in {dims.world_size:,} "
        f"process{'es' * (dims.world_size > 1)}",
        "memory": f"weights of {size_text(max(weights))} on the fullest rank{of}",
        "scores": ", ".join(scores),
        "writes": "only the scores, to the screen" if predictions is None else predictions,
    }
    notes: list[str] = []
    for name, data, remarks in open_held_out(model):
        rows[name] = f"{len(data.order):,} samples: {epoch_tokens(data)}"
        notes += remarks.lines
    for line in [aligned_lines(rows), *notes]:
        console.print(escape_controls(line), markup=False, soft_wrap=True)
    if target.memory is not None and max(weights) > USABLE * target.memory:
        console.print("The weights alone do not fit: give more parallel.tp or parallel.pp.")
    return 0
