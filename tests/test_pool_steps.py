"""The steps of a round with a pool, on rollouts written by hand; the flow that strings them together."""

from pathlib import Path

import dspy
import pytest
from prefect import flow

from tasks.candidate import Candidate
from tasks.collect import collect
from tasks.evaluate import evaluate
from tasks.group import group
from tasks.optimize import optimize
from tasks.pool import ANSWERS, DRAWN, draw, kept_in, select
from tasks.score import score
from tasks.step import Manifest, Step
from tasks.train import train
from twofold.asking import Answers, write_answers
from twofold.endpoints import Spent
from twofold.errors import RecordError
from twofold.examples import write_examples
from twofold.hints import Placed, read_hints
from twofold.leaks import Verdict
from twofold.pool import at_round, counts, read_pool
from twofold.pool_view import restore
from twofold.records import Call, Rollout, read_groups, read_json, read_rollouts, write_rollouts
from twofold.scaffolds import PROGRAM, Attempt, Hint, Scaffolding
from twofold.scores import of_examples, read_scores
from twofold.settings import Settings

MIXED, HARD, SOLVED = (0.0, 1.0), (0.0, 0.0), (1.0, 1.0)
CHECK = Verdict("effect", True)
ROUNDS = {"reserve_every": 2, "recheck_every": 3, "max_draws": 3}


def settings(arm: str = "filter_only", seed: int = 0, **pool: int) -> Settings:
    scaffold = {"arm": arm, "eps": {"visits_before_teacher": 1}, "pool": ROUNDS | pool}
    return Settings.model_validate({"seed": seed, "scaffold": scaffold, "weights": {"groups": {"size": 2}}})


def candidate() -> Candidate:
    """The base model, which no step here opens."""
    nothing = Manifest("nowhere", {})
    return Candidate("tiny", "code", nothing, nothing)


def data(names: str) -> Manifest:
    Path("data").mkdir(exist_ok=True)
    write_examples([dspy.Example(id=name).with_inputs("id") for name in names], Path("data/train.jsonl"))
    return Manifest.of(Path("data"))


def collected(folder: Path, rewards: dict[str, tuple[float, ...]]) -> Manifest:
    """Rollouts of one call each."""
    rollouts = []
    for example, own in rewards.items():
        for k, reward in enumerate(own):
            name = f"{folder.name}/{example}/{k}"
            call = Call(name, "answer", 0, 0, (1,), (2,), (-0.5,), "x", "stop", "base", 1.0, 0)
            rollouts.append(Rollout(name, example, 0, "student", (call,), {}, reward))
    write_rollouts(rollouts, folder)
    return Manifest.of(folder)


def round_of(
    chosen: Settings,
    source: Manifest,
    before: Manifest | None,
    number: int,
    answers: Manifest | None = None,
    **rewards: tuple[float, ...],
) -> tuple[dict[str, list[str]], Manifest]:
    """What the pool asks for, and what is selected when every example earns these rewards; all are visited at once.

    A scaffold earns what its original does under the name `hinted_NAME`.
    """
    folder = Path(f"round-{number}")

    def steps() -> tuple[dict[str, list[str]], Manifest]:
        drawn = draw(folder / "draw", settings=chosen, data=source, before=before, answers=answers, round_number=number)
        asked = read_json(drawn.folder / DRAWN)
        parts, shards = [], []
        for place in ("drawn", "due"):
            own = {name: rewards[f"hinted_{name[0]}" if "+" in name else name] for name in asked[place]}
            shards.append(collected(folder / place, own))
            parts.append(
                score(
                    folder / f"{place}-scores",
                    settings=chosen,
                    candidate=candidate(),
                    shards=shards[-1:],
                    round_number=number,
                )
            )
        kept = sorted(kept_in(parts[0], chosen))
        made = select(
            folder / "groups",
            settings=chosen,
            drawn=drawn,
            shards=shards,
            scored=parts,
            kept=kept,
            round_number=number,
        )
        return asked, made

    return flow(steps, name="test")()


def test_what_is_drawn_visited_and_kept_over_four_rounds(workplace: Path) -> None:
    source, chosen = data("abc"), settings()
    first = {"a": MIXED, "b": HARD, "c": SOLVED}
    asked, made = round_of(chosen, source, None, 0, **first)
    assert (sorted(asked["drawn"]), asked["due"]) == (["a", "b", "c"], [])
    assert {found.example_id for found in read_groups(made.folder / "groups.parquet")} == {"a"}
    assert len(read_rollouts(made.folder)) == 6
    assert made.metrics["reward"] == 0.5
    assert (made.metrics["kept"], made.metrics["drawn"], made.metrics["due"]) == (1, 3, 0)
    assert [made.metrics[f"visited/{name}"] for name in ("keep", "too_hard", "solved", "flat")] == pytest.approx(
        [1 / 3, 1 / 3, 1 / 3, 0]
    )
    actions = {row.example_id: row.action for row in of_examples(read_scores(made.folder / "scores.parquet"))}
    assert actions == {"a": "train", "b": "scaffold", "c": "retire"}
    # No arm has a teacher: what needs one waits in reserve.
    assert counts(read_pool(made.folder / "pool")) == {
        "active": 1, "queued": 0, "refresh": 0, "reserve": 1, "solved": 1, "suspect": 0,
    }  # fmt: skip
    # In round 2 reserve is due, in round 4 what was solved in round 1 as well.
    asked, made = round_of(chosen, source, made.part("pool"), 1, **first)
    assert asked == {"drawn": ["a"], "due": ["b"]}
    assert (made.metrics["reward"], made.metrics["due"]) == (0.5, 1)
    asked, made = round_of(chosen, source, made.part("pool"), 2, **first)
    assert asked == {"drawn": ["a"], "due": []}
    asked, made = round_of(chosen, source, made.part("pool"), 3, a=MIXED, b=MIXED, c=HARD)
    assert asked == {"drawn": ["a"], "due": ["b", "c"]}
    assert {found.example_id for found in read_groups(made.folder / "groups.parquet")} == {"a"}
    assert read_pool(made.folder / "pool").states() == {"a": "active", "b": "active", "c": "reserve"}


def test_the_groups_of_kept_inputs_are_those_of_a_round_without_a_pool(workplace: Path) -> None:
    source = data("abc")
    _, made = round_of(settings(), source, None, 0, a=MIXED, b=MIXED, c=HARD)
    kept = [one for one in read_rollouts(made.folder) if one.example_id != "c"]
    write_rollouts(kept, Path("kept"))

    def plain() -> Manifest:
        return group(Path("plain"), settings=settings(), shards=[Manifest.of(Path("kept"))], round_number=0)

    found = flow(plain, name="test")()
    assert found.outputs["groups.parquet"] == made.outputs["groups.parquet"]


def test_a_round_without_inputs_selects_nothing(workplace: Path) -> None:
    source, chosen = data("a"), settings()
    _, made = round_of(chosen, source, None, 0, a=SOLVED)
    asked, made = round_of(chosen, source, made.part("pool"), 1)
    assert asked == {"drawn": [], "due": []}
    assert read_groups(made.folder / "groups.parquet") == []
    assert "reward" not in made.metrics
    assert (made.metrics["kept"], made.metrics["visited/keep"], made.metrics["pool/solved"]) == (0, 0, 1)


def test_random_routing_keeps_as_many_as_eps_but_others(workplace: Path) -> None:
    source, rewards = data("abc"), {"a": MIXED, "b": HARD, "c": SOLVED}
    kept = set()
    for seed in range(6):
        _, made = round_of(settings("random_routing", seed), source, None, 0, **rewards)
        (one,) = {found.example_id for found in read_groups(made.folder / "groups.parquet")}
        pool = read_pool(made.folder / "pool")
        assert counts(pool)["solved"] == counts(pool)["reserve"] == 1
        assert pool.state(one) == "active"
        kept.add(one)
    assert len(kept) > 1


def taught(*prompt_ids: str, folder: str) -> Manifest:
    """A teacher's hints for these prompts, all admitted."""
    found = tuple(Scaffolding(name, (Attempt(Hint("Look.", "script", "v"), (CHECK,)),)) for name in prompt_ids)
    write_answers(Answers(found, dict.fromkeys(prompt_ids, PROGRAM), Spent(len(found))), Path(folder) / ANSWERS)
    return Manifest.of(Path(folder))


def test_a_hint_joins_is_trained_on_and_fades(workplace: Path) -> None:
    source, chosen = data("ab"), settings("whole")
    _, made = round_of(chosen, source, None, 0, a=HARD, b=MIXED)
    assert read_pool(made.folder / "pool").states() == {"a": "queued", "b": "active"}
    assert made.metrics["pool/queued"] == 1
    asked, made = round_of(chosen, source, made.part("pool"), 1, taught("a", folder="hints"), a=HARD, b=MIXED,
                           hinted_a=MIXED)  # fmt: skip
    # Round 2 refreshes at once, and looks at what is in reserve.
    assert (sorted(asked["drawn"]), asked["due"]) == (["a+1", "b"], ["a"])
    assert {found.example_id for found in read_groups(made.folder / "groups.parquet")} == {"a+1", "b"}
    numbers = [made.metrics[f"scaffolds/{name}"] for name in ("drawn", "useful", "gain")]
    assert numbers == pytest.approx([1, 1, 0.5], abs=1e-3)
    assert read_hints(made.folder / "pool") == {"a+1": Placed("a", "Look.", PROGRAM)}
    assert read_pool(made.folder / "pool").states() == {"a": "reserve", "b": "active", "a+1": "active"}
    asked, made = round_of(chosen, source, made.part("pool"), 2, a=MIXED, b=MIXED, hinted_a=MIXED)
    asked, made = round_of(chosen, source, made.part("pool"), 3, a=MIXED, b=MIXED, hinted_a=MIXED)
    # The original teaches by itself now: it comes back, and its scaffold leaves.
    assert asked["due"] == ["a"]
    assert read_pool(made.folder / "pool").states() == {"a": "active", "b": "active", "a+1": None}
    asked, made = round_of(chosen, source, made.part("pool"), 4, a=MIXED, b=MIXED)
    assert sorted(asked["drawn"]) == ["a", "b"]


def test_a_training_begins_with_a_restored_pool(workplace: Path) -> None:
    """With its states, hints and misses; the round after the restored one is round 1."""
    source, chosen = data("ab"), settings("whole")
    _, made = round_of(chosen, source, None, 0, a=HARD, b=MIXED)
    _, made = round_of(chosen, source, made.part("pool"), 1, taught("a", folder="hints"), a=HARD, b=SOLVED,
                       hinted_a=HARD)  # fmt: skip
    restore(made.folder / "pool", 2, Path("restored"))
    shown = read_pool(Path("restored"))
    assert shown.states() == {"a": "reserve", "b": "solved", "a+1": "queued"}
    asked, made = round_of(chosen, data("abc"), Manifest.of(Path("restored")), 0, c=SOLVED, hinted_a=MIXED)
    assert (sorted(asked["drawn"]), asked["due"]) == (["a+1", "c"], [])
    pool = read_pool(made.folder / "pool")
    assert pool.states() == {"a": "reserve", "b": "solved", "c": "solved", "a+1": "active"}
    assert at_round(pool, 0).states() == shown.states() | {"c": "active", "a+1": "active"}
    assert read_hints(made.folder / "pool") == {"a+1": Placed("a", "Look.", PROGRAM)}
    with pytest.raises(RecordError, match="1 prompts of the pool are no training examples: b"):
        round_of(chosen, data("a"), Manifest.of(Path("restored")), 0)


def test_a_round_looks_at_no_more_than_reserve_batch_again(workplace: Path) -> None:
    source, chosen = data("abc"), settings(reserve_batch=2)
    rewards = {"a": HARD, "b": HARD, "c": HARD}
    _, made = round_of(chosen, source, None, 0, **rewards)
    seen = []
    for number in (1, 2):
        asked, made = round_of(chosen, source, made.part("pool"), number, **rewards)
        seen.append(asked["due"])
    assert seen == [["a", "b"], ["c"]]


def test_scaffold_only_trains_on_all_it_draws(workplace: Path) -> None:
    source = data("abc")
    _, made = round_of(settings("scaffold_only"), source, None, 0, a=MIXED, b=HARD, c=SOLVED)
    assert {found.example_id for found in read_groups(made.folder / "groups.parquet")} == {"a", "b", "c"}
    assert read_pool(made.folder / "pool").states() == {"a": "active", "b": "queued", "c": "solved"}


@pytest.mark.parametrize("other", [collect, evaluate, group, optimize, train], ids=lambda step: step.name)
def test_settings_of_the_pool_are_in_no_other_steps_key(other: Step) -> None:
    without = settings().model_copy(update={"scaffold": None})
    assert other.key(settings=settings()) == other.key(settings=without)
