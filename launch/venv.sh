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
  local began=$SECONDS status=0 every=60 begin='' end=$'\n'
  if [ -t 2 ]; then  # one line that counts, in place of a line a minute
    every=1 begin=$'\r' end=''
  fi
  # as long as this shell lives, also when Ctrl-C ends pip; a sleep that outlives it must not hold stderr open
  (while sleep $every >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
    printf '%sinstalling, %d s so far%s' "$begin" $((SECONDS - began)) "$end" >&2
  done) &
  local ticker=$!
  .venv/bin/python -m pip install -qq --disable-pip-version-check --editable "$1" || status=$?
  kill $ticker 2>/dev/null || true
  wait $ticker 2>/dev/null || true
  [ -z "$begin" ] || printf '\r\033[K' >&2
  return $status
}
