"""The errors a user can cause, and can mend: each says what is wrong, where, and what to do."""


class TwofoldError(Exception):
    """The base of all errors that are meant to be read by a user."""


class SettingsError(TwofoldError):
    """`params.yaml` has an unknown key or a wrong value."""


class RecordError(TwofoldError):
    """A record file is torn, or was written by a newer version."""


class ModelError(TwofoldError):
    """The base model cannot be fetched, or is not what it should be."""


class ServerError(TwofoldError, ConnectionError):
    """No server that samples answers; it may later."""


class PipelineError(TwofoldError):
    """A pipeline's file is missing or does not give what it must."""


class ExportError(TwofoldError):
    """A strategy's result cannot be exported."""


class ChampionError(TwofoldError):
    """There is no champion, or not the files of one."""


class RetrainError(TwofoldError):
    """A retraining cannot begin, or a command of it failed."""
