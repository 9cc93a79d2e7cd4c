"""The commands that write data and model of the demo: `megatron-vlm shapes`, `megatron-vlm
tiny`."""

import argparse
from dataclasses import fields

from megatron_vlm.commands.demo.tiny_spec import TinySpec
from megatron_vlm.io.printable import escape_controls


def add_shapes_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megatron-vlm shapes`."""
    parser.add_argument("--out", required=True, help="folder to write; must not exist or be empty")
    parser.add_argument("--train", type=int, default=2000, help="records to learn from")
    parser.add_argument("--eval", type=int, default=200, help="records held out")
    easy = "records to start with, in easy.jsonl: one shape and its name"
    parser.add_argument("--easy", type=int, default=0, help=easy)
    parser.add_argument("--seed", type=int, default=0, help="of the pictures and questions")


def shapes(args: argparse.Namespace) -> None:
    """write the demo set: coloured shapes and questions about them

    Write train.jsonl, eval.jsonl and images/ with questions about the colour, shape, count and
    position of coloured shapes. Train on it with data=shapes.
    """
    from megatron_vlm.commands.demo.coloured_shapes import ShapesSpec, write_shapes

    write_shapes(args.out, ShapesSpec(args.train, args.eval, args.easy, args.seed))
    print(escape_controls(f"wrote {args.out}"))


def add_tiny_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megatron-vlm tiny`."""
    parser.add_argument("--out", required=True, help="folder to write; must not exist or be empty")
    dtypes = ["float32", "bfloat16", "float16"]
    parser.add_argument("--dtype", default="float32", choices=dtypes, help="of the weights")
    for item in fields(TinySpec):
        option, text = f"--{item.name.replace('_', '-')}", item.metadata["help"]
        if item.type is bool:
            parser.add_argument(option, action="store_true", help=text)
        else:
            parser.add_argument(option, type=type(item.default), default=item.default, help=text)


def tiny(args: argparse.Namespace) -> None:
    """write a complete random checkpoint, small enough for a laptop

    Write a random Qwen3-VL or Qwen3.5 checkpoint with tokenizer, chat template and image processor,
    to try a configuration or data with. The options are the sizes of its config.json; the same ones
    give the same bytes.
    """
    from megatron_vlm.commands.demo.tiny_model import write_tiny

    spec = TinySpec(**{item.name: getattr(args, item.name) for item in fields(TinySpec)})
    write_tiny(args.out, spec, args.dtype)
    print(escape_controls(f"wrote {args.out}"))
