"""`megatron-vlm chat DIR`: its arguments, checked before the model is loaded, without torch."""

import argparse
from pathlib import Path
from typing import get_args

from megatron_vlm.commands.chat.chat_settings import Settings, parse_template_kwargs
from megatron_vlm.config.schema import PlatformName
from megatron_vlm.distributed.process import is_under_launcher
from megatron_vlm.errors import ConfigError
from megatron_vlm.io.hub import check_not_a_run
from megatron_vlm.io.untrusted import home_path, require_file
from megatron_vlm.training.preflight import check_model

_CONFIGS = ("config.json", "adapter_config.json")


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "where", metavar="DIR", help="a Hugging Face folder or an adapter; or a run: its export"
    )
    picture = "shown with the first question; may be given several times"
    parser.add_argument("--image", action="append", default=[], metavar="PATH", help=picture)
    parser.add_argument("--video", action="append", default=[], metavar="PATH", help=picture)
    one = "answer this one question and end; nothing but the answer goes to stdout"
    parser.add_argument("--prompt", metavar="TEXT", help=one)
    max_tokens = "of an answer (default: 512)"
    parser.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help=max_tokens)
    heat = "above 0, tokens are sampled (default: 0, the likeliest each time)"
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help=heat)
    seed = "of sampled answers (default: 0)"
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=seed)
    variable = "variable of the chat template (enable_thinking=false); may be given several times"
    parser.add_argument(
        "--template-kwargs", action="append", default=[], metavar="NAME=VALUE", help=variable
    )
    where = "where to compute (default: auto, a GPU if there is one)"
    parser.add_argument("--platform", choices=get_args(PlatformName), default="auto", help=where)


def chat(args: argparse.Namespace) -> int:
    """chat with a checkpoint in the terminal, with pictures

    Load an exported checkpoint, on a GPU if there is one, and answer what is typed. /image PATH and
    /video PATH show something with the next question, /reset begins again, /quit or Ctrl-D ends,
    Ctrl-C stops an answer.

    example: megatron-vlm chat runs/first --image cat.jpg --prompt "What is it?"
    """
    settings = Settings(
        args.max_new_tokens,
        args.temperature,
        args.seed,
        args.platform,
        parse_template_kwargs(args.template_kwargs),
    )
    folder, adapter = find_model(args.where)
    for path in (*args.image, *args.video):
        require_file(home_path(path))
    if is_under_launcher():
        raise ConfigError(
            "runs in one process", key="megatron-vlm chat", remedy="start it without a launcher"
        )
    from megatron_vlm.commands.chat.conversation import run_chat

    return run_chat(folder, adapter, args.image, args.video, args.prompt, settings)


def find_model(path: str) -> tuple[str, Path | None]:
    """Return the folder itself or the export of a run. If that is an adapter, return the model that
    it was trained on, and the adapter. Check both as far as is possible without torch."""
    check_not_a_run(path)
    folder = home_path(path)
    model_dir = folder
    if not any((folder / name).is_file() for name in _CONFIGS):
        if any((folder / "export" / name).is_file() for name in _CONFIGS):
            model_dir = folder / "export"
        elif (folder / "checkpoints").is_dir() or (folder / "complete.json").is_file():
            raise ConfigError(
                "has no export to chat with",
                place=path,
                remedy=f"write one: megatron-vlm export {path} DIR",
            )
    if (model_dir / "config.json").is_file() or not (model_dir / "adapter_config.json").is_file():
        check_model(str(model_dir))
        return str(model_dir), None
    from megatron_vlm.lora.peft_folder import base_of

    base = base_of(model_dir)
    check_model(base)
    return base, model_dir
