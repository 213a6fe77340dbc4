"""A pipeline's data as files: the splits that every stage reads."""

from pathlib import Path

from twofold.arrivals import arrived
from twofold.errors import PipelineError
from twofold.examples import example_id, write_examples
from twofold.programs import Pipeline
from twofold.settings import Settings

SPLITS = ("train", "dev", "test")


def write_splits(pipeline: Pipeline, settings: Settings, folder: Path) -> dict[str, int]:
    """Write `train.jsonl`, `dev.jsonl` and `test.jsonl`, cut as `settings.data` says; returns each one's size.

    What arrived since the pipeline's data were made follows its train examples.

    Raises:
        PipelineError: the pipeline gives something else, a split is empty, or an example is in two splits.
    """
    loaded = pipeline.load(settings)
    if len(loaded) != len(SPLITS):
        raise PipelineError(f"{pipeline.path}: `load` must return train, dev and test, not {len(loaded)} parts.")
    seen: dict[str, str] = {}
    sizes = {}
    for split, examples in zip(SPLITS, loaded, strict=True):
        kept = examples[: getattr(settings.data, split)]
        if split == "train" and kept:
            kept = [*kept, *arrived(pipeline.name, kept[0].inputs().keys())]
        write_examples(kept, folder / f"{split}.jsonl")
        for name in map(example_id, kept):
            if name in seen:
                raise PipelineError(f"{pipeline.path}: example {name} is both in {seen[name]} and in {split}.")
            seen[name] = split
        sizes[split] = len(kept)
    return sizes
