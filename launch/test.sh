#!/usr/bin/env bash
# The whole suite on a fresh machine: makes .venv, installs with [test], runs pytest on 8 fake CPU devices.
# Usage: bash launch/test.sh [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "$0")/.."

source launch/venv.sh
install '.[test]'

.venv/bin/python -m pytest -n 2 --dist worksteal "$@"
