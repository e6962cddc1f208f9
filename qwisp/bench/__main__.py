"""`python -m qwisp.bench`: the bench's command line. Results on stdout, all else on stderr."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from qwisp.bench import picture
from qwisp.bench.progress import ProgressDisplay
from qwisp.bench.prompts import read_prompts
from qwisp.bench.report import Report
from qwisp.bench.run import Run
from qwisp.bench.settings import Capacity, RunSettings
from qwisp.bench.table import PLAIN_WIDTH, failures, print_report
from qwisp.cli import EXIT_REFUSED, add_model, run_command, try_capacity
from qwisp.config import EngineConfig
from qwisp.errors import ConfigError

EXIT_NOT_EXACT = 1


def build_parser(config: EngineConfig | None = None) -> argparse.ArgumentParser:
    """The parser. `config`: where the defaults of engine settings come from."""
    config = config or EngineConfig()
    parser = argparse.ArgumentParser(
        prog="python -m qwisp.bench",
        description="Measurements, each with its exactness. Without a command: run.",
        epilog="The options of run: python -m qwisp.bench run --help",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    run = commands.add_parser(
        "run",
        help="speed, reads, memory and exactness at several capacities",
        description="Measures one lane at several capacities, then checks that every one of them "
        "gives the bytes of the resident run (L1). The last line on stdout is the report as JSON.",
    )
    add_model(run)
    run.add_argument(
        "--capacity",
        action="append",
        type=parse_capacities,
        metavar="C",
        help="experts of each layer in memory: a number, 'auto', or several with commas; may be "
        "repeated (default: an eighth, a quarter, a half and all of the model's, where they fit)",
    )
    run.add_argument(
        "--prompt-file",
        type=Path,
        metavar="F",
        help="text file with one prompt, or .jsonl with one per line: a string, chat messages or "
        "token ids (default: three built-in prompts)",
    )
    run.add_argument(
        "--max-tokens",
        type=int,
        default=RunSettings.max_tokens,
        metavar="N",
        help="tokens generated from each prompt (default: %(default)s)",
    )
    run.add_argument(
        "--trials",
        type=int,
        default=RunSettings.trials,
        metavar="N",
        help="timed repetitions of all prompts (default: %(default)s)",
    )
    run.add_argument(
        "--read-gbs-limit",
        type=float,
        default=config.read_gbs_limit,
        metavar="X",
        help="simulate a disk of X GB/s (default: %(default)s)",
    )
    run.add_argument(
        "--out", type=Path, metavar="DIR", help="write bench.json and, with matplotlib, bench.png"
    )
    return parser


def parse_capacities(text: str) -> list[Capacity]:
    """Capacities of a comma list.

    Raises:
        argparse.ArgumentTypeError: one is neither a whole number nor "auto".
    """
    capacities: list[Capacity] = []
    for part in text.split(","):
        word = part.strip()
        capacity = try_capacity(word)
        if capacity is None:
            raise argparse.ArgumentTypeError(
                f"{word!r} is no capacity: give whole numbers above 0, or 'auto', such as 8,16"
            )
        capacities.append(capacity)
    return capacities


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    if not __debug__:
        print(
            "qwisp.bench: python -O takes out the assertions that guard exactness; "
            "run it without -O and with PYTHONOPTIMIZE unset",
            file=sys.stderr,
        )
        return EXIT_REFUSED
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments.insert(0, "run")
    return run_command("qwisp.bench", lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    config = EngineConfig.from_env()
    return run(build_parser(config).parse_args(arguments), config)


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    """Measure, print the table, then the report as one line of JSON.

    Raises:
        QwispError: the model or a setting cannot work, or a request failed.
    """
    config = EngineConfig(**{**dict(config), "read_gbs_limit": args.read_gbs_limit})
    settings = _settings(args, config)
    if args.out is not None:
        _make_folder(args.out)
    with ProgressDisplay(Console(stderr=True)) as progress:
        report = Run(settings, config, progress).execute()
    return finish(report, args.out)


def finish(report: Report, out: Path | None) -> int:
    """Write a report everywhere it belongs; the exit status says whether L1 held."""
    # A width of its own where there is no terminal: rich would take 80 columns and fold the table.
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    print_report(report, Console(file=sys.stdout, width=width))
    if out is not None:
        _write_files(report, out)
    for failure in failures(report):
        print(f"qwisp.bench: {failure}", file=sys.stderr)
    print(report.model_dump_json())
    return 0 if report.is_exact else EXIT_NOT_EXACT


def _settings(args: argparse.Namespace, config: EngineConfig) -> RunSettings:
    capacities = tuple(capacity for group in args.capacity or () for capacity in group)
    if not capacities and config.capacity != "auto":
        capacities = (config.capacity,)
    prompts = RunSettings.prompts if args.prompt_file is None else read_prompts(args.prompt_file)
    return RunSettings(
        model=args.model,
        capacities=capacities,
        prompts=prompts,
        max_tokens=args.max_tokens,
        trials=args.trials,
    )


def _make_folder(out: Path) -> None:
    """Before anything is measured, so that a typing mistake costs no minutes."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise ConfigError(f"--out {out}: {cause}") from cause


def _write_files(report: Report, out: Path) -> None:
    try:
        (out / "bench.json").write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
        if picture.can_draw():
            picture.draw(report, out / "bench.png")
        else:
            print(f"qwisp.bench: {picture.HOW_TO_GET}", file=sys.stderr)
    except OSError as cause:
        raise ConfigError(f"--out {out}: {cause}") from cause


if __name__ == "__main__":
    sys.exit(main())
