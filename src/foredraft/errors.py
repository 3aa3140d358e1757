"""Every exception that Foredraft raises on purpose."""


class ForedraftError(Exception):
    """Base of all Foredraft errors: `except ForedraftError` catches whatever the library raises on purpose."""


class ConfigError(ForedraftError, ValueError):
    """An engine setting is out of range or contradicts another; the message names the field and the rule."""


class ModelLoadError(ForedraftError):
    """A checkpoint cannot be found, read or understood; the message says which file and what to do."""


class RequestError(ForedraftError, ValueError):
    """A request cannot be served as asked; the message names the field and the rule. Other requests are unharmed."""


class HandoverError(ForedraftError):
    """A request cannot be handed over: its bytes are damaged or do not come, or it was begun with another model."""


class EngineBusyError(ForedraftError):
    """So many requests wait already that one more is not taken: ask again later."""


class EngineUnavailableError(ForedraftError):
    """The engine takes no requests, or has given up this one: it loads, shuts down or has failed."""


def shown(value: object) -> str:
    """A value as a message names it: short, and without failing, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # an integer of too many digits, or a repr that is broken
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def described(error: BaseException) -> str:
    """Somebody else's error for a message: its kind and its text, short, even if it cannot say what it is."""
    try:
        text = str(error)
    except Exception:
        text = "(it has no text)"
    return f"{type(error).__name__}: {text}"[:500]
