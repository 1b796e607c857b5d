"""The answer as text: the best plan, what binds it, the runners-up, the curves, and what the next euro buys."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.sim.plan.answer import Answer
from rollout.sim.plan.measure import Measured
from rollout.sim.plan.search import Point
from rollout.sim.plan.space import Candidate
from rollout.sim.plan.waiting import RESOURCES, most_waited

CURVES = {
    "training_gpus": "training GPUs",
    "async_factor": "async factor",
    "slots": "slots of a worker",
    "l2_gb": "L2, GB a node",
    "sandboxes": "sandboxes",
}
"""What varies in the curves, in words."""
RUNNERS_SHOWN = 8


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell; the first one to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]


def million(tokens: float) -> str:
    return f"{tokens / 1e6:.3f}"


def setting(candidate: Candidate) -> str:
    """In one line."""
    l2 = f"{candidate.l2_gb:.0f} GB L2 a node" if candidate.l2_gb else "no L2"
    sandboxes = f"{candidate.sandboxes} sandboxes" if candidate.sandboxes else "sandboxes as asked for"
    return (
        f"{candidate.training_gpus} GPUs train ({candidate.replicas} replicas), {candidate.rollout_gpus} roll out "
        f"({candidate.workers} workers of TP {candidate.tp}), {candidate.slots} slots, "
        f"async_factor {candidate.async_factor:g}, {l2}, {sandboxes}"
    )


def headline(found: Answer) -> list[str]:
    best = found.best
    rates = [run.tokens_per_hour for run in best.runs]
    spread = f" ({million(min(rates))} to {million(max(rates))} over {len(rates)} seeds)" if len(rates) > 1 else ""
    idle = found.config.cluster.gpus - best.candidate.gpus
    lines = [
        f"best: {setting(best.candidate)}",
        f"      {million(best.tokens_per_hour)} million trained tokens an hour{spread}, a step of {best.step_s:.0f} s; "
        f"closed-form limit about {million(found.bounds.tokens_per_hour)}",
        f"      {found.month_cost:,.0f} euro a month, {found.euro_per_million:.2f} euro a million trained tokens",
    ]
    if idle > 0:
        lines.append(f"      {idle} GPUs are left over")
    if not best.comparable:
        lines.append("      * it trains other lengths than were submitted: its rate is not to be believed")
    return lines


def bottleneck(found: Answer) -> list[str]:
    shares, best = found.best.shares, found.best
    by_name = {gain.name: gain for gain in found.doublings}
    rows = [["waited for", "share of time", "twice as much of it"]]
    for name in sorted(RESOURCES, key=lambda name: -shares[name]):
        rows.append([RESOURCES[name], f"{shares[name]:.1%}", f"{by_name[name].gain:+.1%}"])
    top = by_name[found.bottleneck]
    lines = [
        f"bottleneck: {RESOURCES[top.name]}: {top.words} would give {top.gain:+.1%}; "
        f"the next step waits for it {shares[top.name]:.0%} of its time",
        *align(rows),
    ]
    recomputed = max(run.recomputed_per_token for run in best.runs)
    if recomputed > 0:
        lines.append(f"prompt tokens computed a second time: {recomputed:.2f} for each token trained")
    return lines


def _row(measured: Measured, best: Measured) -> list[str]:
    c = measured.candidate
    return [
        f"{c.training_gpus}+{c.rollout_gpus}",
        f"{c.workers}×TP{c.tp}",
        str(c.slots),
        f"{c.async_factor:g}",
        f"{c.l2_gb:.0f}",
        str(c.sandboxes or "all"),
        million(measured.tokens_per_hour) + ("" if measured.comparable else " *"),
        f"{measured.tokens_per_hour / best.tokens_per_hour:.2f}x",
        f"{measured.step_s:.0f}",
        RESOURCES[most_waited(measured.shares)],
    ]


def table(found: Answer) -> list[list[str]]:
    """The best and the runners-up, a header first."""
    header = [
        "train+roll",
        "workers",
        "slots",
        "async",
        "L2 GB",
        "sandboxes",
        "Mtok/h",
        "of best",
        "step s",
        "bottleneck",
    ]
    return [header, *[_row(m, found.best) for m in (found.best, *found.runners[:RUNNERS_SHOWN])]]


def curve(name: str, points: Sequence[Point]) -> str:
    """In one line."""
    parts = [f"{point.x:g}: {million(point.tokens_per_hour)}" for point in points]
    return f"{CURVES[name]}: " + ", ".join(parts)


def money(found: Answer) -> list[list[str]]:
    """What can be bought next, a header first."""
    rows = [["buy", "euro a month", "gain", "over seeds", "ktok/h for 1,000 euro"]]
    for gain in found.purchases:
        rows.append(
            [
                gain.words,
                f"{gain.month_cost:,.0f}",
                f"{gain.gain:+.1%}",
                f"{gain.low:+.1%} to {gain.high:+.1%}",
                f"{gain.per_1000 / 1e3:+.1f}" if abs(gain.gain) > found.config.search.tie else "none",
            ]
        )
    return rows


def notes(found: Answer) -> list[str]:
    config = found.config
    group, prices = config.sim.group, config.prices
    lines = [
        f"workload {config.sim.workload.kind}, batch {group.batch} × {group.size}, policy {config.sim.policy.name}, "
        f"{found.best.steps} steps, seeds {', '.join(map(str, config.seeds))}; {found.feasible} feasible candidates, "
        f"{found.unseen} of them judged by closed form alone; {found.simulated_runs} simulations",
        f"prices (euro a month; put your own): GPU {prices.gpu:g}, GB of host memory {prices.host_gb:g}, "
        f"sandbox {prices.sandbox:g}",
        f"rates within {config.search.tie:.0%} count as equal: the smaller setting is taken. Samples are staler with a "
        "larger async factor; whether that learns as well is not modelled.",
    ]
    if len(config.seeds) == 1:
        lines.append("one seed: differences of a few per cent may be luck; give --seeds 0,1,2 and leave out --quick")
    return lines


def text(found: Answer) -> str:
    lines = [*headline(found), "", *bottleneck(found), ""]
    lines += [*align(table(found)), "", "million trained tokens an hour by"]
    lines += [f"  {curve(name, points)}" for name, points in found.curves.items()]
    lines += ["", *align(money(found)), "", *notes(found)]
    return "\n".join(lines)
