"""Every exception that Foredraft raises on purpose."""


class ForedraftError(Exception):
    """Base of all Foredraft errors: `except ForedraftError` catches whatever the library raises on purpose."""


class ConfigError(ForedraftError, ValueError):
    """An engine setting is out of range or contradicts another; the message names the field and the rule."""


class ModelLoadError(ForedraftError):
    """A checkpoint cannot be found, read or understood; the message says which file and what to do."""


class RequestError(ForedraftError, ValueError):
    """A request cannot be served as asked; the message names the field and the rule. Other requests are unharmed."""
