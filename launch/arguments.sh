# Sourced by tpu_vm.sh and gke/render.sh: refuses wrong arguments before anything is created.
# Reads usage, root (of this tree), from (the caller's folder), secrets (of --env), extras (of --extra) and training
# (its arguments), and calls the script's expect_sent NAMED_BY WORD PATH. Sets sources, the folder of the user's files.
# shellcheck shell=bash
most_mib=100  # of the user's files that are sent

refuse() {
  echo "$usage; --help has the options" >&2
  echo "error: $1" >&2
  exit 2
}

# Refuses a value that the extended regular expression does not match as a whole.
expect() {
  [[ $2 =~ ^($3)$ ]] || refuse "$1 = '$2': $4"
}

# Refuses a URL whose bucket has a name that no bucket can have.
expect_bucket() {
  local bucket=${2#gs://} wrong=''
  bucket=${bucket%%/*}
  if [ ${#bucket} -lt 3 ]; then wrong='too short'; fi
  if [ ${#bucket} -gt 63 ] && [[ $bucket != *.* ]]; then wrong='too long'; fi
  [ -z "$wrong" ] || refuse "$1 = '$2': the bucket's name '$bucket' is $wrong; Cloud Storage needs 3 to 63 characters"
  expect "$1" "$bucket" '[a-z0-9][-a-z0-9._]+[a-z0-9]' 'the name of a bucket: small letters, digits, and -._ inside'
}

# Refuses a value that is not gs://BUCKET/PATH.
expect_url() {
  case $2 in gs://*) expect_bucket "$1" "$2" ;; esac
  expect "$1" "$2" 'gs://[^/]+(/[^/[:space:]]+)+' 'gs://BUCKET/PATH, without a slash at its end'
}

# Refuses arguments of the training that could not work.
check_training() {
  local argument
  [[ " ${training[*]-} " == *' --config'[=\ ]* ]] || refuse 'run needs -- --config=FILE:PRESET'
  for argument in "${training[@]}"; do
    case $argument in
      --workdir | --workdir=*) refuse '--workdir: goes before --' ;;
      gs://* | --*=gs://*) expect_bucket "${argument%%=*}" "gs://${argument#*gs://}" ;;
    esac
  done
}

# Refuses names of --env without a value here. No message has a value.
check_secrets() {
  local name
  for name in ${secrets[@]+"${secrets[@]}"}; do
    case $name in
      *=*) refuse "--env = '${name%%=*}=...': give the name alone; the value is the one that is exported here" ;;
      JAX_COMPILATION_CACHE_DIR | GRPO_JAX_DATA | LIBTPU_INIT_ARGS)
        refuse "--env = '$name': has an option of its own" ;;
    esac
    expect --env "$name" '[A-Za-z_][A-Za-z0-9_]*' 'the name of a variable that is exported here'
    [ -n "$(printenv "$name")" ] || refuse "--env = '$name': is not exported here, or is empty"
  done
}

# Refuses extras that pyproject.toml does not have.
check_extras() {
  local extra known
  known=$(sed -n '/^\[project.optional-dependencies\]/,/^$/s/^\([a-z]*\) = .*/\1/p' "$root/pyproject.toml")
  for extra in ${extras//,/ }; do
    [[ $'\n'$known$'\n' == *$'\n'"$extra"$'\n'* ]] || refuse "--extra = '$extra': one of ${known//$'\n'/, }"
  done
}

# Prints the paths of Python files in an argument's value, or else the value if it is a path; one a line.
paths_in() {
  local value=${1#*=}
  case $value in
    gs://*) ;;
    *.py*) grep -oE "[^][(){}'\", =:]+\.py" <<< "$value" || : ;;
    */*) echo "$value" ;;
  esac
}

# Prints the absolute path of a file or folder as a training here would find it, also beside the file $2; nothing where
# there is none.
find_local() {
  local path
  [ -n "$1" ] || return 0
  case $1 in /*) set -- "$1" ;; *) set -- "$from/$1" "$root/$1" "$root/grpo_jax/$1" "${2:-$from/}$1" ;; esac
  for path in "$@"; do
    if [ -e "$path" ]; then
      echo "$(cd "$(dirname "$path")" && pwd -P)/$(basename "$path")"
      return
    fi
  done
}

# Whether a path lies in this tree, and is sent with it.
in_tree() {
  case $1 in "$root"/*) ! git -C "$root" check-ignore -q "$1" 2> /dev/null ;; *) return 1 ;; esac
}

# Whether a path lies in sources, and is sent with them.
in_sources() {
  [ -n "$sources" ] && [[ $1 == "$sources"/* ]] && [[ /${1#"$sources"/} != */.* ]] &&
    ! git -C "$sources" check-ignore -q "$1" 2> /dev/null
}

# Sets sources: the folder with the user's Python files, which lie outside this tree; '' without such files. It is the
# caller's folder where that holds them, since a training here would import from there.
find_sources() {
  local argument word path
  sources=''
  for argument in "${training[@]}"; do
    while IFS= read -r word; do
      path=$(find_local "$word")
      if [[ $path != *.py ]] || in_tree "$path" || in_sources "$path"; then continue; fi
      case $path in "$root"/*) refuse "$argument: git ignores $word, so that it is not sent; put it elsewhere" ;; esac
      if [ -z "$sources" ]; then
        sources=${path%/*}
        case $from in "$HOME" | "$root" | "$root"/*) ;; *) [[ $path != "$from"/* ]] || sources=$from ;; esac
      elif [[ $sources == "${path%/*}"/* ]]; then
        sources=${path%/*}
      else
        refuse "$argument: $word is not in $sources, where other files of yours are; put all into one folder"
      fi
    done <<< "$(paths_in "$argument")"
  done
  case $sources in
    '') return ;;
    "$HOME" | /tmp) refuse "files of yours are in $sources; put them into a folder of their own, which is sent" ;;
  esac
  [ "$(list_sources | tar -C "$sources" --null -cf - -T - | head -c $((most_mib * 1048576 + 1)) | wc -c)" -le \
    $((most_mib * 1048576)) ] || refuse "$sources, which is sent, has more than $most_mib MiB; \
put your Python files into a folder of their own"
}

# Prints the names of the files in sources, each with a NUL: those that git knows or would add, without a git all; none
# that is hidden.
list_sources() {
  (
    cd "$sources"
    if git rev-parse --is-inside-work-tree > /dev/null 2>&1; then
      git ls-files -z --cached --others --exclude-standard
    else
      find . -type f ! -path '*/__pycache__/*' -print0
    fi | while IFS= read -r -d '' file; do
      file=${file#./}
      case $file in .* | */.*) ;; *) [ ! -e "$file" ] || printf '%s\0' "$file" ;; esac
    done
  )
}

# Refuses what is on this machine alone, also where the user's own files name it, and changes the paths in `training`
# into those of the machines.
check_files() {
  local i argument word path seen
  for i in "${!training[@]}"; do
    argument=${training[i]}
    while IFS= read -r word; do
      path=$(find_local "$word")
      if [ -z "$path" ]; then
        [[ $word != *.py ]] || refuse "$argument: there is no $word here"
        continue
      fi
      expect_sent "$argument" "$word" "$path"
      if in_sources "$path"; then seen=${path#"$sources"/}; else seen=${sources:+../grpo_jax/}${path#"$root"/}; fi
      training[i]=${training[i]/"$word"/"$seen"}
      if [[ $path == *.py ]]; then check_names "$path"; fi
    done <<< "$(paths_in "$argument")"
  done
}

# Refuses a Python file that names files which the machines will not have.
check_names() {
  local word path
  while IFS= read -r word; do
    path=$(find_local "$word" "${1%/*}/")
    case $path in '') continue ;; esac
    case $word in
      /usr/* | /etc/* | /dev/* | /proc/* | /opt/* | /var/* | /tmp | /) ;;  # not the user's
      /*) refuse "$1 names $word: the machines have other folders; name it from ${sources:-$root} on" ;;
      *) expect_sent "$1" "$word" "$path" ;;
    esac
  done <<< "$(grep -oE "['\"]([^'\" ]*/[^'\" ]+|[^'\" ]*\.py(:[A-Za-z0-9_]+)?)['\"]" "$1" |
    sed "s/^.//; s/.$//; s/\.py:.*/.py/")"
}
