"""Models of the Hugging Face Hub by name: ORG/NAME, or ORG/NAME@REVISION.

The files come through huggingface_hub into its cache; HF_TOKEN, HF_HOME, HF_HUB_OFFLINE and
HF_ENDPOINT keep their meaning. A name with a commit as its revision is pinned: its files
never change, and once they are in the cache nothing connects to the Hub again.
"""

import errno
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vlm.errors import ConfigError
from megatron_vlm.io.untrusted import home_path

_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Files of the folder itself are downloaded, but no pickles: a pickle may run any program.
_SETTINGS = ["*.json", "*.txt", "*.jinja", "README*", "LICEN[CS]E*", "NOTICE*"]
_WEIGHTS = ["model*.safetensors"]
_BELOW = ["*/*"]
_TOKEN = "give a token of an account that may read it, as HF_TOKEN or with `hf auth login`"


@dataclass(frozen=True)
class HubName:
    """A model on the Hub and its revision; None is the newest one of its main branch."""

    repo: str
    revision: str | None = None

    @property
    def commit(self) -> str | None:
        """The revision if it is a commit, which never changes, or else None."""
        return self.revision if _COMMIT.fullmatch(self.revision or "") else None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def hub_name(path: str | Path) -> HubName | None:
    """Return the model that a path names on the Hub. Return None where it is, or looks like, a path
    of this machine: it exists, begins with / . or ~, or does not have exactly one slash before the
    revision."""
    match = _NAME.fullmatch(str(path))
    if match is None or os.path.lexists(path):
        return None
    return HubName(match[1], match[2])


def is_repo(text: str) -> bool:
    """Return whether the text is ORG/NAME."""
    match = _NAME.fullmatch(text)
    return match is not None and match[2] is None


def check_not_a_run(path: str) -> None:
    """Refuse a folder that is not there, beside runs that are: it looks like a name on the Hub."""
    beside = [file.parent for file in Path(path).parent.glob("*/metrics.jsonl")]
    if hub_name(path) is not None and beside:
        raise ConfigError(
            "does not exist", place=path, remedy=f"give a run that does, such as {min(beside)}"
        )


def beside_run(path: str, run: Path, inside: str = "config.json") -> str:
    """Return a relative path as it is found from here: `run` names it relative to the folder where
    its job was started, which is most often one above the run. `inside`: a file that a folder at
    this path must have."""
    if Path(path).is_absolute() or Path(path).exists():
        return path
    above = (folder / path for folder in run.resolve().parents)
    return next((str(each) for each in above if (each / inside).exists()), path)


def pin(path: str, weights: bool = False) -> str:
    """Return the path, to which a name on the Hub gets its commit. The model's settings are in the
    cache afterwards, and its weights, too, if `weights` is true."""
    if (name := hub_name(path)) is None:
        return path
    return f"{name.repo}@{_download(name, weights).name}"


def folder_of(path: str | Path, weights: bool = False) -> Path:
    """Return the folder of a checkpoint: the path itself, or for a name on the Hub its folder in
    the cache. Missing files are downloaded."""
    if (name := hub_name(path)) is None:
        return home_path(path)
    return _download(name, weights)


def _download(name: HubName, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    which: dict[str, Any] = {
        "repo_id": name.repo,
        "revision": name.revision,
        "allow_patterns": _SETTINGS + _WEIGHTS * weights,
        "ignore_patterns": _BELOW,
    }
    try:  # one rank of a machine downloads each file, and locks the cache meanwhile
        return Path(snapshot_download(**which, tqdm_class=_bar(name, weights)))
    except Exception as error:  # from httpx, huggingface_hub or the file system
        if name.commit:  # the cache may have it without a list of its files
            with suppress(Exception):
                return Path(snapshot_download(**which, local_files_only=True))
        problem, remedy = _reason(name, error)
        raise ConfigError(problem, key="model.path", found=str(name), remedy=remedy) from error


def _bar(name: HubName, weights: bool) -> Any:
    """Return the class of progress bars, which are shown on the terminal of rank 0. Where there is
    no terminal, one line explains the delay."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import tqdm

    first = os.environ.get("RANK", "0") == "0"
    if first and sys.stderr.isatty():
        return tqdm
    cached = try_to_load_from_cache(name.repo, "config.json", revision=name.revision)
    there = isinstance(cached, str) and (not weights or any(Path(cached).parent.glob("*.safe*")))
    if first and not there:
        print(f"megatron-vlm: getting {name} from the Hub", file=sys.stderr, flush=True)

    class Hidden(tqdm):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **{**options, "disable": True})

    return Hidden


def _reason(name: HubName, error: Exception) -> tuple[str, str]:
    """Return the problem, and the remedy."""
    import httpx
    from huggingface_hub import constants, errors

    message = " ".join(str(error).split())
    here = f": there is no folder {str(name)!r} here, and "
    if isinstance(error, errors.GatedRepoError):
        return (
            f": the Hub asks for consent before it gives {name.repo}",
            f"agree on its page, and {_TOKEN}",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{here}the Hub shows no model of this name",
            f"check both spellings; if it is private, {_TOKEN}",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f": {name.repo} has no revision {name.revision!r} on the Hub",
            "give a branch, a tag or a whole commit after the @",
        )
    if constants.HF_HUB_OFFLINE:
        return (
            f"{here}the Hub is not used because HF_HUB_OFFLINE is set, and not all files of the "
            f"model are in the cache {constants.HF_HUB_CACHE}",
            f"unset it, or run `hf download {name.repo}` where there is a network",
        )
    if isinstance(error, errors.HfHubHTTPError):
        status = f"{error.response.status_code} {error.response.reason_phrase}"
        later = f"try again later, or download it: hf download {name.repo}"
        return f": the Hub answers {status}", later
    if isinstance(error, httpx.HTTPError | errors.LocalEntryNotFoundError | ConnectionError):
        return (
            f"{here}the Hub at {constants.ENDPOINT} cannot be reached ({message})",
            "check the network, proxies and HF_ENDPOINT, or give a folder",
        )
    if isinstance(error, OSError) and error.errno in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EACCES,
        errno.EROFS,
    ):
        return (
            f": the cache {constants.HF_HUB_CACHE} cannot be written: {error.strerror}",
            "free space there, or set HF_HOME to another folder",
        )
    return f"cannot be downloaded: {type(error).__name__}: {message}", ""
