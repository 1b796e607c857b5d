"""The study: runs wanted once, raw results that a stopped study goes on with, tables that add up; and its metrics."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from envclient.base.errors import ConfigError
from rollout.policy.registry import POLICIES
from rollout.sim import compiled, study, study_adopt, study_runs, study_tune
from rollout.sim.fairness import classes, discard_shares, drift, shares
from rollout.sim.study_cells import FREE_COPIES, NO_LIMITS, ORACLE, OURS, TUNED, Cell, Run, live, runs
from rollout.sim.study_report import document
from rollout.sim.study_results import Results, contexts_held, kv_demand
from rollout.sim.study_runs import Row, code_digest, make_missing, read_rows
from tests.sim.kit import run

# ----------------------------------------------------------------------------------------------------------- metrics


def test_classes_are_equal_shares_by_length() -> None:
    kinds = classes({f"p{n}": float(10 - n) for n in range(8)}, 4)
    assert [kinds[f"p{n}"] for n in range(8)] == [3, 3, 2, 2, 1, 1, 0, 0]
    assert shares([0, 0, 3, 1], 4) == [0.5, 0.25, 0.0, 0.25]


def test_drift_is_the_largest_distance_on_the_way() -> None:
    kinds = {"a": 0, "b": 1, "c": 0, "d": 1}
    stream = ["a", "b", "c", "d"]
    assert drift(kinds, stream, [["b", "a"], ["d", "c"]]) == 0.0
    # Both short ones first: 2/2 against the declared 1/2 of each, and equal again at the end.
    assert drift(kinds, stream, [["a", "c"], ["b", "d"]]) == 0.5


def test_discards_are_counted_by_decile() -> None:
    lengths = {f"t{n}": n for n in range(20)}
    found = discard_shares(lengths, {"t0", "t18", "t19", "another attempt"})
    assert found == [0.5, *[0.0] * 8, 1.0]
    assert discard_shares({}, set()) == [0.0] * 10


def test_on_policy_order_cannot_move_the_mixture() -> None:
    result = run("group.async_factor=1.0", "policy.name=paper")
    assert result.mixture_drift == 0.0
    assert run("group.async_factor=2.0", "policy.name=paper", "engine.slots=4").mixture_drift > 0.0


def test_discards_are_shown_where_the_trainer_need_not_wait() -> None:
    keys = ("engine.slots=2", "group.async_factor=3.0", "group.include_promoted=false", "group.max_resamples=50")
    result = run(*keys, "policy.name=action", "group.max_refills=1000")
    assert result.discarded > 0
    assert sum(result.discard_shares) > 0 and max(result.discard_shares) <= 1.0


def test_waits_and_goodput_follow_what_is_short() -> None:
    loose, slots, sandboxes = run(), run("engine.slots=2"), run("environment.sandboxes=6")
    assert slots.turn_wait_s > 2 * loose.turn_wait_s and slots.environment_goodput < loose.environment_goodput
    assert loose.lease_wait_s < 0.1 < sandboxes.lease_wait_s
    for result in (loose, slots, sandboxes):
        assert 0 < result.rollout_goodput < 1 and sum(result.mixture) == pytest.approx(1.0)
        busy = result.step_s * result.trainer_busy + result.sync_s + result.trainer_wait_s
        assert busy == pytest.approx(result.step_s, rel=0.02)


# ------------------------------------------------------------------------------------------------------------- study


def test_every_run_is_wanted_once_and_quick_is_a_part_of_full() -> None:
    quick, full = runs(False), runs(True)
    assert len(set(quick)) == len(quick) and len(set(full)) == len(full)
    assert set(quick) <= set(full)
    cells = {run.cell for run in full if run.policy == OURS and run.cell.include_promoted and not run.cell.sandboxes}
    assert len(cells) == 2 * 3 * 3 * 3 * 3
    for cell in cells:
        for policy in (*live(cell).values(), OURS, ORACLE):
            assert {run.seed for run in full if run.cell == cell and run.policy == policy} >= {0, 1, 2}


def test_kv_demand_counts_device_and_host() -> None:
    short, ample = (kv_demand(Cell(batch=64, l2=memory)) for memory in ("none", "default"))
    assert short == pytest.approx(3 * ample, rel=1e-3)
    assert kv_demand(Cell(batch=64, async_factor=2.0)) == pytest.approx(2 * ample)
    # 512 trajectories on four workers without a host cache.
    assert short * contexts_held(Cell()) * 4 == pytest.approx(512)


def _row(policy: str, rate: float, *, cell: Cell | None = None, seed: int = 0, **changed: Any) -> Row:
    result = {
        **run("steps=1", "skip_steps=0", "group.batch=2", "group.size=2").row(),
        "trained_tokens_per_hour": rate,
        "length_ratio": 1.0,
        "length_ks": 0.0,
        **changed,
    }
    return Row(
        code="c",
        commit="d",
        machine="a machine",
        cell=cell or Cell(),
        policy=policy,
        seed=seed,
        cpu_s=1.0,
        result=result,
    )


def test_ratios_are_of_medians_over_common_seeds_and_of_runs_that_count() -> None:
    rows = [_row(OURS, rate, seed=seed) for seed, rate in enumerate((10.0, 30.0, 20.0))]
    paper, action = live(Cell())["paper"], live(Cell())["action"]
    rows += [_row(paper, 10.0, seed=0), _row(action, 40.0, seed=0, length_ratio=0.9)]
    results = Results(rows)
    assert results.ratio(Cell(), OURS, paper) == 1.0
    assert results.middle(Cell(), OURS) == 20.0 and results.values(Cell(), OURS) == [10.0, 20.0, 30.0]
    assert not results.counts(Cell(), action)
    assert results.rivals(Cell()) == [(1.0, "paper")]
    (third,) = Results([_row(OURS, 9.0, groups_per_hour=3.0), _row(paper, 9.0, groups_per_hour=1.0)]).consumed(Cell())
    assert third == pytest.approx(1 / 3)
    assert Results([*rows, _row(OURS, 20.0, seed=3, length_ks=0.1)]).rivals(Cell()) == []
    none = Cell(l2="none")
    limits = [_row(label, rate, cell=none) for label, rate in zip(NO_LIMITS, (50.0, 40.0), strict=True)]
    bounded = Results([*rows, _row(ORACLE, 25.0), _row(FREE_COPIES, 30.0, cell=none), *limits])
    assert bounded.bounds(Cell()) == (2.5, 3.0, 5.0)


def test_the_report_judges_targets_and_shows_losing_cells() -> None:
    cell = Cell(batch=64, async_factor=2.0, l2="default")
    rivals = dict.fromkeys(live(cell).values(), 6e6) | {live(cell)["paper"]: 10e6}
    rows = [_row(name, rate, cell=cell) for name, rate in {OURS: 9e6, **rivals}.items()]
    close = Cell(batch=64, async_factor=1.0, l2="none")
    rows += [_row(OURS, 10.96e6, cell=close), _row(live(close)["program_aware"], 1e7, cell=close)]
    rows += [_row(NO_LIMITS[1], 11.5e6, cell=close), _row(FREE_COPIES, 11.2e6, cell=close)]
    partial = Cell(batch=16, l2="none")  # not complete, so not judged
    rows += [_row(OURS, 1e6, cell=partial), _row(live(partial)["action"], 2e6, cell=partial)]
    text = document(Results(rows), full=False, wanted=len(runs(False)))
    assert "## Targets, as far as it ran" in text and "Not run yet." in text
    assert "| never below 0.95× | 0.900× of `paper` at 32b B=64 af=2 L2=default ρ=0.6 | **no** |" in text
    assert "batch 64, L2 default | 1.500–1.50×, median 1.50×, in 1 cells | yes |" in text
    assert "| 32b B=64 af=2 L2=default ρ=0.6 | `paper` | 0.900 |" in text
    assert "batch 64, L2 none | 1.096–1.10×, median 1.10×, in 1 cells | **no** |" in text
    assert "| 32b B=64 af=1 L2=none ρ=0.6 | 1.096 | – | 1.02 | 1.05 |" in text


def test_every_policy_is_tuned_alike_and_the_study_uses_what_came_of_it() -> None:
    wanted = study_tune.tuning_runs()
    assert len(set(wanted)) == len(wanted) and {run.seed for run in wanted}.isdisjoint({run.seed for run in runs(True)})
    assert {len(settings) for settings in study_tune.SETTINGS.values()} == {6}
    assert study_tune.SETTINGS.keys() == {*TUNED, OURS}
    rows = read_rows(Path(study.__file__).parent / "study" / "tune.jsonl")
    assert {name: study_tune.best(rows, name) for name in TUNED} == TUNED
    for hosted in (False, True):
        found = study_tune.scores(rows, OURS, hosted)
        assert found[""][0] > 0.98 * max(score for score, _ in found.values()), "it runs as it is configured"


def test_a_setting_is_scored_by_its_geometric_mean_where_it_ran_everywhere() -> None:
    rows: list[Row] = []

    def ran(setting: str, cell: Cell, speed: float) -> None:
        label = study_tune.label("action", setting)
        rows.extend(_row(label, 1.0, cell=cell, seed=seed, hours=8.0 / speed) for seed in study_tune.SEEDS)

    for hosted, setting in ((False, "engine.slots=12"), (True, "engine.slots=48")):
        for speed, cell in zip((1.0, 4.0), study_tune.cells_of(hosted), strict=True):
            ran("", cell, 1.0)
            ran(setting, cell, speed)
    ran("engine.slots=32", study_tune.CELLS[0], 8.0)
    found = study_tune.scores(rows, "action", False)
    assert found.keys() == {"", "engine.slots=12"} and found[""][0] == 1.0
    assert found["engine.slots=12"] == (pytest.approx(2.0), pytest.approx([1.0, 4.0]))
    assert study_tune.best(rows, "action") == ("action:engine.slots=12", "action:engine.slots=48")
    assert study_tune.best(rows, "paper") is None
    text = document(Results(rows), full=False, wanted=1, tuning=rows)
    assert "| `action` | `engine.slots=12` | **2.000** | 1.00 | 4.00 |" in text


class Pool:
    """Of no process."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_a_stopped_study_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [Run(cell=Cell(batch=16), policy=name, seed=0) for name in ("action", "paper", "venus")]
    made: list[Run] = []

    class Now(Pool):
        """Runs what is submitted at once."""

        def submit(self, _: Any, one: Run) -> Any:
            from concurrent.futures import Future

            made.append(one)
            future: Future[Any] = Future()
            future.set_result(({"trained_tokens_per_hour": 1e6}, 0.1))
            return future

    monkeypatch.setattr(study_runs, "ProcessPoolExecutor", Now)
    raw = tmp_path / "study" / "raw.jsonl"
    lines: list[str] = []
    assert make_missing(raw, wanted[:1], processes=1, budget_s=None, tell=lines.append) == 0
    with raw.open("ab") as file:
        file.write(b'{"code": "cut off')  # killed while writing
    assert make_missing(raw, wanted, processes=2, budget_s=None, tell=lines.append) == 0
    assert made == wanted and {row.run for row in read_rows(raw)} == set(wanted)
    assert {row.policy: row.code for row in read_rows(raw)} == {one.policy: code_digest(one.policy) for one in wanted}
    assert make_missing(raw, [*wanted, Run(cell=Cell(), policy="paper", seed=1)], processes=1, budget_s=-1.0) == 1
    assert "[2/2, 0 min left]" in lines[-1]


@pytest.mark.parametrize(
    ("changed", "concerned"),
    [
        ("policy/venus.py", {"venus", "oracle"}),
        ("policy/working_set.py", {"venus", "oracle", "paper", "fcfs_priority", "longest_first"}),
        ("policy/program_load.py", {"program_aware", "program_aware_plus"}),
        ("policy/lengths.py", set(POLICIES)),
        ("policy/registry.py", set(POLICIES)),
        ("dispatcher/machine.py", set(POLICIES)),
        ("sim/kv.py", set(POLICIES)),
        ("sim/study_report.py", set()),
        ("sim/recordings.py", set()),
    ],
)
def test_a_change_concerns_whom_it_reaches(tmp_path: Path, changed: str, concerned: set[str]) -> None:
    home = tmp_path / "rollout"
    shutil.copytree(Path(study_runs.__file__).parents[1], home, ignore=shutil.ignore_patterns("__pycache__", "study"))
    code_digest.cache_clear()
    before = {name: code_digest(name, home) for name in ("", *POLICIES)}
    assert before == {name: code_digest(name) for name in before}
    with (home / changed).open("a") as file:
        file.write("# changed\n")
    code_digest.cache_clear()
    assert {name for name in POLICIES if code_digest(name, home) != before[name]} == concerned
    assert (code_digest("", home) != before[""]) == bool(concerned)


def test_a_report_keeps_policies_of_which_nothing_changed(tmp_path: Path) -> None:
    cell = Cell(batch=64, async_factor=2.0)
    old = msgspec.structs.replace(_row("trajectory", 1e6, cell=cell), code="older")
    codes = (code_digest(OURS), "older", code_digest(OURS))  # one of them adopted
    new = [msgspec.structs.replace(_row(OURS, 1e6, cell=cell), code=code) for code in codes]
    raw = tmp_path / "study" / "raw.jsonl"
    raw.parent.mkdir()
    raw.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in (old, *new)))
    assert study.main(["--report-only", "--folder", str(tmp_path)]) == 0
    text = (tmp_path / "STUDY.md").read_text()
    assert "Runs: 2 of the" in text and f"(code {', '.join(sorted((code_digest(OURS), 'older')))};" in text


def test_runs_of_other_code_are_kept_where_some_come_out_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[Run] = []

    class Now(Pool):
        def map(self, _: Any, some: list[Run]) -> list[tuple[dict[str, Any], float]]:
            again.extend(some)
            # What is simulated now differs for `paper`, and only in one run.
            return [({"hours": 2.0 if r.policy == "paper" and r.seed == 4 else 1.0}, 0.1) for r in some]

    monkeypatch.setattr(study_adopt, "ProcessPoolExecutor", Now)

    def row(policy: str, seed: int, code: str) -> Row:
        return msgspec.structs.replace(_row(policy, 1.0, seed=seed), code=code, result={"hours": 1.0})

    rows = [row(policy, seed, "older") for policy in ("action:engine.slots=24", "paper") for seed in range(6)]
    rows += [row("action", 6, "oldest"), row(OURS, 0, code_digest(OURS))]
    raw = tmp_path / "raw.jsonl"
    raw.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    said: list[str] = []
    study_adopt.adopt(raw, 6, processes=1, tell=said.append)
    assert len(again) == 13 and len(set(again)) == 13
    after = read_rows(raw)
    action = code_digest("action")
    kept = [msgspec.structs.replace(r, code=action, made_by=r.code) if "action" in r.policy else r for r in rows]
    assert after == kept and {r.made_by for r in after} == {"older", "oldest", ""}
    assert "action:engine.slots=24, 32b, L2 default, code older: 6 of 6 runs are equal: kept" in said
    assert any(line.endswith("seed 4 is another one: 6 runs are not kept") for line in said)
    again.clear()
    study_adopt.adopt(raw, 2, processes=1, tell=said.append)
    assert [r.policy for r in again] == ["paper"] * 2 and len(set(again)) == 2


def test_each_kind_of_run_is_simulated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change may concern one host cache, one model or one setting alone. What is no row, or changes, is refused."""
    rows = [_row("action", 1.0, cell=Cell(l2=memory)) for memory in ("none", "default") for _ in range(4)]
    rows += [_row("action:engine.slots=8", 1.0), _row("action", 1.0, cell=Cell(preset="4b"))]
    raw = tmp_path / "raw.jsonl"
    lines = b"".join(msgspec.json.encode(msgspec.structs.replace(row, code="older")) + b"\n" for row in rows)
    raw.write_bytes(lines)
    asked: list[Run] = []

    class Counting(Pool):
        def map(self, _: Any, some: list[Run]) -> list[tuple[dict[str, Any], float]]:
            asked.extend(some)
            raw.write_bytes(lines + lines)
            return [({}, 0.1)] * len(some)

    monkeypatch.setattr(study_adopt, "ProcessPoolExecutor", Counting)
    monkeypatch.setattr(study_adopt, "_first_difference", lambda some, again: None)
    with pytest.raises(ConfigError, match="changed meanwhile"):
        study_adopt.adopt(raw, 1, processes=1, tell=lambda line: None)
    kinds = {(run.policy, run.cell.preset, run.cell.l2) for run in asked}
    assert len(asked) == len(kinds) == 4
    raw.write_bytes(lines + b"<<<<<<< HEAD\n" + lines)
    with pytest.raises(ConfigError, match="no run after 10"):
        study_adopt.adopt(raw, 1, processes=1, tell=lambda line: None)
    study_adopt.adopt(tmp_path / "none.jsonl", 1, processes=1)
    assert not (tmp_path / "none.jsonl").exists()


def test_one_run_as_a_process_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"workers": 1, "group": {"size": 2}, "workload": {"turns_mu": 1.0}, "engine": {"kv_tokens": 200000}}
    monkeypatch.setitem(study_runs.PRESETS, "tiny", tiny)
    monkeypatch.setattr(Cell, "overrides", lambda self: ["group.batch=2", "steps=2", "skip_steps=0"])
    one = Run(cell=Cell(preset="tiny"), policy="trajectory:engine.slots=1", seed=3)
    row, cpu_s = study_runs.simulate_run(one)
    assert row["policy"] == one.policy and row["seed"] == 3 and row["steps"] == 2 and cpu_s >= 0
    assert len(row["mixture"]) == 4 and "trained_lengths" not in row


def test_a_report_is_made_from_what_is_there(tmp_path: Path) -> None:
    cell = Cell(batch=64, async_factor=2.0)
    rows = [_row(policy, 1e6, cell=cell) for policy in (OURS, "trajectory", "trajectory:engine.slots=8")]
    raw = tmp_path / "study" / "raw.jsonl"
    raw.parent.mkdir()
    rows[1] = msgspec.structs.replace(rows[1], machine="another")
    raw.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    assert study.main(["--report-only", "--folder", str(tmp_path)]) == 0
    text = (tmp_path / "STUDY.md").read_text()
    assert "Runs: 3 of the" in text and "Commit d (code c;" in text and "a machine; another; " in text
    table = list(csv.DictReader((tmp_path / "study" / "cells.csv").open()))
    assert [row["policy"] for row in table] == [row.policy for row in rows]
    assert table[0]["async_factor"] == "2.0" and table[0]["trained_tokens_per_hour_median"] == "1e+06"
    for name in ("throughput", "slots"):
        assert (tmp_path / "study" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--processes is 0"):
        study.main(["--processes", "0", "--folder", str(tmp_path)])
    with pytest.raises(ConfigError, match="--adopt is 0"):
        study.main(["--adopt", "0", "--folder", str(tmp_path)])
    with pytest.raises(ConfigError, match="no run of this study"):
        study.main(["--report-only", "--folder", str(tmp_path)])


def test_a_compiled_copy_needs_its_tools_and_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "compiled").touch()
    assert compiled.compiled_copy(tmp_path / "there") == tmp_path / "there"
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="C compiler"):
        compiled.compiled_copy(tmp_path / "copy")
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs mypy"):
        compiled.compiled_copy(tmp_path / "copy")
    root = Path(compiled.__file__).resolve().parents[2]
    assert [name for name in compiled.MODULES if not (root / name).is_file()] == []


def test_a_run_is_the_same_whatever_was_simulated_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts are drawn once a process, for all policies; those of another seed or workload are others."""
    monkeypatch.setattr(study_runs, "_workloads", {})
    cell = Cell(batch=16, steps=1)
    asked = [Run(cell=cell, policy=policy, seed=seed) for seed in (0, 1) for policy in ("action", "trajectory")]
    asked.append(Run(cell=msgspec.structs.replace(cell, correlation=0.3), policy="action", seed=0))
    together = [study_runs.simulate_run(each)[0] for each in asked]
    assert len(study_runs._workloads) == 3
    for each, result in zip(asked, together, strict=True):
        study_runs._workloads.clear()
        assert study_runs.simulate_run(each)[0] == result
    assert len({json.dumps(result, sort_keys=True) for result in together}) == len(asked)
