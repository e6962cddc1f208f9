"""Text that streams token by token, joined, is that of all tokens, at constant cost per token."""

import codecs
import itertools
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from qwisp.engine.detokenizer import ByteLevelDetokenizer, Detokenizer, byte_level_bytes
from qwisp.engine.tokenizer import Tokenizer
from tests.tree import ROOT

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKEN_OF_BYTE = {byte_level_bytes(token)[0]: token for token in ALPHABET}
UNKNOWN_ID = 9000
"""An id of a padded embedding, which no tokenizer here knows."""
TEXTS = ["👩‍👩‍👧 family", "e\u0301\u0323 i\u0308", "नमस्ते", "日本語", "a\x00b", "\ufffd", "🏴󠁧󠁢󠁳󠁣󠁴󠁿"]


def load(backend: Backend, folder: Path) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder, (), UNKNOWN_ID + 1)


@pytest.fixture(scope="module")
def embedded() -> Tokenizer:
    return Tokenizer.load(ROOT / "qwisp/models/tiny", (), UNKNOWN_ID + 1)


@pytest.fixture(scope="module")
def awkward(tmp_path_factory) -> Tokenizer:
    """A token per byte, then added tokens with characters in and outside the byte alphabet."""
    vocab = {TOKEN_OF_BYTE[byte]: byte for byte in range(256)}
    backend = Backend(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>", "日"])
    backend.add_tokens(
        [AddedToken(t, special=False) for t in ("<think>", "é", "日本", "two words")]
    )
    return load(backend, tmp_path_factory.mktemp("awkward"))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> Tokenizer:
    """Byte fallback, where a byte may change the text of the bytes before it, and a strip."""
    tokens = ["<unk>", "▁", "▁a", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    to_spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*to_spaces, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<end>"])
    return load(backend, tmp_path_factory.mktemp("sentencepiece"))


def add_all(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.finish()]


def assert_joined_equals_decode(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    assert "".join(add_all(tokenizer.detokenizer(), token_ids)) == tokenizer.decode(token_ids)


embedded_ids = st.lists(st.integers(0, 258) | st.integers(0, 8191) | st.just(UNKNOWN_ID))
awkward_ids = st.lists(
    st.sampled_from([0xC3, 0xE2, 0xED, 0xF0, 0xF4, 0x80, 0x90, 0xA0, 0xBF, 0x41])
    | st.integers(0, 261)
    | st.just(UNKNOWN_ID)
)


@given(embedded_ids)
@settings(max_examples=200)
def test_joined_text_equals_the_full_decode_for_any_ids_of_the_embedded_vocabulary(embedded, ids):
    assert_joined_equals_decode(embedded, ids)


@given(awkward_ids)
@settings(max_examples=300)
@example([0xF0, 0x9F, 256, 0x98, 0x80])  # a skipped special token inside an emoji
@example([0xF0, 0x9F, 259])  # "é" is in the byte alphabet: it stands for the invalid byte E9
@example([0xE6, 260, 261, UNKNOWN_ID, 0xE6])
def test_joined_text_equals_the_full_decode_for_any_bytes_and_added_tokens(awkward, ids):
    assert_joined_equals_decode(awkward, ids)


@given(st.lists(st.integers(0, 260)))
@example([1, 1, 2, 3])
@example([4 + 0xE2, 4 + 0x82, 4 + 0xAC, 4 + 0xE2])  # a whole euro sign, spoilt by the byte after it
def test_joined_text_equals_the_full_decode_for_a_decoder_that_is_not_byte_level(
    sentencepiece, ids
):
    assert_joined_equals_decode(sentencepiece, ids)


@pytest.mark.parametrize("text", TEXTS)
def test_a_character_split_over_tokens_appears_whole_with_its_last_token(awkward, text):
    pieces = add_all(awkward.detokenizer(), list(text.encode()))
    lengths = [len(character.encode()) for character in text]
    expected = [[""] * (n - 1) + [character] for n, character in zip(lengths, text, strict=True)]
    assert pieces == [*itertools.chain(*expected), ""]


@pytest.mark.parametrize("incomplete", [b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98"])
def test_an_incomplete_sequence_never_stalls_the_text_after_it(awkward, incomplete):
    detokenizer = awkward.detokenizer()
    assert [detokenizer.add(byte) for byte in incomplete] == [""] * len(incomplete)
    assert detokenizer.add(ord("a")) == "\ufffda"
    assert detokenizer.add(ord("b")) == "b"
    assert detokenizer.finish() == ""


@given(awkward_ids)
def test_text_is_never_taken_back_and_only_an_unfinished_character_is_held(awkward, ids):
    detokenizer = awkward.detokenizer()
    shown = ""
    for count, token_id in enumerate(ids, start=1):
        shown += detokenizer.add(token_id)
        so_far = awkward.decode(ids[:count])
        assert so_far.startswith(shown)
        # Two for the first two bytes of a surrogate, which Python refuses only with the third.
        assert so_far[len(shown) :] in {"", "\ufffd", "\ufffd\ufffd"}


def test_detokenizers_of_two_requests_do_not_mix(awkward):
    first, second = awkward.detokenizer(), awkward.detokenizer()
    assert first.add(0xC3) == ""
    assert second.add(0xC3) == ""
    assert first.add(0xA9) == "é"
    assert second.add(ord("x")) == "\ufffdx"


def test_the_byte_alphabet_is_that_of_the_library():
    assert sorted(TOKEN_OF_BYTE) == list(range(256))
    assert all(len(byte_level_bytes(token)) == 1 for token in ALPHABET)
    every_utf8_byte = "".join(
        map(chr, [*range(0x800), *range(0x800, 0xD800, 0x400), 0xE000, 0xF000])
    )
    every_utf8_byte += "".join(map(chr, range(0x10000, 0x110000, 0x10000)))
    to_tokens = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    [(tokens, _)] = to_tokens.pre_tokenize_str(every_utf8_byte)
    # Bytes that occur in no valid UTF-8 (C0, C1, F5 to FF) look alike once decoded.
    assert byte_level_bytes(tokens) == every_utf8_byte.encode()
    assert len(set(every_utf8_byte.encode())) == 256 - 13


@pytest.mark.parametrize("token", ["é", "日本", "a b", "Ġ日", "<think>", "ð", "", "\u0144", "é "])
def test_a_token_outside_the_alphabet_stands_for_its_own_utf8(token):
    text = byte_level_bytes(token).decode(errors="replace")
    assert text == decoders.ByteLevel().decode([token])


def test_invalid_utf8_is_replaced_as_the_library_does_it():
    # Both sides of every border in the table of well-formed UTF-8.
    borders = b"\x41\x7f\x80\x8f\x90\x9f\xa0\xbf\xc0\xc1\xc2\xdf"
    borders += b"\xe0\xe1\xec\xed\xee\xef\xf0\xf1\xf3\xf4\xf5\xff"
    decoder = decoders.ByteLevel()
    fragments = [bytes(f) for n in (1, 2, 3) for f in itertools.product(borders, repeat=n)]
    fragments += [
        bytes(f) for f in itertools.product(b"\x41\x80\xa0\xc2\xe1\xed\xf0\xf4", repeat=5)
    ]
    incremental = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for fragment in fragments:
        expected = decoder.decode(["".join(TOKEN_OF_BYTE[byte] for byte in fragment)])
        pieces = [incremental.decode(fragment[i : i + 1]) for i in range(len(fragment))]
        assert "".join(pieces) + incremental.decode(b"", final=True) == expected, fragment


def test_the_work_of_a_token_does_not_grow_with_the_tokens_before_it(monkeypatch):
    decoded_sizes = []
    asked = []

    class CountingDecoder(codecs.getincrementaldecoder("utf-8")):
        @staticmethod
        def _buffer_decode(data, errors, final):
            decoded_sizes.append(len(data))
            return codecs.utf_8_decode(data, errors, final)

    monkeypatch.setattr(codecs, "getincrementaldecoder", lambda _: CountingDecoder)
    detokenizer = ByteLevelDetokenizer(lambda token_id: asked.append(token_id) or b"\xf0\x9f\x98")
    num_tokens = 2000
    for token_id in range(num_tokens):
        detokenizer.add(token_id)
    detokenizer.finish()
    assert asked == list(range(num_tokens))
    assert len(decoded_sizes) == num_tokens + 1
    assert max(decoded_sizes) <= 3 + 3  # the token, and at most an unfinished sequence
