"""Checks of the command line, config.json and the names of files. They run before torch and
transformers are imported, which takes many seconds, and before processes are started.

Everything that passes here is checked again, more closely, where it is used.
"""

import glob
import os
import re
from pathlib import Path

from megatron_vlm.config.checks import processes_for
from megatron_vlm.config.objectives import reference_folder
from megatron_vlm.config.schema import Config
from megatron_vlm.config.teachers import target_folder
from megatron_vlm.data.scores.score_index import check_scores, read_complete
from megatron_vlm.data.sources.columns import read_dataset_info
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.distributed.process import is_under_launcher
from megatron_vlm.errors import ConfigError
from megatron_vlm.family.added_tokens import find_new_tokens
from megatron_vlm.family.config_json import Counts, no_config_json, read_counts
from megatron_vlm.io.untrusted import home_path, no_file_error, what_is_at
from megatron_vlm.model.constraints import check_layout, check_router_keys, check_supported

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")  # a name on the Hub


def check_run(cfg: Config, gpus: int | None = None) -> None:
    """Refuse a run or an evaluation with an impossible model, layout or data. `gpus`: the number
    that a dry run plans for."""
    check_supported(cfg)
    counts = check_model(cfg.model.path)
    # Only torch knows the number of GPUs, and only Ray's cluster knows its own.
    processes = cfg.launch.processes if cfg.launch.backend == "local" else None
    is_known = processes is not None or gpus is not None
    world = processes_for(cfg, gpus or 0) if is_known else cfg.parallel.tp * cfg.parallel.pp
    if is_under_launcher():
        world = int(os.environ["WORLD_SIZE"])
    if counts is not None:
        check_layout(counts, ParallelDims.create(cfg.parallel, world, counts.layers))
        check_router_keys(cfg, counts)
    check_new_tokens(cfg)
    check_data(cfg, "data.train")
    check_data(cfg, "data.eval")
    if (targets := target_folder(cfg)) is not None:
        check_scores(targets, cfg.teacher.top_k, cfg.distill.temperature)
    if (folder := reference_folder(cfg)) is not None:
        if not home_path(folder).is_dir():
            kinds = "auto, keep, adapters_off, model, or a folder of megatron-vlm score"
            raise ConfigError(key="preference.reference", found=folder, allowed=kinds)
        read_complete("preference.reference", folder)
    names = cfg.eval.candidates
    if isinstance(names, str) and _kind_of_path(names) == "nothing":
        raise ConfigError(
            ": there is no such file", key="eval.candidates", found=names, allowed="a text file"
        )


def check_records(cfg: Config) -> None:
    """Refuse an impossible model, or impossible records of data.train, for a command that starts no
    run."""
    check_model(cfg.model.path)
    check_new_tokens(cfg)
    check_data(cfg, "data.train")


def check_model(path: str) -> Counts | None:
    """Refuse a model.path without a config.json of a family that this version trains. Return None
    if JSON alone cannot decide."""
    if _kind_of_path(str(Path(path) / "config.json")) == "nothing":
        if _NAME.fullmatch(path) and "/" in path and _kind_of_path(path) == "nothing":
            return None
        raise no_config_json(path)
    return read_counts(path)


def check_new_tokens(cfg: Config) -> None:
    """Refuse tokens of data.add_tokens that the tokenizer of a folder already has."""
    if _kind_of_path(str(Path(cfg.model.path) / "config.json")) == "a file":
        find_new_tokens(cfg.model.path, cfg.data.add_tokens)


def check_data(cfg: Config, key: str) -> None:
    """Refuse files of data.train or data.eval, and folders of their images, that do not exist."""
    held_out = [each.source for each in cfg.data.eval]
    for spec in cfg.data.train if key == "data.train" else held_out:
        described = read_dataset_info(spec)
        path = described[0].path if described else spec.path
        name = _NAME.fullmatch(path) and not Path(path).suffix
        if (
            not name
            and not glob.has_magic(path)
            and ":" not in path
            and _kind_of_path(path) == "nothing"
        ):
            raise no_file_error(path, key)
        if (root := spec.image_root or cfg.data.image_root) and _kind_of_path(root) == "nothing":
            raise ConfigError(
                ": there is no such folder",
                key="data.image_root",
                found=root,
                remedy=f"give the one that holds the images of {path}, or leave it out if they "
                "are beside that file",
            )


def _kind_of_path(path: str) -> str:
    try:
        return what_is_at(os.path.expanduser(path))
    except (OSError, ValueError):
        return "something else"  # the code that opens it reports the error
