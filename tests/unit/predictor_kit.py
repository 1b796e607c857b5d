"""Made-up episodes for tests of the predictor: the prompt's second token says how long an episode will be."""

from __future__ import annotations

import random

from rollout.predictor.episodes import EpisodeRow, TurnRow

STOP = 2


def episode(
    name: str, *, group: str, started: int, turns: list[tuple[int, int]], prompt: int = 4, task: str = "t", gap: int = 3
) -> EpisodeRow:
    """`turns`: (number of the event, output tokens); it ends with the event after its last turn."""
    rows, context = [], prompt
    for seq, output in turns:
        rows.append(TurnRow(seq=seq, context_tokens=context, output_tokens=output))
        context += output + gap
    return EpisodeRow(
        trajectory_id=name,
        group_id=group,
        task_id=task,
        started_seq=started,
        ended_seq=turns[-1][0] + 1,
        token_ids=list(range(5, 5 + context - gap)),
        turns=rows,
    )


def told_episodes(tasks: int, *, members: int = 2, seed: int = 0) -> list[EpisodeRow]:
    """Tasks of 1 to 4 turns of 6 tokens; the text tells which, the siblings of a later start do too."""
    rng = random.Random(seed)
    rows, seq = [], 0
    for task in range(tasks):
        kind = rng.randrange(4)
        for member in range(members):
            turns = [(seq + 1 + turn, 6) for turn in range(kind + 1)]
            row = episode(f"p{task}.0.{member}.0", group=f"p{task}.0", started=seq, turns=turns, task=f"task{task}")
            seq = row.ended_seq + 1
            noise = [rng.randrange(40, 60) for _ in row.token_ids]
            noise[1] = 20 + kind
            rows.append(
                EpisodeRow(**{name: getattr(row, name) for name in row.__struct_fields__} | {"token_ids": noise})
            )
    return rows
