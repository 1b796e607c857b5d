"""PURE: version spans, promotion, and which groups must have a place in which batch (paper §4.2).

The version span of a trajectory is last − first + 1 over its generated tokens; more than S is discarded, S is promoted.
A trajectory in flight is judged by the version at its start, a lower bound of its first token's version.
"""

from __future__ import annotations

from collections.abc import Iterable


def version_span(first_version: int, last_version: int) -> int:
    """Number of weight versions sampled under; 0 for a trajectory without generated tokens (first_version −1)."""
    return 0 if first_version < 0 else last_version - first_version + 1


def is_promoted(oldest_version: int, version: int, max_span: int) -> bool:
    """Whether `version` is the last one that a trajectory begun at `oldest_version` may sample under."""
    return version - oldest_version + 1 >= max_span


def is_stale(oldest_version: int, version: int, max_span: int) -> bool:
    """Whether sampling under `version` would make the span larger than S."""
    return version - oldest_version + 1 > max_span


def is_overdue(admitted_version: int, version: int, max_span: int) -> bool:
    """Whether a group of which nothing has started was passed over so long that it comes before all others. [R]

    The paper promotes by the age of tokens: a group that is never started has none, and an order by length would pass
    it over for ever.
    """
    return version - admitted_version >= 2 * max_span


def leaves_room_for_older(
    oldest_version: int, older: Iterable[tuple[int, int]], *, free: int, step: int, batch: int, max_span: int
) -> bool:
    """Whether a ready group may take one of `free` places of `step`'s batch and older ones are still served in time.

    A group whose oldest version is v must be in the batch of step v + S or an earlier one, or its trajectories outlive
    their span. Fresher groups may pass it only while places remain: for each deadline d before the candidate's own,

        |groups not handed out with deadline ≤ d| ≤ free − 1 + B · (d − step).

    With S = 2 only d = step binds and this is the paper's rule: a promoted group (at its last valid version) has a
    place in the current batch. For larger S [R] that rule alone would let too many deadlines meet in one batch.

    Args:
        oldest_version: of the candidate.
        older: (oldest version, number of groups not handed out), ascending.
    """
    must_be_in = 0
    for version, groups in older:
        if version >= oldest_version:
            break
        must_be_in += groups
        deadline = max(version + max_span, step)
        if must_be_in > free - 1 + batch * (deadline - step):
            return False
    return True
