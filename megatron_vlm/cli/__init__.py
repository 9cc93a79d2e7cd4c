"""The `megatron-vlm` command. Slow imports are inside functions."""

import os
import sys

from megatron_vlm.distributed.process import DEBUG, ended_by_signals, print_to_user
from megatron_vlm.errors import MegatronVLMError, sentence

_RUNS = ("train", "rl", "eval", "serve")  # commands that schedulers stop and start again


def main(argv: list[str] | None = None) -> int:
    """Parse the arguments and run the command; return the exit status. Errors that a user can
    correct end with one sentence and without a traceback."""
    arguments = sys.argv[1:] if argv is None else argv
    words = [word for word in arguments if word != "--debug"]  # the option may be anywhere
    if debug := len(words) < len(arguments):
        os.environ[DEBUG] = "1"  # for the processes that a command starts
    try:
        if words[:1] and words[0] in _RUNS:
            with ended_by_signals():
                return _run(words)
        return _run(words)
    except (MegatronVLMError, OSError) as error:
        if (text := sentence(error)) is None or debug:
            raise
        print_to_user(text)
        return 2


def _run(words: list[str]) -> int:
    from megatron_vlm.cli.parser import make_parser
    from megatron_vlm.config.arguments import parse_arguments

    args = parse_arguments(make_parser(), words)
    return args.run(args) or 0
