# Sourced by tpu_vm.sh, whose options are its variables: the queued resource, its workers, and watching a training.
# shellcheck shell=bash

runtime_of() {
  case $1 in
    v6e-*) echo v2-alpha-tpuv6e ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    *) echo tpu-ubuntu2204-base ;;
  esac
}

nodes() {
  local i
  if [ "$slices" = 1 ]; then
    echo "$name"
  else
    for ((i = 0; i < slices; i++)); do echo "$name-$i"; done
  fi
}

request() {
  local flags=(--accelerator-type="$accelerator" --runtime-version="${runtime:-$(runtime_of "$accelerator")}")
  if [ "$slices" = 1 ]; then flags+=(--node-id="$name"); else flags+=(--node-count="$slices" --node-prefix="$name"); fi
  [ "$spot" = 0 ] || flags+=(--spot)
  tpus queued-resources create "$name" "${where[@]}" "${flags[@]}" ${create_flags[@]+"${create_flags[@]}"}
}

# Prints the state of the queued resource.
resource() {
  tpus queued-resources describe "$name" "${where[@]}" --format='value(state.state)' || return
  [ "$dry_run" = 0 ] || echo ACTIVE
}

# Waits until the TPUs are there; 1 if they will not come.
wait_active() {
  local state began=$SECONDS
  while :; do
    state=$(resource) || state=unknown
    [ "$dry_run" = 1 ] || say "$state after $((SECONDS - began)) s"
    case $state in
      ACTIVE) return 0 ;;
      FAILED | SUSPENDED) return 1 ;;
    esac
    sleep "$poll"
  done
}

remove() {
  tpus queued-resources delete "$name" "${where[@]}" --force --quiet
}

# Prints active, gone (preempted), changing (neither) or unknown (no answer).
condition() {
  local state node
  state=$(resource) || state=unknown
  if [ "$state" = ACTIVE ]; then
    for node in $(nodes); do
      case $(tpus tpu-vm describe "$node" "${where[@]}" --format='value(state)' || echo unknown) in
        READY) ;;
        PREEMPTED | TERMINATED) state=SUSPENDED; break ;;
        unknown) state=unknown ;;
        *) state=changing ;;
      esac
    done
  fi
  case $state in
    ACTIVE) echo active ;;
    SUSPENDED | FAILED) echo gone ;;
    unknown) echo unknown ;;
    *) echo changing ;;
  esac
}

# Runs a command on every worker of every slice at once; the status is one of theirs, 0 when all succeeded.
everywhere() {
  local node pid pids=() status=0
  for node in $(nodes); do
    tpus tpu-vm ssh "$node" "${where[@]}" --quiet --worker=all --command="$1" &
    pids+=($!)
    [ "$dry_run" = 0 ] || wait $!  # in order
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
  return "$status"
}

on_workers() {
  everywhere "bash grpo_jax/launch/worker.sh$(quoted "$@")"
}

# Copies a file to every worker of every slice, in the home folder, under a name.
send() {
  local node
  for node in $(nodes); do
    tpus tpu-vm scp "$1" "$node:$2" "${where[@]}" --quiet --worker=all || return 1
  done
}

# Packs the files that git knows or would add, as they are now.
pack() {
  local file
  mkdir -p "${archive%/*}"
  git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    [ ! -e "$file" ] || printf '%s\0' "$file"  # deleted, not yet committed
  done | tar --null -czf "$archive" -T -
  echo "$extras" > "$kept.extras"  # for run --keep
  say "sending $(wc -c < "$archive") bytes to every worker"
}

# Packs the user's own files, as they are now; run --keep sends the same ones after a preemption.
pack_sources() {
  mkdir -p "${kept%/*}"
  list_sources | tar -C "$sources" --null -h -czf "$kept.sources.tar.gz" -T -
  say "sending the files of $sources to every worker"
}

# Sends the variables of --env in a file that only its owner reads: a command line would show them to others.
send_secrets() {
  local variable status=0
  if [ "$dry_run" = 0 ]; then
    mkdir -p "${kept%/*}"
    rm -f "$kept.env"
    trap 'rm -f "$kept.env"' EXIT
    (umask 077 && for variable in "${secrets[@]}"; do
      printf 'export %s=%q\n' "$variable" "$(printenv "$variable")"
    done > "$kept.env")
  fi
  send "$kept.env" grpo_jax_env || status=1
  [ "$dry_run" = 1 ] || rm -f "$kept.env"
  return "$status"
}

install_everywhere() {
  send "$archive" grpo_jax.tar.gz || return
  # what is no longer in the tree goes away; the environment stays
  everywhere 'case $(bash grpo_jax/launch/worker.sh state 2> /dev/null) in
*running) echo "error: a training is running; stop it first" >&2; exit 2 ;; esac
mkdir -p grpo_jax && find grpo_jax -mindepth 1 -maxdepth 1 ! -name .venv -exec rm -rf {} + &&
tar -xzf grpo_jax.tar.gz -C grpo_jax && bash grpo_jax/launch/worker.sh setup'"$(quoted ${extras:+"$extras"})"
}

start() {
  local options=(--workdir="$workdir" --cache="$cache")
  [ -z "$data" ] || options+=(--data="$data")
  [ -z "$libtpu" ] || options+=(--libtpu-init-args="$libtpu")
  if [ -n "$sources" ]; then
    send "$kept.sources.tar.gz" grpo_jax_sources.tar.gz || return 1
    options+=(--sources)
  fi
  if [ ${#secrets[@]} != 0 ]; then
    send_secrets || return 1
    options+=(--env)
  fi
  on_workers start "${options[@]}" -- "${training[@]}"
}

# Prints what the workers' states make together: running, ended, stopped, failed STATUS, or nothing without a state.
outcome() {
  local line worst=''
  while IFS= read -r line; do
    case $line in
      *': running') [ "${worst:-ended}" != ended ] || worst=running ;;
      *': exited 0') worst=${worst:-ended} ;;
      *': exited 2' | *': exited 46') echo "failed ${line##* }"; return ;;
      *': stopped '*) echo stopped; return ;;
      *': exited '*) worst="failed ${line##* }" ;;
      *': lost' | *': idle') worst='failed 1' ;;
    esac
  done
  echo "$worst"
}

# Counts a failure to reach the TPUs; gives up after many in a row.
trouble() {
  troubles=$((troubles + 1))
  say "$1 ($troubles of $patience)"
  [ "$troubles" -lt "$patience" ] || fail "gave up: $1" 1
}

# Does what is to do: delete, ask, install and start, each leading to the next; 0 when nothing is left.
proceed() {
  if [ "$todo" = delete ]; then
    say 'preempted: deleting, and asking again'
    remove || return
    todo=ask
  fi
  if [ "$todo" = ask ]; then
    request || return
    todo=install
  fi
  if [ "$todo" = install ]; then
    { wait_active && install_everywhere; } || return
    todo=start
  fi
  on_workers stop "$grace" || return  # some may still run
  start || { [ $? != 2 ] || fail 'the workers refused to start the training'; return 1; }
  todo=''
}

# Shows the end of the first worker's log.
last_words() {
  tpus tpu-vm ssh "$(nodes | head -n 1)" "${where[@]}" --quiet --worker=0 --command='tail -n 20 grpo_jax_run/log' \
    >&2 || :
}

# Decides after a look at the training; leaves with its status when it has ended.
judge() {
  case $1 in
    running) failed=0 ;;
    ended) say 'training has ended'; exit ;;
    stopped) fail 'training was stopped' 143 ;;
    'failed 2') last_words; fail 'training refused its input' ;;
    'failed 46') last_words; fail 'a diagnosis has stopped the training' 46 ;;  # as config.diagnose.on says
    failed*)
      failed=$((failed + 1))
      [ "$failed" = 2 ] || return 0  # workers may die before a preemption shows: look twice
      failed=0
      last_words
      [ "$restarts" -lt "$max_restarts" ] || fail "training failed with status ${1#* }" "${1#* }"
      restarts=$((restarts + 1))
      say "training failed with status ${1#* }: restart $restarts of $max_restarts"
      todo=start ;;
  esac
}

watch() {
  local restarts=0 troubles=0 failed=0 states result now
  while :; do
    now=$(condition)
    [ "$now" != gone ] || todo=delete
    case $now-$todo in
      active-)
        states=$(on_workers state) || states=''
        result=$(outcome <<< "$states")
        if [ -n "$result" ]; then troubles=0; judge "$result"; else trouble 'the workers do not answer'; fi ;;
      gone-* | active-* | *-ask)
        if proceed; then troubles=0; failed=0; else trouble 'cannot set the training up'; fi ;;
      changing-*) say 'the TPUs are changing' ;;
      *) trouble 'no answer from gcloud' ;;
    esac
    sleep "$poll"
  done
}
