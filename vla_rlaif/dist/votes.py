"""The votes of the ends of a delivery. Ends answer every fraction of a second, so that one that is gone is noticed."""

import concurrent.futures
import time
from collections.abc import Callable, Mapping

from vla_rlaif.dist.answers import Answer, WorkerFailure, WorkerLate
from vla_rlaif.dist.staging import Vote

POLL_S = 0.1  # seconds that an end waits before it says "not yet"; it does nothing else that is urgent meanwhile

type Polls = Mapping[str, Answer[Vote | None]]


def collect_votes(
    first: Polls,
    again: Callable[[str], Answer[Vote | None]],
    *,
    doing: str,
    silent_s: float,
    timeout_s: float,
    until_failure: bool,
) -> dict[str, Vote | WorkerFailure]:
    """What became of each end, by name. One that is silent for ``silent_s``, or has not voted after ``timeout_s``, is
    late. ``until_failure``: return with the first failure, leaving out those who have not voted yet.
    """
    found: dict[str, Vote | WorkerFailure] = {}
    open_polls = dict(first)
    end = time.monotonic() + timeout_s
    heard = dict.fromkeys(first, time.monotonic())
    while open_polls:
        until = min(end, *(heard[name] + silent_s for name in open_polls))
        wait_s = max(0.0, until - time.monotonic())
        concurrent.futures.wait(open_polls.values(), wait_s, return_when=concurrent.futures.FIRST_COMPLETED)
        now = time.monotonic()
        for name, poll in list(open_polls.items()):
            outcome = _outcome(poll) if poll.done() else None
            if outcome is not None:
                found[name] = outcome
                del open_polls[name]
            elif now >= end or (not poll.done() and now >= heard[name] + silent_s):
                found[name] = WorkerLate(name, doing, timeout_s if now >= end else silent_s)
                del open_polls[name]
            elif poll.done():
                heard[name], open_polls[name] = now, again(name)
        if until_failure and not all(is_yes(outcome) for outcome in found.values()):
            break
    return {name: found[name] for name in first if name in found}


def is_yes(outcome: Vote | WorkerFailure) -> bool:
    return isinstance(outcome, Vote) and outcome.is_yes


def problem_of(outcome: Vote | WorkerFailure) -> str:
    return outcome.problem if isinstance(outcome, Vote) else str(outcome)


def _outcome(poll: Answer[Vote | None]) -> Vote | WorkerFailure | None:
    try:
        return poll.result()
    except WorkerFailure as failure:
        return failure
