"""Stop strings end the text before them, however the text is cut into pieces."""

import dataclasses
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwisp.engine.stop_strings import StopMatcher, StopText
from qwisp.errors import RequestError

stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


def expected(stops: Sequence[str], text: str) -> StopText:
    """The whole text searched at once: the first end wins, of equal ends the first start."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return StopText(text[: min(found)[1]] if found else text, is_stopped=bool(found))


def held_back(stops: Sequence[str], text: str) -> str:
    """The longest end of a text that is the start of a stop string."""
    starts = {stop[:length] for stop in stops for length in range(len(stop))}
    return next(text[start:] for start in range(len(text) + 1) if text[start:] in starts | {""})


def run(stops: Sequence[str], pieces: Sequence[str]) -> StopText:
    matcher = StopMatcher(stops)
    shown, is_stopped = "", False
    for piece in pieces:
        result = matcher.add(piece)
        assert not (is_stopped and result.text), "text after a stop"
        assert not (is_stopped and not result.is_stopped), "a stop taken back"
        shown, is_stopped = shown + result.text, result.is_stopped
    return StopText(shown + matcher.finish(), is_stopped)


@given(stop_lists, st.lists(st.text("abc", max_size=6), max_size=12))
@settings(max_examples=400)
def test_the_text_in_pieces_stops_where_the_whole_text_does(stops, pieces):
    assert run(stops, pieces) == expected(stops, "".join(pieces))


@given(stop_lists, st.lists(st.text("abc", max_size=4), max_size=12))
@settings(max_examples=200)
def test_exactly_what_may_still_become_a_stop_is_held_back(stops, pieces):
    matcher = StopMatcher(stops)
    text = shown = ""
    for piece in pieces:
        result = matcher.add(piece)
        text, shown = text + piece, shown + result.text
        if result.is_stopped:
            break
        assert shown + held_back(stops, text) == text


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        (["END"], ["one E", "N", "D two"], "one "),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb"),
        (["aab"], ["aaa", "ab"], "aa"),
        (["abcd", "bc"], ["abcd"], "a"),  # complete first, though the other starts earlier
        (["b", "ab"], ["xa", "b"], "x"),  # complete together: the longer one
        (["🙂"], ["ok 🙂 no"], "ok "),
        (["a", "a"], ["ba"], "b"),
    ],
)
def test_text_before_the_stop_is_shown_and_nothing_after(stops, pieces, shown):
    assert run(stops, pieces) == StopText(shown, is_stopped=True)


def test_without_stop_strings_text_passes_at_once():
    matcher = StopMatcher(())
    assert matcher.add("abc") == StopText("abc", is_stopped=False)
    assert matcher.finish() == ""


def test_finish_releases_a_stop_string_that_never_ended():
    matcher = StopMatcher(["</end>"])
    assert matcher.add("x</en") == StopText("x", is_stopped=False)
    assert matcher.finish() == "</en"
    assert matcher.finish() == ""


@pytest.mark.parametrize(
    "stops", ["END", [""], ["a", ""], [b"a"], [1], [None], None, 5, {"a"}, [["a"]]]
)
def test_bad_stop_strings_are_refused(stops):
    with pytest.raises(RequestError, match=r"^stop"):
        StopMatcher(stops)


def test_a_result_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        StopText("a", is_stopped=False).text = "b"


def lines_run(stop: str, text: str) -> int:
    """Lines of Python that the search runs for this text, a character at a time."""
    matcher = StopMatcher([stop])
    count = 0

    def trace(_frame, event, _argument):
        nonlocal count
        count += event == "line"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        for character in text:
            matcher.add(character)
    finally:
        sys.settrace(previous)
    return count


def test_the_search_is_linear_in_the_text_and_does_not_grow_with_the_stop_string():
    # Each "b" lets a long match fail, and each "a" begins as many as there are characters.
    text = ("a" * 99 + "c") * 10
    short, long = lines_run("aab", text), lines_run("a" * 98 + "b", text)
    assert lines_run("a" * 98 + "b", text * 2) <= 2 * long
    assert long <= 1.5 * short
