#!/usr/bin/env bash
# Trains Qwen3-32B on 32 Hopper GPUs: bash examples/qwen3_32b_swe.sh model.path=FOLDER [key=value …]
#   mode=gpu141     GPUs of 141 GB instead of 80     resume=auto   go on after an interruption
# Not verified on a GPU, and all on one machine so far. Installs requirements-gpu.txt into .venv-gpu; results are in runs/qwen3-32b-swe/.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
die() { printf 'error: %s\n' "$*" >&2; exit 2; }
plan="python -m megatron_venus.launch --config examples/configs/qwen3_32b_swe.yaml --dry-run"
needed=32   # 16 train, 16 generate

gpus="$(command -v nvidia-smi >/dev/null && timeout 20 nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)"
[ "${gpus:-0}" -gt 0 ] \
  || die "no NVIDIA GPU here, Qwen3-32B needs $needed: on a CPU machine run bash examples/quickstart.sh (the plan alone: $plan)"
[ "$gpus" -ge "$needed" ] \
  || die "this machine has $gpus GPUs, Qwen3-32B needs $needed, and starting on several machines is not there yet (the plan alone: $plan)"

PYTHON="$ROOT/.venv-gpu/bin/python"
stamp="$ROOT/.venv-gpu/venus-stamp"
wanted="$(cat requirements-gpu.txt pyproject.toml | sha256sum | cut -d' ' -f1)"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  [ -x "$PYTHON" ] || "${VENUS_PYTHON:-python3}" -m venv "$ROOT/.venv-gpu" || die "python3 -m venv failed (apt-get install python3-venv)"
  # Transformer Engine's torch part is built here and needs torch first.
  grep '^torch==' requirements-gpu.txt | xargs "$PYTHON" -m pip install -q >&2 || die "pip could not install torch"
  "$PYTHON" -m pip install -q --no-build-isolation -r requirements-gpu.txt >&2 || die "pip could not install requirements-gpu.txt"
  "$PYTHON" -m pip install -q --no-deps --no-build-isolation -e . >&2 || die "pip could not install VenusRL itself"
  printf '%s' "$wanted" > "$stamp"
fi
exec "$PYTHON" -m megatron_venus.launch --config examples/configs/qwen3_32b_swe.yaml "$@"
