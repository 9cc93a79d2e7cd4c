"""The `megatron-vlm` command. Slow imports are inside functions."""

import os
import signal
import sys

from megatron_vlm.distributed.process import DEBUG, INTERRUPTED, ended_by_signals, print_to_user
from megatron_vlm.errors import MegatronVLMError, sentences

_RUNS = ("train", "rl", "eval", "score", "serve")  # commands that schedulers stop and start again


def main(argv: list[str] | None = None) -> int:
    """Parse the arguments and run the command; return the exit status. Errors that a user can
    correct end with one sentence, and Ctrl-C with none; neither has a traceback."""
    arguments = sys.argv[1:] if argv is None else argv
    words = [word for word in arguments if word != "--debug"]  # the option may be anywhere
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # they stay in the output
    if debug := len(words) < len(arguments):
        os.environ[DEBUG] = "1"  # for the processes that a command starts
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set while the package was imported
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if words[:1] and words[0] in _RUNS:
            with ended_by_signals():
                return _run(words)
        return _run(words)
    except (MegatronVLMError, OSError) as error:
        if not (lines := sentences(error)) or debug:
            raise
        for line in lines:
            print_to_user(line)
        return 2
    except KeyboardInterrupt:
        if debug:
            raise
        return INTERRUPTED


def _run(words: list[str]) -> int:
    from megatron_vlm.cli.parser import make_parser
    from megatron_vlm.config.arguments import check_command, parse_arguments

    parser = make_parser()
    check_command(words, list(parser.get_default("known_commands")))
    args = parse_arguments(parser, words)
    return args.run(args) or 0
