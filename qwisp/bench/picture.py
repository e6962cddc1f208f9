"""A report as a picture: speed and bytes per token over the capacity. Needs matplotlib."""

import importlib.util
from importlib import import_module
from pathlib import Path
from typing import Any

from qwisp.bench.report import Report, Spread

HOW_TO_GET = "no picture: matplotlib is not installed; python -m pip install 'qwisp[plot]'"


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(report: Report, path: Path) -> None:
    """Write a PNG file.

    Raises:
        OSError: the file cannot be written.
    """
    # Imported by name: matplotlib is an extra, and this file has types without it too.
    figure = import_module("matplotlib.figure").Figure(figsize=(9, 4), layout="constrained")
    speed, traffic = figure.subplots(1, 2)
    capacities = [result.plan.capacity for result in report.results]
    speeds = [result.decode_tok_s for result in report.results]
    _draw_spreads(speed, capacities, speeds, 1)
    _draw_spreads(traffic, capacities, [each.bytes_per_token for each in report.results], 1e-6)
    speed.set_ylabel("decode tok/s")
    traffic.set_ylabel("MB read per token")
    num_experts = report.reference.plan.num_experts
    for axes in (speed, traffic):
        axes.set_xlabel(f"experts of each layer in memory, of {num_experts}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(capacities, [str(capacity) for capacity in capacities])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    verdict = "exact (L1)" if report.is_exact else "NOT exact (L1)"
    figure.suptitle(f"{report.reference.plan.model} on {report.machine.processor}: {verdict}")
    figure.savefig(path, dpi=150)


def _draw_spreads(axes: Any, x: list[int], spreads: list[Spread | None], scale: float) -> None:
    """Medians with bars from the least to the most."""
    known = [(at, spread) for at, spread in zip(x, spreads, strict=True) if spread is not None]
    axes.errorbar(
        [at for at, _ in known],
        [spread.median * scale for _, spread in known],
        yerr=[
            [(spread.median - spread.low) * scale for _, spread in known],
            [(spread.high - spread.median) * scale for _, spread in known],
        ],
        marker="o",
        capsize=3,
    )
