"""Errors that a user can cause, told apart from bugs: they end the program with exit code 2."""


class UserError(ValueError):
    """Something that a user can put right; the message names what, its value, rule and remedy."""


class ConfigError(UserError):
    """A configuration field, file or combination of fields that cannot work."""


class DataError(UserError):
    """Prompt data that cannot be used: the message names the file or text, row, and remedy."""


class CheckpointError(UserError):
    """A checkpoint or HF directory that cannot be loaded: the message names the tensor or file."""
