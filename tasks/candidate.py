"""What a step samples from: a program, and the weights under it."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import dspy
from transformers.utils import logging

from tasks import WORK
from tasks.step import Manifest
from twofold import digests, policy, programs, servers
from twofold.records import BASE_POLICY, SHARED
from twofold.sampling import Engine
from twofold.sampling.local import LocalEngine
from twofold.sampling.vllm import VLLMEngine
from twofold.servers import Server
from twofold.settings import Settings

if TYPE_CHECKING:
    from twofold.trainer import Trainer

ASKED = WORK / "endpoints"
"""Where endpoints' answers are kept: what was once asked and paid stays, whatever else changes."""


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
    """Trained adapters; None for the base model."""
    hosted: tuple[str | float, ...] = ()
    """Name of the endpoint in `settings.hosted` that answers instead of the model, and what its answers depend on."""

    def open_program(self) -> dspy.Module:
        program = programs.load_pipeline(self.pipeline).program()
        programs.load_state(program, self.program.folder / programs.STATE)
        return program

    @property
    def adapters(self) -> dict[str, Path]:
        """Folders of the adapters, by module or for all modules; none for the base model."""
        return policy.adapters_in(self.checkpoint.folder) if self.checkpoint else {}

    @property
    def policy(self) -> str:
        """One name for the weights: `base`, the digest of the adapter, or one digest of the adapters of all modules."""
        names = {name: policy.digest(folder) for name, folder in self.adapters.items()}
        if len(names) > 1:
            return digests.short(digests.of_json(names))
        return next(iter(names.values()), BASE_POLICY)

    def open_engine(self, settings: Settings) -> tuple[Engine | Server, dict[str, str]]:
        """What can answer for this candidate, and the policies to ask it for, by adapter."""
        if self.hosted:
            return _hosted(settings, self.hosted[0]), {}
        engine = _engine(self.model.folder, settings)
        return engine, {name: engine.load(folder) for name, folder in self.adapters.items()}

    def open_endpoints(self, settings: Settings) -> dict[str, dspy.LM]:
        """The LMs that the program and its metric ask by name."""
        return _endpoints(settings, programs.load_pipeline(self.pipeline).endpoints)

    def open_trainer(self, settings: Settings) -> "Trainer":
        """A trainer that goes on from this candidate's weights."""
        shared = settings.weights.adapters == "shared"
        names = (SHARED,) if shared else tuple(programs.modules(self.open_program()))
        trainer = _trainer(self.model.folder, settings, names)
        trainer.open(self.checkpoint.folder if self.checkpoint else None)
        return trainer


# Bars over the loading of weights would be most of what a stage prints.
logging.disable_progress_bar()


# Models are heavy: one engine and one trainer live as long as the process, whatever steps ask for them.
@lru_cache(maxsize=1)
def _engine(model: Path, settings: Settings) -> Engine:
    if settings.sampling.engine == "vllm":
        return VLLMEngine(model, settings)
    return LocalEngine(model, settings)


@lru_cache(maxsize=1)
def _endpoints(settings: Settings, needed: tuple[str, ...]) -> dict[str, dspy.LM]:
    return servers.connect(settings.endpoints, needed, ASKED)


@lru_cache(maxsize=1)
def _hosted(settings: Settings, name: str) -> Server:
    return servers.hosted(name, settings.hosted[name], ASKED)


@lru_cache(maxsize=1)
def _trainer(model: Path, settings: Settings, adapters: tuple[str, ...]) -> "Trainer":
    # TRL takes seconds to import, and most stages train nothing.
    from twofold.trainer import Trainer

    return Trainer(model, settings, adapters)
