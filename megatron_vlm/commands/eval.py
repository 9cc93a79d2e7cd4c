"""`megatron-vlm eval WHERE KEY=VALUE ...`: score a checkpoint, a run or a Hugging Face folder."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_vlm.checkpoint.run_checkpoints import find_checkpoint, held_checkpoint
from megatron_vlm.config import ConfigFile, load_config, read_saved
from megatron_vlm.config.arguments import add_overrides, rank_arguments
from megatron_vlm.config.checks import require
from megatron_vlm.config.data_sources import SourceSpec
from megatron_vlm.config.evaluation_checks import held_out_names
from megatron_vlm.config.load import given_keys
from megatron_vlm.config.objectives import reference_of
from megatron_vlm.config.schema import CheckpointConfig, Config
from megatron_vlm.data.worker_processes import start_server
from megatron_vlm.distributed import process
from megatron_vlm.distributed.dims import loads_data
from megatron_vlm.distributed.watchdog import Watchdog
from megatron_vlm.errors import ConfigError
from megatron_vlm.io.hub import beside_run, check_not_a_run, hub_name, pin
from megatron_vlm.io.printable import escape_controls

if TYPE_CHECKING:
    from megatron_vlm.run.evaluation.evaluate import Evaluation


_MAX_COLUMNS = 7  # scores in a row of the table


@contextmanager
def held_in_place(where: str) -> Iterator[str]:
    """Yield the checkpoint of a run that all processes of a command will read, and keep it from
    deletion until they end. Yield anything else unchanged."""
    folder = Path(where)
    if _is_hugging_face(where) or (folder / "adapter_config.json").is_file():
        yield where
        return
    with held_checkpoint(folder) as checkpoint:
        yield str(checkpoint)


def _is_hugging_face(where: str) -> bool:
    return (Path(where) / "config.json").is_file() or hub_name(where) is not None


def locate(
    where: str,
    overrides: Sequence[str],
    file: ConfigFile | None = None,
    needs: str = "data.eval",
    weights: bool = True,
) -> tuple[Config, Path | None]:
    """Return the configuration and the checkpoint to load, which is None for a Hugging Face folder
    or a name on the Hub. `file`: the file of --config; `needs`: a key that must be set; `weights`:
    whether the weights of a model on the Hub are needed, too."""
    folder = Path(where)
    check_not_a_run(where)
    if _is_hugging_face(where):
        cfg, checkpoint = _with_model(where, overrides, file), None
    elif (folder / "adapter_config.json").is_file():
        cfg, checkpoint = _with_adapter(folder, overrides, file), None
    else:
        checkpoint = find_checkpoint(folder)
        cfg = read_saved(checkpoint, overrides, file)
        cfg = with_data_beside(cfg, checkpoint, given_keys(overrides, file))
        cfg = replace(cfg, lora=replace(cfg.lora, path=None))  # the checkpoint continued from there
        if needs == "data.eval" and cfg.data.eval:  # the training set may be elsewhere
            cfg = replace(cfg, data=replace(cfg.data, train=()))
    if needs != "data.eval" or not held_out_names(cfg):
        require(cfg, needs)
    if needs == "data.eval" and checkpoint is None and reference_of(cfg) is not None:
        raise ConfigError(
            f": its rewards compare a trained model with the initial one, and {where} is one model",
            key="train.objective",
            found=cfg.train.objective,
            remedy="give the folder of the run, or train.objective=sft with records of chats",
        )
    path = pin(cfg.model.path, weights)
    return replace(cfg, model=replace(cfg.model, path=path)), checkpoint


def with_data_beside(cfg: Config, run: Path, given: set[str]) -> Config:
    """Return the configuration of a run with its data as it is found from here, except for the keys
    that were given."""

    def find(spec: SourceSpec) -> SourceSpec:
        root = spec.image_root and beside_run(spec.image_root, run, "")
        return replace(spec, path=beside_run(spec.path, run, ""), image_root=root)

    data = cfg.data
    found = {
        "train": tuple(map(find, data.train)),
        "eval": tuple(replace(each, source=find(each.source)) for each in data.eval),
        "image_root": data.image_root and beside_run(data.image_root, run, ""),
    }
    changed: dict[str, Any] = {k: v for k, v in found.items() if f"data.{k}" not in given}
    return replace(cfg, data=replace(data, **changed))


def _with_model(path: str, overrides: Sequence[str], file: ConfigFile | None) -> Config:
    """Return the configuration with a model, which may be at a path that no override could have,
    unless `overrides` name another one."""
    cfg = load_config(["model.path=base", *overrides], file)
    if "model.path" in given_keys(overrides):
        return cfg
    return replace(cfg, model=replace(cfg.model, path=path))


def _with_adapter(folder: Path, overrides: Sequence[str], file: ConfigFile | None) -> Config:
    """Return the configuration with an adapter, and with the base model that it names unless
    `overrides` name another one. Its base is quantized as it was in training, unless they say
    otherwise."""
    from megatron_vlm.lora.peft_folder import base_of, lora_of

    keys = given_keys(overrides)
    given = sorted(key for key in keys if key.partition(".")[0] == "lora")
    if wrong := [key for key in given if key != "lora.base"]:
        raise ConfigError(
            f": {folder} is an adapter, which has its own",
            key=wrong[0],
            remedy="leave it out; of lora.*, only lora.base can be given",
        )
    base = "" if "model.path" in keys else base_of(folder)
    cfg = _with_model(base, [*(["lora.rank=1"] if given else ()), *overrides], file)
    lora = lora_of(folder, cfg.model.path)
    if given:
        lora = replace(lora, base=cfg.lora.base)
    return replace(cfg, lora=lora, checkpoint=CheckpointConfig(export=False))


def add_where(
    parser: argparse.ArgumentParser,
    models: str = "a Hugging Face folder, an adapter or a name on the Hub",
) -> None:
    """Add the model of a command, and the keys of its configuration."""
    text = f"{models}; or a run or one of its checkpoints, with its configuration"
    parser.add_argument("where", metavar="WHERE", help=text)
    add_overrides(parser)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command and of each of its processes."""
    add_where(parser)
    parser.add_argument(
        "--predictions", metavar="DIR", help="write every answer to DIR/SET.jsonl, too"
    )


def run_eval(arguments: Sequence[str]) -> int:
    """Evaluate on one rank."""
    args, file = rank_arguments(arguments, add_arguments)
    cfg, checkpoint = locate(args.where, args.overrides, file)
    with Watchdog.watch_rank(process.rank_of_process(), cfg.launch.timeout_minutes) as watchdog:
        _evaluate(cfg, checkpoint, args.predictions, watchdog)
    return 0


def _evaluate(
    cfg: Config, checkpoint: Path | None, predictions: str | None, watchdog: Watchdog
) -> None:
    if cfg.data.num_workers and loads_data(
        cfg.parallel, process.rank_of_process(), process.world_of_process()
    ):
        start_server()  # the server imports at the same time as this process
    import torch.distributed as dist

    from megatron_vlm.checkpoint.save_load import load
    from megatron_vlm.run.evaluation.evaluate import Evaluator
    from megatron_vlm.training.frozen_inputs import changed_inputs, frozen_inputs, inputs_from_json
    from megatron_vlm.training.run_objective import objective_of
    from megatron_vlm.training.worker import MegatronWorker

    worker = MegatronWorker(cfg, training=False, watchdog=watchdog)
    evaluator = Evaluator(worker, cfg, objective_of(worker, cfg))
    if reference_of(cfg) == "keep":
        evaluator.keep_reference()  # the weights are still the initial ones
    if checkpoint is not None:
        watchdog.begin_phase(0, "loading the checkpoint", files=True)
        before = inputs_from_json(load(worker, checkpoint))
        changed_inputs(checkpoint, before, frozen_inputs(worker, is_rl=False))
    if dist.get_rank() == 0:
        for held_out in evaluator.sets:
            for line in held_out.remarks.lines:
                process.print_to_user(line)
    watchdog.begin_phase(0, "evaluation")
    scores: dict[str, Mapping[str, float]] = {}
    with closing(evaluator):
        for done in evaluator.evaluate():
            if dist.get_rank() == 0:
                scores[done.name] = done.scores
                _report_set(done, predictions)
    if scores:
        print_scores(scores)


def _report_set(done: "Evaluation", predictions: str | None) -> None:
    from megatron_vlm.run.evaluation.evaluate import write_predictions

    print(json.dumps({"name": done.name, **done.scores}), flush=True)
    for remark in done.remarks:
        process.print_to_user(remark)
    if predictions:
        write_predictions(Path(predictions), done)


def print_scores(scores: Mapping[str, Mapping[str, float]]) -> None:
    """Print a table of the sets for people. It goes to stderr: stdout has JSON alone."""
    from rich.console import Console
    from rich.text import Text

    from megatron_vlm.report.terminal import plain_table

    names = list(dict.fromkeys(name for figures in scores.values() for name in figures))
    has_many = len(names) > _MAX_COLUMNS  # they are rows then
    rows = [("score" if has_many else "set", *names)]
    for held_out, figures in scores.items():
        values = (_show_score(figures.get(name)) for name in names)
        rows.append((escape_controls(held_out), *values))
    header, *body = zip(*rows, strict=True) if has_many else rows
    table = plain_table(*map(Text, header), first=1)
    for row in body:
        table.add_row(*map(Text, row))
    Console(stderr=True, highlight=False).print(table)


def _show_score(value: float | None) -> str:
    """Return a figure with at most four digits that matter."""
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(process.run_process(run_eval, sys.argv[1:]))
