"""What a training learns from beside its own student: teacher programs, by digest."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from tasks.candidate import Candidate
from tasks.step import Manifest
from twofold import sources
from twofold.endpoints import Ledger
from twofold.programs import STATE
from twofold.settings import AskedEndpoint, Draw, Settings

WHERE = "weights.sources"


@dataclass(frozen=True, slots=True)
class Source:
    """A teacher program: small enough to be an input of a step."""

    name: str
    rollouts: int
    """Of each example."""
    program: Manifest | None
    """A folder with `program.json`; None for the student's own."""
    lm: AskedEndpoint | None
    """None for the base model."""

    def open(self, candidate: Candidate, settings: Settings, draw: Draw, ledger: Ledger) -> sources.Source:
        """The program in the candidate's place; what its LM costs is charged to the ledger."""
        if self.lm:
            lm_of = sources.endpoint_lms(self.lm, f"{WHERE}.{self.name}.lm", ledger)
        else:
            engine, _ = candidate.open_engine(settings)
            lm_of = sources.local_lms(engine, draw, settings.sampling.max_tokens, ledger)
        own = replace(candidate, program=self.program) if self.program else candidate
        return sources.Source(self.name, own.open_program(), lm_of)


def sources_of(settings: Settings, candidate: Candidate, folder: Path) -> list[Source]:
    """The sources of a training, their programs copied into `folder`, so that none changes on the way.

    Raises:
        PipelineError: a program is missing, or differs from the candidate's in its structure.
        SettingsError: the environment lacks an endpoint's key.
    """
    wanted = settings.weights.sources
    sources.check(wanted, candidate.open_program())
    made = []
    for source in wanted:
        program = _copied(Path(source.program), folder / source.name) if source.program else None
        made.append(Source(source.name, settings.weights.rollouts_by_source[source.name], program, source.lm))
    return made


def _copied(program: Path, folder: Path) -> Manifest:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(program, folder / STATE)
    return Manifest.of(folder)
