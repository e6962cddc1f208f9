"""Prompts to token ids, and token ids to text. Knows no weights."""

from collections.abc import Mapping, Sequence
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qwisp.engine.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    WholeTextDetokenizer,
    byte_level_bytes,
)
from qwisp.engine.tokenizer_files import is_byte_level, read_eos, read_pretrained
from qwisp.errors import RequestError
from qwisp.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Tokenizer:
    """The vocabulary of a model. Safe to use from any thread: nothing changes after `load`.

    A folder without any tokenizer file gives a tokenizer without text (`has_text` is False): token
    ids still pass through `encode`, and `detokenizer` gives empty text; every other use raises
    RequestError.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        pretrained: "PreTrainedTokenizerFast | None",
    ) -> None:
        self.eos_token_ids = eos_token_ids
        """All ids that end a text: the tokenizer's, config.json's and generation_config.json's."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._pretrained = pretrained
        # The Rust tokenizer itself. transformers' own encode() sets its truncation on each call,
        # which two threads must not do at once; the methods used here only read.
        self._backend: Any = None if pretrained is None else pretrained.backend_tokenizer
        self._special_ids: frozenset[int] = frozenset()
        if self._backend is not None:
            # tokenizer.json may ask for both; a prompt is never cut or padded.
            self._backend.no_truncation()
            self._backend.no_padding()
            added = self._backend.get_added_tokens_decoder()
            self._special_ids = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def load(cls, folder: Path, spec_eos: Sequence[int], vocab_size: int) -> "Tokenizer":
        """Read the tokenizer of a folder, from local files only.

        spec_eos: the end-of-text ids of config.json. vocab_size: the rows of the model's embedding,
        which limit the ids of a prompt; the tokenizer may know fewer.

        Raises:
            CheckpointError: a tokenizer file is missing beside others, or one is bad, or
                generation_config.json is, or an end-of-text id is outside the vocabulary.
        """
        pretrained = read_pretrained(folder)
        eos_token_ids = read_eos(folder, pretrained, spec_eos, vocab_size)
        return cls(folder, vocab_size, eos_token_ids, pretrained)

    @property
    def has_text(self) -> bool:
        """Whether the folder has a tokenizer, so that prompts and stop strings may be text."""
        return self._pretrained is not None

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The token ids of a prompt.

        Text gets the special tokens that the tokenizer's configuration adds to any text; chat
        messages get what the chat template writes, up to the start of the answer.

        Raises:
            RequestError: the prompt is empty, has an id outside the vocabulary, is of no known
                form, or the folder cannot serve its form.
        """
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
            raise RequestError(
                f"the prompt is {type(prompt).__name__}; it must be str, a sequence of token ids, "
                "or a sequence of chat messages"
            )
        ids: Sequence[object]
        if isinstance(prompt, str):
            ids = self._encode_text(prompt, add_special_tokens=True) if prompt else ()
        elif prompt and isinstance(prompt[0], Mapping):
            text = self._render(cast("Sequence[Mapping[str, object]]", prompt))
            ids = self._encode_text(text, add_special_tokens=False)
        else:
            ids = prompt
        if not ids:
            raise RequestError("the prompt has no tokens; give at least one")
        return _checked_ids(ids, self._vocab_size)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special tokens and without any clean-up of spaces.

        An id that the tokenizer does not know has no text.

        Raises:
            RequestError: the folder has no tokenizer.
        """
        backend = self._require_text("token ids have no text").backend_tokenizer
        return backend.decode(list(token_ids), skip_special_tokens=True)

    def detokenizer(self) -> Detokenizer:
        """A new detokenizer, for one request; its pieces joined are `decode` of all tokens."""
        if self._backend is None:
            return ByteLevelDetokenizer(lambda _: b"")
        if is_byte_level(self._backend):
            return ByteLevelDetokenizer(self._token_bytes)
        return WholeTextDetokenizer(self.decode)

    def _token_bytes(self, token_id: int) -> bytes:
        token = None if token_id in self._special_ids else self._backend.id_to_token(token_id)
        return b"" if token is None else byte_level_bytes(token)

    def _encode_text(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        backend = self._require_text("give the prompt as token ids").backend_tokenizer
        try:
            text.encode()
        except UnicodeEncodeError as fault:
            raise RequestError(
                f"character {fault.start} of the prompt is a lone surrogate, which has no tokens"
            ) from None
        return backend.encode(text, add_special_tokens=add_special_tokens).ids

    def _render(self, messages: Sequence[Mapping[str, object]]) -> str:
        """The text of chat messages, by the folder's template."""
        pretrained = self._require_text("give the prompt as token ids")
        for position, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise RequestError(
                    f"message {position} of the prompt is {type(message).__name__}; it must be a "
                    "mapping with a role and a content"
                )
        if pretrained.chat_template is None:
            raise RequestError(
                f"{self._folder} has no chat template, neither in tokenizer_config.json nor as "
                "chat_template.jinja; give the prompt as text"
            )
        chat: list[Any] = [dict(message) for message in messages]
        try:
            rendered = pretrained.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=False
            )
        except Exception as fault:  # The template is the folder's own code: it may raise anything.
            raise RequestError(
                f"the chat template of {self._folder} refuses these messages "
                f"({type(fault).__name__}: {fault}); change them, or give the prompt as text"
            ) from fault
        return cast(str, rendered)

    def _require_text(self, advice: str) -> "PreTrainedTokenizerFast":
        if self._pretrained is None:
            raise RequestError(f"{self._folder} has no tokenizer (tokenizer.json); {advice}")
        return self._pretrained


def _checked_ids(ids: Sequence[object], vocab_size: int) -> tuple[int, ...]:
    checked = []
    for position, value in enumerate(ids):
        token_id = _as_int(value)
        if token_id is None or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"token {position} of the prompt is {value!r}; it must be an int from 0 to "
                f"{vocab_size - 1}, the model's vocabulary"
            )
        checked.append(token_id)
    return tuple(checked)


def _as_int(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return index(cast(int, value))
    except TypeError:
        return None
