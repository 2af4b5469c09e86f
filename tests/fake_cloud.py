"""A cloud without machines: launch/ runs against tests/fake_program.py in place of gcloud, kubectl and others."""

import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROGRAMS = ('gcloud', 'kubectl', 'python3', 'sudo', 'gcsfuse', 'mountpoint')


class Cloud:
    """A folder with fake programs first on PATH; call() runs a script, calls() lists what it called."""

    def __init__(self, folder):
        self.folder = folder
        self.script('script.json', {})
        self.script('trainings.json', {'all': [0]})
        (folder / 'bin').mkdir()
        for program in PROGRAMS:
            path = folder / 'bin' / program
            path.write_text(f'#!/bin/sh\nexec {sys.executable} -SE {ROOT}/tests/fake_program.py {program} "$@"\n')
            path.chmod(0o755)
        clean = {
            k: v for k, v in os.environ.items() if not k.startswith(('TPU_', 'LIBTPU', 'GRPO', 'JAX', 'PYTHON', 'HF_'))
        }
        self.environment = clean | {
            'PATH': f'{folder}/bin:{os.environ["PATH"]}',
            'HOME': str(folder),
            'XDG_CACHE_HOME': str(folder / 'cache'),
            'FAKE_CLOUD': str(folder),
            'TPU_POLL_SECONDS': '0.01',
        }

    def script(self, name, content):
        (self.folder / name).write_text(json.dumps(content))

    def call(self, *arguments, script='tpu_vm.sh', stdin='', folder=None, **environment):
        return subprocess.run(
            ['bash', os.path.join(ROOT, 'launch', script), *arguments],
            input=stdin,
            text=True,
            capture_output=True,
            timeout=60,
            cwd=folder,
            env=self.environment | environment,
        )

    def calls(self, program='gcloud'):
        path = self.folder / 'calls.jsonl'
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row for row in rows if row['program'] == program]

    def verbs(self):
        """What gcloud was asked for, shortly: create, describe, install, start, state, stop, tail, delete, scp."""
        short = []
        for call in self.calls():
            words = call['arguments'][2:]
            text = ' '.join(words)
            known = ('worker.sh setup', 'worker.sh start', 'worker.sh stop', 'worker.sh state', 'tail')
            part = next((part for part in known if part in text), words[1])
            short.append(part.removeprefix('worker.sh '))
        return [verb for verb in short if verb != 'describe']

    def sent(self):
        """Lets run --keep find what setup has sent."""
        (self.folder / 'cache' / 'grpo_jax').mkdir(parents=True)
        (self.folder / 'cache' / 'grpo_jax' / 'tpu.tar.gz').write_text('the tree')
