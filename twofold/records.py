"""What a run writes down: calls, rollouts, groups, checkpoints.

Records are immutable. Rollouts, calls and groups are stored as Parquet (one row per record), manifests and
checkpoints as JSON. Every file carries the schema version it was written with; a file from a newer version, or one
that was cut off while it was written, is refused.
"""

import dataclasses
import json
import os
import typing
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from twofold.errors import RecordError

SCHEMA_VERSION = 2
"""Version 2 has `off_policy` in calls; before, no call was."""

Status = Literal["ok", "parse_error", "lm_error", "context_overflow", "timeout", "program_error"]
"""How a rollout ended; every status but `ok` is a failure with its own reward in the settings."""

FAILURES: tuple[Status, ...] = typing.get_args(Status)[1:]

BASE_POLICY = "base"
"""The policy name of the base model without an adapter."""

STUDENT = "student"
"""The source of rollouts that the program made which is trained."""

SHARED = "all-modules"
"""Name of the adapter that all modules share; no module can have it, for it is no Python name."""


def policy_of(module: str, policies: Mapping[str, str]) -> str:
    """The policy that answers for a module, out of policies by adapter name; the base model when there are none."""
    return policies.get(SHARED) or policies.get(module, BASE_POLICY)


@dataclass(frozen=True, slots=True)
class Call:
    """One answer of a language model inside a rollout, token in and token out.

    What is trained on is what was sampled: nothing here is ever rendered or tokenised again. The one exception is
    marked `off_policy`: a text of another program's LM, in the student's tokens, under the student's own prompt.
    """

    rollout_id: str
    module: str
    """Dotted path of the predictor in the program, such as `route` or `hops[0].query.predict`."""
    index: int
    """This is the k-th call of this module in this rollout, from 0."""
    order: int
    """Position among all calls of the rollout, from 0."""
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    """Sampled tokens, the end-of-sequence token included when it was sampled."""
    logprobs: tuple[float, ...]
    """Natural log-probability of each completion token under the distribution it was drawn from; empty when
    `off_policy`."""
    text: str
    finish_reason: str
    """`stop` when the model ended the answer, `length` when `max_tokens` did."""
    policy: str
    """Digest of the adapter that answered, or `base`; the source's name when `off_policy`."""
    temperature: float
    seed: int
    parsed: bool = True
    parsed_share: float = 1.0
    """Share of the output fields that could be read from `text`, 0 to 1; 1 exactly when `parsed`."""
    images: tuple[str, ...] = ()
    """Digests of the images in the prompt, in order."""
    off_policy: bool = False


@dataclass(frozen=True, slots=True)
class Rollout:
    """One run of the whole program on one example."""

    rollout_id: str
    example_id: str
    seed: int
    source: str
    """`student`, or the name of the teacher program that made it."""
    calls: tuple[Call, ...]
    output: dict[str, Any]
    """Fields of the final prediction (JSON values); empty when the program failed."""
    reward: float
    channels: dict[str, float] = field(default_factory=dict)
    """Named parts of the metric, such as `accuracy` and `format`."""
    status: Status = "ok"
    error: str = ""
    """For a failure: the kind and text of the exception."""
    usage: dict[str, float] = field(default_factory=dict)
    """What answers of endpoints came to: `NAME/calls`, `NAME/tokens_in`, `NAME/tokens_out` and `NAME/money`."""


@dataclass(frozen=True, slots=True)
class Member:
    """One rollout's part in a group."""

    rollout_id: str
    call_index: int
    """Index of the call among this module's calls in the rollout; -1 when the member is the whole rollout."""
    reward: float
    weight: float
    """How much this member counts in the group's mean, deviation and loss; copies of a rollout share 1."""
    advantage: float
    filled: bool = False
    """True for a stand-in: the rollout made no call at the group's index, and another of its calls was drawn."""


@dataclass(frozen=True, slots=True)
class Group:
    """Calls that are compared with each other: same example, same module, same index; or whole rollouts."""

    group_id: str
    example_id: str
    module: str
    """Dotted path of the predictor; empty for a group of whole rollouts."""
    index: int
    """The call index k; -1 for a group of whole rollouts."""
    members: tuple[Member, ...]
    mean: float
    std: float
    all_equal: bool
    """True when no member's reward differs: such a group has no gradient and is left out of the update."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder with adapters and all that training needs to go on from it."""

    path: str
    """Folder, relative to the run's work folder."""
    policies: dict[str, str]
    """Digest of each adapter, by the module it is for; `all-modules` when they share one."""
    round: int
    """Rounds of training done."""
    parents: dict[str, str]
    """Policies that these were trained from; empty for the base model."""
    digests: dict[str, str] = field(default_factory=dict)
    """Digests of what it came from: model, data, program, settings, groups."""
    metrics: dict[str, float] = field(default_factory=dict)


def of_student(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """The rollouts that no teacher program made: they alone say how good the student is."""
    return [rollout for rollout in rollouts if rollout.source == STUDENT]


def tokens_of(calls: Iterable[Call]) -> dict[str, int]:
    """How many tokens the calls were asked with, `tokens_in`, and answered with, `tokens_out`."""
    lengths = [(len(call.prompt_ids), len(call.completion_ids)) for call in calls]
    return {"tokens_in": sum(asked for asked, _ in lengths), "tokens_out": sum(answered for _, answered in lengths)}


def usage_of(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """What the endpoints' answers in all these rollouts came to: `endpoints/NAME/calls` and so on."""
    sums: Counter[str] = Counter()
    for rollout in rollouts:
        sums.update(rollout.usage)
    return {f"endpoints/{name}": float(value) for name, value in sums.items()}


def money_of(rollouts: Iterable[Rollout]) -> float:
    """What the endpoints' answers in all these rollouts cost at the settings' prices."""
    return sum((v for rollout in rollouts for k, v in rollout.usage.items() if k.endswith("/money")), 0.0)


_COLUMNS: dict[type, pa.Schema] = {
    Call: pa.schema(
        [
            ("rollout_id", pa.string()),
            ("module", pa.string()),
            ("index", pa.int32()),
            ("order", pa.int32()),
            ("prompt_ids", pa.list_(pa.int32())),
            ("completion_ids", pa.list_(pa.int32())),
            ("logprobs", pa.list_(pa.float64())),
            ("text", pa.string()),
            ("finish_reason", pa.string()),
            ("policy", pa.string()),
            ("temperature", pa.float64()),
            ("seed", pa.int64()),
            ("parsed", pa.bool_()),
            ("parsed_share", pa.float64()),
            ("images", pa.list_(pa.string())),
            ("off_policy", pa.bool_()),
        ]
    ),
    Rollout: pa.schema(
        [
            ("rollout_id", pa.string()),
            ("example_id", pa.string()),
            ("seed", pa.int64()),
            ("source", pa.string()),
            ("output", pa.string()),
            ("reward", pa.float64()),
            ("channels", pa.string()),
            ("status", pa.string()),
            ("error", pa.string()),
            ("usage", pa.string()),
        ]
    ),
    Group: pa.schema(
        [
            ("group_id", pa.string()),
            ("example_id", pa.string()),
            ("module", pa.string()),
            ("index", pa.int32()),
            (
                "members",
                pa.list_(
                    pa.struct(
                        [
                            ("rollout_id", pa.string()),
                            ("call_index", pa.int32()),
                            ("reward", pa.float64()),
                            ("weight", pa.float64()),
                            ("advantage", pa.float64()),
                            ("filled", pa.bool_()),
                        ]
                    )
                ),
            ),
            ("mean", pa.float64()),
            ("std", pa.float64()),
            ("all_equal", pa.bool_()),
        ]
    ),
}


_JSON = ("output", "channels", "usage")
"""Fields of a rollout that are written as JSON."""


def write_rollouts(rollouts: list[Rollout], folder: Path) -> None:
    """Write `rollouts.parquet` and `calls.parquet` into `folder`."""
    rows = [_row(rollout) | {name: _dumps(getattr(rollout, name)) for name in _JSON} for rollout in rollouts]
    _write_table(rows, Rollout, folder / "rollouts.parquet")
    _write_table([_row(call) for rollout in rollouts for call in rollout.calls], Call, folder / "calls.parquet")


def read_rollouts(folder: Path, only: Collection[str] | None = None) -> list[Rollout]:
    """Read what `write_rollouts` wrote.

    Args:
        only: ids of the rollouts to read; None reads all.

    Raises:
        RecordError: a file is missing, torn, or from a newer version.
    """
    calls: dict[str, list[Call]] = {}
    for row in _read_table(Call, folder / "calls.parquet", only):
        calls.setdefault(row["rollout_id"], []).append(Call(**{k: _frozen(v) for k, v in row.items()}))
    return [dataclasses.replace(one, calls=tuple(calls.get(one.rollout_id, ()))) for one in read_outcomes(folder, only)]


def read_outcomes(folder: Path, only: Collection[str] | None = None) -> list[Rollout]:
    """The rollouts without their calls, which are most of what there is to read; otherwise like `read_rollouts`."""
    return [
        Rollout(**{**row, "calls": (), **{name: json.loads(row[name]) for name in _JSON}})
        for row in _read_table(Rollout, folder / "rollouts.parquet", only)
    ]


def write_groups(groups: list[Group], path: Path) -> None:
    _write_table([dataclasses.asdict(group) for group in groups], Group, path)


def read_groups(path: Path) -> list[Group]:
    """Read what `write_groups` wrote; raises `RecordError` like `read_rollouts`."""
    return [
        Group(**{**row, "members": tuple(Member(**member) for member in row["members"])})
        for row in _read_table(Group, path)
    ]


def write_json(value: Any, path: Path) -> None:
    """Write a manifest (a dict or a record) so that a reader sees all of it or nothing."""
    content = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
    text = json.dumps({"schema_version": SCHEMA_VERSION, **content}, indent=2, sort_keys=True) + "\n"
    with _replacing(path) as aside:
        aside.write_bytes(text.encode())


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote, less the schema version; raises `RecordError` like `read_rollouts`."""
    try:
        content = json.loads(path.read_bytes())
        version = content.pop("schema_version")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(_torn(path, error)) from error
    _check_version(version, path)
    return content


def read_checkpoint(path: Path) -> Checkpoint:
    return Checkpoint(**read_json(path))


def _row(record: Call | Rollout) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.name != "calls"}


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _dumps(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def write_table(table: pa.Table, path: Path) -> None:
    """Write a table with the schema version, so that a reader sees all of it or nothing; equal ones as equal bytes."""
    versioned = table.replace_schema_metadata({"twofold_schema": str(SCHEMA_VERSION)})
    with _replacing(path) as aside:
        pq.write_table(versioned, aside, compression="zstd")


def read_table(schema: pa.Schema, kind: str, path: Path, rows: pc.Expression | None = None) -> pa.Table:
    """Read what `write_table` wrote; raises `RecordError` like `read_rollouts`, naming the `kind` of its records.

    Args:
        rows: which to read; None reads all.
    """
    try:
        table = pq.read_table(path, filters=rows)
        version = int(table.schema.metadata[b"twofold_schema"])
    except (OSError, pa.ArrowException, KeyError, TypeError) as error:
        raise RecordError(_torn(path, error)) from error
    _check_version(version, path)
    if version < 2 and schema is _COLUMNS[Call]:
        table = table.append_column(schema.field("off_policy"), pa.array([False] * len(table)))
    if table.schema.names != schema.names:
        raise RecordError(f"{path}: not a file of {kind} records. Its columns are {table.schema.names}.")
    return table


def _write_table(rows: list[dict[str, Any]], kind: type, path: Path) -> None:
    write_table(pa.Table.from_pylist(rows, schema=_COLUMNS[kind]), path)


def _read_table(kind: type, path: Path, rollouts: Collection[str] | None = None) -> list[dict[str, Any]]:
    rows = None if rollouts is None else pc.field("rollout_id").isin(pa.array(list(rollouts), pa.string()))
    return read_table(_COLUMNS[kind], kind.__name__, path, rows).to_pylist()


def _check_version(version: int, path: Path) -> None:
    if version > SCHEMA_VERSION:
        raise RecordError(
            f"{path} was written with schema {version}, this Twofold reads up to {SCHEMA_VERSION}. Update Twofold."
        )


def _torn(path: Path, error: Exception) -> str:
    if not path.exists():
        return f"{path} is missing. Run the stage that writes it again."
    return f"{path} cannot be read ({error}): it is torn or is no record file. Delete it and run its stage again."


class _replacing:
    """A path beside `path` to write to; it takes `path`'s place when the block ends without an error."""

    def __init__(self, path: Path):
        self.path = path
        self.aside = path.with_name(f".{path.name}.{os.getpid()}.part")

    def __enter__(self) -> Path:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self.aside

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            os.replace(self.aside, self.path)
        else:
            self.aside.unlink(missing_ok=True)
