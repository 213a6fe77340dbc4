"""Where tables for a person are printed."""

from rich.console import Console


def console() -> Console:
    """As wide as the terminal; where there is none, such as in a log, 120 columns."""
    return Console(width=None if Console().is_terminal else 120)
