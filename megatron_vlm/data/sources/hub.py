"""Data sets by name or folder, as `datasets` loads them.

The README.md of a data set may say which files it consists of. It is data like the rest: it names
no file outside its folder, and no address.
"""

import os
import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from megatron_vlm.config.data_sources import HUB, SourceSpec
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.io.untrusted import Outside

_README = re.compile(r"\s*---[^\n]*\n(.*?)\n---", re.DOTALL)  # its YAML stands first


def load_by_name(spec: SourceSpec, streaming: bool = False) -> Any:
    """A split of a data set on the Hub, or in a folder of files."""
    import datasets

    name = spec.path.removeprefix(HUB)
    folder = name == spec.path and os.path.isdir(name)
    if folder:
        _refuse_addresses(Path(name))
    elif os.path.isdir(name):  # a folder of this name is not what is meant
        name = f"hf://datasets/{name}"
    which = {"path": name, "name": spec.subset, "revision": spec.revision}
    try:
        builder = datasets.load_dataset_builder(**which)
        _refuse_outside(builder.config.data_files or {}, name, folder)
        # It resolves the same files once more.
        return datasets.load_dataset(**which, split=spec.split, streaming=streaming)
    except DataError:
        raise
    except Exception as error:  # connection, missing data set, missing split, bad files
        verb = "stream" if streaming else "load"
        raise ConfigError(
            f"is not a file here, and `datasets` cannot {verb} it: {root_cause(error)}",
            place=spec.path,
        ) from error


def root_cause(error: BaseException) -> str:
    """The first line of the error that led to this one."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error) or type(error).__name__).splitlines()[0]


def _refuse_addresses(folder: Path) -> None:
    """Refuse them before `datasets` asks them whether the files are there."""
    for path in (folder / "README.md", folder / ".huggingface.yaml"):
        file = Outside(str(path), remedy="mend it")
        text = file.content().decode(errors="replace") if os.path.lexists(path) else ""
        head = _README.match(text) if path.suffix == ".md" else None
        with file.border("its YAML cannot be read"):
            said = yaml.safe_load(head[1] if head else "" if path.suffix == ".md" else text)
        configs = said.get("configs") if isinstance(said, dict) else None
        if found := re.search(r"[\w+.]+://[^'\"\s]*|::", str(configs or "")):
            raise DataError(
                f"names {found[0]} as a data file",
                place=str(path),
                remedy="download it into the folder and name it there",
            )


def _refuse_outside(files: Any, name: str, folder: bool) -> None:
    """Refuse files outside the folder; for a data set on the Hub, all files of this machine."""
    root = os.path.abspath(os.path.expanduser(name))
    for path in (str(path) for paths in files.values() for path in paths):
        inside = os.path.normpath(path).startswith(os.path.join(root, "")) if folder else False
        if not inside and (folder or "://" not in path):
            raise DataError(
                f": the README.md names {path} as a data file, which lies outside the folder",
                place=name,
                remedy="move the file into the folder, or give its path as data.train",
            )
