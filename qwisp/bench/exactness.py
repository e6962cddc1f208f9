"""L1 as a comparison: does a run give the reference's token ids and logits bytes?"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

from qwisp.bench.report import Difference, Exactness, ReferencePrompt
from qwisp.types import Completion

Completions = Mapping[str, Completion]
"""By the prompt's name."""


def check_exactness(
    reference: Completions, recorded: Completions | None, timed: Sequence[Completions]
) -> Exactness:
    """Compare a capacity with the reference.

    Args:
        reference: The reference run, with logits digests.
        recorded: The run at this capacity, with logits digests; None if it is the reference.
        timed: The timed trials at this capacity. They record no logits, so only their token ids are
            compared.
    """
    differences = []
    tokens_compared = 0
    for name, expected in reference.items():
        found = None if recorded is None else _logits_difference(name, expected, recorded[name])
        for completions in timed:
            found = found or _token_difference(name, expected, completions[name], "timed trial")
        if found is not None:
            differences.append(found)
        tokens_compared += len(expected.token_ids)
    return Exactness(
        is_exact=not differences,
        is_reference=recorded is None,
        tokens_compared=0 if recorded is None else tokens_compared,
        differences=tuple(differences),
    )


def describe_reference(reference: Completions) -> Iterator[ReferencePrompt]:
    """The reference run, short enough for a report."""
    for name, completion in reference.items():
        yield ReferencePrompt(
            prompt=name,
            prompt_tokens=completion.prompt_tokens,
            token_ids=completion.token_ids,
            logits_digest=hashlib.sha256("".join(completion.logits_digests).encode()).hexdigest(),
        )


def _logits_difference(name: str, expected: Completion, found: Completion) -> Difference | None:
    if found.numerics_digest != expected.numerics_digest:
        what = (
            f"numerics {found.numerics_digest[:12]} instead of {expected.numerics_digest[:12]}: "
            "equal bytes were never promised"
        )
        return Difference(prompt=name, token_idx=None, what=what)
    for which, completion in (("reference", expected), ("run", found)):
        if len(completion.logits_digests) != len(completion.token_ids):
            what = (
                f"the {which} recorded {len(completion.logits_digests)} logits rows for "
                f"{len(completion.token_ids)} tokens"
            )
            return Difference(prompt=name, token_idx=None, what=what)
    pairs = zip(expected.logits_digests, found.logits_digests, strict=False)
    for index, (ours, theirs) in enumerate(pairs):
        if ours != theirs:
            return Difference(prompt=name, token_idx=index, what="logits bytes differ")
    return _token_difference(name, expected, found, "run")


def _token_difference(
    name: str, expected: Completion, found: Completion, which: str
) -> Difference | None:
    if found.token_ids == expected.token_ids and found.finish_reason == expected.finish_reason:
        return None
    pairs = zip(expected.token_ids, found.token_ids, strict=False)
    for index, (ours, theirs) in enumerate(pairs):
        if ours != theirs:
            what = f"{which}: token {theirs} instead of {ours}"
            return Difference(prompt=name, token_idx=index, what=what)
    what = (
        f"{which}: ended by {found.finish_reason} after {len(found.token_ids)} tokens "
        f"instead of by {expected.finish_reason} after {len(expected.token_ids)}"
    )
    return Difference(prompt=name, token_idx=None, what=what)
