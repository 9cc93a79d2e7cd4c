"""The errors a user can cause. Each message names the field, the numbers and the remedy."""

import errno
import os


class MegatronVLMError(ValueError):
    """Base of the family: catch this to catch everything that a user can put right."""


class ConfigError(MegatronVLMError):
    """A configuration that cannot work, found before any weight is read."""


class DataError(MegatronVLMError):
    """A row or a batch that the model cannot take; names the row."""


class LostError(DataError):
    """A process that read data is gone, such as one that was killed for its memory: starting again
    may help."""


class CheckpointError(MegatronVLMError):
    """A checkpoint whose tensors are not the ones this model needs; lists them."""


class TrainError(MegatronVLMError):
    """A run that cannot continue; says at which step and why."""


# What a disk or its owner refuses, wherever it meets us: no mistake of ours.
_REFUSALS = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there, or have the quota raised",
    errno.EFBIG: "allow larger files there",
    errno.EROFS: "give a folder that can be written to",
    errno.EACCES: "change its permissions, or give another folder",
    errno.EPERM: "change its permissions, or give another folder",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.ELOOP: "it is one of links in a circle: remove them",
    errno.EIO: "the disk or the network that it is on has failed",
    errno.ESTALE: "the server of this folder has replaced or removed it",
}


def sentence(error: Exception) -> str | None:
    """What a user is told in place of a traceback; None for what is no user's to put right."""
    if isinstance(error, MegatronVLMError):
        return str(error)
    if isinstance(error, OSError) and (remedy := _REFUSALS.get(error.errno or 0)) is not None:
        file = "a file" if error.filename is None else os.fsdecode(error.filename)
        return f"{file} cannot be used: {os.strerror(error.errno or 0)}; {remedy}, and start again"
    return None
