"""Is one resident stream of qwisp at least as fast as mlx-lm's, in the same process?

Runs pairs of mlx-lm and qwisp, in alternating order, on the embedded model: time to the first token
of a 512-token prompt, and decode of 128 tokens. Both are greedy and must give the same tokens.
`python benchmarks/single_stream/run.py --out benchmarks/single_stream` writes data and picture.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from qwisp import Engine, EngineConfig, __version__
from qwisp.engine.loading import EMBEDDED_MODEL
from qwisp.engine.tokenizer import Tokenizer

TEXT = Path(__file__).parents[2] / "LICENSE"
PROMPT_TOKENS = 512
DECODE_TOKENS = 128
DECODE_PROMPT = "import os\n\nclass Node:\n"
"""A text that the embedded model continues for hundreds of tokens."""


@dataclass(frozen=True)
class Trial:
    """One run of one engine."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    token_ids: tuple[int, ...]


def mlx_lm_runner() -> Callable[[list[int], list[int]], Trial]:
    """mlx-lm with its defaults: asynchronous decode, prefill in steps of 2,048."""
    model, _ = load_model(EMBEDDED_MODEL)

    def run(prompt: list[int], decode_prompt: list[int]) -> Trial:
        def timed(token_ids: list[int], num_tokens: int) -> tuple[list[float], tuple[int, ...]]:
            times, tokens = [time.perf_counter()], []
            for token, _ in generate_step(mx.array(token_ids), model, max_tokens=num_tokens):
                tokens.append(int(token))
                times.append(time.perf_counter())
            return times, tuple(tokens)

        prefill, first = timed(prompt, 1)
        decode, rest = timed(decode_prompt, DECODE_TOKENS)
        return Trial(
            len(prompt) / (prefill[1] - prefill[0]),
            (DECODE_TOKENS - 1) / (decode[-1] - decode[1]),
            first + rest,
        )

    return run


def qwisp_runner(engine: Engine) -> Callable[[list[int], list[int]], Trial]:
    """qwisp through its public engine."""

    def run(prompt: list[int], decode_prompt: list[int]) -> Trial:
        prefill = engine.generate(prompt, max_tokens=1)
        decode = engine.generate(decode_prompt, max_tokens=DECODE_TOKENS)
        assert len(decode.token_ids) == DECODE_TOKENS, "the text ended early: take another prompt"
        return Trial(
            len(prompt) / prefill.timings.first_token_s,
            (DECODE_TOKENS - 1) / decode.timings.decode_s,
            prefill.token_ids + decode.token_ids,
        )

    return run


def measure(num_pairs: int) -> dict[str, list[Trial]]:
    """Alternating runs after one warm-up of each."""
    tokenizer = Tokenizer.load(EMBEDDED_MODEL, (), 8192)
    prompts = [
        list(tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:PROMPT_TOKENS]),
        list(tokenizer.encode(DECODE_PROMPT)),
    ]
    trials: dict[str, list[Trial]] = {"mlx-lm": [], "qwisp": []}
    with Engine.load(None, EngineConfig(capacity=64)) as engine:
        runners = {"mlx-lm": mlx_lm_runner(), "qwisp": qwisp_runner(engine)}
        for runner in runners.values():
            runner(*prompts)
        for pair in range(num_pairs):
            names = list(runners) if pair % 2 == 0 else list(runners)[::-1]
            for name in names:
                trials[name].append(runners[name](*prompts))
            print({name: f"{t[-1].decode_tokens_per_s:.1f} tok/s" for name, t in trials.items()})
    tokens = {trial.token_ids for runs in trials.values() for trial in runs}
    assert len(tokens) == 1, "the two engines, or two runs, gave different tokens"
    return trials


def summarize(trials: dict[str, list[Trial]]) -> dict[str, object]:
    """Medians of each engine, and of the ratios pair by pair (above 1: qwisp is faster)."""
    summary: dict[str, object] = {}
    for field in ("prefill_tokens_per_s", "decode_tokens_per_s"):
        rates = {name: [getattr(t, field) for t in runs] for name, runs in trials.items()}
        ratios = [a / b for a, b in zip(rates["qwisp"], rates["mlx-lm"], strict=True)]
        summary[field] = {
            "median": {name: round(statistics.median(values), 2) for name, values in rates.items()},
            "ratio_median": round(statistics.median(ratios), 3),
            "ratio_min": round(min(ratios), 3),
            "ratio_max": round(max(ratios), 3),
            "trials": {name: [round(v, 2) for v in values] for name, values in rates.items()},
        }
    return summary


def draw(summary: dict, path: Path) -> None:
    """Two panels of paired trials."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6))
    titles = {
        "prefill_tokens_per_s": f"Prefill of {PROMPT_TOKENS} tokens",
        "decode_tokens_per_s": f"Decode of {DECODE_TOKENS} tokens",
    }
    for panel, (field, title) in zip(panels, titles.items(), strict=True):
        trials = summary[field]["trials"]
        for index, name in enumerate(trials):
            panel.scatter([index] * len(trials[name]), trials[name], alpha=0.5, s=24)
            median = statistics.median(trials[name])
            panel.hlines(median, index - 0.2, index + 0.2)
            panel.annotate(f"{median:.1f}", (index + 0.22, median), va="center")
        for a, b in zip(*trials.values(), strict=True):
            panel.plot([0, 1], [a, b], color="grey", alpha=0.25, linewidth=0.8)
        panel.set_xticks(range(len(trials)), list(trials))
        panel.set_xlim(-0.4, 1.6)
        panel.set_ylim(bottom=0)
        panel.set_ylabel("tokens per second")
        panel.set_title(f"{title}: median ratio {summary[field]['ratio_median']:.2f}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--name", default="cpu", help="name of the data file")
    arguments = parser.parse_args()
    summary = summarize(measure(arguments.pairs))
    report = {
        "question": "resident single stream against mlx-lm",
        "machine": platform.processor() or platform.machine(),
        "device": str(mx.default_device()),
        "device_name": mx.device_info().get("device_name", ""),
        "versions": {"qwisp": __version__} | {name: version(name) for name in ("mlx", "mlx-lm")},
        "pairs": arguments.pairs,
        **summary,
    }
    if arguments.out is not None:
        (arguments.out / f"{arguments.name}.json").write_text(json.dumps(report, indent=1) + "\n")
        draw(report, arguments.out / f"{arguments.name}.png")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
