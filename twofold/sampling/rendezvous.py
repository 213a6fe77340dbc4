"""Batches that do not depend on timing.

The rollouts of a shard run each in a thread of its own and meet here whenever they need an answer:

1. A rollout enters before it starts and leaves when it has ended, however it ended.
2. A request waits until every rollout that is still in has a request waiting.
3. All waiting requests then form one batch, in rollout order; the thread that completed it takes it to the engine.
4. Every waiting thread goes on with its own answer.

No timer takes part, so a fast machine and a slow one form the same batches. A rollout that itself runs several threads
counts as waiting as soon as one of them waits; which of its requests share a batch then depends on timing, what each
of them is answered does not (a draw depends on its own seed and prompt).

A rollout that runs without asking for anything would block the others for ever. So each has a `Stopwatch` that counts
the seconds it spends itself and the seconds the engine works for it, not those it waits for its neighbours. Whoever
runs the shard makes a rollout that is out of time leave.
"""

import threading
import time
from dataclasses import dataclass

from twofold.errors import TwofoldError
from twofold.sampling import Completion, Engine, Refusal, SampleRequest

Answer = Completion | Refusal | BaseException


class Stopwatch:
    """Counts down the seconds that a rollout may spend; it runs from the beginning, unless paused."""

    def __init__(self, seconds: float):
        # Seconds left when it last changed, and when it was set running, if it is. One attribute, so that a thread
        # that looks while another one pauses sees a whole state.
        self._state: tuple[float, float | None] = (seconds, time.monotonic())

    @property
    def left(self) -> float:
        """Seconds that remain; negative when more were spent than allowed."""
        left, since = self._state
        return left if since is None else left - (time.monotonic() - since)

    @property
    def expired(self) -> bool:
        """Out of time, and not just waiting for an answer."""
        left, since = self._state
        return since is not None and time.monotonic() - since >= left

    def pause(self) -> None:
        self._state = (self.left, None)

    def resume(self, spent: float = 0.0) -> None:
        """Run on, `spent` seconds poorer."""
        self._state = (self.left - spent, time.monotonic())


@dataclass(slots=True, eq=False)
class _Ticket:
    """A request and, later, its answer."""

    order: int
    request: SampleRequest
    answer: Answer | None = None


class Rendezvous:
    """Where the rollouts of one shard wait for each other; see the module's text.

    Args:
        engine: answers the batches, one at a time.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._changed = threading.Condition()
        self._live: dict[int, Stopwatch] = {}
        self._waiting: list[_Ticket] = []
        self._sampling = False
        self.failure: TwofoldError | None = None
        """What the engine raised that somebody must mend first: more than a failure of the rollouts that asked."""

    def enter(self, order: int, stopwatch: Stopwatch) -> None:
        """Count rollout `order` in. Enter all rollouts of a shard before the first one starts."""
        with self._changed:
            self._live[order] = stopwatch

    def leave(self, order: int) -> None:
        """Stop counting rollout `order` in; requests it still makes are refused. Leaving twice is harmless."""
        with self._changed:
            self._live.pop(order, None)
            for ticket in self._waiting:
                if ticket.order == order:
                    ticket.answer = _late()
            self._waiting = [ticket for ticket in self._waiting if ticket.order != order]
            self._changed.notify_all()

    def sample(self, order: int, request: SampleRequest) -> Completion | Refusal:
        """The answer to a request of rollout `order`, once its batch was full and sampled.

        A rollout that has left or is out of time gets a `timeout` refusal. What the engine raises is raised here, in
        every thread whose request was in the batch.
        """
        ticket = _Ticket(order, request)
        self._admit(ticket)
        while ticket.answer is None:
            if batch := self._next_batch(ticket):
                self._answer(batch)
        if isinstance(ticket.answer, BaseException):
            raise ticket.answer
        return ticket.answer

    def _admit(self, ticket: _Ticket) -> None:
        with self._changed:
            stopwatch = self._live.get(ticket.order)
            if stopwatch is None or stopwatch.expired:
                ticket.answer = _late()
            else:
                stopwatch.pause()
                self._waiting.append(ticket)

    def _next_batch(self, ticket: _Ticket) -> list[_Ticket]:
        """Wait for an answer to `ticket` (then the batch is empty) or for a full batch, and take it."""
        with self._changed:
            self._changed.wait_for(lambda: ticket.answer is not None or self._is_full())
            if ticket.answer is not None:
                return []
            batch = sorted(self._waiting, key=lambda t: (t.order, t.request.prompt_ids, t.request.seed))
            self._waiting = []
            self._sampling = True
            return batch

    def _is_full(self) -> bool:
        return not self._sampling and self._live.keys() <= {ticket.order for ticket in self._waiting}

    def _answer(self, batch: list[_Ticket]) -> None:
        start = time.monotonic()
        answers: list[tuple[_Ticket, Answer]]
        try:
            answers = list(zip(batch, self._engine.sample([ticket.request for ticket in batch]), strict=True))
        except BaseException as error:
            self.failure = error if isinstance(error, TwofoldError) else self.failure
            answers = [(ticket, error) for ticket in batch]
        with self._changed:
            for ticket, answer in answers:
                ticket.answer = answer
            for order in {ticket.order for ticket in batch} & self._live.keys():
                self._live[order].resume(spent=time.monotonic() - start)
            self._sampling = False
            self._changed.notify_all()


def _late() -> Refusal:
    return Refusal("timeout", "The rollout asked for an answer after its time was over. See sampling.timeout.")
