"""`megatron-vlm rl`: its arguments, and the processes that it starts."""

import argparse

from megatron_vlm.commands.dry_run.dry_run_arguments import (
    add_dry_run_arguments,
    check_dry_run_arguments,
)
from megatron_vlm.config.arguments import add_cfg_option, add_overrides, read_configuration
from megatron_vlm.config.listing import listing
from megatron_vlm.run.log_sinks import check_sinks
from megatron_vlm.run.saved_config import check_unnamed, with_commit, with_model
from megatron_vlm.training.preflight import check_run


def add_rl_arguments(parser: argparse.ArgumentParser) -> None:
    """Add recipes, keys, --config, --cfg and --dry-run, as for training."""
    parser.epilog = f"{parser.epilog}\n\n{listing('rl')}"
    recipe = "a recipe of a group (rl=dapo) or a value (rl.samples=16); values win"
    add_overrides(parser, recipe)
    add_cfg_option(parser)
    shown = "data, steps, layout, memory, the engine, and the rewards of a few answers"
    add_dry_run_arguments(parser, shown)


def rl(args: argparse.Namespace) -> int:
    """let a checkpoint learn from its own answers

    Reinforcement learning: answers to the prompts of data.train are sampled. A function of yours
    scores them (rl.reward), or an environment responds to them (rl.environment), and better answers
    become more likely. Run, checkpoints, resume, evaluation, report and export are those of
    training.

    example: megatron-vlm rl rl=grpo rl.reward=rewards.py:score model.path=DIR data.train=asks.jsonl
    train.global_batch_size=32 rl.samples=8 run=runs/rl

    docs/rl.md describes rewards, environments and engines.
    """
    from megatron_vlm.config import load_config, to_yaml
    from megatron_vlm.config.command_checks import check_rl
    from megatron_vlm.distributed.launch.launch import launch
    from megatron_vlm.engines.engine_kinds import check_engine
    from megatron_vlm.rl.rl_train import run_rl

    file, arguments = read_configuration(args)
    cfg = load_config(args.overrides, file)
    if args.cfg:
        print(to_yaml(cfg), end="")
        return 0
    check_dry_run_arguments(args)
    check_rl(cfg)
    check_engine(cfg, "rl")
    check_run(cfg, args.gpus)
    saved = check_unnamed(cfg, args.overrides, file)
    check_sinks(cfg)
    if args.dry_run:
        from megatron_vlm.commands.dry_run.rl_dry_run import rl_dry_run

        return rl_dry_run(cfg, args.gpus, args.memory)
    cfg = with_model(cfg, saved=saved)
    return launch(cfg, "megatron_vlm.rl", run_rl, with_commit(arguments, cfg))
