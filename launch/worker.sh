#!/usr/bin/env bash
# The other end of tpu_vm.sh, run on every TPU VM: prepares it, and starts, reports and stops one training there.
# Usage: worker.sh setup [EXTRA,...]
#        worker.sh start --workdir=FOLDER --cache=FOLDER [--data=FOLDER] [--libtpu-init-args=FLAGS] [--sources] [--env]
#            -- ARGUMENTS
#        worker.sh state           one line, HOST: running | exited STATUS | stopped STATUS | lost | idle
#        worker.sh stop SECONDS    SIGTERM, and SIGKILL to what is left after that many seconds
# --sources: runs in a folder with the files of ~/grpo_jax_sources.tar.gz; --env: with the variables of ~/grpo_jax_env.
# Folders may be gs://BUCKET/PATH, also in ARGUMENTS: the bucket is mounted, since training writes ordinary files.
set -euo pipefail
cd "$(dirname "$0")/.."
run=$HOME/grpo_jax_run  # of the newest training: log, pid, group (of processes), status when it ended, stopped

fail() {
  echo "error: $(hostname): $1" >&2
  exit 2
}

setup() {
  # the TPU runtime starts and ends faster so
  echo always | sudo tee /sys/kernel/mm/transparent_hugepage/enabled > /dev/null
  if ! command -v gcsfuse > /dev/null; then
    local key=/usr/share/keyrings/cloud.google.asc apt=https://packages.cloud.google.com/apt
    curl -fsSL "$apt/doc/apt-key.gpg" | sudo tee "$key" > /dev/null
    echo "deb [signed-by=$key] $apt gcsfuse-$(lsb_release -cs) main" | sudo tee /etc/apt/sources.list.d/gcsfuse.list
    # a fresh machine may still be updating itself
    sudo apt-get -qq -o DPkg::Lock::Timeout=600 update
    sudo apt-get -qq -o DPkg::Lock::Timeout=600 install -y gcsfuse
  fi
  PYTHON=$(usable_python)
  source launch/venv.sh
  install ".[tpu${1:+,$1}]"
  echo "$(hostname): ready"
}

# Prints a Python of 3.11 to 3.13 that can make virtual environments. The images have 3.10: then uv brings 3.12.
usable_python() {
  local python=${PYTHON:-python3}
  if ! "$python" -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2> /dev/null
  then
    PIP_BREAK_SYSTEM_PACKAGES=1 "$python" -m pip install --quiet --user uv >&2
    "$HOME/.local/bin/uv" python install 3.12 >&2
    python=$("$HOME/.local/bin/uv" python find --managed-python 3.12)
  fi
  echo "$python"
}

# Prints the path of gs://BUCKET/PATH under a mount of the bucket; other values as they are. Hosts write to one folder,
# so nothing about files is cached; folders are renamed at once or not at all.
mounted() {
  case $1 in
    gs://*)
      local path=${1#gs://}
      local folder=$HOME/gcs/${path%%/*}
      if ! mountpoint -q "$folder"; then
        mkdir -p "$folder"
        gcsfuse --implicit-dirs --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0 --rename-dir-limit=0 \
          "${path%%/*}" "$folder" >&2 || fail "cannot mount gs://${path%%/*}: $1"
      fi
      echo "$HOME/gcs/$path" ;;
    *) echo "$1" ;;
  esac
}

# A checkpoint is finished by renaming its folder, which only a bucket with a hierarchical namespace does at once.
check_renames() {
  local probe
  probe=$1/.rename.$(hostname)
  mkdir -p "$probe"
  : > "$probe/file"
  if ! mv "$probe" "$probe.renamed"; then
    rm -rf "$probe"
    fail "folders cannot be renamed in $1: make the bucket with --enable-hierarchical-namespace"
  fi
  rm -rf "$probe.renamed"
}

start() {
  local workdir='' cache='' data='' folder=$PWD word
  while [ "$1" != -- ]; do
    case $1 in
      --workdir=*) workdir=$(mounted "${1#*=}") ;;
      --cache=*) cache=$(mounted "${1#*=}") ;;
      --data=*) data=$(mounted "${1#*=}") ;;
      --libtpu-init-args=*) export LIBTPU_INIT_ARGS=${1#*=} ;;
      --sources) folder=$HOME/grpo_jax_sources ;;
      --env)
        # shellcheck source=/dev/null
        source ~/grpo_jax_env
        rm -f ~/grpo_jax_env ;;
      *) fail "unknown option $1" ;;
    esac
    shift
  done
  shift
  [ "$(state)" != running ] || fail 'a training is running here; stop it first'
  check_renames "$workdir"
  if [ "$folder" != "$PWD" ]; then
    rm -rf "$folder"
    mkdir -p "$folder"
    tar -xzf "$folder.tar.gz" -C "$folder"
  fi

  local arguments=(--workdir="$workdir")
  for word in "$@"; do
    case $word in
      --*=gs://*) word=${word%%=*}=$(mounted "${word#*=}") ;;
      gs://*) word=$(mounted "$word") ;;
    esac
    arguments+=("$word")
  done
  export JAX_COMPILATION_CACHE_DIR=$cache PYTHONUNBUFFERED=1
  [ -z "$data" ] || export GRPO_JAX_DATA=$data
  source launch/venv.sh

  mkdir -p "$run"
  rm -f "$run"/{pid,group,status,stopped}
  # a session of its own: it outlives ssh, and is killed as a whole
  nohup setsid bash launch/worker.sh supervise "$folder" "${arguments[@]}" >> "$run/log" 2>&1 < /dev/null &
  until [ -e "$run/pid" ]; do sleep 0.1; done
  echo "$(hostname): started, log in $run/log"
}

supervise() {
  local status=0 python=$PWD/.venv/bin/python
  cd "$1"
  shift
  echo "== $(date -u +%FT%TZ) $(hostname): python -m grpo_jax.train $(printf '%q ' "$@")"
  "$python" -m grpo_jax.train "$@" &
  echo $$ > "$run/group"
  echo $! > "$run/pid.writing"
  mv "$run/pid.writing" "$run/pid"
  wait $! || status=$?
  echo "== $(date -u +%FT%TZ) $(hostname): ended with status $status"
  ended "$status"
}

ended() {
  echo "$1" > "$run/status.writing"
  mv "$run/status.writing" "$run/status"
}

state() {
  if [ -e "$run/status" ]; then
    if [ -e "$run/stopped" ]; then echo "stopped $(cat "$run/status")"; else echo "exited $(cat "$run/status")"; fi
  elif [ ! -e "$run/pid" ]; then
    echo idle
  elif kill -0 "$(cat "$run/pid")" 2> /dev/null; then
    echo running
  else
    echo lost  # the machine was restarted
  fi
}

stop() {
  local waited=0
  if [ "$(state)" = running ]; then
    : > "$run/stopped"
    kill -TERM "$(cat "$run/pid")"
    while [ ! -e "$run/status" ] && [ "$waited" -lt "$1" ]; do
      sleep 1
      waited=$((waited + 1))
    done
    if [ ! -e "$run/status" ]; then
      kill -KILL -- "-$(cat "$run/group")"
      ended 137
    fi
  fi
  echo "$(hostname): $(state)"
}

command=$1
shift
case $command in
  state) echo "$(hostname): $(state)" ;;
  setup | start | supervise | stop) "$command" "$@" ;;
  *) fail "unknown command $command" ;;
esac
