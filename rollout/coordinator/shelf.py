"""The shelf: whole trajectories between a worker's report and the trainer's step.

The dispatcher decides on ids alone; here are the tokens that belong to them. A trajectory is kept from its report until
the dispatcher drops it, or until its group's prompt is closed; a report that nobody ordered is not kept at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from envclient.base.errors import InvariantError
from rollout.types import SealGroup, StartTrajectory, TrainGroup, TrainSequence, Trajectory


@dataclass(frozen=True, kw_only=True)
class SealedGroup:
    """A ready group with the records it was made of."""

    seal: SealGroup
    members: tuple[Trajectory, ...]
    sealed_at: float
    """Seconds on the coordinator's clock."""

    def for_step(self, step: int) -> TrainGroup:
        """The group as the trainer takes it."""
        return TrainGroup(
            group_id=self.seal.group_id,
            prompt_id=self.seal.prompt_id,
            task_id=self.seal.task_id,
            step=step,
            sequences=[
                TrainSequence(
                    trajectory_id=t.trajectory_id,
                    prompt_ids=t.prompt_ids,
                    response_ids=t.response_ids,
                    loss_mask=t.loss_mask,
                    logprobs=t.logprobs,
                    spans=t.spans,
                    advantage=advantage,
                    reward=t.reward,
                )
                for t, advantage in zip(self.members, self.seal.advantages, strict=True)
            ],
        )


class Shelf:
    """Owner of the trajectories' tokens."""

    def __init__(self) -> None:
        self._orders: dict[str, StartTrajectory] = {}
        self._loose: dict[str, Trajectory] = {}
        self._of_group: dict[str, set[str]] = {}
        self._sealed: dict[str, SealedGroup] = {}

    def __len__(self) -> int:
        return len(self._loose) + sum(len(g.members) for g in self._sealed.values())

    def expect(self, order: StartTrajectory) -> None:
        """A worker was told to run this trajectory."""
        self._orders[order.trajectory_id] = order
        self._of_group.setdefault(order.group_id, set()).add(order.trajectory_id)

    def order(self, trajectory_id: str) -> StartTrajectory | None:
        """The command that started a trajectory whose report is still welcome."""
        return self._orders.get(trajectory_id)

    def put(self, trajectory: Trajectory) -> bool:
        """Keep a reported trajectory. False, and nothing changes, when nobody ordered it or it is a repeat."""
        trajectory_id = trajectory.trajectory_id
        if trajectory_id not in self._orders or trajectory_id in self._loose:
            return False
        self._loose[trajectory_id] = trajectory
        return True

    def drop(self, trajectory_ids: Iterable[str]) -> list[Trajectory]:
        """Forget these trajectories; returns those that were reported."""
        dropped = []
        for trajectory_id in trajectory_ids:
            order = self._orders.pop(trajectory_id, None)
            if order is None:
                continue
            siblings = self._of_group[order.group_id]
            siblings.discard(trajectory_id)
            if not siblings:
                del self._of_group[order.group_id]
            trajectory = self._loose.pop(trajectory_id, None)
            if trajectory is not None:
                dropped.append(trajectory)
        return dropped

    def seal(self, command: SealGroup, now: float) -> None:
        """Make a sealed group of its members.

        Raises:
            InvariantError: a member was never reported.
        """
        members = self.drop(command.members)
        if len(members) != len(command.members):
            missing = sorted(set(command.members) - {t.trajectory_id for t in members})
            raise InvariantError(f"group {command.group_id} is sealed, but its member {missing[0]} is not here")
        self._sealed[command.group_id] = SealedGroup(seal=command, members=tuple(members), sealed_at=now)

    def sealed(self, group_id: str) -> SealedGroup:
        """The sealed group `group_id`."""
        try:
            return self._sealed[group_id]
        except KeyError:
            raise InvariantError(f"group {group_id} is handed out, but it is not sealed") from None

    def close(self, group_id: str) -> SealedGroup | None:
        """Forget all of a group; returns it when it was sealed."""
        self.drop(list(self._of_group.get(group_id, ())))
        return self._sealed.pop(group_id, None)
