"""Seconds that a start of a run spends on many rows: to read, open and compare them; the same at each resume.

python -m benchmarks.many_rows [--rows=200000] [--longest=490]

It invents the rows; each has four columns, and a prompt of 20 to 60 words. It prints CPU seconds beside wall-clock
seconds, because other work on the machine makes only the latter longer. It leaves out the gold self-test, which only
the first start runs.
"""

import argparse
import json
import os
import random
import tempfile
import time

from grpo_jax import data
from grpo_jax.configs import arithmetic
from grpo_jax.data import files
from grpo_jax.rewards import gold
from grpo_jax.run import steering
from grpo_jax.run.open import make_workdir, open_run, open_splits, open_training

WORDS = (
    'the a of price apples dollars each how many does she buy if train leaves at minutes total cost red blue'.split()
)


def write(folder, split, count):
    """A split of made-up rows."""
    draw = random.Random(split)
    with open(os.path.join(folder, f'{split}.jsonl'), 'w', encoding='utf8') as file:
        for i in range(count):
            prompt = ' '.join(draw.choices(WORDS, k=draw.randint(20, 60))) + f' {split} {i}?'
            file.write(json.dumps({'prompt': prompt, 'answer': str(i), 'source': 'x', 'solution': prompt[::-1]}) + '\n')


def timed(name, function):
    """The function's result; prints its seconds."""
    clock, cpu = time.time(), time.process_time()
    result = function()
    print(f'{name:34s} {time.time() - clock:7.2f} s, of the CPU {time.process_time() - cpu:7.2f} s', flush=True)
    return result


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument('--rows', type=int, default=200_000)
    parser.add_argument('--longest', type=int, default=490, help='data.max_prompt_tokens')
    values = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for split, count in (('train', values.rows), ('test', 1000)):
            write(folder, split, count)
        config = arithmetic.get_config('dr_grpo')
        config.data.name, config.data.options, config.supervised.updates = 'files', {'folder': folder}, 0
        config.data.max_prompt_tokens, config.rollout.max_tokens = values.longest, 12
        workdir = os.path.join(folder, 'run')
        timed('reads the files', lambda: sum(1 for _ in files.rows(folder, 'train')))
        run = timed('opens the run without data', lambda: open_run(config, workdir))
        splits = timed('opens the splits, reads included', lambda: open_splits(run))
        timed('digests', lambda: data.contents_of(splits.train.read))
        timed('calls each reward once', lambda: gold.try_out(run.rewards, splits.train.examples))
        contents = steering.read_contents(workdir, run.settings.recorded, splits._asdict())
        os.makedirs(workdir)
        begun, _ = open_training(config, workdir)
        make_workdir(begun, 0)
        assert begun.contents.digests == contents.digests
        timed('opens all of it again (resume)', lambda: open_training(config, workdir))


if __name__ == '__main__':
    main()
