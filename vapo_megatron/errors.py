"""Errors that a user can cause, told apart from bugs: they end the program with one line and exit code 2."""


class UserError(ValueError):
    """Something that a user can put right. The message names what, its value, the rule and the remedy."""


class ConfigError(UserError):
    """A configuration field, file or combination of fields that cannot work."""


class DataError(UserError):
    """A prompt file that cannot be read: the message names the file, the line or row, and the remedy."""


class CheckpointError(UserError):
    """A checkpoint or HF directory that cannot be loaded: the message names the tensor or file."""
