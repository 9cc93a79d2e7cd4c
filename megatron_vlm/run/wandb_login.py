"""The login of Weights & Biases."""

from megatron_vlm.errors import ConfigError


def wandb_mode() -> str:
    """Return how W&B will log: online, offline or disabled. Raise a ConfigError if it would
    need a login that it does not have. This asks W&B's own functions, and no server."""
    from pydantic import ValidationError
    from wandb.errors import AuthenticationError
    from wandb.sdk import wandb_setup

    try:
        settings = wandb_setup.singleton().settings
    except ValidationError as error:  # a WANDB_ variable or its settings file is wrong
        faults = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(
            f": wandb cannot read its settings: {'; '.join(faults)}",
            key="log.trackers",
            found="wandb",
            remedy="correct the WANDB_ variables, such as WANDB_MODE, or wandb's settings file",
        ) from error
    for name, modes in {"offline": ("offline", "dryrun"), "disabled": ("disabled",)}.items():
        if settings.mode in modes:
            return name
    try:
        from wandb.sdk.lib.wbauth import authenticate_session

        found = authenticate_session(
            host=settings.base_url, source="log.trackers", prompt=False, update_session=False
        )
    except (ImportError, TypeError):  # The version has no such function: its `init` decides.
        return "online"
    except AuthenticationError as error:
        raise _no_login(str(error).rstrip(".")) from error
    if found is None:
        raise _no_login(f"there is no login for {settings.base_url}")
    return "online"


def _no_login(reason: str) -> ConfigError:
    return ConfigError(
        f": {reason}",
        key="log.trackers",
        found="wandb",
        remedy="run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline to log into RUN "
        "and send it later with `wandb sync`",
    )
