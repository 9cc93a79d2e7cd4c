"""The `megatron-vlm` command. Errors a user can put right end with one sentence, no traceback."""

import argparse
import sys
from dataclasses import fields

from megatron_vlm import __version__
from megatron_vlm.errors import MegatronVLMError


def main(argv: list[str] | None = None) -> int:
    """Parse and run; the exit status."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except MegatronVLMError as error:
        if args.debug:
            raise
        print(f"megatron-vlm: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    from megatron_vlm.tiny import TinySpec

    parser = argparse.ArgumentParser(
        prog="megatron-vlm", description="Fine-tune Qwen3-VL on Megatron-Core."
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    tiny = commands.add_parser(
        "tiny",
        help="write a complete random Qwen3-VL checkpoint, small enough for a laptop",
        description="Write a random Qwen3-VL checkpoint with tokenizer, chat template and image "
        "processor: for tests, demos and dry runs of a configuration.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    tiny.add_argument("--out", required=True, help="folder to write; must not exist or be empty")
    tiny.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    for item in fields(TinySpec):
        option = f"--{item.name.replace('_', '-')}"
        if item.type is bool:
            tiny.add_argument(option, action="store_true", help="tie embedding and head")
        else:
            tiny.add_argument(option, type=int, default=item.default, help=item.name)
    tiny.set_defaults(run=_tiny)
    return parser


def _tiny(args: argparse.Namespace) -> int:
    from megatron_vlm.tiny import TinySpec, write_tiny

    spec = TinySpec(**{item.name: getattr(args, item.name) for item in fields(TinySpec)})
    write_tiny(args.out, spec, args.dtype)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
