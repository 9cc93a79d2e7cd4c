"""The errors a user can cause. Each message names the field, the numbers and the remedy."""


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
