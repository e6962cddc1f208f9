"""Finds stop strings in text that arrives piece by piece. Knows no tokens."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from qwisp.errors import RequestError


@dataclass(frozen=True, slots=True)
class StopText:
    """What may be shown after a piece of text came."""

    text: str
    """Text that belongs to no stop string, whatever comes next."""
    is_stopped: bool
    """A stop string is complete; `text` ends before it and nothing follows."""


class StopMatcher:
    """Watches the text of one request for stop strings, across the borders of its pieces.

    The stop string that is complete first wins; of those that end with the same character, the
    longest. How the text is cut into pieces never changes the result. The search takes a number of
    steps proportional to the text; what is held back is shorter than the longest stop string.

    Raises:
        RequestError: `stops` is not a sequence of strings, or one of them is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._automaton = _Automaton(_checked(stops))
        self._state = 0
        self._held = ""
        self._is_stopped = False

    def add(self, text: str) -> StopText:
        """Take the next piece of text and give what is safe to show. After a stop, nothing is."""
        if self._is_stopped:
            return StopText("", is_stopped=True)
        pending = self._held + text
        for num_seen, character in enumerate(text, start=len(self._held) + 1):
            self._state = self._automaton.step(self._state, character)
            match_length = self._automaton.match_length[self._state]
            if match_length > 0:
                self._is_stopped = True
                self._held = ""
                return StopText(pending[: num_seen - match_length], is_stopped=True)
        num_safe = len(pending) - self._automaton.depth[self._state]
        self._held = pending[num_safe:]
        return StopText(pending[:num_safe], is_stopped=False)

    def finish(self) -> str:
        """The text held back, when no more comes: the start of a stop string that never ended."""
        held, self._held, self._state = self._held, "", 0
        return held


class _Automaton:
    """Aho and Corasick's: a state is the longest end of the text that begins some stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._shorter = [0]
        """Of each state, the next shorter end of the text that begins some stop string."""
        self.depth = [0]
        """Of each state, how many characters it has matched."""
        self.match_length = [0]
        """Of each state, the length of the longest stop string that ends here, or 0."""
        for stop in stops:
            self._insert(stop)
        self._link()

    def step(self, state: int, character: str) -> int:
        # Each turn of the loop makes the state shorter and each call makes it at most one longer,
        # so the turns of all calls together are no more than the characters.
        while state and character not in self._children[state]:
            state = self._shorter[state]
        return self._children[state].get(character, 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            child = self._children[state].get(character)
            if child is None:
                child = len(self.depth)
                self._children[state][character] = child
                self._children.append({})
                self._shorter.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match_length.append(0)
            state = child
        self.match_length[state] = len(stop)

    def _link(self) -> None:
        # Breadth first: a state's shorter end is complete before the state is reached.
        waiting = deque(self._children[0].values())
        while waiting:
            state = waiting.popleft()
            if not self.match_length[state]:
                self.match_length[state] = self.match_length[self._shorter[state]]
            for character, child in self._children[state].items():
                self._shorter[child] = self.step(self._shorter[state], character)
                waiting.append(child)


def _checked(stops: Sequence[str]) -> tuple[str, ...]:
    if isinstance(stops, str) or not isinstance(stops, Sequence):
        raise RequestError(
            f"stop={stops!r} is not a sequence of strings; for one, use ({stops!r},)"
        )
    for position, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise RequestError(
                f"stop[{position}]={stop!r} is {type(stop).__name__}; a stop string must be str"
            )
        if not stop:
            raise RequestError(
                f"stop[{position}] is empty and would stop before the first token; remove it"
            )
    return tuple(stops)
