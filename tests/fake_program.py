"""What fake_cloud.Cloud puts in place of gcloud, kubectl and others: `fake_program.py PROGRAM ARGUMENTS`.

FAKE_CLOUD is a folder. calls.jsonl gets a line for every call: program, arguments, stdin. script.json is {part of a
gcloud command: answers}: the first key that occurs in the command gives its next answer, [status, standard output];
the last answer stays. With FAKE_VMS, what no key answers is done: ssh and scp lead to the folder of the node, as the
home of a TPU VM. The training, `python3 -m grpo_jax.train`, does what trainings.json says next: an exit status, wait
(for SIGTERM, then 42), or deaf (to it).
"""

import fcntl
import json
import os
import sys

FOLDER = os.environ['FAKE_CLOUD']
KEPT = ('JAX_COMPILATION_CACHE_DIR', 'LIBTPU_INIT_ARGS', 'GRPO_JAX_DATA', 'GLIBC_TUNABLES', 'HF_TOKEN')


def record(program, arguments, **more):
    with open(os.path.join(FOLDER, 'calls.jsonl'), 'a', encoding='utf8') as calls:
        calls.write(json.dumps({'program': program, 'arguments': arguments} | more) + '\n')


def scripted(name, key):
    """The next answer of FOLDER/name for the first key that is part of `key`; None without one."""
    path = os.path.join(FOLDER, name)
    with open(path, 'r+', encoding='utf8') as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # slices are called at once
        script = json.load(file)
        for part, answers in script.items():
            if part in key:
                answer = answers.pop(0) if len(answers) > 1 else answers[0]
                file.seek(0)
                file.truncate()
                json.dump(script, file)
                return answer
    return None


def cloud(program, arguments):
    record(program, arguments, stdin=sys.stdin.read())
    answer = scripted('script.json', ' '.join(arguments))
    if answer is None and 'FAKE_VMS' in os.environ:
        return on_vm(arguments)
    status, text = answer or (0, '')
    print(text)
    return status


def on_vm(arguments):
    import shutil  # here, since starting this program is most of the tests' time
    import subprocess

    verb = arguments[3]
    if verb == 'scp':
        node, path = arguments[5].split(':')
        os.makedirs(os.path.join(FOLDER, node), exist_ok=True)
        shutil.copy(arguments[4], os.path.join(FOLDER, node, path))
        return 0
    home = os.path.join(FOLDER, arguments[4])
    command = next(word for word in arguments if word.startswith('--command=')).removeprefix('--command=')
    return subprocess.run(['bash', '-c', command], cwd=home, env=os.environ | {'HOME': home}, check=False).returncode


def python(arguments):
    import shutil

    if arguments[:2] == ['-m', 'venv']:
        os.makedirs(os.path.join(arguments[2], 'bin'))
        shutil.copy(shutil.which('python3'), os.path.join(arguments[2], 'bin', 'python'))
    if arguments[:2] == ['-m', 'pip']:
        record('pip', arguments[2:])
    if arguments[:2] != ['-m', 'grpo_jax.train']:
        return 0
    import signal
    import time

    then = scripted('trainings.json', 'all')
    if then == 'wait':
        signal.signal(signal.SIGTERM, lambda *_: os._exit(42))
    if then == 'deaf':
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    record('training', arguments[2:], environment=environment, folder=os.getcwd())
    if isinstance(then, str):
        time.sleep(60)
    return then


def main(program, *arguments):
    """The exit status of what stands in for the program."""
    if program in ('gcloud', 'kubectl'):
        return cloud(program, list(arguments))
    if program == 'python3':
        return python(list(arguments))
    record(program, list(arguments))
    return {'mountpoint': 1}.get(program, 0)


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
