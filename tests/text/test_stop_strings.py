"""Stop strings: any cut of the text gives what a search of the whole text gives."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from twostep.text.stop_strings import StopStrings

Result = tuple[str, str | None]

letters = st.text("ab<", max_size=30)
stop_lists = st.lists(st.text("ab<", min_size=1, max_size=5), max_size=4)


def expected(text: str, stops: list[str], begin: int = 0) -> Result:
    """The stop string that is complete first behind `begin`, the longest of those: by str.endswith of every prefix."""
    for end in range(begin + 1, len(text) + 1):
        complete = [(end - len(stop), stop) for stop in stops if text[:end].endswith(stop)]
        if complete:
            start, stop = min(complete)
            return text[:start], stop
    return text, None


def stream(pieces: list[str], stops: list[str]) -> Result:
    watch = StopStrings(stops)
    sent, given_text = "", ""
    for piece in pieces:
        was_matched = watch.matched is not None
        text = watch.push(piece)
        if not was_matched:
            given_text += piece
        sent += text
        held = given_text[len(sent) :]
        if watch.matched is None:
            # What is held back may begin a stop string, and nothing longer may.
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
            longer = (given_text[-n:] for n in range(len(held) + 1, len(given_text) + 1))
            assert not any(stop.startswith(end) for end in longer for stop in stops)
    return sent + watch.finish(), watch.matched


@settings(max_examples=200)
@given(st.lists(letters, max_size=8), stop_lists)
def test_any_cut(pieces: list[str], stops: list[str]) -> None:
    assert stream(pieces, stops) == expected("".join(pieces), stops)


@settings(max_examples=200)
@given(st.lists(letters, max_size=4), st.lists(letters, max_size=4), stop_lists)
def test_what_is_complete_too_early_is_text(early: list[str], late: list[str], stops: list[str]) -> None:
    watch = StopStrings(stops)
    sent = "".join(watch.push(piece, may_end=False) for piece in early)
    sent += "".join(watch.push(piece) for piece in late)
    assert (sent + watch.finish(), watch.matched) == expected("".join(early + late), stops, len("".join(early)))
