#!/usr/bin/env bash
# A training on TPU slices of a GKE cluster: fills in jobset.yaml and applies it.
set -euo pipefail
from=$(pwd -P)
cd "$(dirname "$0")"
root=$(cd ../.. && pwd -P)

usage='usage: launch/gke/render.sh --name=NAME --image=IMAGE --accelerator=KIND --topology=AxB[xC]
       --workdir=gs://BUCKET/PATH --service-account=NAME [OPTIONS] -- ARGUMENTS OF grpo_jax.train'

help() {
  echo "$usage"
  cat << 'END'

  --name=NAME               of the JobSet
  --image=IMAGE             made of launch/gke/Dockerfile and pushed
  --accelerator=KIND        v4, v5e, v5p, v6e or tpu7x
  --topology=AxB[xC]        chips of a slice, like 4x4 for v5e and v6e, 2x2x4 for v4, v5p and tpu7x
  --slices=N                default 1
  --chips-per-host=N        of the node pool's machines: 1, 4 or 8; default 4, or the whole slice where that is less
  --workdir=gs://B/PATH     of the run, in a bucket with a hierarchical namespace
  --cache=gs://B/PATH       compiled programs, in the same bucket; default: compiled/ beside the workdir
  --data=gs://B/PATH        GRPO_JAX_DATA of the training, in the same bucket
  --service-account=NAME    a Kubernetes service account that may write to the bucket
  --namespace=NAME          default: default
  --spot                    on spot nodes
  --max-restarts=N          after crashes and preemptions; default 100
  --libtpu-init-args=FLAGS  XLA flags of the training
  --env=NAME                the training gets this variable with its value here, by a Secret, like --env=HF_TOKEN;
                            repeatable
  --extra=NAME              of pyproject.toml, which each pod installs before it starts, like --extra=wandb; repeatable
  --dry-run                 prints the manifest and applies nothing
END
}

parse() {
  name='' image='' accelerator='' topology='' slices=1 chips='' workdir='' cache='' data='' account='' namespace=default
  spot=0 max_restarts=100 libtpu='' dry_run=0 training=() secrets=() extras=''
  while [ $# -gt 0 ]; do
    case $1 in
      --) shift; training=("$@"); return ;;
      --spot) spot=1 ;;
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
    --image) image=$2 ;;
    --accelerator) accelerator=$2 ;;
    --topology) topology=$2 ;;
    --slices) slices=$2 ;;
    --chips-per-host) chips=$2 ;;
    --workdir) workdir=$2 ;;
    --cache) cache=$2 ;;
    --data) data=$2 ;;
    --service-account) account=$2 ;;
    --namespace) namespace=$2 ;;
    --max-restarts) max_restarts=$2 ;;
    --libtpu-init-args) libtpu=$2 ;;
    --env) secrets+=("$2") ;;
    --extra) extras=${extras:+$extras,}$2 ;;
    *) refuse "unknown option $1" ;;
  esac
}

check() {
  local label='[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?' sides='[1-9][0-9]{0,2}(x[1-9][0-9]{0,2})' argument
  local path='(/[^/[:space:]]+)+'
  expect --name "$name" "$label" 'small letters, digits and dashes'
  expect --namespace "$namespace" "$label" 'small letters, digits and dashes'
  expect --service-account "$account" "$label" 'small letters, digits and dashes'
  expect --image "$image" '[a-z0-9][-a-zA-Z0-9._/:@]*' 'the name of an image'
  expect --slices "$slices" '[1-9][0-9]{0,3}' 'a number from 1'
  expect --max-restarts "$max_restarts" '0|[1-9][0-9]{0,8}' 'a number from 0'
  expect --accelerator "$accelerator" 'v4|v5e|v5p|v6e|tpu7x' 'v4, v5e, v5p, v6e or tpu7x'
  case $accelerator in
    v5e | v6e) expect --topology "$topology" "$sides" 'two sides, like 4x4' ;;
    *) expect --topology "$topology" "$sides{2}" 'three sides, like 2x2x4' ;;
  esac
  all=$((${topology//x/*}))
  chips=${chips:-$((all < 4 ? all : 4))}
  expect --chips-per-host "$chips" '1|4|8' '1, 4 or 8'
  [ $((all % chips)) = 0 ] || refuse "--chips-per-host = '$chips': does not divide the $all chips of $topology"
  [ "$slices" = 1 ] || [ "$all" -gt "$chips" ] || refuse "--slices = '$slices': slices of one host cannot be connected"
  expect_url --workdir "$workdir"
  bucket=${workdir#gs://}
  bucket=${bucket%%/*}
  cache=${cache:-${workdir%/*}/compiled}
  expect --cache "$cache" "gs://$bucket$path" "gs://$bucket/PATH: the bucket of the workdir is mounted"
  expect --data "$data" "(gs://$bucket$path)?" "gs://$bucket/PATH: the bucket of the workdir is mounted"
  [ "$cache" != "$workdir" ] || refuse "--cache = '$cache': is the workdir"
  check_training
  for argument in ${training[@]+"${training[@]}"}; do
    case $argument in
      gs://"$bucket"/* | --*=gs://"$bucket"/*) ;;
      gs://* | --*=gs://*) refuse "$argument: only gs://$bucket, the bucket of the workdir, is mounted" ;;
    esac
  done
  check_secrets
  check_extras
  check_files
}

# Refuses a path that the image does not have. $1: what names it; $2: how; $3: the absolute path.
expect_sent() {
  case $3 in
    "$root"/configs/* | "$root"/grpo_jax/*) ;;
    *.py) refuse "$1: $2 is not in the image; put it into configs/ of this tree, and build the image again" ;;
    *) refuse "$1: $2 is on this machine alone; put it into the bucket, and name gs://$bucket/PATH" ;;
  esac
}

# Prints a string as YAML, with gs://BUCKET/PATH, whole or behind --FLAG=, as a path of the mount.
yaml() {
  local word=$1
  case $word in gs://* | --*=gs://*) word=${word/gs:\/\//\/gcs/} ;; esac
  word=${word//\\/\\\\}
  word=${word//\"/\\\"}
  word=${word//$'\n'/\\n}
  printf '"%s"' "${word//$'\t'/\\t}"
}

variable() {
  printf '{name: %s, value: %s}' "$1" "$(yaml "$2")"
}

# Prints the Secret with the variables of --env.
secret() {
  local word
  printf 'apiVersion: v1\nkind: Secret\nmetadata:\n'
  printf '  name: %s\n  namespace: %s\ndata:\n' "$(yaml "$name-env")" "$(yaml "$namespace")"
  for word in "${secrets[@]}"; do
    printf '  %s: "%s"\n' "$word" "$(printf %s "$(printenv "$word")" | base64 | tr -d '\n')"
  done
}

selector() {
  case $accelerator in
    v4) echo tpu-v4-podslice ;;
    v5e) echo tpu-v5-lite-podslice ;;
    v5p) echo tpu-v5p-slice ;;
    v6e) echo tpu-v6e-slice ;;
    *) echo tpu7x ;;
  esac
}

render() {
  local manifest argument arguments env word command='[python, -m, grpo_jax.train]'
  manifest=$(< jobset.yaml)
  arguments=$(yaml "--workdir=$workdir")
  for argument in "${training[@]}"; do arguments+=", $(yaml "$argument")"; done
  env="$(variable JAX_COMPILATION_CACHE_DIR "$cache")"
  [ -z "$data" ] || env+=", $(variable GRPO_JAX_DATA "$data")"
  [ -z "$libtpu" ] || env+=", $(variable LIBTPU_INIT_ARGS "$libtpu")"
  for word in ${secrets[@]+"${secrets[@]}"}; do
    env+=", {name: $word, valueFrom: {secretKeyRef: {name: $(yaml "$name-env"), key: $word}}}"
  done
  if [ -n "$extras" ]; then
    command="pip install --quiet --no-cache-dir --editable '.[tpu,$extras]' && exec python -m grpo_jax.train"
    command="[sh, -c, $(yaml "$command \"\$@\""), sh]"  # the last sh is \$0 there, then come the arguments
  fi
  fill NAME "$(yaml "$name")"
  fill NAMESPACE "$(yaml "$namespace")"
  fill MAX_RESTARTS "$max_restarts"
  fill SLICES "$slices"
  fill HOSTS $((all / chips))
  fill CHIPS "$chips"
  fill SERVICE_ACCOUNT "$(yaml "$account")"
  fill ACCELERATOR "$(selector)"
  fill TOPOLOGY "$topology"
  fill SPOT "$([ "$spot" = 0 ] || echo 'cloud.google.com/gke-spot: "true"')"
  fill IMAGE "$(yaml "$image")"
  fill COMMAND "$command"
  fill ENV "[$env]"
  fill MOUNT "$(yaml "gs://$bucket")"
  fill BUCKET "$(yaml "$bucket")"
  fill ARGUMENTS "[$arguments]"  # last: they may hold anything
  printf '%s\n' "$manifest"
}

fill() {
  manifest=${manifest//"@$1@"/"$2"}
}

# shellcheck source=launch/arguments.sh
source "$root/launch/arguments.sh"
case ${1:-} in -h | --help) help; exit ;; esac
sources=''  # files outside this tree are refused
parse "$@"
check
if [ "$dry_run" = 1 ]; then
  [ ${#secrets[@]} = 0 ] || echo "# besides, the Secret $name-env with ${secrets[*]}, whose values are not printed"
  render
else
  command -v kubectl > /dev/null || { echo 'error: no kubectl on PATH' >&2; exit 2; }
  # server-side, as otherwise an annotation of the Secret would have the values a second time
  [ ${#secrets[@]} = 0 ] || secret | kubectl apply --server-side --force-conflicts -f -
  render | kubectl apply -f -
fi
