"""Shows the exact text and token ids of prompts, as the model sees them.

Examples:
    python -m grpo_jax show --config=arithmetic
    python -m grpo_jax show --config=gsm8k --config.model.path=Qwen/Qwen3-0.6B --prompts=1
"""

from collections.abc import Iterator
from typing import Any

from absl import flags

from grpo_jax import data, train
from grpo_jax.run import cli
from grpo_jax.run.open import NOWHERE
from grpo_jax.text import escape


def lines(config: Any, count: int) -> Iterator[str]:
    """Yields lines on the stop tokens and on the first `count` prompts of step 0: text, token ids, answer.

    Raises BadInput for all that a run of the config would be refused for.
    """
    run, splits = train.check(config, NOWHERE)
    tokenizer, dataset, stops = run.model.tokenizer, splits.train, run.settings.sampling.stop_tokens
    yield f'model {run.model.folder}  prompts {len(dataset.examples)}  stop tokens ' + ' '.join(
        f'{i} {tokenizer.convert_ids_to_tokens(i)!r}' for i in stops
    )
    for index in data.indices(config.seed, 0, count, len(dataset.examples), dataset.sources):
        example, ids = dataset.examples[index], dataset.tokens[index]
        yield ''
        yield f'example {example.id}, {len(ids)} of {config.data.max_prompt_tokens} tokens, answer {example.answer!r}'
        yield f'text {data.exact_text(tokenizer, ids)!r}'
        yield f'ids  {ids}'


def main() -> None:
    """Runs the command."""
    for line in lines(flags.FLAGS.config, flags.FLAGS.prompts):
        print(escape(line))


if __name__ == '__main__':
    flags.DEFINE_integer('prompts', 4, 'How many prompts to show.', lower_bound=1)
    cli.define_flags(workdir=False)
    cli.run(main)
