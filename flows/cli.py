"""The command `twofold`: what a person asks before and after a run."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from twofold.errors import TwofoldError

if TYPE_CHECKING:
    from twofold.plan import Work
    from twofold.programs import Pipeline
    from twofold.settings import Settings


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 2 for an error that the user can mend."""
    parser = argparse.ArgumentParser(prog="twofold", description="Trains language-model programs.")
    commands = parser.add_subparsers(required=True)
    _add_check(commands.add_parser("check", help="check settings, data and model, and show the plan of a run"))
    _add_preset(commands.add_parser("preset", help="write the settings file for a task and a model"))
    _add_pool(commands.add_parser("pool", help="the prompts that a training chose from: show, compare, restore"))
    _add_scaffolds(commands.add_parser("scaffolds", help="show what a teacher did for an input"))
    _add_champion(commands.add_parser("champion", help="show which result is in use, or go back to the one before"))
    _add_serve(commands.add_parser("serve", help="serve the settings' base model on this machine, for trying"))
    _add_export(commands.add_parser("export", help="write a strategy's result as a folder to ship"))
    options = vars(parser.parse_args(arguments))
    run = options.pop("run")
    try:
        run(**options)
    except TwofoldError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="settings file (%(default)s)")
    parser.set_defaults(run=check)


def _add_preset(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", help="helpdesk, banking77, hover, hotpotqa, papillon or papillon_offline")
    parser.add_argument("--model", default="smollm2", help="smollm2, qwen3-8b or llama3.1-8b (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("params.yaml"), help="file to write (%(default)s)")
    parser.set_defaults(run=write_preset)


def _add_pool(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True)
    show = actions.add_parser("show", help="every prompt, its state and its last visit")
    show.add_argument("folder", type=Path, help="such as outputs/weights/0-w/pool")
    show.add_argument("--round", type=int, help="as it was after this round (default: the last)")
    show.set_defaults(run=show_pool)
    diff = actions.add_parser("diff", help="the prompts whose state differs between two pools")
    for name in ("a", "b"):
        diff.add_argument(name, type=Path, help="folder of a pool")
        diff.add_argument(f"--round-{name}", type=int, help=f"{name} as it was after this round (default: the last)")
    diff.set_defaults(run=diff_pools)
    restore = actions.add_parser("restore", help="write the pool of an earlier round, to begin a training with")
    restore.add_argument("folder", type=Path, help="such as outputs/weights/0-w/pool")
    restore.add_argument("out", type=Path, metavar="OUT", help="folder to write, new or empty")
    restore.add_argument("--round", type=int, required=True, help="as it was after this round")
    restore.set_defaults(run=restore_pool)


def _add_scaffolds(parser: argparse.ArgumentParser) -> None:
    show = parser.add_subparsers(required=True).add_parser(
        "show", help="the hints for one input, and what became of it and its scaffolds"
    )
    show.add_argument("id", help="of the input, or of a scaffold of it")
    show.add_argument("folder", type=Path, help="what a training left, such as outputs/weights/0-w")
    show.set_defaults(run=show_scaffolds)


def _add_champion(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True)
    show = actions.add_parser("show", help="who is champion, and every decision about it")
    show.set_defaults(run=show_champion)
    back = actions.add_parser("rollback", help="put the previous champion back")
    back.set_defaults(run=roll_back)
    for action in (show, back):
        action.add_argument("--params", type=Path, default=Path("params.yaml"), help="settings file (%(default)s)")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=8000, help="on 127.0.0.1 (%(default)s)")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="settings file (%(default)s)")
    parser.set_defaults(run=serve)


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write, new or empty")
    parser.add_argument("--strategy", required=True, help="a strategy of the settings that has run")
    parser.add_argument("--merged", action="store_true", help="also write the whole weights, with the adapter")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="settings file (%(default)s)")
    parser.set_defaults(run=export_result)


def check(params: Path) -> None:
    """Check what a run needs, without running or downloading anything; print all settings and the plan."""
    # Imported here, so that --help does not wait for DSPy.
    from tempfile import TemporaryDirectory

    from twofold.examples import example_id, read_examples
    from twofold.models import folder_of, outlook
    from twofold.plan import prompt_tokens, work
    from twofold.pool import begin, read_pool
    from twofold.presets import as_yaml
    from twofold.programs import load_pipeline, modules
    from twofold.scaffolds import check_teacher
    from twofold.settings import load
    from twofold.sources import check as check_sources
    from twofold.splits import write_splits

    settings = load(params)
    pipeline = load_pipeline(settings.pipeline)
    with TemporaryDirectory() as scratch:
        sizes = write_splits(pipeline, settings, Path(scratch))
        examples = read_examples(Path(scratch) / "train.jsonl")
    if settings.teaches:
        check_teacher(settings.scaffold, pipeline, examples)
    if settings.scaffold and settings.scaffold.pool.start:
        begin(read_pool(Path(settings.scaffold.pool.start)), [example_id(example) for example in examples])
    program = pipeline.program()
    check_sources(settings.weights.sources, program)
    model = outlook(settings.model.source, folder_of(settings.model.source))
    print(as_yaml(settings))
    print(f"pipeline  {pipeline.path}: modules {', '.join(modules(program))}")
    print(f"data      {', '.join(f'{size} {split}' for split, size in sizes.items())}")
    print(f"model     {settings.model.source}: {model}")
    _show_endpoints(settings, pipeline)
    _show(work(settings, sizes, len(modules(program)), prompt_tokens(program, examples)))
    _warn(settings)


def write_preset(task: str, model: str, out: Path) -> None:
    """Write a settings file; one that is there already is never overwritten."""
    from twofold.errors import SettingsError
    from twofold.presets import as_yaml, preset

    text = as_yaml(preset(task, model))
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise SettingsError(f"{out}: {error.strerror}. Name another file with --out, or move this one away.") from error
    print(f"{out}: {task} with {model}. Look it over with: twofold check --params {out}")


def export_result(strategy: str, out: Path, params: Path, merged: bool) -> None:
    """Write a strategy's result to `out`, and print how to use it."""
    from transformers.utils import logging

    from twofold.export import export

    # Bars over the loading of weights would be most of what it prints.
    logging.disable_progress_bar()
    serve = export(strategy, out, params, merged)
    print(f"{out}: {strategy}. Its README.md says how to load it with DSPy and transformers. To serve it with vLLM:")
    print(serve)


def serve(port: int, params: Path) -> None:
    """Answer requests in OpenAI's form with the base model, until it is interrupted."""
    from twofold.models import fetch, folder_of
    from twofold.sampling.local import LocalEngine
    from twofold.serving import ModelServer
    from twofold.settings import load

    settings = load(params)
    folder = folder_of(settings.model.source)
    fetch(settings.model.source, folder)
    with ModelServer(LocalEngine(folder, settings), port, settings.sampling.max_tokens) as server:
        print(f"{settings.model.source} at {server.url}; Ctrl+C ends it.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def show_pool(folder: Path, round: int | None) -> None:
    """Print a pool."""
    from twofold import pool_view

    pool_view.show(folder, round)


def diff_pools(a: Path, b: Path, round_a: int | None, round_b: int | None) -> None:
    """Print what differs between two pools."""
    from twofold import pool_view

    pool_view.show_difference(a, b, round_a, round_b)


def restore_pool(folder: Path, out: Path, round: int) -> None:
    """Write a pool as it was."""
    from twofold import pool_view

    pool_view.restore(folder, round, out)


def show_scaffolds(id: str, folder: Path) -> None:
    """Print the lineage of an input."""
    from twofold import scaffold_view

    scaffold_view.show(id, folder)


def show_champion(params: Path) -> None:
    """Print who is champion, and the decisions that made it so."""
    from twofold import champion_view
    from twofold.settings import load

    champion_view.show(load(params).pipeline)


def roll_back(params: Path) -> None:
    """Put the previous champion back, also in MLflow."""
    from tasks import stage, tracking
    from twofold import champion
    from twofold.settings import load

    settings = load(params)
    with stage.alone("retraining", "rollback", "retrain"):
        decision = champion.rollback(settings.pipeline)
        tracking.follow(settings)
    print(f"{decision.candidate} is champion again, instead of {decision.champion}.")


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


def _show_endpoints(settings: "Settings", pipeline: "Pipeline") -> None:
    """A line for each server that is going to be asked; raises `SettingsError` when one or its key is missing."""
    from twofold.endpoints import key_of
    from twofold.servers import check_named

    check_named(settings.endpoints, pipeline.endpoints)
    if settings.prompts.proposer and any("p" in steps for steps in settings.strategies.values()):
        key_of(settings.prompts.proposer, "prompts.proposer")
    for section in ("endpoints", "hosted"):
        for name, one in getattr(settings, section).items():
            key_of(one, f"{section}.{name}")
            prices = f"{one.price_in:g} and {one.price_out:g} per million tokens in and out"
            print(f"{section:9} {name}: {one.model} at {one.base_url}, key {one.key or 'none'}, {prices}")


def _warn(settings: "Settings") -> None:
    for warning in settings.warnings():
        print(f"warning: {warning}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
