"""The options of a dry run. Importing this file imports no large package."""

import argparse

from megatron_vlm.errors import ConfigError


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
