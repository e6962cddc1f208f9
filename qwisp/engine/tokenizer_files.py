"""Reads the tokenizer files of a model folder, never the network. Knows no prompts."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from qwisp.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)


class _GenerationConfig(BaseModel):
    """What we read of generation_config.json."""

    model_config = ConfigDict(frozen=True, strict=True)

    eos_token_id: int | list[int] | None = None


def read_pretrained(folder: Path) -> "PreTrainedTokenizerFast | None":
    """The tokenizer of a folder, or None if it has no tokenizer file, as a synthetic checkpoint.

    Raises:
        CheckpointError: tokenizer.json is missing beside other tokenizer files, or one is bad.
    """
    if not _has_tokenizer(folder):
        return None
    # Slow to import, and of no use to a folder without a tokenizer.
    with _without_advice():
        from transformers import PreTrainedTokenizerFast
    # Not AutoTokenizer: by config.json's model type it may choose a class that replaces the
    # pre-tokenizer of tokenizer.json by its own, and the model sees tokens it was not trained on.
    try:
        pretrained: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
            folder, local_files_only=True
        )
    except Exception as fault:  # The tokenizers library raises plain Exception for a bad file.
        raise CheckpointError(
            f"the tokenizer of {folder} (tokenizer.json, tokenizer_config.json) cannot be read: "
            f"{type(fault).__name__}: {fault}"
        ) from fault
    if not is_byte_level(pretrained.backend_tokenizer):
        logger.warning(
            "the tokenizer of %s is not byte-level: a request's text comes at its end, and stop "
            "strings do not end it early",
            folder,
        )
    return pretrained


def read_eos(
    folder: Path,
    pretrained: "PreTrainedTokenizerFast | None",
    spec_eos: Sequence[int],
    vocab_size: int,
) -> frozenset[int]:
    """All ids that end a text: those of config.json, generation_config.json and the tokenizer.

    Raises:
        CheckpointError: generation_config.json is bad, or an id is outside the vocabulary.
    """
    found = {
        folder / "config.json": tuple(spec_eos),
        folder / "generation_config.json": _generation_config_eos(folder),
    }
    if pretrained is not None and pretrained.eos_token_id is not None:
        found[folder / "tokenizer_config.json"] = (pretrained.eos_token_id,)
    for path, ids in found.items():
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise CheckpointError(
                    f"{path}: the end-of-text id {token_id} is outside the model's vocabulary of "
                    f"{vocab_size} and could never end a text; the files are not of one model"
                )
    return frozenset().union(*found.values())


def is_byte_level(backend: Any) -> bool:
    """Whether a tokenizer of the tokenizers library decodes each token to bytes of its own."""
    return type(backend.decoder).__name__ == "ByteLevel"


def _has_tokenizer(folder: Path) -> bool:
    if (folder / "tokenizer.json").is_file():
        return True
    parts = ("tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model")
    present = [name for name in parts if (folder / name).is_file()]
    if present:
        raise CheckpointError(
            f"{folder / 'tokenizer.json'} is missing, though {', '.join(present)} is there; "
            "download it, or write it with transformers' AutoTokenizer and save_pretrained"
        )
    return False


@contextmanager
def _without_advice() -> Iterator[None]:
    """Drop one line that transformers logs when it is imported: that PyTorch is not there."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("PyTorch was not found")

    adviser = logging.getLogger("transformers")
    adviser.addFilter(is_wanted)
    try:
        yield
    finally:
        adviser.removeFilter(is_wanted)


def _generation_config_eos(folder: Path) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return ()
    try:
        eos = _GenerationConfig.model_validate_json(path.read_bytes()).eos_token_id
    except ValidationError as invalid:
        fault = invalid.errors()[0]
        name = str(fault["loc"][0]) if fault["loc"] else "the file"
        raise CheckpointError(f"{path}: {name}: {fault['msg']}, got {fault['input']!r}") from None
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
