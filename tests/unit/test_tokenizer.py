"""Prompts become the tokens the model was trained on, and what cannot is refused by name."""

import json
import logging
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from qwisp.engine.tokenizer import Tokenizer
from qwisp.engine.tokenizer_files import _without_advice
from qwisp.errors import CheckpointError, RequestError
from tests.tree import ROOT

TINY = ROOT / "qwisp/models/tiny"
VOCAB_SIZE = 8192
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
ONE_MESSAGE = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY, (), VOCAB_SIZE)


@pytest.fixture(scope="module")
def backend() -> Backend:
    """tokenizer.json as the tokenizers library reads it, without transformers."""
    return Backend.from_file(str(TINY / "tokenizer.json"))


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of the embedded tokenizer, to be changed."""
    for name in FILES:
        shutil.copy(TINY / name, tmp_path)
    return tmp_path


def load(folder: Path, spec_eos: tuple[int, ...] = ()) -> Tokenizer:
    return Tokenizer.load(folder, spec_eos, VOCAB_SIZE)


def change(path: Path, **values: object) -> None:
    """Set keys of a JSON file; None removes a key."""
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.mark.parametrize("text", ["Hello, world", "  a\n\n\tb ", "x<|im_end|>y", "🙂é日本", "नमस्ते"])
def test_text_is_encoded_as_tokenizer_json_says(tokenizer, backend, text):
    assert list(tokenizer.encode(text)) == backend.encode(text).ids


def test_tokenizer_json_holds_though_transformers_has_a_class_for_the_model_type(folder, tokenizer):
    # Such a class brings a normaliser and a pre-tokenizer of its own.
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe"}))
    change(folder / "tokenizer.json", normalizer={"type": "Lowercase"})
    assert load(folder).encode("HELLO") == tokenizer.encode("hello")


def test_text_gets_the_special_tokens_that_the_tokenizer_is_configured_to_add(folder, tokenizer):
    start = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    change(
        folder / "tokenizer.json",
        post_processor={
            "type": "TemplateProcessing",
            "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [start, {"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {
                "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
            },
        },
    )
    adding = load(folder)
    assert adding.encode("Hi") == (1, *tokenizer.encode("Hi"))
    assert adding.encode(CHAT) == tokenizer.encode(CHAT)


def test_a_prompt_is_never_cut_or_padded(folder, tokenizer):
    change(
        folder / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        },
    )
    assert load(folder).encode("one two three four five") == tokenizer.encode(
        "one two three four five"
    )


def test_text_without_utf8_is_refused(tokenizer):
    with pytest.raises(RequestError, match="character 2 of the prompt is a lone surrogate"):
        tokenizer.encode("ab\ud800")
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode([{"role": "user", "content": "\udfff"}])


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_an_empty_prompt_is_refused(tokenizer, prompt):
    with pytest.raises(RequestError, match="has no tokens"):
        tokenizer.encode(prompt)


def test_token_ids_pass_unchanged(tokenizer):
    assert tokenizer.encode([0, 5, VOCAB_SIZE - 1]) == (0, 5, VOCAB_SIZE - 1)
    assert tokenizer.encode((np.int32(5),)) == (5,)
    assert type(tokenizer.encode([np.int64(5)])[0]) is int


@pytest.mark.parametrize("bad", [-1, VOCAB_SIZE, 2**70, True, np.True_, 1.0, "a", None, [1]])
def test_a_bad_token_id_is_refused_with_its_position_and_the_limit(tokenizer, bad):
    with pytest.raises(RequestError, match=r"token 1 of the prompt is .* 0 to 8191"):
        tokenizer.encode([7, bad])


def test_the_limit_is_the_model_s_vocabulary_not_the_tokenizer_s():
    assert Tokenizer.load(TINY, (), 9000).encode([8999]) == (8999,)
    with pytest.raises(RequestError, match="0 to 99"):
        Tokenizer.load(TINY, (), 100).encode("a rare word: ookup treated")


@pytest.mark.parametrize(
    "prompt", [None, 5, b"abc", bytearray(b"abc"), {1, 2}, np.array([1]), object()]
)
def test_a_prompt_of_no_known_form_is_refused(tokenizer, prompt):
    with pytest.raises(RequestError, match="it must be str, a sequence of token ids"):
        tokenizer.encode(prompt)


def test_chat_messages_go_through_the_template_up_to_the_start_of_the_answer(tokenizer):
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"
    assert tokenizer.encode(CHAT) == tokenizer.encode(text + "<|im_start|>assistant\n")
    assert tokenizer.encode(tuple(CHAT)) == tokenizer.encode(CHAT)


def test_the_template_comes_from_tokenizer_config_or_from_its_own_file(folder, tokenizer):
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    change(folder / "tokenizer_config.json", chat_template="{{ messages[0].content }}?")
    assert load(folder).encode(ONE_MESSAGE) == tokenizer.encode("Hi!")
    (folder / "chat_template.jinja").unlink()
    assert load(folder).encode(ONE_MESSAGE) == tokenizer.encode("Hi?")


def test_a_missing_template_is_named_with_what_to_do(folder):
    (folder / "chat_template.jinja").unlink()
    change(folder / "tokenizer_config.json", chat_template=None)
    with pytest.raises(
        RequestError, match=r"has no chat template.*give the prompt as text"
    ) as raised:
        load(folder).encode(CHAT)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].nothing.at_all }}",
        "{{ 1 + messages[0].content }}",
        "{{ 1 // 0 }}",
        "{% if %}",
    ],
)
def test_a_template_that_fails_is_named_with_its_reason(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(RequestError, match=r"the chat template of .* refuses") as raised:
        load(folder).encode(ONE_MESSAGE)
    assert str(folder) in str(raised.value)
    assert str(raised.value.__cause__) in str(raised.value)


def test_a_message_that_is_no_mapping_is_refused_with_its_position(tokenizer):
    with pytest.raises(RequestError, match="message 1 of the prompt is int"):
        tokenizer.encode([ONE_MESSAGE[0], 3])


def test_a_template_that_writes_nothing_gives_an_empty_prompt(folder):
    (folder / "chat_template.jinja").write_text("{# nothing #}")
    with pytest.raises(RequestError, match="has no tokens"):
        load(folder).encode(ONE_MESSAGE)


def test_decoding_skips_special_tokens_and_cleans_nothing_up(tokenizer):
    text = 'a , b . "c" n\'t  d .'
    assert tokenizer.decode([1, *tokenizer.encode(text), 2, 0]) == text


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30))
def test_decoding_equals_that_of_transformers(tokenizer, ids):
    pretrained = tokenizer._pretrained
    expected = pretrained.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert tokenizer.decode(ids) == expected


def test_an_id_the_tokenizer_does_not_know_has_no_text(tokenizer):
    assert tokenizer.decode([9000, *tokenizer.encode("a"), 9001]) == "a"


def test_a_tokenizer_that_is_not_byte_level_is_announced_and_still_right(folder, caplog):
    change(folder / "tokenizer.json", decoder={"type": "Fuse"})
    with caplog.at_level(logging.WARNING, logger="qwisp"):
        fused = load(folder)
    assert "not byte-level" in caplog.text
    ids = fused.encode("Hello there")
    detokenizer = fused.detokenizer()
    assert "".join([*map(detokenizer.add, ids), detokenizer.finish()]) == fused.decode(ids)


def test_many_threads_may_encode_and_decode_at_once(tokenizer):
    texts = [f"{i} thread, one tokenizer {i * i}" for i in range(40)]
    expected = [(tokenizer.encode(text), tokenizer.encode(CHAT)) for text in texts]

    def work(_: int) -> None:
        for text, (ids, chat) in zip(texts, expected, strict=True):
            assert tokenizer.encode(text) == ids
            assert tokenizer.encode(CHAT) == chat
            assert tokenizer.decode(ids) == text

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_end_of_text_is_the_union_of_all_three_files(folder):
    change(folder / "generation_config.json", eos_token_id=[5, 6])
    assert load(folder, (7, 2)).eos_token_ids == frozenset({2, 5, 6, 7})  # 2: <|im_end|>


@pytest.mark.parametrize(("value", "expected"), [(5, {2, 5}), ([], {2}), (None, {2})])
def test_generation_config_may_have_one_id_several_or_none(folder, value, expected):
    change(folder / "generation_config.json", eos_token_id=value)
    assert load(folder).eos_token_ids == expected


def test_generation_config_may_be_missing(folder):
    (folder / "generation_config.json").unlink()
    assert load(folder).eos_token_ids == frozenset({2})


@pytest.mark.parametrize(
    "bad", [-1, True, "2", 2.0, [2, "0"], [True], [[2]], {}, VOCAB_SIZE, [2, 9000]]
)
def test_a_bad_end_of_text_id_is_refused_naming_the_file(folder, bad):
    change(folder / "generation_config.json", eos_token_id=bad)
    with pytest.raises(
        CheckpointError, match=r"generation_config\.json: .*(eos_token_id|end-of-text)"
    ):
        load(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"3"])
def test_a_generation_config_that_is_no_object_is_refused_naming_the_file(folder, content):
    (folder / "generation_config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json: "):
        load(folder)


def test_end_of_text_outside_the_vocabulary_is_refused_naming_the_file(folder):
    with pytest.raises(CheckpointError, match=r"/config\.json: the end-of-text id 8192 is outside"):
        load(folder, (VOCAB_SIZE,))
    change(folder / "tokenizer_config.json", eos_token="<not in the vocabulary>")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: the end-of-text id 8192"):
        load(folder)


def test_a_folder_without_a_tokenizer_serves_token_ids_and_nothing_else(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    bare = load(tmp_path, (4,))
    assert not bare.has_text
    assert bare.eos_token_ids == frozenset({3, 4})
    assert bare.encode([1, 2]) == (1, 2)
    for use in (lambda: bare.encode("a"), lambda: bare.encode(CHAT), lambda: bare.decode([1])):
        with pytest.raises(RequestError, match="has no tokenizer") as raised:
            use()
        assert str(tmp_path) in str(raised.value)
    detokenizer = bare.detokenizer()
    assert detokenizer.add(1) + detokenizer.add(2) + detokenizer.finish() == ""


def test_a_folder_with_a_tokenizer_has_text(tokenizer):
    assert tokenizer.has_text


@pytest.mark.parametrize("left", ["tokenizer_config.json", "vocab.json", "merges.txt"])
def test_a_part_of_a_tokenizer_is_refused_naming_what_is_missing(tmp_path, left):
    (tmp_path / left).write_text("{}")
    with pytest.raises(
        CheckpointError, match=rf"tokenizer\.json is missing, though {left} is there"
    ):
        load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_broken_tokenizer_file_is_refused_naming_the_folder(folder, name, content):
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"the tokenizer of .* cannot be read") as raised:
        load(folder)
    assert str(folder) in str(raised.value)


def test_only_the_advice_to_install_pytorch_is_silenced_and_only_while_importing(
    caplog, monkeypatch
):
    adviser = logging.getLogger("transformers")
    # transformers lets its records through to the root logger where CI is set: seen twice then.
    monkeypatch.setattr(adviser, "propagate", False)
    adviser.addHandler(caplog.handler)
    try:
        with _without_advice():
            adviser.warning("PyTorch was not found. Models won't be available")
            adviser.warning("something else")
        adviser.warning("PyTorch was not found, later")
    finally:
        adviser.removeHandler(caplog.handler)
    assert [record.message for record in caplog.records] == [
        "something else",
        "PyTorch was not found, later",
    ]


FRESH_PROCESS = """
import json, logging, socket, sys
from pathlib import Path
from qwisp.engine.tokenizer import Tokenizer
assert "transformers" not in sys.modules, "transformers was imported early"

def refuse(*_, **__):
    print("NETWORK", file=sys.stderr)
    raise OSError("no network in this test")

socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
before = logging.root.level, list(logging.root.handlers)
tokenizer = Tokenizer.load(Path(sys.argv[1]), (), 200_000)
assert tokenizer.encode("Hi") and tokenizer.encode([{"role": "user", "content": "Hi"}])
assert (logging.root.level, list(logging.root.handlers)) == before
assert logging.getLogger("transformers").filters == []
assert "torch" not in sys.modules
"""


def test_loading_is_silent_lazy_and_without_network_even_for_a_large_vocabulary(folder):
    # transformers looks at a vocabulary above 100,000 in search of a fault of some Mistral models.
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] |= {f"filler{i}": i for i in range(VOCAB_SIZE, 100_100)}
    path.write_text(json.dumps(content))
    change(folder / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe"}))
    run = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
