#!/usr/bin/env bash
# The demo on a fresh machine: makes .venv, installs, trains arithmetic on the CPU, writes its report.
# Usage: bash launch/local.sh [WORKDIR]          (default: runs/arithmetic)
set -euo pipefail
cd "$(dirname "$0")/.."
workdir=${1:-runs/arithmetic}

source launch/venv.sh
install .

export JAX_PLATFORMS=cpu
export JAX_COMPILATION_CACHE_DIR="$PWD/.venv/compiled"
.venv/bin/python -m grpo_jax.train --config=configs/arithmetic.py --workdir="$workdir"
exec .venv/bin/python -m grpo_jax report --workdir="$workdir"
