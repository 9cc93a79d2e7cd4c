"""Folder of an export: its mark, with its origin and the sizes and digests of its files, and its
upload to the Hugging Face Hub in one commit, to a repository that is private if new."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

from megatron_vlm.distributed.process import MISTAKE
from megatron_vlm.errors import CheckpointError, ConfigError, MegatronVLMError
from megatron_vlm.io.atomic import MARK, digest_of, read_mark, write_mark, write_text
from megatron_vlm.io.hub import is_repo

CARD = "README.md"  # the model card
_THREADS = 8
_STALE = ["*.safetensors", "model.safetensors.index.json"]  # from another number of shards
_WRITER = "give one that may write, as HF_TOKEN or with `hf auth login`"


@dataclass(frozen=True)
class ExportMark:
    """Origin of the weights of an export."""

    run: str | None  # id of the run
    step: int
    checkpoint: str  # id of the checkpoint, see checkpoint/manifest.py
    # The digest of the weights that an adapter was trained with.
    base: str | None = field(default=None, compare=False)
    base_type: str | None = field(default=None, compare=False)  # lora.base of that training


def finish_mark(folder: Path, mark: ExportMark | None) -> None:
    """Mark a folder whose files are written. Without `mark` only the export remains in it."""
    if mark is None:
        (folder / MARK).unlink()
        return
    content = _content(folder)
    with ThreadPoolExecutor(_THREADS) as threads:  # the new files are cached in memory
        digests = list(threads.map(digest_of, content.values()))
    facts: dict[str, Any] = {"step": mark.step, "checkpoint": mark.checkpoint}
    bases = {"base": mark.base, "base_type": mark.base_type}
    facts |= {key: value for key, value in bases.items() if value is not None}
    facts["files"] = {name: path.stat().st_size for name, path in content.items()}
    facts["digests"] = dict(zip(content, digests, strict=True))
    write_mark(folder, mark.run, **facts)


def read_export_mark(folder: Path) -> ExportMark | None:
    """Return the mark, or None if no run exported this folder or the export has lost a file."""
    mark = read_mark(folder)
    try:
        if mark is None or any(not (folder / name).is_file() for name in mark["files"]):
            return None
        bases = mark.get("base"), mark.get("base_type")
        return ExportMark(mark["run"], mark["step"], mark["checkpoint"], *bases)
    except (KeyError, TypeError):
        return None


def changed_file(folder: Path, since_ns: int = 0) -> str | None:
    """Return the first file that is not as it was written, of those changed since `since_ns`."""
    mark = read_mark(folder) or {}
    sizes, digests = mark.get("files", {}), mark.get("digests", {})

    def is_changed(name: str) -> bool:
        path = content[name]
        if path.is_dir() or path.is_symlink() or path.stat().st_size != sizes.get(name):
            return True
        return path.stat().st_ctime_ns >= since_ns and digest_of(path) != digests.get(name)

    content = _content(folder)
    with ThreadPoolExecutor(_THREADS) as threads:
        return next(compress(content, threads.map(is_changed, content)), None)


def add_to_card(folder: Path, title: str, text: str) -> None:
    """Add a section to the model card of a marked export, in place of a former one. The export
    stays as its run wrote it, so that a later one may replace it. A card that someone has changed
    is left alone."""
    card, mark = folder / CARD, read_mark(folder)
    if mark is None or CARD not in mark.get("digests", {}) or not card.is_file():
        return
    if digest_of(card) != mark["digests"][CARD]:
        return
    begin, end = f"<!-- {title} -->\n", f"<!-- {title} end -->\n"
    before, _, rest = card.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    section = f"{begin}\n## {title}\n\n{text}\n{end}"
    write_text(card, f"{before.rstrip()}\n\n{section}{after}")
    mark["files"][CARD], mark["digests"][CARD] = card.stat().st_size, digest_of(card)
    facts = {key: value for key, value in mark.items() if key != "run"}
    write_mark(folder, mark["run"], **facts)


def check_replaceable(folder: Path, run: str | None) -> None:
    """Refuse to export into a folder that holds anything but an earlier export of this run. The
    mark was written last, so files that have not been touched since are unchanged and are not read
    again."""
    if not os.path.lexists(folder):
        return
    place = str(folder)
    if not folder.exists():
        raise CheckpointError("is a link that leads nowhere", place=place, remedy="remove it")
    if not folder.is_dir():
        raise CheckpointError("is a file", place=place, remedy="choose a new folder for the export")
    if not _content(folder):
        return
    mark = read_mark(folder)
    if run is None or mark is None or mark["run"] != run:
        raise CheckpointError(
            "is not empty", place=place, remedy="choose a new folder for the export"
        )
    name = changed_file(folder, (folder / MARK).stat().st_ctime_ns)
    if name is not None:
        raise CheckpointError(
            f"would be replaced by a new export, but this run did not write {name} as it is now",
            place=place,
            remedy="move that file, or the folder, somewhere else",
        )


def is_replaceable(folder: Path, run: str | None) -> bool:
    """Return whether a folder holds nothing but an earlier export of this run."""
    try:
        check_replaceable(folder, run)
    except CheckpointError:
        return False
    return True


def _content(folder: Path) -> dict[str, Path]:
    """Return the files, however deep, and empty folders or links, by their names in the folder."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path != folder / MARK
        and (path.is_symlink() or not path.is_dir() or not any(path.iterdir()))
    }


def check_push(repo: str, key: str = "checkpoint.push") -> None:
    """Refuse a name, which the user gave as `key`, or a token with which an upload would fail."""
    if not is_repo(repo):
        raise ConfigError(
            "is not the name of a model on the Hub", key=key, found=repo, allowed="ORG/NAME"
        )
    who = _ask_hub(repo, key, lambda api: api.whoami())
    token = (who.get("auth") or {}).get("accessToken") or {}
    scopes = str((token.get("fineGrained") or {}).get("scoped"))
    role = token.get("role")
    if role == "read" or (role == "fineGrained" and "repo.write" not in scopes):
        name = token.get("displayName")
        raise ConfigError(
            f"cannot be written: the token {name!r} may only read",
            key=key,
            found=repo,
            remedy=_WRITER,
        )
    owners = [str(account.get("name")) for account in (who, *who.get("orgs", ()))]
    owner = repo.partition("/")[0]
    if owner not in owners:
        raise ConfigError(
            f"cannot be written: the token belongs to {owners[0]}, and {owner} is not among "
            f"{', '.join(owners)}",
            key=key,
            found=repo,
            remedy="give another name or another token",
        )


def check_pushable(folder: Path) -> ExportMark:
    """Return the mark of an export; refuse a folder that is not a whole one."""
    mark = read_export_mark(folder)
    if mark is None:
        raise ConfigError(
            "the folder is not the whole export of a run",
            place=str(folder),
            remedy="write one with megatron-vlm export",
        )
    return mark


def push(folder: Path, repo: str) -> str:
    """Upload an export and return the address of its commit. An existing repository keeps its
    visibility and its other files."""
    mark = check_pushable(folder)

    def upload(api: Any) -> str:
        api.create_repo(repo, private=True, exist_ok=True)
        message = f"Step {mark.step}, exported by megatron_vlm"
        done = api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message=message, delete_patterns=_STALE
        )
        return str(done.commit_url)

    remedy = f"{folder} is whole: try again with {command(folder, repo)}"
    return _ask_hub(repo, "repo", upload, remedy)


class Upload:
    """Upload in a thread of its own."""

    DONE = 1

    def __init__(self, folder: Path, repo: str):
        self.folder, self.repo = folder, repo
        self.ending, self.said = 0, ""
        self.again = f"upload it with {command(folder, repo)}"
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def wait(self) -> int:
        """Wait up to a second. Return 0, then DONE or MISTAKE; `said` has the message."""
        self.thread.join(1.0)
        return self.ending

    def _run(self) -> None:
        try:
            self.said = f"uploaded to {push(self.folder, self.repo)}"
            self.ending = self.DONE
        except MegatronVLMError as error:
            self.said, self.ending = str(error), MISTAKE
        except Exception as error:  # no other code would report it
            self.said, self.ending = f"{self.folder}: {error!r}; {self.again}", MISTAKE


def command(folder: Path, repo: str) -> str:
    """Return the command with which a user uploads an export."""
    return f"megatron-vlm push {folder} {repo}"


def _ask_hub(repo: str, key: str, ask: Callable[[Any], Any], remedy: str = "") -> Any:
    """Call the Hub and return its answer; raise ConfigError if the call fails."""
    from huggingface_hub import HfApi

    try:
        return ask(HfApi())
    except Exception as error:  # errors of httpx, of huggingface_hub or of the file system
        raise ConfigError(
            f"cannot be written: {_reason(error)}", key=key, found=repo, remedy=remedy
        ) from error


def _reason(error: BaseException) -> str:
    from huggingface_hub import constants, errors

    while not isinstance(error, errors.HfHubHTTPError) and error.__cause__ is not None:
        error = error.__cause__
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set; unset it"
    message = " ".join(str(error).split())
    if isinstance(error, errors.LocalTokenNotFoundError):
        return f"there is no token of the Hub; {_WRITER}"
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return f"the Hub does not accept the token ({status}); {_WRITER}"
        return f"the Hub answers {status} {error.response.reason_phrase}: {message[:200]}"
    kind = type(error).__name__
    return f"the Hub at {constants.ENDPOINT} cannot be reached or used: {kind}: {message[:300]}"
