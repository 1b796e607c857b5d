"""Episodes as samples: what was known after each turn, and what was still to come.

A sample's text is the context up to the turn's end; beside it stand the numbers that simpler estimates use: siblings
that had finished by then, and what the embedded estimator (`rollout.policy.lengths`) said, which is run here over the
same stream of events in the order in which they came. Tasks, not episodes, are split: a held-out task was never
trained on, whichever run it comes from.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from envclient.base.errors import ConfigError
from envclient.base.files import write_atomic
from rollout.policy.jobs import Job, JobGroup
from rollout.policy.lengths import OnlineLengths
from rollout.predictor.episodes import EpisodeRow
from rollout.types import Record

HELD_OUT_SHARE = 0.25
_GROWTH_TOKENS = 1000
"""What the embedded estimator takes for a length before it has seen any, as `rollout.policy.growth_tokens`."""


class TurnSample(Record, frozen=True, kw_only=True):
    """What was known when a turn had ended; turn 0 is the prompt alone."""

    turn: int
    context_tokens: int
    """Length of the text: the episode's first so many tokens."""
    generated_tokens: int
    remaining_tokens: int
    """Still to be generated: the target."""
    siblings: int
    """Members of the group that had finished."""
    siblings_tokens: float
    """Mean of what those have generated in all; 0 without any."""
    embedded_tokens: float
    """Remaining tokens as the embedded estimator saw it then."""


class EpisodeSamples(Record, frozen=True, kw_only=True):
    """An episode's samples, which share its tokens."""

    trajectory_id: str
    group_id: str
    task_id: str
    held_out: bool
    token_ids: list[int]
    turns: list[TurnSample]


def draw(task_id: str, salt: str = "") -> float:
    """A number in [0, 1) that is random among tasks and depends on the name alone: the same in every run."""
    digest = hashlib.blake2b(f"{salt}{task_id}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def is_held_out(task_id: str) -> bool:
    """Whether the task is for evaluation only."""
    return draw(task_id) < HELD_OUT_SHARE


def window(token_ids: Sequence[int], limit: int) -> list[int]:
    """At most `limit` tokens of a context: what it begins with (the task) and what it ends with (where it stands).

    What is left out grows in steps of a quarter of `limit`, so that most turns only add to what was read at the turn
    before, and find it in the engine's prefix cache.
    """
    if len(token_ids) <= limit:
        return list(token_ids)
    head = step = max(1, limit // 4)
    begin = -(-(len(token_ids) - (limit - head)) // step) * step
    return [*token_ids[:head], *token_ids[begin:]]


def make_samples(episodes: Iterable[EpisodeRow]) -> list[EpisodeSamples]:
    """Samples of one run's episodes, in the order in which these ended."""
    return _Stream(episodes).run()


class _Stream:
    """The episodes' events once more, one by one, past an embedded estimator."""

    def __init__(self, episodes: Iterable[EpisodeRow]) -> None:
        self._episodes = sorted(episodes, key=lambda episode: episode.ended_seq)
        # Some groups are not whole here: they had begun before the files, or had not ended with them.
        self._group_size = max(Counter(episode.group_id for episode in self._episodes).values(), default=1)
        self._lengths = OnlineLengths(growth_tokens=_GROWTH_TOKENS)
        self._groups: dict[str, JobGroup] = {}
        self._jobs: dict[str, Job] = {}
        self._samples: dict[str, list[TurnSample]] = {}

    def run(self) -> list[EpisodeSamples]:
        events = []
        for number, episode in enumerate(self._episodes):
            events.append((episode.started_seq, number, 0))
            events += [(turn.seq, number, place) for place, turn in enumerate(episode.turns, start=1)]
            events.append((episode.ended_seq, number, -1))
        for _, number, place in sorted(events):
            episode = self._episodes[number]
            if place < 0:
                self._end(episode)
            elif place == 0:
                self._start(episode)
            else:
                self._turn(episode, place)
        return [
            EpisodeSamples(
                trajectory_id=episode.trajectory_id,
                group_id=episode.group_id,
                task_id=episode.task_id,
                held_out=is_held_out(episode.task_id),
                token_ids=episode.token_ids,
                turns=self._samples[episode.trajectory_id],
            )
            for episode in self._episodes
        ]

    def _start(self, episode: EpisodeRow) -> None:
        group = self._groups.setdefault(
            episode.group_id, JobGroup(order=len(self._groups), group_id=episode.group_id, size=self._group_size)
        )
        job = Job(trajectory_id=episode.trajectory_id, group=group, member=0, worker="")
        job.context_tokens = group.prompt_tokens = episode.turns[0].context_tokens
        self._jobs[episode.trajectory_id] = job
        self._samples[episode.trajectory_id] = []
        self._look(episode, job)

    def _turn(self, episode: EpisodeRow, place: int) -> None:
        job, turn = self._jobs[episode.trajectory_id], episode.turns[place - 1]
        job.turns = place
        job.context_tokens = turn.context_tokens + turn.output_tokens
        job.output_tokens += turn.output_tokens
        self._look(episode, job)

    def _look(self, episode: EpisodeRow, job: Job) -> None:
        self._lengths.observe(job)
        done = job.group.finished_tokens
        total = sum(turn.output_tokens for turn in episode.turns)
        self._samples[episode.trajectory_id].append(
            TurnSample(
                turn=job.turns,
                context_tokens=job.context_tokens,
                generated_tokens=job.output_tokens,
                remaining_tokens=total - job.output_tokens,
                siblings=len(done),
                siblings_tokens=sum(done) / len(done) if done else 0.0,
                embedded_tokens=self._lengths.estimate(job)[0],
            )
        )

    def _end(self, episode: EpisodeRow) -> None:
        job = self._jobs.pop(episode.trajectory_id)
        job.group.finished_tokens.append(job.output_tokens)
        self._lengths.finished(job, job.output_tokens)
        self._lengths.dropped(job)


def write_samples(samples: Iterable[EpisodeSamples], path: Path) -> None:
    """One JSON object an episode."""
    write_atomic(path, b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples))


def read_samples(path: Path) -> list[EpisodeSamples]:
    """What `write_samples` wrote.

    Raises:
        ConfigError: no such file, or a line that is no sample, by number.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file", "make it with python -m rollout.predictor.collect")
    decoder = msgspec.json.Decoder(EpisodeSamples)
    samples = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            samples.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}:{number}: {error}", "was it written by this version?") from None
    return samples
