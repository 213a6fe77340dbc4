"""What a step samples from: a program, and the weights under it."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import dspy
from transformers.utils import logging

from tasks.step import Manifest
from twofold import programs
from twofold.records import BASE_POLICY
from twofold.sampling.local import LocalEngine
from twofold.settings import Settings
from twofold.trainer import ADAPTER, Trainer

STATE = "program.json"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A program with its weights, by digest: small enough to be an input of a step."""

    pipeline: str
    code: str
    """Digest of the pipeline's file."""
    program: Manifest
    """A folder with `program.json`: instructions and demos."""
    model: Manifest
    checkpoint: Manifest | None = None
    """A trained adapter; None for the base model."""

    def open_program(self) -> dspy.Module:
        program = programs.load_pipeline(self.pipeline).program()
        programs.load_state(program, self.program.folder / STATE)
        return program

    def open_engine(self, settings: Settings) -> tuple[LocalEngine, str]:
        """An engine that can answer for this candidate, and the policy to ask it for."""
        engine = _engine(self.model.folder, settings)
        return engine, engine.load(self.checkpoint.folder / ADAPTER) if self.checkpoint else BASE_POLICY

    def open_trainer(self, settings: Settings) -> Trainer:
        """A trainer that goes on from this candidate's weights."""
        trainer = _trainer(self.model.folder, settings)
        trainer.open(self.checkpoint.folder if self.checkpoint else None)
        return trainer


# Bars over the loading of weights would be most of what a stage prints.
logging.disable_progress_bar()


# Models are heavy: one engine and one trainer live as long as the process, whatever steps ask for them.
@lru_cache(maxsize=1)
def _engine(model: Path, settings: Settings) -> LocalEngine:
    return LocalEngine(model, settings)


@lru_cache(maxsize=1)
def _trainer(model: Path, settings: Settings) -> Trainer:
    return Trainer(model, settings)
