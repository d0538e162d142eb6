"""Errors that are the user's to mend: one line that names the fault and the remedy."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in the input. The command line prints it as one line and exits with code 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which known name was probably meant: `; did you mean 'oelm_v2'?`."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; choose from: {', '.join(options)}"


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """An error for a name that is not in a fixed list, naming the nearest that is."""
    return UserError(f"unknown {kind} '{name}'{nearest(name, known)}")
