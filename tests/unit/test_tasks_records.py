"""Task records: broken ones are refused by line and field; the shipped ones keep their promises."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from envclient.base.errors import ConfigError, PreflightError
from examples.tasks import libraries
from examples.tasks.mutants import fits, sites
from examples.tasks.records import DEFAULT_RECORDS, MIN_TESTS, dump_records, load_records, parse_record
from examples.tasks.repair_task import TaskReader
from examples.tasks.source import make_source


def row(**changes: Any) -> dict[str, Any]:
    first = json.loads(DEFAULT_RECORDS.read_text().splitlines()[0])
    return {**first, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position": "two"}, "field 'position'"),
        ({"position": -1}, "field 'position'"),
        ({"first_line": 0}, "field 'first_line'"),
        ({"library": "numpy"}, "field 'library'"),
        ({"version": "9.9"}, "field 'version'"),
        ({"file": "../secrets.py"}, "field 'file'"),
        ({"split": "test"}, "field 'split'"),
        ({"FAIL_TO_PASS": []}, "field 'FAIL_TO_PASS'"),
        ({"FAIL_TO_PASS": "[1, 2"}, "field 'FAIL_TO_PASS'"),
        ({"FAIL_TO_PASS": ["a"], "PASS_TO_PASS": ["a", "b"]}, "field 'PASS_TO_PASS'"),
        ({"FAIL_TO_PASS": ["a"], "PASS_TO_PASS": ["b"]}, "at least 3"),
        ({"FAIL_TO_PASS": ["a", 7], "PASS_TO_PASS": ["b"]}, "field 'FAIL_TO_PASS"),
        ({"instance_id": "a b/c"}, "field 'instance_id'"),
        ({"original": "x", "replacement": "x"}, "field 'replacement'"),
        ({"deterministic": "yes"}, "field 'deterministic'"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(row(instance_id="other")) + "\n\n" + json.dumps(row(**changes)) + "\n")
    with pytest.raises(ConfigError) as error:
        load_records(path)
    assert "line 3" in str(error.value) and message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["instance_id", "FAIL_TO_PASS", "position", "deterministic"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        parse_record(json.dumps({name: value for name, value in row().items() if name != field}))


@pytest.mark.parametrize("line", ["{", "[1]", "7"])
def test_a_line_that_is_no_object_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match="line 1: not"):
        load_records(path)


def test_missing_empty_and_doubled(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    with pytest.raises(ConfigError, match=r"tasks\.jsonl.*No such file"):
        load_records(path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no record"):
        load_records(path)
    path.write_text(f"{json.dumps(row())}\n" * 2)
    with pytest.raises(ConfigError, match=r"line 2: field 'instance_id'.*twice"):
        make_source(records=str(path))


def test_swe_bench_lists_as_json_strings_and_its_other_fields() -> None:
    strings = {name: json.dumps(row()[name]) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    assert parse_record(json.dumps(row(base_commit="abc", patch="...", **strings))) == parse_record(json.dumps(row()))


def test_dump_and_load_are_inverse(tmp_path: Path) -> None:
    records = load_records(DEFAULT_RECORDS)
    path = tmp_path / "again.jsonl"
    path.write_bytes(dump_records(records))
    assert load_records(path) == records
    assert path.read_bytes() == DEFAULT_RECORDS.read_bytes()


def test_shipped_records_split_by_function_with_enough_tests() -> None:
    records = load_records(DEFAULT_RECORDS)
    splits = defaultdict(set)
    for record in records:
        splits[record.library, record.function].add(record.split)
        assert record.deterministic and len(record.tests) >= MIN_TESTS
    assert all(len(found) == 1 for found in splits.values())
    source = make_source()
    assert len(source.train_ids()) >= 250 and len(source.eval_ids()) >= 80
    assert not set(source.train_ids()) & set(source.eval_ids())
    assert set(make_source(libraries=["toolz"]).eval_ids()) < set(source.eval_ids())
    with pytest.raises(ConfigError, match="numpy"):
        make_source(libraries=["numpy"])


def test_every_shipped_record_fits_its_library_and_its_fix_is_a_candidate_edit() -> None:
    reader = TaskReader()
    for record in load_records(DEFAULT_RECORDS):
        task = reader.read(record)
        assert fits(task.original)
        assert task.fix in sites(task.buggy)
        assert sum(a != b for a, b in zip(task.original, task.buggy, strict=True)) == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"position": 400}, "position"), ({"first_line": 2}, "function"), ({"file": "no.py"}, "file")],
)
def test_a_record_that_does_not_fit_its_library_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"field '{field}'"):
        TaskReader().read(parse_record(json.dumps(row(**changes))))


def test_without_an_index_the_error_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VENUS_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(PreflightError, match=r"funcy==2\.0") as error:
        libraries.root(libraries.LIBRARIES["funcy"])
    assert "\n" not in str(error.value)
    assert [path.name for path in (tmp_path / "tasks").iterdir()] == [".lock"]


def test_another_file_under_the_pinned_name_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "toolz-1.0.0.tar.gz"
    archive.write_bytes(b"not toolz")
    with pytest.raises(PreflightError, match="SHA-256"):
        libraries.check_archive(libraries.LIBRARIES["toolz"], archive)
