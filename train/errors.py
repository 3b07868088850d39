"""Errors that end a run after it began, in a module that costs nothing to import."""


class SaveError(RuntimeError):
    """The last checkpoint of a run could not be written; the message names the reason and what is left."""


class DataError(ValueError):
    """The data of a run can no longer be read; the message names the file and the reason."""
