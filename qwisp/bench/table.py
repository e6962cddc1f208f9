"""A report for people: one line per capacity, and what must be known to read it."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from qwisp.bench.report import CapacityResult, Exactness, Report, Spread

PLAIN_WIDTH = 80
"""Columns of the table where stdout is no terminal that could say."""

_COLUMNS = (
    "C",
    "decode\ntok/s",
    "least-most",
    "first\ntoken ms",
    "MB per\ntoken",
    "hits\n%",
    "prefill\npasses",
    "decode\npasses",
    "read\nwait %",
    "peak\nMB",
    "exact\n(L1)",
)


def print_report(report: Report, console: Console) -> None:
    """Write the table and its notes."""
    table = Table(box=SIMPLE_HEAD, padding=0)
    for heading in _COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for result in report.results:
        table.add_row(*_cells(result))
    for line in _title(report):
        console.print(line, markup=False, highlight=False)
    console.print(table)
    for note in _notes(report):
        console.print(note, markup=False, highlight=False)


def _title(report: Report) -> Iterator[str]:
    machine, plan = report.machine, report.reference.plan
    yield (
        f"{plan.model}: {plan.num_moe_layers} MoE layers of {plan.num_experts} experts, "
        f"top-{plan.top_k}; C of them in memory per layer"
    )
    yield (
        f"{machine.processor}, {machine.cpu_count} CPUs, MLX {report.versions.mlx} on "
        f"{machine.mlx_device}"
    )


def _cells(result: CapacityResult) -> Iterator[str]:
    speed = result.decode_tok_s
    yield str(result.plan.capacity)
    yield _median(speed, 1, 1)
    yield "-" if speed is None else f"{speed.low:.1f}-{speed.high:.1f}"
    yield _median(result.first_token_s, 1e3, 0)
    yield _median(result.bytes_per_token, 1e-6, 2)
    yield _median(result.hit_rate, 100, 0)
    yield _median(result.prefill_passes, 1, 2)
    yield _median(result.decode_passes, 1, 2)
    yield _median(result.read_wait_share, 100, 0)
    yield f"{result.peak_memory_bytes / 1e6:.0f}"
    yield _verdict(result.exactness)


def _median(spread: Spread | None, scale: float, digits: int) -> str:
    return "-" if spread is None else f"{spread.median * scale:.{digits}f}"


def _verdict(exactness: Exactness) -> str:
    if not exactness.is_exact:
        return "[bold red]NO[/]"
    return "ref." if exactness.is_reference else "yes"


def _notes(report: Report) -> Iterator[str]:
    reference = report.reference
    num_rows = sum(len(prompt.token_ids) for prompt in reference.prompts)
    yield (
        f"Medians of {len(report.results[0].trials)} trials of {len(reference.prompts)} prompts, "
        f"one after another, at most {report.max_tokens} tokens each, greedy. Passes per layer "
        "step; MB = 1e6 bytes; bytes, hits and read wait are of decode."
    )
    held = f"C={reference.plan.capacity}"
    held += ", everything resident" if reference.is_resident else ", the most that memory allows"
    yield (
        f"Exact: {num_rows} token ids and the SHA-256 of their logits rows equal those of the "
        f"reference ({held}); numerics {report.numerics_digest[:12]}."
    )
    if report.config.read_gbs_limit is None:
        yield (
            "Experts that were read before come from the operating system's page cache if it has "
            "room; --read-gbs-limit simulates a disk."
        )
    else:
        yield f"Expert reads limited to {report.config.read_gbs_limit:g} GB/s."
    if any(result.memory_before_bytes for result in report.results):
        yield "Peak memory contains arrays that were there before a load: see memory_before_bytes."


def failures(report: Report) -> Iterator[str]:
    """A sentence for each prompt at each capacity where L1 does not hold."""
    for result in report.results:
        for difference in result.exactness.differences:
            where = "" if difference.token_idx is None else f", token {difference.token_idx}"
            yield (
                f"L1 fails at C={result.plan.capacity}, prompt {difference.prompt}{where}: "
                f"{difference.what}"
            )
