"""Shows the exact text and token ids of prompts, as the model sees them.

Examples:
    python -m grpo_jax show --config=arithmetic
    python -m grpo_jax show --config=gsm8k --config.model.path=Qwen/Qwen3-0.6B --prompts=1 --split=test
"""

from collections.abc import Iterator
import os
import sys
from typing import Any

from absl import flags

from grpo_jax import data, train
from grpo_jax.run import cli
from grpo_jax.run.open import NOWHERE, open_config, open_split
from grpo_jax.text import escape, exact_text


def lines(config: Any, count: int, split: str = 'train') -> Iterator[str]:
    """Yields lines on the stop tokens and on `count` prompts: text, token ids, gold answer.

    The lines also have the completions in the data from which the run learns, if any. split: 'train' for the first
    prompts of step 0, or 'test' for prompts of the split that evaluations use. Raises BadInput for a config that
    training, or for 'test' an evaluation, would refuse.
    """
    if split == 'train':
        run, (dataset, _) = train.check(config, NOWHERE)
    else:
        run = open_config(config, NOWHERE)
        dataset = open_split(run, split)
    tokenizer, stops = run.model.tokenizer, run.settings.sampling.stop_tokens
    yield f'model {run.model.folder}  prompts {len(dataset.examples)}  stop tokens ' + ' '.join(
        f'{i} {tokenizer.convert_ids_to_tokens(i)!r}' for i in stops
    )
    learns = config.supervised.updates or config.collection.source in ('demonstrations', 'pairs')
    imitated = ('demonstration', 'rejected') if learns and split == 'train' else ()
    for index in data.indices(config.seed, 0, count, len(dataset.examples), dataset.sources):
        example, ids = dataset.examples[index], dataset.tokens[index]
        yield ''
        yield f'example {example.id}, {len(ids)} of {config.data.max_prompt_tokens} tokens, answer {example.answer!r}'
        yield f'text {exact_text(tokenizer, ids)!r}'
        yield f'ids  {ids}'
        yield from (f'{name} {example.meta[name]!r}' for name in imitated if name in example.meta)


def main() -> None:
    """Runs the command."""
    try:
        for line in lines(flags.FLAGS.config, flags.FLAGS.prompts, flags.FLAGS.split):
            print(escape(line), flush=True)
    except BrokenPipeError:  # the reader, like head, has closed the pipe; the interpreter flushes once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == '__main__':
    flags.DEFINE_integer('prompts', 4, 'How many prompts to show.', lower_bound=1)
    flags.DEFINE_enum('split', 'train', ['test', 'train'], 'Split of the data.')
    cli.define_flags(workdir=False)
    cli.run(main)
