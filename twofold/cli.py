"""The command `twofold`: what a person asks before and after a run."""

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
    preset_parser = commands.add_parser("preset", help="write the settings file for a task and a model")
    preset_parser.add_argument("task", help="such as helpdesk")
    preset_parser.add_argument("--model", default="smollm2", help="smollm2, qwen3-8b or llama3.1-8b (%(default)s)")
    preset_parser.add_argument("--out", type=Path, default=Path("params.yaml"), help="file to write (%(default)s)")
    _add_pool(commands.add_parser("pool", help="show the prompts that a training chose from"))
    _add_scaffolds(commands.add_parser("scaffolds", help="show what a teacher did for an input"))
    options = parser.parse_args(arguments)
    try:
        if options.command == "check":
            check(options.params)
        elif options.command == "pool":
            look_at_pool(options)
        elif options.command == "scaffolds":
            look_at_scaffolds(options)
        else:
            write_preset(options.task, options.model, options.out)
    except TwofoldError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def check(params: Path) -> None:
    """Check what a run needs, without running or downloading anything; print all settings and the plan."""
    # Imported here, so that --help does not wait for DSPy.
    from tempfile import TemporaryDirectory

    from twofold.examples import read_examples
    from twofold.models import folder_of, outlook
    from twofold.plan import prompt_tokens, work
    from twofold.presets import as_yaml
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
    print(as_yaml(settings))
    print(f"pipeline  {pipeline.path}: modules {', '.join(modules(program))}")
    print(f"data      {', '.join(f'{size} {split}' for split, size in sizes.items())}")
    print(f"model     {settings.model.source}: {model}")
    _show(work(settings, sizes, len(modules(program)), prompt_tokens(program, examples)))
    _warn(settings)


def write_preset(task: str, model: str, path: Path) -> None:
    """Write a settings file; one that is there already is never overwritten."""
    from twofold.errors import SettingsError
    from twofold.presets import as_yaml, preset

    text = as_yaml(preset(task, model))
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise SettingsError(
            f"{path}: {error.strerror}. Name another file with --out, or move this one away."
        ) from error
    print(f"{path}: {task} with {model}. Look it over with: twofold check --params {path}")


def look_at_pool(options: argparse.Namespace) -> None:
    """Print a pool, or what differs between two."""
    from twofold import pool_view

    if options.action == "show":
        pool_view.show(options.folder, options.round)
    else:
        pool_view.show_difference(options.a, options.b, options.round_a, options.round_b)


def look_at_scaffolds(options: argparse.Namespace) -> None:
    """Print the lineage of an input."""
    from twofold import scaffold_view

    scaffold_view.show(options.id, options.folder)


def _add_scaffolds(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    show = actions.add_parser("show", help="the hints for one input, and what became of it and its scaffolds")
    show.add_argument("id", help="of the input, or of a scaffold of it")
    show.add_argument("folder", type=Path, help="what a training left, such as outputs/weights/0-w")


def _add_pool(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    show = actions.add_parser("show", help="every prompt, its state and its last visit")
    show.add_argument("folder", type=Path, help="such as outputs/weights/0-w/pool")
    show.add_argument("--round", type=int, help="as it was after this round (default: the last)")
    diff = actions.add_parser("diff", help="the prompts whose state differs between two pools")
    for name in ("a", "b"):
        diff.add_argument(name, type=Path, help="folder of a pool")
        diff.add_argument(f"--round-{name}", type=int, help=f"{name} as it was after this round (default: the last)")


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
