"""What clients are told of a call that has failed, and whose mistake it was."""

from pydantic import ValidationError

from megatron_vlm.errors import CheckpointError, ConfigError, DataError
from megatron_vlm.service.journal.values import Failure
from megatron_vlm.service.wire.values import RequestError

USERS = (RequestError, DataError, ConfigError, ValidationError)


def failure_of(error: Exception) -> Failure:
    """As the journal has it."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        return Failure(f"{where}: {first['msg']}", "user")
    user = isinstance(error, USERS) and not isinstance(error, CheckpointError)
    return Failure(str(error), "user" if user else "server")
