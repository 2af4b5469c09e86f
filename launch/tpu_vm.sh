#!/usr/bin/env bash
# Cloud TPU VMs through queued resources: gets them, prepares them, trains on them, and gives them back.
set -euo pipefail
from=$(pwd -P)
cd "$(dirname "$0")/.."
root=$(pwd -P)

usage='usage: launch/tpu_vm.sh create|setup|run|status|logs|stop|delete --name=NAME --zone=ZONE [OPTIONS]
       [-- ARGUMENTS OF grpo_jax.train]'

help() {
  echo "$usage"
  cat << 'END'

  create   asks for the TPUs and waits until they are there     --accelerator-type --slices --spot --runtime-version
           (--no-wait: does not wait)                           --create-flag
  setup    sends this tree to every worker and installs it      --extra
  run      starts python -m grpo_jax.train ARGUMENTS            --workdir --cache --data --env --libtpu-init-args
           on every worker (--keep: watches it, and recreates   --max-restarts, and those of create
           the TPUs after a preemption, until it has ended)
  status   state of the TPUs and of the training
  logs     follows the log of a worker                          --worker --slice
  stop     SIGTERM, so that a checkpoint is written, then kill  --grace
  delete   gives the TPUs back (--yes: without asking)

  option                 environment             meaning
  --name=NAME            TPU_NAME                of the queued resource; nodes are NAME, or NAME-0, NAME-1, ...
  --zone=ZONE            TPU_ZONE                like us-east5-a
  --project=PROJECT      TPU_PROJECT             default: gcloud's
  --accelerator-type=T   TPU_ACCELERATOR_TYPE    v4-32, v5litepod-16, v5p-128, v6e-16, ...
  --slices=N             TPU_SLICES              slices of that type, connected by the data-centre network; default 1
  --runtime-version=V    TPU_RUNTIME_VERSION     default: the one for the accelerator
  --spot                 TPU_SPOT=1              cheaper, and may be taken away
  --create-flag=FLAG                             handed on to gcloud, like --create-flag=--reserved; repeatable
  --workdir=gs://B/PATH  TPU_WORKDIR             of the run, in a bucket with a hierarchical namespace
  --cache=gs://B/PATH    TPU_CACHE               compiled programs; default: compiled/ beside the workdir
  --data=gs://B/PATH     TPU_DATA                GRPO_JAX_DATA of the training
  --libtpu-init-args=A   LIBTPU_INIT_ARGS        XLA flags of the training
  --env=NAME                                     the training gets this variable with its value here, like
                                                 --env=HF_TOKEN or --env=WANDB_API_KEY; repeatable
  --extra=NAME                                   of pyproject.toml, installed too, like --extra=wandb; repeatable
  --max-restarts=N                               after crashes, in a whole --keep; default 3
  --worker=N --slice=N                           whose log; default 0 and 0
  --grace=SECONDS                                between SIGTERM and SIGKILL; default 600
  --dry-run                                      prints the gcloud commands and runs nothing
                         TPU_POLL_SECONDS        between two looks at the TPUs; default 30
                         TPU_PATIENCE            looks in a row without an answer until --keep gives up; default 10
END
}

fail() {
  echo "error: $1" >&2
  exit "${2:-2}"
}

say() {
  echo "$(date +%H:%M:%S) $name: $1" >&2
}

# Prints its arguments, a space before each, in single quotes where a shell would not read them as they are.
quoted() {
  local word quote="'\\''"
  for word in "$@"; do
    case $word in
      '' | *[!A-Za-z0-9_@%+=:,./-]*) printf " '%s'" "${word//\'/$quote}" ;;
      *) printf ' %s' "$word" ;;
    esac
  done
}

exec 3>&1  # a dry run's commands come out even where their output would be read
tpus() {
  if [ "$dry_run" = 1 ]; then
    printf 'gcloud compute tpus%s\n' "$(quoted "$@")" >&3
  else
    gcloud compute tpus "$@" < /dev/null
  fi
}

defaults() {
  name=${TPU_NAME:-} zone=${TPU_ZONE:-} project=${TPU_PROJECT:-} accelerator=${TPU_ACCELERATOR_TYPE:-}
  slices=${TPU_SLICES:-1} runtime=${TPU_RUNTIME_VERSION:-} spot=${TPU_SPOT:-0}
  workdir=${TPU_WORKDIR:-} cache=${TPU_CACHE:-} data=${TPU_DATA:-} libtpu=${LIBTPU_INIT_ARGS:-}
  keep=0 wait=1 yes=0 dry_run=0 max_restarts=3 worker=0 slice=0 grace=600 create_flags=() training=()
  secrets=() extras='' sources=''
}

parse() {
  while [ $# -gt 0 ]; do
    case $1 in
      --) shift; training=("$@"); return ;;
      --spot) spot=1 ;;
      --keep) keep=1 ;;
      --no-wait) wait=0 ;;
      --yes) yes=1 ;;
      --dry-run) dry_run=1 ;;
      --*=*) option "${1%%=*}" "${1#*=}" ;;
      --*) [ $# -gt 1 ] || refuse "$1 needs a value"; option "$1" "$2"; shift ;;
      *) refuse "unexpected $1; arguments of the training go behind --" ;;
    esac
    shift
  done
}

option() {
  case $1 in
    --name) name=$2 ;;
    --zone) zone=$2 ;;
    --project) project=$2 ;;
    --accelerator-type) accelerator=$2 ;;
    --slices) slices=$2 ;;
    --runtime-version) runtime=$2 ;;
    --create-flag) create_flags+=("$2") ;;
    --workdir) workdir=$2 ;;
    --cache) cache=$2 ;;
    --data) data=$2 ;;
    --libtpu-init-args) libtpu=$2 ;;
    --env) secrets+=("$2") ;;
    --extra) extras=${extras:+$extras,}$2 ;;
    --max-restarts) max_restarts=$2 ;;
    --worker) worker=$2 ;;
    --slice) slice=$2 ;;
    --grace) grace=$2 ;;
    *) refuse "unknown option $1" ;;
  esac
}

check() {
  local number='0|[1-9][0-9]{0,8}'
  expect --name "$name" '[a-z]([-a-z0-9]{0,50}[a-z0-9])?' 'small letters, digits and dashes, a letter first'
  expect --zone "$zone" '[a-z]+-[a-z]+[0-9]+-[a-z]' 'a zone like us-east5-a'
  expect --project "$project" '([a-z][-a-z0-9.:]+[a-z0-9])?' 'the id of a project'
  expect --slices "$slices" '[1-9][0-9]{0,3}' 'a number from 1'
  expect TPU_SPOT "$spot" '0|1' '0 or 1'
  expect --max-restarts "$max_restarts" "$number" 'a number from 0'
  expect --worker "$worker" "$number" 'a number from 0'
  expect --grace "$grace" "$number" 'a number of seconds'
  expect --slice "$slice" "$number" 'a number from 0'
  [ "$slice" -lt "$slices" ] || refuse "--slice = '$slice': less than --slices, $slices"
  expect TPU_PATIENCE "$patience" '[1-9][0-9]{0,8}' 'a number from 1'
  expect TPU_POLL_SECONDS "$poll" '[0-9]+([.][0-9]+)?' 'a number of seconds'
  if [ "$command" = create ] || [ "$keep" = 1 ]; then
    expect --accelerator-type "$accelerator" '(v2|v3|v4|v5litepod|v5p|v6e)-[1-9][0-9]{0,4}' \
      'a type like v4-32, v5litepod-16, v5p-128 or v6e-16; for TPU7x see launch/gke'
  fi
  [ "$command" = run ] || [ "$keep" = 0 ] || refuse '--keep: goes with run'
  [ "$command" = run ] || [ ${#training[@]} = 0 ] || refuse 'arguments behind --: go with run'
  [ "$command" = run ] || [ ${#secrets[@]} = 0 ] || refuse '--env: goes with run'
  [ "$command" = setup ] || [ -z "$extras" ] ||
    refuse '--extra: goes with setup; after a preemption run --keep installs it too'
  check_extras
  [ "$command" = run ] || return 0
  expect_url --workdir "$workdir"
  cache=${cache:-${workdir%/*}/compiled}
  expect_url --cache "$cache"
  [ "$cache" != "$workdir" ] || refuse "--cache = '$cache': is the workdir"
  [ -z "$data" ] || expect_url --data "$data"
  check_training
  check_secrets
  find_sources
  check_files
}

# Refuses a path that is neither in this tree nor in sources. $1: what names it; $2: how; $3: the absolute path.
expect_sent() {
  in_tree "$3" || in_sources "$3" || refuse "$1: $2 is on this machine alone; put it ${sources:+below $sources, or }\
into a bucket, and name gs://BUCKET/PATH"
}

create() {
  request
  [ "$wait" = 0 ] || wait_active || fail "the request failed: gcloud compute tpus queued-resources describe $name" 1
}

setup() {
  [ "$dry_run" = 1 ] || pack
  install_everywhere
}

run() {
  local states todo
  [ "$dry_run" = 1 ] || [ -z "$sources" ] || pack_sources
  if [ "$keep" = 0 ]; then
    start
  elif [ "$dry_run" = 1 ]; then
    start
    condition > /dev/null
    on_workers state
  else
    [ -e "$archive" ] || fail "no $archive: run setup first; what it sent is sent again after a preemption"
    extras=$(cat "$kept.extras" 2> /dev/null || :)  # what setup has installed
    todo=start
    if states=$(on_workers state) && [ "$(outcome <<< "$states")" = running ]; then
      say 'a training is running: watching it'
      todo=''
    fi
    watch
  fi
}

status() {
  local state node
  state=$(resource)
  [ "$dry_run" = 1 ] || echo "$name $state"
  if [ "$dry_run" = 1 ] || [ "$state" = ACTIVE ]; then
    for node in $(nodes); do
      tpus tpu-vm describe "$node" "${where[@]}" --format='value(name.basename(), state, health)'
    done
    on_workers state
  fi
}

logs() {
  local node
  node=$(nodes | sed -n "$((slice + 1))p")
  tpus tpu-vm ssh "$node" "${where[@]}" --quiet --worker="$worker" --command='tail -n 100 -F grpo_jax_run/log'
}

stop() {
  on_workers stop "$grace"
}

delete() {
  local answer=y
  if [ "$yes" = 0 ] && [ "$dry_run" = 0 ]; then
    read -r -p "Delete $name and what is on its disks? [y/N] " answer || :
  fi
  case $answer in
    y | Y | yes) remove ;;
    *) fail 'nothing was deleted; --yes does not ask' 1 ;;
  esac
}

# shellcheck source=launch/arguments.sh
source launch/arguments.sh
# shellcheck source=launch/tpus.sh
source launch/tpus.sh

command=${1:-}
case $command in
  create | setup | run | status | logs | stop | delete) shift ;;
  -h | --help) help; exit ;;
  *) refuse "command = '$command': one of create, setup, run, status, logs, stop, delete" ;;
esac
poll=${TPU_POLL_SECONDS:-30} patience=${TPU_PATIENCE:-10}
defaults
parse "$@"
check
where=(--zone="$zone")
[ -z "$project" ] || where+=(--project="$project")
kept=${XDG_CACHE_HOME:-$HOME/.cache}/grpo_jax/$name  # what begins like this is sent
archive=$kept.tar.gz
[ "$dry_run" = 1 ] || command -v gcloud > /dev/null || fail 'no gcloud on PATH: install the Google Cloud CLI'
"$command"
