"""The commands that write data and model of the demo: `megatron-vlm demo shapes`, `megatron-vlm
tiny`."""

import argparse
from dataclasses import fields

from megatron_vlm.family.tiny import TinySpec
from megatron_vlm.io.printable import escape_controls

_OUT = "folder to write; must not exist or be empty"
_METAVARS = {int: "N", float: "X", str: "NAME"}


def demo(args: argparse.Namespace) -> None:
    """write data or a tiny model to try the program with

    Write a set of coloured shapes with questions about them, or a random checkpoint that is small
    enough for a laptop. megatron-vlm demo tiny --help lists the options of one of them.

    example: megatron-vlm demo shapes --out shapes --train 200 --eval 20
    """
    raise AssertionError("argparse asks for one of its two parts")


def add_shapes_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megatron-vlm demo shapes`."""
    parser.add_argument("--out", required=True, metavar="DIR", help=_OUT)
    easy = "records to start with, in easy.jsonl: one shape and its name"
    for option, default, text in (
        ("--train", 2000, "records to learn from"),
        ("--eval", 200, "records held out"),
        ("--easy", 0, easy),
        ("--seed", 0, "of the pictures and questions"),
    ):
        parser.add_argument(option, type=int, default=default, metavar="N", help=text)
    sides = "pixels of a side of a picture, one of these (64 96 100)"
    parser.add_argument(
        "--sides", type=int, nargs="+", default=[64, 96, 100], metavar="N", help=sides
    )


def shapes(args: argparse.Namespace) -> None:
    """write the demo set: coloured shapes and questions about them

    Write train.jsonl, eval.jsonl and images/ with questions about the colour, shape, count and
    position of coloured shapes. Train on it with data=shapes.
    """
    from megatron_vlm.commands.demo.coloured_shapes import ShapesSpec, write_shapes

    counts = (args.train, args.eval, args.easy, args.seed)
    write_shapes(args.out, ShapesSpec(*counts, sides=tuple(args.sides)))
    print(escape_controls(f"wrote {args.out}"))


def add_tiny_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megatron-vlm demo tiny`."""
    parser.add_argument("--out", required=True, metavar="DIR", help=_OUT)
    dtypes = ["float32", "bfloat16", "float16"]
    parser.add_argument("--dtype", default="float32", choices=dtypes, help="of the weights")
    for item in fields(TinySpec):
        option, text = f"--{item.name.replace('_', '-')}", item.metadata["help"]
        if item.type is bool:
            parser.add_argument(option, action="store_true", help=text)
        else:
            kind = type(item.default)
            parser.add_argument(
                option, type=kind, default=item.default, metavar=_METAVARS[kind], help=text
            )


def tiny(args: argparse.Namespace) -> None:
    """write a complete random checkpoint, small enough for a laptop

    Write a random Qwen3-VL, Qwen3.5 or Gemma 4 checkpoint with tokenizer, chat template and image
    processor, to try a configuration or data with. The options are the sizes of its config.json;
    the same ones give the same bytes.
    """
    from megatron_vlm.commands.demo.tiny_model import write_tiny

    spec = TinySpec(**{item.name: getattr(args, item.name) for item in fields(TinySpec)})
    write_tiny(args.out, spec, args.dtype)
    print(escape_controls(f"wrote {args.out}"))
