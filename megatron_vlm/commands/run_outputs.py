"""The commands `export`, `push` and `report`, which read what a run has written."""

import argparse
from pathlib import Path

from megatron_vlm.io.printable import escape_controls


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint and the folder."""
    where = "RUN/checkpoints/step-..., or RUN for its newest"
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=where)
    out = "folder to write; must not exist or be empty"
    parser.add_argument("out", metavar="DIR", help=out)
    moved = "the folder or name on the Hub that was trained, if it has moved since"
    parser.add_argument("--model", metavar="PATH", help=moved)
    forms = (
        "of a run with adapters: PEFT's files, or the model that they are merged into; of any run: "
        "the model in FP8, for vLLM, or as GGUF files, for llama.cpp"
    )
    choices = ["adapter", "merged", "fp8", "gguf"]
    parser.add_argument("--as", dest="kind", choices=choices, help=forms)


def export(args: argparse.Namespace) -> None:
    """write a checkpoint of a run as a Hugging Face folder

    Write a folder that transformers loads, from a checkpoint of a run: its weights, and every other
    file of the folder that was trained. This needs no GPU, and memory for one file of weights.

    example: megatron-vlm export runs/first/checkpoints/step-00001000 tuned

    Training does this itself at its end, to run=/export.
    """
    from megatron_vlm.checkpoint.export_checkpoint import export_checkpoint
    from megatron_vlm.hf.fp8_folder import to_fp8
    from megatron_vlm.hf.gguf_folder import gguf_change

    kind, change = args.kind, None
    if kind in ("fp8", "gguf"):
        kind, change = None, to_fp8 if kind == "fp8" else gguf_change()
    folder = export_checkpoint(args.checkpoint, args.out, args.model, kind, change)
    print(escape_controls(f"wrote {args.out} from {folder}"))


def add_push_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the folder and the repository."""
    folder = "an export of a run, such as RUN/export"
    parser.add_argument("folder", type=Path, metavar="DIR", help=folder)
    parser.add_argument("repo", metavar="ORG/NAME", help="the model on the Hub; private if new")


def push_(args: argparse.Namespace) -> None:
    """upload an export to the Hugging Face Hub

    Upload an export, with its model card, as one commit. A new repository is private. An existing
    one stays as it is, and its weights are replaced. The token comes from HF_TOKEN or `hf auth
    login`.

    example: megatron-vlm push runs/first/export ORG/NAME

    Training does this itself at its end with checkpoint.push=ORG/NAME.
    """
    from megatron_vlm.hf.hub_upload import check_push, check_pushable, push

    check_pushable(args.folder)
    check_push(args.repo, "repo")
    print(escape_controls(f"uploaded to {push(args.folder, args.repo)}"))


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the runs and the page."""
    folder = "a folder given to training as run="
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=folder)
    page = (
        "the page to write (default: RUN/report.html for one run, and comparison.html in the "
        "folder of the first for several)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help=page)


def report(args: argparse.Namespace) -> None:
    """write the page of a run, or of several to compare them

    Write curves, scores, example answers, history and configuration of a run, also of one that is
    still training, as one file that needs no network. Several runs share one page: their curves
    together, a table of results, and the keys in which they differ. Training writes the page of its
    run at its end.

    example: megatron-vlm report runs/first runs/second --out comparison.html
    """
    from megatron_vlm.report.run import write_report

    print(escape_controls(f"wrote {write_report(*args.runs, out=args.out)}"))
