"""Parts of the coordinator: the door for trajectories, workers' mail, evaluations, the events file."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envclient.base.errors import ConfigError, VenusError, WireError
from rollout.config import FactoryConfig
from rollout.coordinator.__main__ import load_tasks, open_events
from rollout.coordinator.evaluation import judge, mean_and_error, spread
from rollout.coordinator.intake import admit, as_event, find_fault
from rollout.coordinator.mailbox import Mailbox
from rollout.coordinator.source import TaskOrder
from rollout.protocol import PollRequest
from rollout.types import (
    PriorityClass,
    Purpose,
    ResumeWorker,
    StartTrajectory,
    Trajectory,
    TrajectoryStatus,
    TurnEnded,
    VersionSpan,
)
from tests.e2e.coordinator_world import ToyWorker, Wire, toy_trajectory

ORDER = StartTrajectory(
    worker="w0",
    trajectory_id="p000000.0.1.0",
    group_id="p000000.0",
    task_id="task0",
    purpose=Purpose.TRAIN,
    priority=PriorityClass.LOW,
)
GOOD = toy_trajectory(ORDER, [1, 2])


def changed(**changes: Any) -> Trajectory:
    return msgspec.structs.replace(GOOD, **changes)


def spans(*triples: tuple[int, int, int]) -> list[VersionSpan]:
    return [VersionSpan(start=a, end=b, version=v) for a, b, v in triples]


def test_a_sound_trajectory_passes_unchanged() -> None:
    assert admit(GOOD, ORDER, 2) is GOOD
    event = as_event(GOOD, "w0")
    assert (event.first_version, event.last_version, event.generated_tokens, event.turns) == (1, 2, 4, 2)
    assert event.context_tokens == len(GOOD.prompt_ids) + len(GOOD.response_ids) > event.generated_tokens


MALFORMED = {
    "another group": changed(group_id="p000001.0"),
    "another task": changed(task_id="task1"),
    "another purpose": changed(purpose=Purpose.EVAL),
    "mask too short": changed(loss_mask=[1, 1, 0, 1]),
    "log-probs too long": changed(logprobs=[*GOOD.logprobs, 0.0]),
    "spans cover too little": changed(spans=spans((0, 2, 1))),
    "spans cover an observation": changed(spans=spans((0, 5, 1))),
    "spans overlap": changed(spans=spans((0, 2, 1), (1, 5, 2))),
    "span out of range": changed(spans=spans((0, 2, 1), (3, 6, 2))),
    "empty span": changed(spans=spans((0, 0, 1), (0, 2, 1), (3, 5, 2))),
    "versions go back": changed(spans=spans((0, 2, 2), (3, 5, 1))),
    "version of the future": changed(spans=spans((0, 2, 1), (3, 5, 3))),
    "version below the first": changed(spans=spans((0, 2, -1), (3, 5, 2))),
    "log-prob of an observation": changed(logprobs=[-0.5, -0.25, -0.1, -1.0, -2.0]),
    "log-prob after the last span": changed(
        response_ids=[*GOOD.response_ids, 9], loss_mask=[*GOOD.loss_mask, 0], logprobs=[*GOOD.logprobs, -1.0]
    ),
    "log-prob above zero": changed(logprobs=[0.5, -0.25, 0.0, -1.0, -2.0]),
    "log-prob not a number": changed(logprobs=[math.nan, -0.25, 0.0, -1.0, -2.0]),
    "log-prob infinite": changed(logprobs=[-math.inf, -0.25, 0.0, -1.0, -2.0]),
    "reward not a number": changed(reward=math.nan),
    "negative token": changed(response_ids=[-1, 5, 6, 7, 8]),
    "no prompt": changed(prompt_ids=[]),
    "nothing generated": changed(spans=[], loss_mask=[0] * 5, logprobs=[0.0] * 5),
    "mask of another number": changed(loss_mask=[2, 1, 0, 1, 1]),
}


@pytest.mark.parametrize("trajectory", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_trajectory_fails_with_its_cause(trajectory: Trajectory) -> None:
    fault = find_fault(trajectory, ORDER, 2)
    assert fault
    admitted = admit(trajectory, ORDER, 2)
    assert admitted.status is TrajectoryStatus.FAILED
    event = as_event(admitted, "w0")
    assert (event.status, event.reward, event.generated_tokens) == (TrajectoryStatus.FAILED, 0.0, 0)
    assert fault in event.cause


def test_a_prompt_that_fills_the_context_is_truncated_and_keeps_its_reward() -> None:
    empty = changed(response_ids=[], loss_mask=[], logprobs=[], spans=[], reward=0.5, turns=0)
    assert "no generated token" in find_fault(empty, ORDER, 2)
    full = msgspec.structs.replace(empty, status=TrajectoryStatus.TRUNCATED)
    assert admit(full, ORDER, 2) is full
    event = as_event(full, "w0")
    assert (event.status, event.reward, event.generated_tokens) == (TrajectoryStatus.TRUNCATED, 0.5, 0)
    assert judge("e", 2, [full, GOOD], 2)["pass"] == (0.5 + GOOD.reward) / 2


def test_a_failed_trajectory_needs_no_tokens() -> None:
    failed = changed(
        status=TrajectoryStatus.FAILED,
        stop_reason="the sandbox is gone",
        response_ids=[],
        loss_mask=[],
        logprobs=[],
        spans=[],
    )
    assert find_fault(failed, ORDER, 2) == ""
    assert as_event(failed, "w0").cause == "the sandbox is gone"


# ------------------------------------------------------------------------------------------------------------ mail


def turn(n: int) -> TurnEnded:
    return TurnEnded(trajectory_id="t", turn=n, context_tokens=1, output_tokens=1, version=0)


def poll(first: int, count: int, acked: int) -> PollRequest:
    return PollRequest(
        worker="w0",
        first_report=first,
        reports=[turn(n) for n in range(first, first + count)],
        acked_command=acked,
        wait_s=0.0,
    )


def new_mailbox() -> Mailbox:
    client: Any = None
    return Mailbox(ToyWorker(Wire(client)).join_request(), 0.0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=20))
def test_reports_are_taken_once_and_in_order_however_polls_are_repeated(steps: list[tuple[int, int]]) -> None:
    mailbox, taken, sent = new_mailbox(), [], 0
    for back, count in steps:
        first = max(0, sent - back)
        taken += mailbox.take(poll(first, sent - first + count, 0))
        sent += count
        assert mailbox.take(poll(first, sent - first, 0)) == []
    assert [t.turn for t in taken if isinstance(t, TurnEnded)] == list(range(sent))


def test_commands_are_sent_again_until_acknowledged() -> None:
    mailbox = new_mailbox()
    commands = [ResumeWorker(worker="w0", version=n) for n in range(3)]
    for command in commands:
        mailbox.post(command)
    assert mailbox.reply().commands == commands
    mailbox.take(poll(0, 0, 2))
    assert (mailbox.reply().first_command, mailbox.reply().commands) == (2, commands[2:])
    mailbox.take(poll(0, 0, 1))  # an older poll, overtaken on the wire
    assert mailbox.reply().commands == commands[2:]


@pytest.mark.parametrize("request_", [poll(2, 1, 0), poll(0, 0, 1)], ids=["report skipped", "command never sent"])
def test_a_poll_of_another_process_is_refused(request_: PollRequest) -> None:
    with pytest.raises(WireError, match="w0"):
        new_mailbox().take(request_)


def test_a_waiting_poll_ends_by_a_command_a_newer_poll_or_its_time() -> None:
    async def scenario() -> None:
        mailbox = new_mailbox()
        first = asyncio.create_task(mailbox.wait_commands(30))
        await asyncio.sleep(0)
        second = asyncio.create_task(mailbox.wait_commands(30))
        await asyncio.wait_for(first, 5)
        assert not second.done()
        mailbox.post(ResumeWorker(worker="w0", version=1))
        await asyncio.wait_for(second, 5)
        await asyncio.wait_for(mailbox.wait_commands(30), 5)
        mailbox.take(poll(0, 0, 1))
        await mailbox.wait_commands(0.01)
        assert mailbox.reply().commands == []

    asyncio.run(scenario())


# ----------------------------------------------------------------------------------------------------- evaluations


@given(st.integers(1, 30), st.integers(1, 200))
def test_samples_are_spread_evenly(tasks: int, samples: int) -> None:
    ids = [f"t{i}" for i in range(tasks)]
    chosen = Counter(spread(ids, samples))
    assert sum(chosen.values()) == samples
    numbers = [chosen[i] for i in ids]
    assert max(numbers) - min(numbers) <= 1
    assert spread(ids, samples) == spread(ids, samples)


def test_no_held_out_tasks_is_one_clear_line() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.tasks"):
        spread([], 8)


def test_standard_error() -> None:
    mean, error = mean_and_error([1.0, 0.0, 0.0, 1.0, 1.0])
    assert mean == pytest.approx(0.6)
    assert error == pytest.approx(math.sqrt(0.3 / 5))  # unbiased variance of these five is 0.3


def test_failed_trajectories_are_not_zeros() -> None:
    failed = changed(status=TrajectoryStatus.FAILED, reward=0.0)
    row = judge("e", 4, [changed(reward=1.0), failed, changed(reward=1.0)], 3)
    assert (row["pass"], row["samples"], row["failed"]) == (1.0, 2, 1)
    with pytest.raises(VenusError, match="could be scored"):
        judge("e", 4, [failed], 1)


# ----------------------------------------------------------------------------------------------- source and events


def test_tasks_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(ConfigError, match="'b' twice"):
        TaskOrder(["a", "b", "b"], 0)
    with pytest.raises(ConfigError, match="no training task"):
        TaskOrder([], 0)


def test_digest_and_order_change_with_tasks_and_seed() -> None:
    tasks = [f"t{i}" for i in range(50)]
    one, two = TaskOrder(tasks, 0), TaskOrder(tasks, 1)
    assert one.digest == two.digest != TaskOrder(tasks[:-1], 0).digest
    assert [one.at(i) for i in range(50)] != [two.at(i) for i in range(50)]
    assert [one.at(i) for i in range(50)] != [one.at(i) for i in range(50, 100)]


@pytest.mark.parametrize("factory", ["nowhere.module:f", "tests.e2e.coordinator_world:nothing", "noColon", ""])
def test_an_unknown_task_factory_is_one_clear_line(factory: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.tasks\.factory"):
        load_tasks(FactoryConfig(factory=factory))


def test_wrong_arguments_of_the_task_factory_are_one_clear_line() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.tasks\.args"):
        load_tasks(FactoryConfig(factory="tests.e2e.coordinator_world:toy_tasks", args={"colour": 1}))


def test_a_torn_line_of_the_events_file_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"seq": 0}\n{"seq": 1}\n{"seq": 2, "no')
    writer, following = open_events(path)
    assert following == 2
    writer.write({"seq": 2})
    assert path.read_text() == '{"seq": 0}\n{"seq": 1}\n{"seq": 2}\n'
