"""Episodes are written down once, read back whole, and say at every turn only what was known then."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

from envclient.base.errors import ConfigError
from rollout.policy.jobs import Job, JobGroup
from rollout.policy.lengths import OnlineLengths
from rollout.predictor.agreement import spearman
from rollout.predictor.collect import coding_sessions, collect, main
from rollout.predictor.data import draw, is_held_out, make_samples, read_samples, window
from rollout.predictor.episodes import EpisodeLog, EpisodeRow, read_episodes
from rollout.types import (
    AnyCommand,
    AnyEvent,
    ClosePrompt,
    EventRow,
    PriorityClass,
    PromptStatus,
    Purpose,
    RunStarted,
    StartTrajectory,
    StepFinished,
    Tick,
    Trajectory,
    TrajectoryEnded,
    TrajectoryStatus,
    TurnEnded,
    VersionSpan,
)
from tests.unit.predictor_kit import episode, told_episodes


def trajectory(name: str, status: TrajectoryStatus = TrajectoryStatus.FINISHED) -> Trajectory:
    return Trajectory(
        trajectory_id=name,
        group_id=name.rsplit(".", 2)[0],
        task_id="task",
        purpose=Purpose.TRAIN,
        status=status,
        stop_reason="done",
        prompt_ids=[5, 6],
        response_ids=[7, 8, 9, 10],
        loss_mask=[1, 1, 0, 1],
        logprobs=[-1.0, -1.0, 0.0, -1.0],
        spans=[VersionSpan(start=0, end=2, version=0), VersionSpan(start=3, end=4, version=0)],
        turns=2,
        reward=1.0,
    )


class Run:
    """Rows as the coordinator's shell hands them on."""

    def __init__(self, folder: Path, keep_steps: int = 0) -> None:
        self.log = EpisodeLog(folder, keep_steps)
        self.seq = 0
        self.row(RunStarted(version=0))

    def row(self, event: AnyEvent, *commands: AnyCommand) -> None:
        self.log.follow(EventRow(seq=self.seq, now=float(self.seq), event=event, commands=list(commands)))
        self.seq += 1

    def start(self, name: str, purpose: Purpose = Purpose.TRAIN) -> None:
        order = StartTrajectory(
            worker="w0",
            trajectory_id=name,
            group_id=name.rsplit(".", 2)[0],
            task_id="task",
            purpose=purpose,
            priority=PriorityClass.LOW,
        )
        self.row(Tick(), order)

    def play(self, name: str, status: TrajectoryStatus = TrajectoryStatus.FINISHED, *, train: bool = True) -> None:
        self.start(name, Purpose.TRAIN if train else Purpose.EVAL)
        for number, (context, output) in enumerate([(2, 2), (5, 1)], start=1):
            self.row(
                TurnEnded(trajectory_id=name, turn=number, context_tokens=context, output_tokens=output, version=0)
            )
        self.log.reported(trajectory(name, status))
        ended = TrajectoryEnded(
            trajectory_id=name,
            worker="w0",
            status=status,
            reward=1.0,
            first_version=0,
            last_version=0,
            generated_tokens=3,
            turns=2,
        )
        self.row(ended)


def test_scored_training_episodes_are_written_with_their_turns(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.play("p0.0.0.0")
    run.play("p0.0.1.0", TrajectoryStatus.FAILED)
    run.play("e0.0.0.0", train=False)
    run.play("p0.0.2.0", TrajectoryStatus.TRUNCATED)
    run.start("p0.0.3.0")
    run.row(Tick(), ClosePrompt(prompt_id="p0", group_id="p0.0", status=PromptStatus.ACCEPTED, cause="", step=1))
    assert run.log._open == {}, "nothing is kept of a group that is closed"
    first, second = read_episodes(tmp_path)
    assert (first.trajectory_id, second.trajectory_id) == ("p0.0.0.0", "p0.0.2.0")
    assert first.token_ids == [5, 6, 7, 8, 9, 10]
    assert [(t.context_tokens, t.output_tokens) for t in first.turns] == [(2, 2), (5, 1)]
    assert (first.started_seq, [t.seq for t in first.turns], first.ended_seq) == (1, [2, 3], 4)


def test_a_cut_line_is_left_out_and_old_steps_are_forgotten(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_steps=2)
    for step in range(1, 4):
        run.play(f"p{step}.0.0.0")
        run.row(StepFinished(step=step))
    run.play("p9.0.0.0")
    run.log.close()
    files = sorted(path.name for path in (tmp_path / "predictor").iterdir())
    assert files == ["episodes-000002.jsonl", "episodes-000003.jsonl"]
    assert [row.trajectory_id for row in read_episodes(tmp_path)] == ["p3.0.0.0", "p9.0.0.0"]
    newest = tmp_path / "predictor" / files[-1]
    newest.write_bytes(newest.read_bytes()[:-5])
    assert [row.trajectory_id for row in read_episodes(tmp_path)] == ["p3.0.0.0"]
    newest.write_bytes(b"{}\n")
    with pytest.raises(ConfigError, match=r"episodes-000003.jsonl:1: .*trajectory_id"):
        read_episodes(tmp_path)
    with pytest.raises(ConfigError, match=r"rollout.predictor.record=true"):
        read_episodes(tmp_path / "nowhere")


def test_a_sample_knows_nothing_of_later() -> None:
    """Two siblings: the first has ended before the second one's last turn, and counts from then on only."""
    rows = [
        episode("a", group="g", started=0, turns=[(2, 3), (4, 5)]),
        episode("b", group="g", started=1, turns=[(3, 7), (9, 1)]),
    ]
    a, b = make_samples(rows)
    assert [(t.turn, t.generated_tokens, t.remaining_tokens, t.context_tokens) for t in a.turns] == [
        (0, 0, 8, 4),
        (1, 3, 5, 7),
        (2, 8, 0, 15),
    ]
    assert [(t.siblings, t.siblings_tokens) for t in b.turns] == [(0, 0.0), (0, 0.0), (1, 8.0)]


def by_hand(rows: list[EpisodeRow]) -> list[float]:
    """Embedded estimates of episodes that follow one another, fed to the estimator as the policies feed it."""
    size = max(Counter(row.group_id for row in rows).values())
    lengths, groups, said = OnlineLengths(growth_tokens=1000), dict[str, JobGroup](), list[float]()
    for row in rows:
        group = groups.setdefault(row.group_id, JobGroup(order=len(groups), group_id=row.group_id, size=size))
        job = Job(trajectory_id=row.trajectory_id, group=group, member=0, worker="w0")
        job.context_tokens = group.prompt_tokens = row.turns[0].context_tokens
        for place, turn in enumerate([None, *row.turns]):
            if turn is not None:
                job.turns, job.context_tokens = place, turn.context_tokens + turn.output_tokens
                job.output_tokens += turn.output_tokens
            lengths.observe(job)
            said.append(lengths.estimate(job)[0])
        group.finished_tokens.append(job.output_tokens)
        lengths.finished(job, job.output_tokens)
    return said


def test_the_embedded_estimate_is_the_live_one() -> None:
    rows = told_episodes(40)
    said = [turn.embedded_tokens for sample in make_samples(rows) for turn in sample.turns]
    assert said == by_hand(rows)
    assert len(set(said[-40:])) > 10, "it has learnt to tell them apart"


def test_who_has_finished_says_how_long_the_others_are() -> None:
    """Groups of eight alike, all at the same pace: after 16 turns of about 40 the estimate orders what is to come."""
    rng = np.random.default_rng(7)
    rows = []
    for number in range(60):
        shared = rng.standard_normal()
        for member in range(8):
            turns = max(1, round(40 * math.exp(0.5 * (0.8 * shared + 0.6 * rng.standard_normal()))))
            said = np.ceil(np.exp(5 + rng.standard_normal(turns))).astype(int).tolist()
            row = episode(f"t{number}.{member}", group=f"g{number}", started=0, turns=[(0, 1)] * turns)
            paced = [
                msgspec.structs.replace(turn, seq=number * 400 + 16 * place + 2 * member, output_tokens=tokens)
                for place, (turn, tokens) in enumerate(zip(row.turns, said, strict=True))
            ]
            end = paced[-1].seq + 1
            rows.append(msgspec.structs.replace(row, started_seq=number * 400, turns=paced, ended_seq=end))
    later = [turn for sample in make_samples(rows)[160:] for turn in sample.turns if turn.turn in (16, 24, 32)]
    truth, estimates = (
        np.array([getattr(turn, name) for turn in later]) for name in ("remaining_tokens", "embedded_tokens")
    )
    assert spearman(truth, estimates) > 0.37, "0.40; by the mean length of those alone it is 0.32"


def test_who_begins_late_is_not_taken_for_one_that_is_nearly_through() -> None:
    """Members of groups of eight side by side: whoever is left of one has little before it; a resampled one has all."""
    rng = np.random.default_rng(3)
    lengths = OnlineLengths(growth_tokens=1000)
    for number in range(80):
        shared = rng.standard_normal()
        ends = sorted(max(1, round(40 * math.exp(0.5 * (shared + 0.6 * rng.standard_normal())))) for _ in range(8))
        group = JobGroup(order=number, group_id=f"g{number}", size=8, prompt_tokens=100)
        jobs = [Job(trajectory_id=f"{number}.{m}", group=group, member=m, worker="w0") for m in range(8)]
        for turn in range(max(ends) + 1):
            for job, end in zip(jobs, ends, strict=True):
                if turn <= end:
                    job.turns, job.output_tokens, job.context_tokens = turn, 200 * turn, 100 + 300 * turn
                    lengths.observe(job)
                if turn == end:
                    group.finished_tokens.append(job.output_tokens)
                    lengths.finished(job, job.output_tokens)

    def estimate(finished: int, turns: int) -> float:
        group = JobGroup(order=99, group_id="g", size=8, prompt_tokens=100, finished_tokens=[8000] * finished)
        late = Job(trajectory_id="late", group=group, member=7, worker="w0", context_tokens=100 + 300 * turns)
        late.turns, late.output_tokens = turns, 200 * turns
        return lengths.estimate(late)[0]

    assert estimate(7, 0) > 0.6 * estimate(0, 0), "as long as its siblings were"
    assert estimate(7, 35) < 0.7 * estimate(0, 35)


def test_the_coding_sessions_are_episodes_without_text() -> None:
    found = coding_sessions()
    assert len(found) == len({sample.group_id for sample in found}) == 460
    assert all(sample.token_ids == [] and sample.turns[-1].remaining_tokens == 0 for sample in found)
    contexts = [turn.context_tokens for turn in found[0].turns]
    assert contexts == sorted(contexts)


def test_tasks_are_held_out_by_name() -> None:
    names = [f"task{number}" for number in range(2000)]
    held = [name for name in names if is_held_out(name)]
    assert 0.22 < len(held) / len(names) < 0.28
    judges = [name for name in names if draw(name, "judge") < 0.25]
    assert 0.04 < len(set(held) & set(judges)) / len(names) < 0.085, "another salt draws independently"


def test_a_window_keeps_both_ends() -> None:
    assert window([1, 2, 3], 4) == [1, 2, 3]
    assert window(list(range(100)), 8) == [0, 1, 94, 95, 96, 97, 98, 99]


def test_a_growing_windows_prefix_stays() -> None:
    """Three of four turns of a long episode read what the turn before read, and go on from there."""
    text, limit, kept = list(range(1000)), 64, 0
    read = window(text[:100], limit)
    for end in range(104, 1000, 4):
        before, read = read, window(text[:end], limit)
        assert read[:16] == text[:16] and read[-1] == text[end - 1]
        assert limit // 2 < len(read) <= limit
        kept += read[: len(before)] == before
    assert kept == 225 * 3 // 4


def test_collect_writes_what_train_and_evaluate_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path)
    run.play("p0.0.0.0")
    out = tmp_path / "samples.jsonl"
    assert main([str(tmp_path), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert said == f"{out}: 1 episodes of 1 tasks, 3 samples; held out: 0 episodes of 0 tasks\n"
    assert read_samples(out) == collect([tmp_path])
    with pytest.raises(ConfigError, match="--sessions alone"):
        main([str(tmp_path), "--sessions", "--out", str(out)])
    with pytest.raises(ConfigError, match=r"rollout.predictor.collect"):
        read_samples(tmp_path / "none.jsonl")
