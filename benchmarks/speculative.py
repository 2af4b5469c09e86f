"""What drafts by n-grams would save in a rollout: tokens a verifying step yields, and what such a step costs.

python -m benchmarks.speculative [--repeats=5]

A draft is the k tokens that followed the latest earlier occurrence of the last n tokens, in the row's prompt and
completion, or also in what the other rows of its group have after as many steps. A verifying step accepts the tokens
that agree with what is sampled, and one more, so the texts that were sampled tell what drafts would have been
accepted. Texts: stories that a trained model samples at temperature 1, and GSM8K's solutions. The price is the time of
the layers' products for k + 1 tokens a row against one, without attention.
"""

import argparse
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import ByteLevelBPETokenizer

from benchmarks import environment
from benchmarks.rollout import MODEL
from grpo_jax import sampler
from grpo_jax.data import gsm8k
from grpo_jax.models import hf, transformer
from grpo_jax.models.hf import families
from grpo_jax.sampler.engine import make_sampler
from grpo_jax.sharding import batches, mesh, specs
from grpo_jax.types import Prompts

DATA = os.environ.get('GRPO_JAX_DATA', 'data')
OPENINGS = (
    'Once upon a time',
    'Lily and Tom',
    'The little dog',
    'One day, a boy',
    'Sara liked to',
    'There was a big',
    'Ben saw a',
    'In the park,',
)
ROWS, GROUP, TOKENS = 64, 8, 160  # of a step that is priced; of the stories
GRAMS, DRAFTS = (2, 3), (1, 3, 7)


def stories():
    """Groups of (prompt, completions) that stories260K samples."""
    folder = os.path.join(DATA, 'models', 'stories260K')
    c, one = families.load_config(folder), mesh.make({})
    tokenizer = hf.load_tokenizer(folder)
    prompts = [[1, *tokenizer.encode(text, add_special_tokens=False)] for text in OPENINGS]
    queries = max(map(len, prompts))
    tokens = np.array([[0] * (queries - len(ids)) + ids for ids in prompts], np.int32)
    mask = np.array([[False] * (queries - len(ids)) + [True] * len(ids) for ids in prompts])
    engine = make_sampler(
        c,
        one,
        batches.Shapes(len(prompts), GROUP, queries, TOKENS),
        sampler.Sampling(temperature=1.0, max_tokens=TOKENS, stop_tokens=(1, 2), pad_token=0),
        {},
    )
    params = hf.load_params(folder, c, specs.params(transformer.param_table(c), one))
    batch = Prompts(jnp.asarray(tokens), jnp.asarray(mask), jnp.arange(len(prompts), dtype=jnp.int32))
    rollout = jax.device_get(engine(params, batch, jax.random.key(0), 0))
    found = [row[queries:][valid].tolist() for row, valid in zip(rollout.tokens, rollout.completion_mask, strict=True)]
    return [(ids, found[i * GROUP : (i + 1) * GROUP]) for i, ids in enumerate(prompts)]


def solutions():
    """Groups of one: GSM8K's test questions and their solutions, in tokens of Qwen2.5's vocabulary."""
    parts = os.path.join(DATA, 'tokenizers', 'qwen2.5')
    tokenizer = ByteLevelBPETokenizer(os.path.join(parts, 'vocab.json'), os.path.join(parts, 'merges.txt'))
    examples = gsm8k.examples('test', folder=os.path.join(DATA, 'math'))[:256]
    return [(tokenizer.encode(x.prompt).ids, [tokenizer.encode(x.meta['demonstration']).ids]) for x in examples]


def lookup(sources, last, k):
    """The k tokens after the latest occurrence of `last`, of the first source that has one."""
    n = len(last)
    for source in sources:
        for at in range(len(source) - n - 1, -1, -1):
            if source[at : at + n] == last:
                return source[at + n : at + n + k]
    return []


def steps_of(groups, n, k, shared):
    """(tokens, verifying steps) of each row."""
    found = []
    for prompt, rows in groups:
        done, steps = [0] * len(rows), [0] * len(rows)
        while any(at < len(row) for at, row in zip(done, rows, strict=True)):
            before = list(done)  # what all rows have when the step begins
            for i, row in enumerate(rows):
                if before[i] == len(row):
                    continue
                own = prompt + row[: before[i]]
                others = [prompt[-n:] + rows[j][: before[j]] for j in range(len(rows)) if j != i] if shared else []
                draft = lookup([own, *others], own[-n:], k)
                ahead = row[before[i] :]
                agreed = next(
                    (j for j, (a, b) in enumerate(zip(draft, ahead, strict=False)) if a != b),
                    min(len(draft), len(ahead)),
                )
                done[i], steps[i] = min(before[i] + agreed + 1, len(row)), steps[i] + 1
        found += list(zip(map(len, rows), steps, strict=True))
    return found


def prices(repeats):
    """{tokens a row: CPU-seconds of the model's products for ROWS rows}."""
    params = jax.jit(transformer.init, static_argnums=1)(jax.random.key(0), MODEL)

    def run(count):
        tokens = jnp.ones((ROWS, count), jnp.int32)
        compiled = jax.jit(
            lambda params, tokens, mask: transformer.unembed(
                params, transformer.forward(params, tokens, transformer.positions_of(mask), mask, MODEL), MODEL
            )
        )
        mask = jnp.ones_like(tokens, bool)
        jax.block_until_ready(compiled(params, tokens, mask))

        def several():
            for _ in range(10):
                jax.block_until_ready(compiled(params, tokens, mask))

        return several

    seconds, _ = environment.interleaved({count: run(count) for count in (1, *(k + 1 for k in DRAFTS))}, repeats)
    return seconds


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--repeats', type=int, default=5)
    arguments = parser.parse_args()
    print(environment.describe())
    price = prices(arguments.repeats)
    print(
        'tokens a row: price of a step of 64 rows   '
        + ', '.join(f'{count}: {seconds / price[1]:.2f}' for count, seconds in price.items())
    )
    for name, groups in (('stories260K', stories()), ('GSM8K solutions', solutions())):
        for shared, n, k in itertools.product((False, True)[: 1 + (len(groups[0][1]) > 1)], GRAMS, DRAFTS):
            rows = steps_of(groups, n, k, shared)
            tokens, steps = (sum(column) for column in zip(*rows, strict=True))
            gain, slowest = tokens / steps, max(rows)[0] / max(steps for _, steps in rows)
            print(
                f'{name}, {"group" if shared else "own text"}, n = {n}, k = {k}: {gain:.2f} tokens a step, '
                f'{slowest:.2f} of the slowest row; here {gain * price[1] / price[k + 1]:.2f} x as fast',
                flush=True,
            )


if __name__ == '__main__':
    main()
