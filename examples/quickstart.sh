#!/usr/bin/env bash
# Trains a small agent by multi-turn RL on this machine: bash examples/quickstart.sh [key=value …]
#   mode=learn      about 30 steps with evaluations and reward.png     resume=auto   go on after an interruption
# Installs what it needs (Debian packages by apt-get, Python packages into .venv); results are in runs/quickstart/.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES-}"   # a CPU job, also on a machine with a GPU
exec "$PYTHON" -m megatron_venus.launch --config examples/configs/quickstart.yaml "$@"
