#!/usr/bin/env bash
# Every check a person would make: format, lint, types, imports, tests. bash tests/run.sh [--long] [pytest args]
# --long: all trials of the tests that a normal run scales down.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../examples/setup.sh"
cd "$ROOT"
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES-}" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore
if [ "${1:-}" = "--long" ]; then export VENUS_LONG=1; shift; fi
bin="$ROOT/.venv/bin"
step() { printf '[check] %s\n' "$*" >&2; "$@"; }
step "$bin/ruff" check .
step "$bin/ruff" format --check .
step "$PYTHON" -m mypy -p megatron_venus -p rollout -p envclient -p ckpt_tools
step "$bin/lint-imports"
step "$PYTHON" -m pytest "$@"
