"""How fast completions are scored, and how much of it hides behind the device.

python -m benchmarks.rewards [--out=trace.json]

1. 1,000 easy completions, GSM8K solutions and boxed MATH answers, every other one wrong, judged by reward math.
2. One rollout of the arithmetic demo with reward math: when each completion was judged, beside when the device
   decoded. --out writes both as a trace that chrome://tracing and Perfetto show.
"""

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import threading
import time

import numpy as np

from benchmarks import environment
from grpo_jax import rewards
from grpo_jax.collect.select import make_collector
from grpo_jax.configs import arithmetic, default
from grpo_jax.data import gsm8k, math
from grpo_jax.rewards import gold
from grpo_jax.run.open import make_policy, make_run_learner, open_run, open_splits

REPEATS = 3


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--out', help='file of the trace')
    out = parser.parse_args().out
    print(environment.describe())
    throughput()
    spans = overlap()
    if out:
        with open(out, 'w', encoding='utf8') as file:
            json.dump({'traceEvents': spans}, file)


def throughput():
    """Prints seconds for 1,000 completions, workers starting included and not."""
    folder = os.path.join(default.DATA, 'math')
    examples = gsm8k.examples('test', folder=folder)[:500] + math.examples('test', folder=folder)[:500]
    section = default.get_config().reward
    section.update({'parts': (('math', 1.0),), 'verifier': 'math', 'workers': os.cpu_count()})
    texts = []
    for row, example in enumerate(examples):
        right, wrong = gold.change_answer(example)
        texts.append(f'So the answer is \\boxed{{{wrong if row % 2 else right}}}.')
    seconds = []
    for _ in range(REPEATS):
        reward_functions = rewards.build(rewards.RewardOptions.from_config(section), 64)
        began = time.monotonic()
        rewarded = rewards.compute_rewards(reward_functions, examples, texts, [False] * len(texts), [0] * len(texts))
        seconds.append(time.monotonic() - began)
        reward_functions.close()
    expected = np.arange(len(texts)) % 2 == 0
    print(
        f'1,000 completions by math, {section.workers} workers: {statistics.median(seconds):.1f} s, median of '
        f'{REPEATS}, cold each time; {np.mean((rewarded.rewards >= 1) == expected):.1%} as made'
    )


def overlap():
    """Prints how much of the scoring of a rollout lay within its sampling; the spans as trace events."""
    config = arithmetic.get_config()
    config.reward.parts, config.reward.verifier = (('math', 1.0),), 'math'
    spans, began = [], time.monotonic()

    def span(name, start):
        spans.append(
            {
                'name': name,
                'ph': 'X',
                'pid': 0,
                'tid': threading.get_ident() % 10**6,
                'ts': (start - began) * 1e6,
                'dur': (time.monotonic() - start) * 1e6,
            }
        )

    with tempfile.TemporaryDirectory() as folder:
        run = open_run(config, folder)
        part = run.rewards.parts['math']

        def timed(text, example):
            start = time.monotonic()
            value = part.function(text, example)
            span('reward', start)
            return value

        timed_rewards = run.rewards._replace(parts={'math': part._replace(function=timed)})
        run = dataclasses.replace(run, rewards=timed_rewards)
        collector = make_collector(run, open_splits(run))
        state = make_run_learner(run, collector.aux).initial(make_policy(run))
        collector.collect(state, lambda *_: None)[0].finish_rewards()  # compiles
        spans.clear()
        start = time.monotonic()
        draw, _ = collector.collect(state, lambda *_: None)
        span('sample', start)
        sampled = spans[-1]
        start = time.monotonic()
        draw.finish_rewards()
        waited = time.monotonic() - start
    judged = [event for event in spans if event['name'] == 'reward']
    threads = run.rewards.options.workers
    within = sum(event['ts'] + event['dur'] <= sampled['ts'] + sampled['dur'] for event in judged)
    print(
        f'a rollout of {len(judged)} completions: {within} judged while others decoded; '
        f'{sum(event["dur"] for event in judged) / 1e6:.2f} s of rewards on {threads} threads, of which '
        f'the step waited for {waited:.2f} s after {sampled["dur"] / 1e6:.2f} s of sampling'
    )
    return spans


if __name__ == '__main__':
    main()
