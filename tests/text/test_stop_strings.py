"""Stop strings: any cut of the text gives what a search of the whole text gives."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from twostep.text import StopResult, StopStrings

letters = st.text("ab<", max_size=30)
stop_lists = st.lists(st.text("ab<", min_size=1, max_size=5), max_size=4)


def expected(text: str, stops: list[str], begin: int = 0) -> StopResult:
    """The stop string that is complete first behind `begin`, the longest of those: by str.endswith of every prefix."""
    for end in range(begin + 1, len(text) + 1):
        complete = [(end - len(stop), stop) for stop in stops if text[:end].endswith(stop)]
        if complete:
            start, stop = min(complete)
            return StopResult(text[:start], stop)
    return StopResult(text)


def stream(pieces: list[str], stops: list[str]) -> StopResult:
    watch = StopStrings(stops)
    sent, given_text = "", ""
    for piece in pieces:
        was_matched = watch.matched is not None
        result = watch.push(piece)
        if not was_matched:
            given_text += piece
        sent += result.text
        held = given_text[len(sent) :]
        if result.matched is None:
            # What is held back may begin a stop string, and nothing longer may.
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
            longer = (given_text[-n:] for n in range(len(held) + 1, len(given_text) + 1))
            assert not any(stop.startswith(end) for end in longer for stop in stops)
    last = watch.finish()
    return StopResult(sent + last.text, last.matched)


@settings(max_examples=200)
@given(st.lists(letters, max_size=8), stop_lists)
def test_any_cut(pieces: list[str], stops: list[str]) -> None:
    assert stream(pieces, stops) == expected("".join(pieces), stops)


@settings(max_examples=200)
@given(st.lists(letters, max_size=4), st.lists(letters, max_size=4), stop_lists)
def test_what_is_complete_too_early_is_text(early: list[str], late: list[str], stops: list[str]) -> None:
    watch = StopStrings(stops)
    sent = "".join(watch.push(piece, may_end=False).text for piece in early)
    sent += "".join(watch.push(piece).text for piece in late)
    last = watch.finish()
    assert StopResult(sent + last.text, last.matched) == expected("".join(early + late), stops, len("".join(early)))
