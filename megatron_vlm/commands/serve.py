"""`megatron-vlm serve`: its arguments, and the processes that it starts."""

import argparse
import importlib.util
from pathlib import Path

from megatron_vlm.commands.dry_run.dry_run_arguments import (
    add_dry_run_arguments,
    check_dry_run_arguments,
)
from megatron_vlm.config.arguments import add_cfg_option, add_overrides, read_configuration
from megatron_vlm.config.listing import listing
from megatron_vlm.errors import ConfigError
from megatron_vlm.run.saved_config import with_commit, with_model
from megatron_vlm.training.preflight import check_run


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add keys, --config, --cfg and --dry-run, as for training."""
    parser.epilog = f"{parser.epilog}\n\n{listing('serve')}"
    add_overrides(parser, "a recipe of a group (model=qwen3_vl_2b) or a value (serve.port=8000)")
    add_cfg_option(parser)
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
    from megatron_vlm.config import load_config, to_yaml
    from megatron_vlm.config.command_checks import check_serve
    from megatron_vlm.distributed.launch.launch import launch
    from megatron_vlm.engines.engine_kinds import check_engine
    from megatron_vlm.serve.main import run_serve

    if args.add_client:
        from megatron_vlm.serve.http.api_keys import add_key

        name, keys = args.add_client
        print(add_key(name, Path(keys)))
        return 0
    file, arguments = read_configuration(args)
    cfg = load_config(args.overrides, file)
    if args.cfg:
        print(to_yaml(cfg), end="")
        return 0
    for name in ("fastapi", "uvicorn", "google.protobuf", "zstandard"):
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            raise ConfigError(
                f"needs {name}", place="serve", remedy="run pip install 'megatron_vlm[serve]'"
            )
    check_dry_run_arguments(args)
    check_serve(cfg)
    check_engine(cfg, "serve")
    check_run(cfg, args.gpus)
    if args.dry_run:
        from megatron_vlm.commands.dry_run.serve_dry_run import serve_dry_run

        return serve_dry_run(cfg, args.gpus, args.memory)
    cfg = with_model(cfg)
    return launch(cfg, "megatron_vlm.serve", run_serve, with_commit(arguments, cfg))
