"""Benchmarks: `python -m tests.benchmarks NAME [--quick] [--json FILE]`, from the project's root with its `.venv`.

A benchmark is a module here with `run(quick: bool, say: Callable[[str], None]) -> dict`. The last line printed is one
JSON object: `benchmark`, `ratio` (ours against `baseline`, measured in the same run, higher is better), `baseline`,
`sizes`, and the details. `--quick` ends within 5 minutes and states its subset.
"""
