"""Commands of `megatron-vlm`: their arguments, and the functions that run them."""

import argparse
from collections.abc import Callable
from typing import Any

from megatron_vlm.cli.completion import add_completion_arguments, completion
from megatron_vlm.cli.help_command import TopicHelp, add_help_arguments, help_
from megatron_vlm.cli.help_text import HelpText, HelpWithDefaults, texts_of
from megatron_vlm.commands.agree.agree_settings import add_agree_arguments
from megatron_vlm.commands.agree.command import agree
from megatron_vlm.commands.bench.command import add_bench_arguments, bench
from megatron_vlm.commands.chat.command import add_chat_arguments, start_chat
from megatron_vlm.commands.demo.command import (
    add_shapes_arguments,
    add_tiny_arguments,
    demo,
    shapes,
    tiny,
)
from megatron_vlm.commands.dry_run.dry_run_arguments import (
    add_dry_run_arguments,
    check_dry_run_arguments,
)
from megatron_vlm.commands.eval import add_arguments, held_in_place, locate, run_eval
from megatron_vlm.commands.import_config.command import add_import_arguments, import_
from megatron_vlm.commands.plan.plan_arguments import add_plan_arguments
from megatron_vlm.commands.rl import add_rl_arguments, rl
from megatron_vlm.commands.run_outputs import (
    add_export_arguments,
    add_push_arguments,
    add_report_arguments,
    export,
    push_,
    report,
)
from megatron_vlm.commands.score import add_score_arguments, score
from megatron_vlm.commands.serve import add_serve_arguments, serve
from megatron_vlm.commands.watch.command import add_watch_arguments, watch
from megatron_vlm.config.arguments import add_cfg_option, add_overrides, read_configuration
from megatron_vlm.config.listing import listing
from megatron_vlm.model.constraints import check_supported
from megatron_vlm.run.log_sinks import check_sinks
from megatron_vlm.run.saved_config import check_unnamed, with_commit, with_model
from megatron_vlm.training.preflight import check_records, check_run
from megatron_vlm.version import __version__


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands with their options."""
    parser = argparse.ArgumentParser(
        prog="megatron-vlm",
        allow_abbrev=False,
        add_help=False,
        formatter_class=HelpText,
        description="Fine-tune Qwen3-VL and Qwen3.5 on Megatron-Core: a Hugging Face checkpoint "
        "and a data set in, a better Hugging Face checkpoint out.",
        epilog="The usual order is doctor, inspect, train --dry-run, train, report, eval, export, "
        "chat: docs/quickstart.md goes through it. Exit status: 0 done, 2 a mistake, "
        "explained in one sentence, 70 a rank was stuck, 75 saved after SIGTERM or SIGUSR1: start "
        "again to resume.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_topic_help(parser, commands.choices, parser)
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error, too")
    parser.set_defaults(known_commands=commands.choices)  # for check_command
    _train_arguments(_command(commands, _train, has_keys=True))
    add_rl_arguments(_command(commands, rl, has_keys=True))
    add_serve_arguments(_command(commands, serve, has_keys=True))
    _eval_arguments(_command(commands, _eval))
    add_score_arguments(_command(commands, score))
    add_bench_arguments(_command(commands, bench))
    add_export_arguments(_command(commands, export))
    add_push_arguments(_command(commands, push_))
    add_chat_arguments(_command(commands, _chat))
    add_report_arguments(_command(commands, report))
    add_watch_arguments(_command(commands, watch))
    _doctor_arguments(_command(commands, _doctor))
    add_plan_arguments(_command(commands, _plan, has_keys=True))
    add_agree_arguments(_command(commands, agree))
    _inspect_arguments(_command(commands, _inspect, has_keys=True))
    add_import_arguments(_command(commands, import_))
    parts = _command(commands, demo).add_subparsers(required=True, metavar="shapes|tiny")
    add_shapes_arguments(_command(parts, shapes, formatter_class=HelpWithDefaults))
    add_tiny_arguments(_command(parts, tiny, formatter_class=HelpWithDefaults))
    add_help_arguments(help_parser := _command(commands, help_))
    help_parser.set_defaults(root=parser, commands=commands.choices)
    add_completion_arguments(completer := _command(commands, completion))
    completer.set_defaults(commands=commands.choices)
    return parser


def _command(
    commands: Any,
    run: Callable[[argparse.Namespace], int | None],
    has_keys: bool = False,
    formatter_class: type[HelpText] = HelpText,
) -> argparse.ArgumentParser:
    """Add a command with the name of its function. With `has_keys`, --help also explains a key."""
    name = run.__name__.strip("_").replace("_", "-")
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        allow_abbrev=False,
        add_help=not has_keys,
        formatter_class=formatter_class,
        **texts_of(run),
    )
    if has_keys:
        _add_topic_help(parser, commands.choices)
    parser.set_defaults(run=run)
    return parser


def _add_topic_help(
    parser: argparse.ArgumentParser, commands: Any, root: argparse.ArgumentParser | None = None
) -> None:
    text = "show this help, or explain a key or a group (--help optim), and exit"
    parser.add_argument(
        "-h", "--help", action=TopicHelp, nargs="?", metavar="KEY", help=text, root=root,
        commands=commands,
    )  # fmt: skip


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"{parser.epilog}\n\n{listing('train')}"
    recipe = "a recipe of a group (model=qwen3_vl_2b) or a value (optim.lr=2e-5); values win"
    add_overrides(parser, recipe)
    add_cfg_option(parser)
    add_dry_run_arguments(parser, "data, steps, layout, memory of each stage and first batches")


def _train(args: argparse.Namespace) -> int:
    """fine-tune a checkpoint on a data set

    Fine-tune a Qwen3-VL or Qwen3.5 checkpoint. The command starts the processes on this machine
    itself, unless torchrun has already started them (launch.processes: one per GPU, or parallel.tp
    x parallel.pp on the CPU). If it is started again with the same run=, it resumes from the newest
    complete checkpoint. megatron-vlm help KEY explains the keys below.

    example: megatron-vlm train model=qwen3_vl_2b model.path=Qwen/Qwen3-VL-2B-Instruct parallel.pp=2
    data.train=chats.jsonl train.steps=1000 run=runs/first

    It writes into run=: metrics.jsonl, checkpoints/, report.html and export/, which transformers
    loads.
    """
    from megatron_vlm.config import load_config, to_yaml
    from megatron_vlm.config.command_checks import check_train

    check_dry_run_arguments(args)
    file, arguments = read_configuration(args)
    cfg = load_config(args.overrides, file)
    if args.cfg:
        print(to_yaml(cfg), end="")
        return 0
    check_train(cfg)
    check_run(cfg, args.gpus)
    saved = check_unnamed(cfg, args.overrides, file)
    check_sinks(cfg)
    if args.dry_run:
        from megatron_vlm.commands.dry_run.command import dry_run

        return dry_run(cfg, args.gpus, args.memory)
    from megatron_vlm.distributed.launch.launch import launch
    from megatron_vlm.train import run_train

    cfg = with_model(cfg, saved=saved)
    return launch(cfg, "megatron_vlm.train", run_train, with_commit(arguments, cfg))


def _eval_arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)
    add_dry_run_arguments(parser, "the checkpoint, the sets, the layout and the memory of weights")


def _eval(args: argparse.Namespace) -> int:
    """score a checkpoint on held-out sets

    Measure the loss and token accuracy of each set in data.eval, and the exact match of generated
    answers with eval.generate=true. With eval.metrics=[anls,my.py:score], also measure other
    metrics of these answers, and with eval.candidates how often the right candidate is the most
    likely one. Print one line of JSON per set.

    example: megatron-vlm eval runs/first data.eval=chats.jsonl eval.generate=true

    A run and its checkpoints have their configuration: single keys can be changed (parallel.pp=1),
    but not recipes. A Hugging Face folder has none: give recipes and keys.
    """
    file, arguments = read_configuration(args)
    check_dry_run_arguments(args)
    with held_in_place(args.where) as where:
        cfg, checkpoint = locate(where, args.overrides, file, weights=not args.dry_run)
        check_run(cfg, args.gpus)
        if args.dry_run:
            from megatron_vlm.commands.dry_run.eval_dry_run import eval_dry_run

            return eval_dry_run(cfg, checkpoint, args.predictions, args.gpus, args.memory)
        arguments = [where, *with_commit(arguments, cfg)]
        if args.predictions:
            arguments += ["--predictions", args.predictions]
        from megatron_vlm.distributed.launch.launch import launch

        return launch(cfg, "megatron_vlm.commands.eval", run_eval, arguments)


def _chat(args: argparse.Namespace) -> int:
    """chat with a checkpoint in the terminal, with pictures

    Load an exported checkpoint, on a GPU if there is one, and answer what is typed. /image PATH and
    /video PATH show something with the next question, /reset begins again, /quit or Ctrl-D ends,
    Ctrl-C stops an answer.

    example: megatron-vlm chat runs/first --image cat.jpg --prompt "What is it?"
    """
    return start_chat(args)


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    model = "also check this checkpoint: a folder, or a name on the Hub"
    parser.add_argument("model", nargs="?", metavar="model.path=PATH", help=model)


def _doctor(args: argparse.Namespace) -> int:
    """check what this machine can run, and what is missing

    Check Python, packages, GPUs, NCCL, gloo, the C compiler, shared memory and disks, and explain
    how to get what is missing. The exit status is 1 where training cannot run.

    example: megatron-vlm doctor model.path=Qwen/Qwen3-VL-2B-Instruct
    """
    from megatron_vlm.commands.doctor import run_doctor

    return run_doctor(args.model)


def _plan(args: argparse.Namespace) -> None:
    """find the fastest layout that fits on a number of GPUs

    Rank the layouts (TP x PP x DP, layers of each stage, micro-batches, recomputation) by predicted
    tokens per second, with the memory of the fullest rank and the bubble, and draw the pipeline.
    Rows are like those of data.train, or assumed without it. The command needs no GPU, reads no
    weights, and prints its assumptions. With --fit it tries the switches that save memory, too.

    example: megatron-vlm plan model.path=DIR data.train=chats.jsonl train.global_batch_size=64
    --gpus 8 --memory 80GiB --html plan.html
    """
    from megatron_vlm.config import load_config

    file, _ = read_configuration(args)
    cfg = load_config(args.overrides, file)
    check_supported(cfg)
    check_records(cfg)
    from megatron_vlm.commands.plan.command import plan_cluster, run_plan

    cluster = plan_cluster(
        args.gpus, args.memory, args.gpu, args.efficiency, args.host_memory, args.host_link
    )
    run_plan(cfg, cluster, args.fit, args.html)


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    page = "also write one self-contained page with pictures"
    parser.add_argument("--html", metavar="FILE", help=page)
    shown = "how many to show (default: 3, and 50 on the page)"
    parser.add_argument("--samples", type=int, metavar="N", help=shown)
    one = "show only the one with this number"
    parser.add_argument("--sample", type=int, metavar="N", help=one)
    ranks = "data parallel ranks to plan for (default: 1)"
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help=ranks)
    decode = "decode every picture and video, whose headers alone are read otherwise"
    parser.add_argument("--decode", action="store_true", help=decode)


def _inspect(args: argparse.Namespace) -> None:
    """print what the model will see of a data set

    Print rendered turns with the trained tokens coloured, sizes over the set, what was dropped and
    why, and the padding and balance of its batches. This reads the tokenizer and image processor of
    model.path, but no weights.

    example: megatron-vlm inspect data.train=chats.jsonl model.path=DIR --html a.html
    """
    from megatron_vlm.config import load_config
    from megatron_vlm.config.checks import require

    file, _ = read_configuration(args)
    cfg = load_config(args.overrides, file)
    require(cfg, "data.train")
    check_records(cfg)
    from megatron_vlm.commands.inspect.command import run_inspect

    run_inspect(cfg, args.html, args.samples, args.sample, args.ranks, args.decode)
