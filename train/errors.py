"""Errors that end a run after it began, in a module that costs nothing to import."""


class SaveError(RuntimeError):
    """The last checkpoint of a run could not be written; the message names the reason and what is left."""


class DataError(ValueError):
    """The data of a run can no longer be read; the message names the file and the reason."""


class TryAgainError(RuntimeError):
    """What stands in the way may pass: a process that is late, a store that cannot be read. The same command helps."""


class RunDirError(ValueError):
    """The run directory is not one that this run can write into."""
