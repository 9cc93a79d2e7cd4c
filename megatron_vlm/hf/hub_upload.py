"""Upload of an export to the Hugging Face Hub in one commit, to a repository that is private if
new."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_vlm.distributed.process import MISTAKE
from megatron_vlm.errors import ConfigError, MegatronVLMError
from megatron_vlm.hf.export_mark import ExportMark, read_export_mark
from megatron_vlm.io.hub import is_repo

_STALE = ["*.safetensors", "model.safetensors.index.json"]  # from another number of shards
_WRITER = "give one that may write, as HF_TOKEN or with `hf auth login`"


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
