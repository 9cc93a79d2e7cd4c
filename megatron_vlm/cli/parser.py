"""Commands of `megatron-vlm`: their arguments, and the functions that run them."""

import argparse
from collections.abc import Callable
from typing import Any

from megatron_vlm.cli import help_command
from megatron_vlm.cli.completion import add_completion_arguments, completion
from megatron_vlm.commands import jobs, run_outputs
from megatron_vlm.commands.agree import agree_settings
from megatron_vlm.commands.bench.command import add_bench_arguments, bench
from megatron_vlm.commands.chat.command import add_chat_arguments, chat
from megatron_vlm.commands.demo.command import (
    add_shapes_arguments,
    add_tiny_arguments,
    demo,
    shapes,
    tiny,
)
from megatron_vlm.commands.eval import add_arguments, held_in_place, locate, run_eval
from megatron_vlm.commands.import_config.command import add_import_arguments, import_
from megatron_vlm.commands.plan.plan_arguments import add_plan_arguments, with_known_sizes
from megatron_vlm.commands.score import add_score_arguments, score
from megatron_vlm.commands.watch.command import add_watch_arguments, watch
from megatron_vlm.config.arguments import SecretiveParser, add_overrides, read_configuration
from megatron_vlm.distributed.process import FAILED, UNLIKE
from megatron_vlm.model.constraints import check_supported
from megatron_vlm.run.run_folder import with_commit
from megatron_vlm.training.preflight import check_records, check_run
from megatron_vlm.version import __version__


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands with their options."""
    parser = SecretiveParser(
        prog="megatron-vlm",
        allow_abbrev=False,
        add_help=False,
        formatter_class=help_command.HelpText,
        description="Fine-tune Qwen3-VL, Qwen3.5 and Gemma 4 on Megatron-Core: a Hugging Face "
        "checkpoint and a data set in, a better Hugging Face checkpoint out.",
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
    jobs.add_train_arguments(_command(commands, jobs.train_, has_keys=True))
    jobs.add_rl_arguments(_command(commands, jobs.rl, has_keys=True))
    jobs.add_serve_arguments(_command(commands, jobs.serve, has_keys=True))
    add_arguments(evaluation := _command(commands, _eval))
    shown = "the checkpoint, the sets, the layout and the memory of weights"
    jobs.add_dry_run_arguments(evaluation, shown)
    add_score_arguments(_command(commands, score))
    add_bench_arguments(_command(commands, bench))
    run_outputs.add_export_arguments(_command(commands, run_outputs.export))
    run_outputs.add_push_arguments(_command(commands, run_outputs.push_))
    add_chat_arguments(_command(commands, chat))
    run_outputs.add_report_arguments(_command(commands, run_outputs.report))
    add_watch_arguments(_command(commands, watch))
    checkpoint = "also check this checkpoint: a folder, or a name on the Hub"
    doctor = _command(commands, _doctor)
    doctor.add_argument("model", nargs="?", metavar="model.path=PATH", help=checkpoint)
    add_plan_arguments(_command(commands, _plan, has_keys=True))
    agree_settings.add_agree_arguments(_command(commands, _agree))
    _inspect_arguments(_command(commands, _inspect, has_keys=True))
    add_import_arguments(_command(commands, import_))
    parts = _command(commands, demo).add_subparsers(required=True, metavar="shapes|tiny")
    add_shapes_arguments(_command(parts, shapes, formatter_class=help_command.HelpWithDefaults))
    add_tiny_arguments(_command(parts, tiny, formatter_class=help_command.HelpWithDefaults))
    help_command.add_help_arguments(help_parser := _command(commands, help_command.help_))
    help_parser.set_defaults(root=parser, commands=commands.choices)
    add_completion_arguments(completer := _command(commands, completion))
    completer.set_defaults(commands=commands.choices)
    return parser


def _command(
    commands: Any,
    run: Callable[[argparse.Namespace], int | None],
    has_keys: bool = False,
    formatter_class: type[help_command.HelpText] = help_command.HelpText,
) -> argparse.ArgumentParser:
    """Add a command with the name of its function. With `has_keys`, --help also explains a key."""
    name = run.__name__.strip("_").replace("_", "-")
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        allow_abbrev=False,
        add_help=not has_keys,
        formatter_class=formatter_class,
        **help_command.texts_of(run),
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
        "-h", "--help", action=help_command.TopicHelp, nargs="?", metavar="KEY", help=text,
        root=root, commands=commands,
    )  # fmt: skip


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
    jobs.check_dry_run_arguments(args)
    with held_in_place(args.where) as where:
        cfg, checkpoint = locate(where, args.overrides, file, weights=not args.dry_run)
        check_run(cfg, args.gpus)
        if args.dry_run:
            from megatron_vlm.commands.dry_run.command import eval_dry_run

            return eval_dry_run(cfg, checkpoint, args.predictions, args.gpus, args.memory)
        arguments = [where, *with_commit(arguments, cfg)]
        if args.predictions:
            arguments += ["--predictions", args.predictions]
        from megatron_vlm.distributed.launch.launch import launch

        return launch(cfg, "megatron_vlm.commands.eval", run_eval, arguments)


def _agree(args: argparse.Namespace) -> int:
    """prove that an engine and the trainer see the same

    Send the prompts of data.eval, or else of data.train, to vLLM and to the trainer, each prompt
    up to its last answer. Compare the ids, the grids, the patches, and the log-probs of the tokens
    that the engine drew, in the layout of parallel.*. The exit status is 1 if they differ.

    example: megatron-vlm agree runs/first --engine .venv-vllm/bin/python parallel.tp=2
    parallel.pp=2 --html agree.html

    A run and its checkpoints bring their configuration, and the trainer gives their weights to the
    engine; the engine itself loads a Hugging Face folder.
    """
    settings = agree_settings.AgreeSettings.from_arguments(args)
    file, arguments = read_configuration(args)
    with held_in_place(args.where) as where:
        cfg, _ = agree_settings.locate_checkpoint(where, args.overrides, file)
        check_run(cfg)
        from megatron_vlm.commands.agree.agree_ranks import run_agree
        from megatron_vlm.distributed.launch.launch import launch

        words = [where, *with_commit(arguments, cfg), *settings.words]
        status = launch(cfg, "megatron_vlm.commands.agree.agree_ranks", run_agree, words)
    return FAILED if status == UNLIKE else status


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
    Rows are like data.train's, or assumed without it. The command needs no GPU, reads no
    weights, and prints its assumptions. With --fit it tries the switches that save memory, too.

    example: megatron-vlm plan model.path=DIR data.train=chats.jsonl train.global_batch_size=64
    --gpus 8 --memory 80GiB --html plan.html
    """
    from megatron_vlm.config import load_config

    file, _ = read_configuration(args)
    cfg = load_config(with_known_sizes(args.overrides, file), file)
    check_supported(cfg)
    check_records(cfg)
    from megatron_vlm.commands.plan.command import plan_cluster, run_plan

    run_plan(cfg, plan_cluster(args), args.fit, args.html)


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
