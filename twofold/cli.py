"""The command `twofold`: what a person asks before a run."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from twofold.errors import TwofoldError

if TYPE_CHECKING:
    from twofold.plan import Work
    from twofold.settings import Settings


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 2 for an error that the user can mend."""
    parser = argparse.ArgumentParser(prog="twofold", description="Trains language-model programs.")
    commands = parser.add_subparsers(dest="command", required=True)
    check_parser = commands.add_parser("check", help="check settings, data and model, and show the plan of a run")
    check_parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="settings file (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        check(options.params)
    except TwofoldError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def check(params: Path) -> None:
    """Check what a run needs, without running or downloading anything; print all settings and the plan."""
    # Imported here, so that --help does not wait for DSPy.
    from tempfile import TemporaryDirectory

    import yaml

    from twofold.examples import read_examples
    from twofold.models import folder_of, outlook
    from twofold.plan import prompt_tokens, work
    from twofold.programs import load_pipeline, modules
    from twofold.settings import load
    from twofold.splits import write_splits

    settings = load(params)
    pipeline = load_pipeline(settings.pipeline)
    with TemporaryDirectory() as scratch:
        sizes = write_splits(pipeline, settings, Path(scratch))
        examples = read_examples(Path(scratch) / "train.jsonl")
    program = pipeline.program()
    model = outlook(settings.model.source, folder_of(settings.model.source))
    print(yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True))
    print(f"pipeline  {pipeline.path}: modules {', '.join(modules(program))}")
    print(f"data      {', '.join(f'{size} {split}' for split, size in sizes.items())}")
    print(f"model     {settings.model.source}: {model}")
    _show(work(settings, sizes, len(modules(program)), prompt_tokens(program, examples)))
    _warn(settings)


def _show(planned: "list[Work]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Plan", caption="Tokens are estimates.")
    for name in ("stage", "what"):
        table.add_column(name)
    numbers = ("rollouts", "calls", "tokens_in", "tokens_out")
    for name in numbers:
        table.add_column(name, justify="right")
    for one in planned:
        table.add_row(one.stage, one.what, *(f"{getattr(one, name):,}" for name in numbers))
    table.add_section()
    table.add_row("total", "", *(f"{sum(getattr(one, name) for one in planned):,}" for name in numbers))
    Console().print(table)


def _warn(settings: "Settings") -> None:
    for warning in settings.warnings():
        print(f"warning: {warning}", file=sys.stderr)
