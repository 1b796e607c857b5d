"""The coordinator's HTTP endpoints: every request of `rollout.protocol`, put to the shell.

An endpoint answers after what it caused is durable. All of them may be called again with the same request: a lost reply
costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import FastAPI

from envclient.base.errors import ConfigError, WireError
from envclient.base.wire import endpoint, make_app
from rollout.config import CoordinatorConfig, RunConfig
from rollout.coordinator.evaluation import spread
from rollout.coordinator.mailbox import Mailbox
from rollout.coordinator.shell import Shell, eval_reply
from rollout.protocol import (
    AckRequest,
    Empty,
    EvaluateReply,
    EvaluateRequest,
    JoinRequest,
    NextGroupRequest,
    PollReply,
    PollRequest,
    Status,
    StepRequest,
    SyncBeginReply,
    SyncBeginRequest,
    SyncEndRequest,
)
from rollout.types import (
    EvalRequested,
    GroupAcknowledged,
    GroupRequested,
    NextGroup,
    NoGroupYet,
    StepFinished,
    SyncFinished,
    SyncRequested,
    WorkerJoined,
    WorkerLost,
)


@dataclass(frozen=True, kw_only=True)
class Service:
    """What the endpoints need."""

    shell: Shell
    run: RunConfig
    config: CoordinatorConfig
    eval_ids: Sequence[str]

    # -------------------------------------------------------------------------------------------------- workers

    async def join(self, request: JoinRequest) -> Empty:
        """A worker process is ready. One that joins under a taken name replaces it: the earlier one is lost."""
        shell = self.shell
        waiting, joined = shell.joining.get(request.worker), shell.mailboxes.get(request.worker)
        if waiting is not None and waiting.join == request:
            await shell.submit()
        elif joined is None or joined.join != request or not joined.untouched:
            shell.joining[request.worker] = Mailbox(request, shell.clock())
            event = WorkerJoined(
                worker=request.worker,
                slots=request.slots,
                version=request.version,
                capabilities=request.capabilities,
                kv_tokens=request.kv_tokens,
                host_kv_tokens=request.host_kv_tokens,
            )
            if joined is not None:
                await shell.submit(WorkerLost(worker=request.worker, cause="it was restarted and joins again"), event)
            else:
                await shell.submit(event)
        return Empty()

    async def poll(self, request: PollRequest) -> PollReply:
        """Take a worker's reports; answer with its commands, at once when it brought reports, else when there are
        some, or empty after `wait_s` seconds or when a newer poll comes."""
        shell = self.shell
        shell.waiters.check()
        mailbox = shell.mailboxes.get(request.worker)
        if mailbox is None:
            raise WireError(f"worker {request.worker} has not joined, or counts as lost", "restart it")
        mailbox.last_poll = shell.clock()
        mailbox.release()
        reports = mailbox.take(request)
        if reports:
            taken = mailbox.taken
            await shell.submit(*[shell.as_event(report, request.worker) for report in reports])
            mailbox.durable = max(mailbox.durable, taken)
        else:
            await mailbox.wait_commands(min(request.wait_s, self.config.worker_timeout_s / 2))
        shell.waiters.check()
        mailbox.last_poll = shell.clock()
        return mailbox.reply()

    # ---------------------------------------------------------------------------------------------------- actor

    async def next_group(self, request: NextGroupRequest) -> NextGroup:
        """The replica's next group of the step, or the end of the batch."""
        future = self.shell.waiters.open(("group", request.replica, request.step))
        await self.shell.submit(GroupRequested(step=request.step, replica=request.replica))
        answer = await self.shell.waiters.wait(future, request.wait_s)
        return NoGroupYet(step=request.step) if answer is None else answer

    async def ack(self, request: AckRequest) -> Empty:
        """The replica has the group's gradient."""
        await self.shell.submit(
            GroupAcknowledged(
                step=request.step, replica=request.replica, group_id=request.group_id, tokens=request.tokens
            )
        )
        return Empty()

    async def step(self, request: StepRequest) -> Empty:
        """The optimizer step is made."""
        self.shell.tracker.report(request.step, request.metrics)
        await self.shell.submit(StepFinished(step=request.step, skipped=request.skipped))
        return Empty()

    async def sync_begin(self, request: SyncBeginRequest) -> SyncBeginReply:
        """Answered when every worker is paused."""
        future = self.shell.waiters.open(("sync", request.version))
        await self.shell.submit(SyncRequested(version=request.version))
        return await self.shell.waiters.wait(future)

    async def sync_end(self, request: SyncEndRequest) -> Empty:
        """Answered when every worker samples under the new version."""
        shell = self.shell
        if shell.dispatcher.version < request.version:
            # A repeated request must not lose a worker that has joined again meanwhile.
            lost = {} if shell.sync_is_ending(request.version) else request.lost
            future = shell.sync_ends(request.version, request.seconds)
            losses = [WorkerLost(worker=worker, cause=cause) for worker, cause in lost.items()]
            await shell.submit(*losses, SyncFinished(version=request.version))
            await shell.waiters.wait(future)
        return Empty()

    async def evaluate(self, request: EvaluateRequest) -> EvaluateReply:
        """Play the held-out tasks under the current version; one that is done already is answered from its record."""
        shell = self.shell
        for row in shell.tracker.evaluations:
            if (row["eval_id"], row["version"]) == (request.eval_id, request.version):
                return eval_reply(row)
        if request.version != shell.dispatcher.version:
            raise ConfigError(
                f"evaluation {request.eval_id} of version {request.version}, but workers hold "
                f"{shell.dispatcher.version}",
                "sync the weights first",
            )
        task_ids = spread(self.eval_ids, self.run.eval_samples)
        future = shell.waiters.open(("eval", request.eval_id))
        await shell.submit(EvalRequested(eval_id=request.eval_id, task_ids=task_ids))
        return await shell.waiters.wait(future)

    # ------------------------------------------------------------------------------------------------- launcher

    async def status(self, request: Empty) -> Status:
        """What goes on; never waits."""
        del request
        shell = self.shell
        numbers = shell.dispatcher.statistics()
        return Status(
            step=shell.ledger.last_step,
            steps=self.run.steps,
            version=shell.dispatcher.version,
            workers=len(shell.mailboxes),
            groups_ready=int(numbers["groups_ready"] + numbers["groups_taken"]),
            groups_running=int(numbers["groups_running"]),
            trajectories_done=shell.progress.trajectories,
            trajectories_running=int(numbers["trajectories_running"]),
            turns_done=shell.progress.turns,
            counts=shell.ledger.counts,
            phase=shell.dispatcher.phase,
            failure=shell.failure,
        )


def build_app(service: Service, token: str) -> FastAPI:
    """The service's HTTP app."""
    app = make_app("coordinator", token)
    endpoint(app, "/v1/worker/join", JoinRequest)(service.join)
    endpoint(app, "/v1/worker/poll", PollRequest)(service.poll)
    endpoint(app, "/v1/actor/next_group", NextGroupRequest)(service.next_group)
    endpoint(app, "/v1/actor/ack", AckRequest)(service.ack)
    endpoint(app, "/v1/actor/step", StepRequest)(service.step)
    endpoint(app, "/v1/actor/sync_begin", SyncBeginRequest)(service.sync_begin)
    endpoint(app, "/v1/actor/sync_end", SyncEndRequest)(service.sync_end)
    endpoint(app, "/v1/actor/evaluate", EvaluateRequest)(service.evaluate)
    endpoint(app, "/v1/status", Empty)(service.status)
    return app
