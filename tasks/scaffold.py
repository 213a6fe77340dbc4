"""The teacher's two steps in a round: ask for hints for the queue of the pool, and let the student try them.

`ask` needs the teacher alone, so that it can run beside the training of the round's batch. `trial` samples with the
weights that this training ends with, and the cores are the trainer's until then: so it comes after.
"""

from pathlib import Path

from tasks.candidate import Candidate
from tasks.pool import ANSWERS, POOL
from tasks.score import SCORES
from tasks.step import Manifest, step
from twofold import asking, rollouts
from twofold.asking import Answers, Case, Kept, cases_of, kept_ledger, read_answers, since, write_answers
from twofold.endpoints import Spent
from twofold.examples import example_id, read_examples
from twofold.hints import Prompt, read_hints
from twofold.pool import read_pool
from twofold.programs import Pipeline, load_pipeline
from twofold.records import Rollout, money_of, of_student, read_rollouts, tokens_of, usage_of, write_rollouts
from twofold.scaffolds import WHERE, make_teacher
from twofold.scores import read_scores
from twofold.settings import Settings
from twofold.trials import Trial, again, try_hints


@step(reads=("scaffold.teacher", "scaffold.gate"))
def ask(
    folder: Path,
    *,
    settings: Settings,
    candidate: Candidate,
    data: Manifest,
    grouped: Manifest,
    tried: Manifest | None,
    spent: Spent,
) -> dict[str, float]:
    """Write what a teacher answered for each prompt in the queue, and what the text checks say of it.

    Finished answers lie beside the folder, where a step that starts again after a kill finds them.

    Args:
        grouped: the round's rollouts, scores and pool.
        tried: an earlier answer of this round; only those whose hint the student refused are asked for again.
        spent: by the teacher so far.
    """
    pipeline = load_pipeline(candidate.pipeline)
    scaffold, kept = settings.scaffold, folder.parent / "answers"
    ledger = kept_ledger(kept, scaffold, spent)
    before = {one.prompt_id: one for one in read_answers(tried.folder / ANSWERS).scaffoldings} if tried else {}
    cases = _cases(settings, pipeline, data, grouped)
    open_cases = [case for name, case in cases.items() if not tried or again(before[name], scaffold.teacher.retries)]
    teacher = Kept(make_teacher(scaffold.teacher, pipeline, ledger, WHERE), kept, scaffold)
    answered = asking.ask(open_cases, teacher, scaffold, pipeline.hint_field, before)
    found = before | {one.prompt_id: one for one in answered}
    places = {name: case.place for name, case in cases.items()}
    write_answers(Answers(tuple(found.values()), places, ledger.spent), folder / ANSWERS)
    return {"money": since(ledger.spent, spent)["teacher/money"]}


@step(
    reads=(
        "seed",
        "model.device",
        "model.dtype",
        "sampling",
        "rewards",
        "weights.draw",
        "scaffold.eps",
        "scaffold.teacher",
        "scaffold.gate",
        "asked",
    )
)
def trial(
    folder: Path,
    *,
    settings: Settings,
    candidate: Candidate,
    data: Manifest,
    grouped: Manifest,
    asked: Manifest,
    names: list[str | int],
) -> dict[str, float]:
    """Write the answers with what the student made of their hints, and its rollouts.

    Args:
        candidate: the student.
        names: begin the rollouts' ids and name their seeds; the trial comes after them.
    """
    pipeline = load_pipeline(candidate.pipeline)
    engine, policies = candidate.open_engine(settings)
    endpoints, program = candidate.open_endpoints(settings), candidate.open_program()

    def run(kind: Trial, prompts: list[Prompt], count: int) -> list[Rollout]:
        jobs = rollouts.plan_prompts(prompts, count, settings.seed, *names, kind)
        draw = settings.weights.draw
        return rollouts.run(program, jobs, pipeline.metric, engine, settings, draw, policies, endpoints=endpoints)

    answers = read_answers(asked.folder / ANSWERS)
    cases = _cases(settings, pipeline, data, grouped)
    judged, made = try_hints(cases, answers.scaffoldings, settings.scaffold, pipeline.hint_field, run)
    write_answers(Answers(tuple(judged), answers.places, answers.spent), folder / ANSWERS)
    write_rollouts(made, folder)
    tokens = tokens_of(call for rollout in made for call in rollout.calls)
    retries = settings.scaffold.teacher.retries
    open_again = sum(again(one, retries) for one in judged)
    return {
        "rollouts": float(len(made)),
        "money": money_of(made),
        **usage_of(made),
        "again": float(open_again),
        **{name: float(count) for name, count in tokens.items()},
    }


def _cases(settings: Settings, pipeline: Pipeline, data: Manifest, grouped: Manifest) -> dict[str, Case]:
    """The queue of the round's pool, by prompt."""
    examples = {example_id(example): example for example in read_examples(data.folder / "train.jsonl")}
    pool = grouped.folder / POOL
    rows, tried = read_scores(grouped.folder / SCORES), of_student(read_rollouts(grouped.folder))
    found = cases_of(read_pool(pool), read_hints(pool), examples, tried, rows, settings.scaffold, pipeline.hint_field)
    return {case.prompt_id: case for case in found}
