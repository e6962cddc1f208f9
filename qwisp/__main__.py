"""`python -m qwisp`: generate text, or see the plan. Results on stdout, all else on stderr."""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import Progress

from qwisp.cli import add_model, run_command, try_capacity
from qwisp.config import EngineConfig, SamplingParams
from qwisp.engine.engine import Engine
from qwisp.engine.loading import plan_model
from qwisp.types import Completion, EngineStats, Prompt, Request

_UNITS = {
    "": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
}


def build_parser(config: EngineConfig | None = None) -> argparse.ArgumentParser:
    """The parser. `config`: where the defaults of engine settings come from."""
    config = config or EngineConfig()
    parser = argparse.ArgumentParser(
        prog="python -m qwisp",
        description="Runs MoE models with their experts on flash, as exact as with all in memory.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    generate = commands.add_parser("generate", help="stream text to stdout")
    generate.set_defaults(run=run_generate)
    _add_request(generate)
    _add_sampling(generate)
    plan = commands.add_parser("plan", help="where the memory would go; loads no weights")
    plan.set_defaults(run=run_plan)
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    for command in (generate, plan):
        _add_engine(command, config)
    return parser


def _add_request(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="the prompt; '-' reads it from stdin")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        dest="raw",
        action="store_false",
        help="the prompt is a user's message in the model's chat template (default)",
    )
    form.add_argument("--raw", action="store_true", help="the prompt is text to continue")
    parser.set_defaults(raw=False)
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=Request.max_tokens,
        metavar="N",
        help="tokens to generate at most (default: %(default)s)",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be repeated",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    defaults = SamplingParams()
    for name, read, meaning in (
        ("temperature", float, "0 takes the most likely token, above 0 samples"),
        ("top_p", float, "sample from the likeliest tokens that make up this probability"),
        ("top_k", int, "sample from this many likeliest tokens; 0: all"),
        ("min_p", float, "drop tokens below this share of the likeliest one's probability"),
        ("seed", int, "seed of the samples"),
    ):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=read,
            default=getattr(defaults, name),
            help=f"{meaning} (default: %(default)s)",
        )


def _add_engine(parser: argparse.ArgumentParser, config: EngineConfig) -> None:
    add_model(parser)
    parser.add_argument(
        "--capacity",
        type=parse_capacity,
        default=config.capacity,
        metavar="C",
        help="experts of each layer in memory, or 'auto' (default: %(default)s)",
    )
    parser.add_argument(
        "--memory-budget",
        type=parse_bytes,
        default=config.memory_budget_bytes,
        metavar="SIZE",
        help="memory for everything: bytes, a size such as 8GB or 7.5GiB, or 'auto' "
        "(default: %(default)s)",
    )


def parse_capacity(text: str) -> int | Literal["auto"]:
    """A number of experts, or "auto".

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    capacity = try_capacity(text)
    if capacity is None:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 1 on, or 'auto'")
    return capacity


def parse_bytes(text: str) -> int | Literal["auto"]:
    """A size in bytes, with or without a unit, or "auto".

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    if text == "auto":
        return "auto"
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([a-z]*)", text.strip().lower())
    if (
        match is None
        or match[2] not in _UNITS
        or not (nbytes := int(float(match[1]) * _UNITS[match[2]]))
    ):
        raise argparse.ArgumentTypeError(
            f"{text!r}: give bytes, a size in KB, MB, GB, KiB, MiB or GiB such as 8GB, or 'auto'"
        )
    return nbytes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    return run_command("qwisp", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    config = EngineConfig.from_env()
    args = build_parser(config).parse_args(argv)
    changed = {"capacity": args.capacity, "memory_budget_bytes": args.memory_budget}
    args.run(args, EngineConfig(**{**dict(config), **changed}))
    return 0


def run_plan(args: argparse.Namespace, config: EngineConfig) -> None:
    """Print what an engine with these settings would decide.

    Raises:
        CheckpointError: the model folder cannot be used.
        ConfigError: a setting cannot work.
    """
    plan = plan_model(args.model, config)
    facts = {**dataclasses.asdict(plan), "total_bytes": plan.total_bytes}
    if args.json:
        print(json.dumps(facts))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        size = f"  ({value / 2**20:,.1f} MiB)" if "bytes" in name and value >= 1 << 20 else ""
        print(f"{name:<{width}}  {value}{size}")


def run_generate(args: argparse.Namespace, config: EngineConfig) -> None:
    """Stream one completion to stdout, then a line about it to stderr.

    Raises:
        QwispError: the model or a setting cannot work, or the request failed.
    """
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    prompt: Prompt = text if args.raw else ({"role": "user", "content": text},)
    names = SamplingParams.model_fields
    sampling = SamplingParams(**{name: getattr(args, name) for name in names})
    with _load(args.model, config) as engine:
        print(engine.plan, file=sys.stderr)
        before = engine.stats()

        def on_prefill(done: int, total: int) -> None:
            nonlocal before
            before = engine.stats()
            progress.update(task, completed=done, total=total)

        request = Request(
            prompt,
            max_tokens=args.max_tokens,
            sampling=sampling,
            stop=tuple(args.stop),
            on_prefill=on_prefill,
        )
        with _progress() as progress:
            task = progress.add_task("prompt tokens", total=None)
            handle = engine.submit(request)
            events = iter(handle)
            first = next(events, None)
        if first is not None:
            print(first.text, end="", flush=True)
        for event in events:
            print(event.text, end="", flush=True)
        print(flush=True)
        print(_summary(handle.result(), before, engine.stats()), file=sys.stderr)


def _progress() -> Progress:
    """A bar on stderr, if somebody watches, that goes when its block ends."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def _load(model: Path | None, config: EngineConfig) -> Engine:
    with _progress() as progress:
        task = progress.add_task("load", total=None)
        return Engine.load(
            model,
            config,
            lambda done, total: progress.update(task, completed=done, total=total),
        )


def _summary(completion: Completion, prefilled: EngineStats, after: EngineStats) -> str:
    num_tokens, timings = len(completion.token_ids), completion.timings
    hits = after.expert_hits - prefilled.expert_hits
    asked = hits + after.expert_misses - prefilled.expert_misses
    nbytes = after.bytes_read - prefilled.bytes_read
    speed = f"{(num_tokens - 1) / timings.decode_s:.1f} tok/s" if num_tokens > 1 else "- tok/s"
    return (
        f"{num_tokens} tokens ({completion.finish_reason}), {speed}, first token after "
        f"{timings.first_token_s:.2f} s ({completion.prompt_tokens} prompt tokens), "
        f"{nbytes / num_tokens / 1e6:.2f} MB read per token, {hits / asked:.0%} expert hits"
    )


if __name__ == "__main__":
    sys.exit(main())
