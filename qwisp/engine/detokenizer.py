"""Text of a growing list of tokens, piece by piece. Knows bytes and UTF-8, but no vocabulary.

A byte-level BPE vocabulary (every family that qwisp runs has one) decodes token by token: each
token stands for bytes of its own, whatever its neighbours are. Other decoders (SentencePiece byte
fallback, WordPiece, strips at either end) may change earlier text when a token is added, without
any bound on how far back; for them the one rule that is right for all is to wait for the end.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Turns the tokens of one request into text: what `add` and `finish` return, joined."""

    def add(self, token_id: int) -> str:
        """The text that became certain with this token; later tokens cannot change it."""

    def finish(self) -> str:
        """The rest, when no more tokens come."""


class ByteLevelDetokenizer:
    """For byte-level vocabularies: holds back at most an unfinished UTF-8 sequence of 1 to 3 bytes.

    The work of `add` depends on the bytes of its token alone. A sequence that is or becomes invalid
    is replaced by U+FFFD with its fourth byte at the latest, so it never stalls what follows.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        # Python replaces invalid UTF-8 as Rust's from_utf8_lossy does: one U+FFFD for each maximal
        # subpart.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        """The text that became certain with this token."""
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """U+FFFD if the tokens end inside a UTF-8 sequence, else nothing."""
        return self._decoder.decode(b"", final=True)


class WholeTextDetokenizer:
    """For any other decoder: gives no text before the end, and then all of it at once."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._token_ids: list[int] = []

    def add(self, token_id: int) -> str:
        """Nothing yet."""
        self._token_ids.append(token_id)
        return ""

    def finish(self) -> str:
        """The text of all tokens."""
        return self._decode(self._token_ids)


def byte_level_bytes(token: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary stands for.

    A token with any character outside the byte alphabet, such as an added token with a space,
    stands for its own UTF-8. This is the rule of the tokenizers library, token by token.
    """
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    # Printable Latin-1 stands for itself; the other bytes, in order, for U+0100 and on.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + idx): byte for idx, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()
