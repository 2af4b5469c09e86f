# Sourced by local.sh, test.sh and worker.sh: `install SPEC` makes .venv once and installs SPEC into it.
# shellcheck shell=bash
# huge pages: the CPU backend frees and faults its temporaries at every step, 20 % of the time
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}

install() {
  local python=${PYTHON:-python3}
  if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
    echo "error: $("$python" --version 2>&1) found; Python 3.11 to 3.13 is needed, set PYTHON" >&2
    exit 2
  fi
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  echo "installing $1 into .venv" >&2
  local began=$SECONDS status=0
  # as long as this shell lives, also when Ctrl-C ends pip
  (while sleep 5 && kill -0 $$ 2>/dev/null; do echo "installing, $((SECONDS - began)) s so far" >&2; done) &
  local ticker=$!
  .venv/bin/python -m pip install -qq --disable-pip-version-check --editable "$1" || status=$?
  kill $ticker 2>/dev/null || true
  wait $ticker 2>/dev/null || true
  return $status
}
