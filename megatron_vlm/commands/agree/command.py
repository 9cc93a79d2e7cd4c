"""`megatron-vlm agree WHERE`: the start of its ranks, before torch is imported."""

import argparse

from megatron_vlm.commands.agree.agree_settings import AgreeSettings, locate_checkpoint
from megatron_vlm.commands.eval import held_in_place
from megatron_vlm.config.arguments import read_configuration
from megatron_vlm.distributed.process import FAILED, UNLIKE
from megatron_vlm.run.saved_config import with_commit
from megatron_vlm.training.preflight import check_run


def agree(args: argparse.Namespace) -> int:
    """prove that an engine and the trainer see the same

    Send the same prompts to vLLM and to the trainer: those of data.eval or else of data.train, each
    up to its last answer. Compare the ids, the grids, the patches, and the log-probs of the tokens
    that the engine drew, in the layout of parallel.*. The exit status is 1 if they differ.

    example: megatron-vlm agree runs/first --engine .venv-vllm/bin/python parallel.tp=2
    parallel.pp=2 --html agree.html

    A run and its checkpoints bring their configuration, and the trainer gives their weights to the
    engine; the engine itself loads a Hugging Face folder.
    """
    settings = AgreeSettings.from_arguments(args)
    file, arguments = read_configuration(args)
    with held_in_place(args.where) as where:
        cfg, _ = locate_checkpoint(where, args.overrides, file)
        check_run(cfg)
        from megatron_vlm.commands.agree.agree_ranks import run_agree
        from megatron_vlm.distributed.launch.launch import launch

        words = [where, *with_commit(arguments, cfg), *settings.words]
        status = launch(cfg, "megatron_vlm.commands.agree.agree_ranks", run_agree, words)
    return FAILED if status == UNLIKE else status
