"""`megatron-vlm train`, `rl` and `serve`: their arguments, and the processes that they start."""

import argparse
from collections.abc import Callable
from pathlib import Path

from megatron_vlm.config import Config, ConfigFile, load_config, to_yaml
from megatron_vlm.config.arguments import add_overrides, read_configuration
from megatron_vlm.config.command_checks import check_used
from megatron_vlm.config.key_docs import listing
from megatron_vlm.distributed.process import print_to_user, rank_of_process
from megatron_vlm.errors import ConfigError, require_extra
from megatron_vlm.run.run_folder import (
    check_folder,
    check_unnamed,
    saved_config,
    with_commit,
    with_model,
)
from megatron_vlm.run.trackers import check_trackers
from megatron_vlm.training.preflight import check_run


def _add_keys(parser: argparse.ArgumentParser, command: str, text: str) -> None:
    """Add KEY=VALUE, of which --help has a list, and --cfg job, as Hydra's programs have it."""
    parser.epilog = f"{parser.epilog}\n\n{listing(command)}"
    add_overrides(parser, text)
    resolved = "print the resolved configuration as YAML and stop"
    parser.add_argument("--cfg", choices=["job"], help=resolved)


def add_dry_run_arguments(parser: argparse.ArgumentParser, shown: str) -> None:
    """Add --dry-run, which prints `shown`, and the options of the machine that it is for."""
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help=f"check everything, print {shown}, and stop: needs no GPU and reads no weights",
    )
    count = "with --dry-run: plan for this number of GPUs in all, not for this machine"
    parser.add_argument("--gpus", type=int, metavar="N", help=count)
    size = "with --dry-run: judge whether it fits into GPUs of this size, such as 80GiB"
    parser.add_argument("--memory", metavar="SIZE", help=size)


def check_dry_run_arguments(args: argparse.Namespace) -> None:
    """Refuse options of a dry run where there is none."""
    for name in ("gpus", "memory"):
        if not args.dry_run and (value := getattr(args, name)) is not None:
            raise ConfigError(
                "is an option of --dry-run",
                key=f"--{name}",
                found=value,
                remedy="add --dry-run, or leave it out",
            )


def _compose(
    args: argparse.Namespace, command: str, check: Callable[[Config], None]
) -> tuple[Config, ConfigFile | None, list[str]]:
    """Return the checked configuration, the file that it is from, and the arguments of the
    processes. Only print the configuration if --cfg asks for it."""
    file, arguments = read_configuration(args)
    cfg = load_config(args.overrides, file)
    if args.cfg:
        print(to_yaml(cfg), end="")
        return cfg, file, arguments
    check(cfg)
    remark = check_used(cfg, command, args.overrides, file)
    if remark is not None and rank_of_process() == 0:
        print_to_user(remark)
    return cfg, file, arguments


def _check_start(args: argparse.Namespace, cfg: Config, file: ConfigFile | None) -> Config | None:
    """Check what a run needs to start. Return the configuration in its folder, if there is one."""
    check_run(cfg, args.gpus)
    saved = check_unnamed(cfg, args.overrides, file)
    check_folder(cfg)
    check_trackers(cfg)
    return saved


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Add recipes, keys, --config, --cfg and --dry-run."""
    recipe = "a recipe of a group (model=qwen3_vl_2b) or a value (optim.lr=2e-5); values win"
    _add_keys(parser, "train", recipe)
    add_dry_run_arguments(parser, "data, steps, layout, memory of each stage and first batches")


def train_(args: argparse.Namespace) -> int:
    """fine-tune a checkpoint on a data set

    Fine-tune a Qwen3-VL, Qwen3.5 or Gemma 4 checkpoint. The command starts the processes on this
    machine itself, unless torchrun has already started them (launch.processes: one per GPU, or
    parallel.tp x parallel.pp on the CPU). If it is started again with the same run=, it resumes
    from the newest complete checkpoint. megatron-vlm help KEY explains the keys below.

    example: megatron-vlm train model=qwen3_vl_2b model.path=Qwen/Qwen3-VL-2B-Instruct parallel.pp=2
    data.train=chats.jsonl train.steps=1000 run=runs/first

    It writes into run=: metrics.jsonl, checkpoints/, report.html and export/, which transformers
    loads.
    """
    from megatron_vlm.config.command_checks import check_train

    check_dry_run_arguments(args)
    cfg, file, arguments = _compose(args, "train", check_train)
    if args.cfg:
        return 0
    saved = _check_start(args, cfg, file)
    if args.dry_run:
        from megatron_vlm.commands.dry_run.command import dry_run

        return dry_run(with_model(cfg, False, saved), args.gpus, args.memory)
    from megatron_vlm.distributed.launch.launch import launch
    from megatron_vlm.train import run_train

    cfg = with_model(cfg, saved=saved)
    return launch(cfg, "megatron_vlm.train", run_train, with_commit(arguments, cfg))


def add_rl_arguments(parser: argparse.ArgumentParser) -> None:
    """Add recipes, keys, --config, --cfg and --dry-run, as for training."""
    _add_keys(parser, "rl", "a recipe of a group (rl=dapo) or a value (rl.samples=16); values win")
    shown = "data, steps, layout, memory, the engine, and the rewards of a few answers"
    add_dry_run_arguments(parser, shown)


def rl(args: argparse.Namespace) -> int:
    """let a checkpoint learn from its own answers

    Reinforcement learning: answers to the prompts of data.train are sampled. A function of yours
    scores them (rl.reward), or an environment responds to them (rl.environment), and better answers
    become more likely. Run, checkpoints, resume, evaluation, report and export work as
    in training.

    example: megatron-vlm rl rl=grpo rl.reward=rewards.py:score model.path=DIR data.train=asks.jsonl
    train.global_batch_size=32 rl.samples=8 run=runs/rl

    docs/rl.md describes rewards, environments and engines.
    """
    from megatron_vlm.config.command_checks import check_rl
    from megatron_vlm.distributed.launch.launch import launch
    from megatron_vlm.engines.engine_kinds import check_engine
    from megatron_vlm.rl.rl_train import run_rl

    check_dry_run_arguments(args)
    cfg, file, arguments = _compose(args, "rl", check_rl)
    if args.cfg:
        return 0
    check_engine(cfg, "rl")
    saved = _check_start(args, cfg, file)
    if args.dry_run:
        from megatron_vlm.commands.dry_run.rl_dry_run import rl_dry_run

        return rl_dry_run(with_model(cfg, False, saved), args.gpus, args.memory)
    cfg = with_model(cfg, saved=saved)
    return launch(cfg, "megatron_vlm.rl", run_rl, with_commit(arguments, cfg))


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add keys, --config, --cfg and --dry-run, as for training."""
    keys = "a recipe of a group (model=qwen3_vl_2b) or a value (serve.port=8000)"
    _add_keys(parser, "serve", keys)
    parser.add_argument(
        "--add-client",
        nargs=2,
        metavar=("NAME", "FILE"),
        help="only make an API key for a client; serve.keys=FILE lets it in",
    )
    add_dry_run_arguments(parser, "the address, API keys, engine, layout and memory of models")


def serve(args: argparse.Namespace) -> int:
    """train and sample for clients that speak the Tinker protocol

    A service: researchers write their loops against the public Tinker client, and this machine or
    cluster does the work. It serves many models at a time, with adapters or as a whole, at any
    layout. It completes every call that it has accepted, also after it is killed and started again
    with the same run=.

    example: megatron-vlm serve model.path=DIR parallel.tp=2 run=runs/serve serve.port=8000

    With --add-client it prints a new API key for NAME, once, writes its digest into FILE, and ends.
    A former key of that name becomes invalid. A running service reads the file again by itself.

    docs/serve.md describes keys for clients, limits and what a service keeps.
    """
    from megatron_vlm.config.command_checks import check_serve
    from megatron_vlm.distributed.launch.launch import launch
    from megatron_vlm.engines.engine_kinds import check_engine
    from megatron_vlm.serve.main import run_serve

    if args.add_client:
        from megatron_vlm.serve.http.api_keys import add_key

        name, keys = args.add_client
        print(add_key(name, Path(keys)))
        return 0
    cfg, _, arguments = _compose(args, "serve", check_serve)
    if args.cfg:
        return 0
    modules = ("fastapi", "uvicorn", "google.protobuf", "zstandard")
    require_extra("serve", *modules, place="serve")
    check_dry_run_arguments(args)
    check_engine(cfg, "serve")
    check_run(cfg, args.gpus)
    saved = saved_config(Path(cfg.run))
    if args.dry_run:
        from megatron_vlm.commands.dry_run.rl_dry_run import serve_dry_run

        return serve_dry_run(with_model(cfg, False, saved), args.gpus, args.memory)
    cfg = with_model(cfg, saved=saved)
    return launch(cfg, "megatron_vlm.serve", run_serve, with_commit(arguments, cfg))
