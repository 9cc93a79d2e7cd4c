"""The `megatron-vlm` command. Errors a user can put right end with one sentence, no traceback."""

import argparse
import os
import sys
from dataclasses import fields
from typing import Any

from megatron_vlm import __version__
from megatron_vlm.distributed.process import DEBUG
from megatron_vlm.errors import MegatronVLMError


def main(argv: list[str] | None = None) -> int:
    """Parse and run; the exit status."""
    args = _parse(argv)
    if args.debug:
        os.environ[DEBUG] = "1"  # for the processes that a command starts
    try:
        return args.run(args)
    except MegatronVLMError as error:
        if args.debug:
            raise
        print(f"megatron-vlm: {error}", file=sys.stderr)
        return 2


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """Overrides may stand among and behind the options."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("-") or "=" not in word]
    if unknown or (rest and not hasattr(args, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(unknown or rest)}")
    if rest:
        args.overrides += rest
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-vlm",
        description="Fine-tune Qwen3-VL on Megatron-Core: a Hugging Face checkpoint and a data set "
        "in, a better Hugging Face checkpoint out.",
        epilog="The usual order is doctor, inspect, train --dry-run, train, report, eval, export: "
        "docs/quickstart.md goes through it. Exit status: 0 done, 2 a mistake, said in one "
        "sentence, 70 a rank stood still, 75 saved after SIGTERM or SIGUSR1, start again to go "
        "on.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error, too")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    _add_eval(commands)
    _add_export(commands)
    _add_report(commands)
    _add_doctor(commands)
    _add_inspect(commands)
    _add_shapes(commands)
    _add_tiny(commands)
    return parser


def _add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="fine-tune a checkpoint on a data set",
        description="Fine-tune a Qwen3-VL checkpoint. Starts the processes on this machine itself "
        "(launch.processes: one a GPU, or parallel.tp x parallel.pp on the CPU), or is one of them "
        "under torchrun. Started again with the same run=, it goes on from the newest complete "
        "checkpoint. All keys: docs/configuration.md.",
        epilog="example: megatron-vlm train model=qwen3_vl_2b model.path=DIR parallel.pp=2 "
        "data.train=chats.jsonl train.steps=1000 run=runs/first. Writes into run=: metrics.jsonl, "
        "checkpoints/, report.html and export/, which transformers loads.",
    )
    train.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="a recipe of a group (model=qwen3_vl_2b) or a value (optim.lr=2e-5); values win",
    )
    train.add_argument(
        "--cfg", choices=["job"], help="print the resolved configuration as YAML, and stop there"
    )
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print layout, memory of each stage and the first batches, and stop "
        "there: needs no GPU and reads no weights",
    )
    train.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> int:
    from megatron_vlm.config import load_config, to_yaml

    cfg = load_config(args.overrides)
    if args.cfg:
        print(to_yaml(cfg), end="")
        return 0
    if args.dry_run:
        from megatron_vlm.tools.dry_run import dry_run

        return dry_run(cfg)
    from megatron_vlm.launch.launch import launch

    return launch(cfg, "megatron_vlm.train", "run_train", args.overrides)


def _add_eval(commands: Any) -> None:
    from megatron_vlm.evaluation.command import add_arguments

    evaluate = commands.add_parser(
        "eval",
        help="score a checkpoint on held-out sets",
        description="Loss and token accuracy of each set in data.eval; exact match of generated "
        "answers with eval.generate=true; with eval.candidates, how often the right one of them is "
        "the likeliest. Prints one line of JSON a set.",
        epilog="example: megatron-vlm eval runs/first data.eval=chats.jsonl eval.generate=true. A "
        "run and its checkpoints bring their configuration: single keys can be changed "
        "(parallel.pp=1), recipes not. A Hugging Face folder brings none: give recipes and keys.",
    )
    add_arguments(evaluate)
    evaluate.set_defaults(run=_eval)


def _eval(args: argparse.Namespace) -> int:
    from megatron_vlm.evaluation.command import locate
    from megatron_vlm.launch.launch import launch

    cfg, _ = locate(args.where, args.overrides)
    words = [args.where, *args.overrides]
    if args.predictions:
        words += ["--predictions", args.predictions]
    return launch(cfg, "megatron_vlm.evaluation.command", "run_eval", words)


def _add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="write a checkpoint of a run as a Hugging Face folder",
        description="Write a folder that transformers loads, from a checkpoint of a run: its "
        "weights, and every other file of the folder that was trained. Needs no GPU, and memory "
        "for one file of weights.",
        epilog="example: megatron-vlm export runs/first/checkpoints/step-00001000 tuned. Training "
        "does this itself at its end, to run=/export.",
    )
    export.add_argument("checkpoint", help="RUN/checkpoints/step-..., or RUN for its newest")
    export.add_argument("out", help="folder to write; must not exist or be empty")
    export.add_argument("--model", help="the folder that was trained, where it lies elsewhere now")
    export.set_defaults(run=_export)


def _export(args: argparse.Namespace) -> int:
    from megatron_vlm.checkpoint.export import export_checkpoint

    folder = export_checkpoint(args.checkpoint, args.out, args.model)
    print(f"wrote {args.out} from {folder}")
    return 0


def _add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="write the page of a run: RUN/report.html",
        description="Curves, scores, example answers, history and configuration of a run, of one "
        "that still goes on too, as one file that needs no network. Training writes it at its end.",
    )
    report.add_argument("folder", metavar="RUN", help="the folder given to training as run=")
    report.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> int:
    from pathlib import Path

    from megatron_vlm.run.report import write_report

    print(f"wrote {write_report(Path(args.folder))}")
    return 0


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="what this machine can run, and what is missing",
        description="Check Python, packages, GPUs, NCCL, gloo, the C compiler, shared memory and "
        "disks, and say how to get what is missing. The exit status is 1 where training cannot "
        "run.",
    )
    doctor.set_defaults(run=_doctor)


def _doctor(_: argparse.Namespace) -> int:
    from megatron_vlm.tools.doctor import run_doctor

    return run_doctor()


_TINY_HELP = {
    "layers": "decoder layers",
    "hidden": "width of the decoder",
    "intermediate": "width of the decoder's MLP",
    "heads": "attention heads; parallel.tp must divide them",
    "kv_heads": "heads of keys and values; parallel.tp must divide them",
    "head_dim": "width of a head",
    "vocab": "tokens of the tokenizer, trained on the spot",
    "vision_depth": "blocks of the vision tower",
    "vision_hidden": "width of the tower",
    "vision_heads": "attention heads of the tower",
    "vision_intermediate": "width of the tower's MLP",
    "deepstack": "DeepStack features: decoder layers that see the tower, too",
    "patch_size": "side of a patch in pixels",
    "tied": "tie embedding and head",
    "from_scratch": "start from weights with which so small a model learns to see",
    "seed": "of the weights",
}


def _add_tiny(commands: Any) -> None:
    from megatron_vlm.demo.tiny_spec import TinySpec

    tiny = commands.add_parser(
        "tiny",
        help="write a complete random Qwen3-VL checkpoint, small enough for a laptop",
        description="Write a random Qwen3-VL checkpoint with tokenizer, chat template and image "
        "processor, to try a configuration or data with. The options are the sizes of its "
        "config.json; the same ones give the same bytes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    tiny.add_argument("--out", required=True, help="folder to write; must not exist or be empty")
    tiny.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "bfloat16", "float16"],
        help="of the weights",
    )
    for item in fields(TinySpec):
        option = f"--{item.name.replace('_', '-')}"
        if item.type is bool:
            tiny.add_argument(option, action="store_true", help=_TINY_HELP[item.name])
        else:
            tiny.add_argument(option, type=int, default=item.default, help=_TINY_HELP[item.name])
    tiny.set_defaults(run=_tiny)


def _add_shapes(commands: Any) -> None:
    shapes = commands.add_parser(
        "shapes",
        help="write the demo set: coloured shapes and questions about them",
        description="Write train.jsonl, eval.jsonl and images/ with questions about the colour, "
        "shape, count and position of coloured shapes. Train on it with data=shapes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    shapes.add_argument("--out", required=True, help="folder to write; must not exist or be empty")
    shapes.add_argument("--train", type=int, default=2000, help="records to learn from")
    shapes.add_argument("--eval", type=int, default=200, help="records held out")
    shapes.add_argument(
        "--easy",
        type=int,
        default=0,
        help="records to begin with, in easy.jsonl: one shape, what is it",
    )
    shapes.add_argument("--seed", type=int, default=0, help="of the pictures and questions")
    shapes.set_defaults(run=_shapes)


def _add_inspect(commands: Any) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="print what the model will see of a data set",
        description="Print rendered turns with the trained tokens coloured, sizes over the set, "
        "what was dropped and why, and the padding and balance of its batches. Reads the tokenizer "
        "and image processor of model.path, no weights.",
        epilog="example: megatron-vlm inspect data.train=chats.jsonl model.path=DIR --html a.html",
    )
    inspect.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for training")
    inspect.add_argument("--config", default="train", help="recipe in configs/ (default: train)")
    inspect.add_argument(
        "--html", metavar="FILE", help="write one self-contained page with pictures, too"
    )
    inspect.add_argument("--samples", type=int, default=3, help="how many to show (default: 3)")
    inspect.add_argument("--sample", type=int, help="show the one with this number alone")
    inspect.add_argument("--ranks", type=int, default=1, help="data parallel ranks to plan for")
    inspect.set_defaults(run=_inspect)


def _shapes(args: argparse.Namespace) -> int:
    from megatron_vlm.demo.shapes import ShapesSpec, write_shapes

    write_shapes(args.out, ShapesSpec(args.train, args.eval, args.easy, args.seed))
    print(f"wrote {args.out}")
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from megatron_vlm.tools.inspection.command import run_inspect

    run_inspect(args.overrides, args.config, args.html, args.samples, args.sample, args.ranks)
    return 0


def _tiny(args: argparse.Namespace) -> int:
    from megatron_vlm.demo.tiny import TinySpec, write_tiny

    spec = TinySpec(**{item.name: getattr(args, item.name) for item in fields(TinySpec)})
    write_tiny(args.out, spec, args.dtype)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
