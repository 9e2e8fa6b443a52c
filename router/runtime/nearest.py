"""The known word that a mistyped one resembles most, for the error about it."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is nearest to this one, in any case of its letters; None if none is near."""
    spellings = {each.lower(): each for each in known}
    close = get_close_matches(word.lower(), spellings, n=1)
    return spellings[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for the known word nearest to this one, or an empty text if none is near."""
    meant = nearest(word, known)
    return f"; did you mean {meant}?" if meant else ""


def unknown(kind: str, name: str, known: Collection[str]) -> str:
    """Return an error about the unknown name of a `kind` of thing, with the nearest known name and then all of them."""
    return f"unknown {kind} {name!r}{did_you_mean(name, known)} (known: {', '.join(known) or 'none'})"


def refuse_unknown_keys(given: object, known: Iterable[str]) -> None:
    """Raise ValueError for the first key of a mapping that is not known; anything but a mapping passes."""
    names = set(known)
    for key in given if isinstance(given, dict) else ():
        if key not in names:
            raise ValueError(f"unknown key {key}{did_you_mean(str(key), names)}")
