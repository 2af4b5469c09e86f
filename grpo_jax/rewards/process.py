"""A process reward model: for each step of a completion, the probability that the step is right.

A step is the text between two of the model's separators (see rewards.model). The model reads prompt and steps up to a
separator, and its value there gives the step's probability. As in training, each step is tokenized by itself.
"""

from collections.abc import Sequence
import math
from typing import Annotated, Any

from scipy.special import expit

from grpo_jax.example import Example
from grpo_jax.ranges import OneOf
from grpo_jax.rewards.model import Source, compute_values, encode_prompts, load

READS_ANSWERS = False  # it judges without a gold answer
AGGREGATES = {'min': min, 'mean': lambda values: sum(values) / len(values), 'product': math.prod}


def reward(
    completions: Sequence[str],
    examples: Sequence[Example],
    *,
    source: Source,
    models: dict,
    aggregate: Annotated[str, OneOf(tuple(AGGREGATES))],
) -> list[float | None]:
    """For each completion the min, mean or product of its steps' probabilities; None where `steps` finds no step."""
    rows = steps(completions, examples, source=source, models=models, centred=False)
    return [AGGREGATES[aggregate]([probability for _, probability in row]) if row else None for row in rows]


def steps(
    completions: Sequence[str], examples: Sequence[Example], *, source: Source, models: dict, centred: bool
) -> list[list[tuple[int, float]]]:
    """For each completion a list of (step's end in characters, probability p that the step is right).

    centred: whether to give 2p - 1 instead of p. The list is empty for a text longer than the model's context.
    """
    model = load(models, source)
    prompts = encode_prompts(model, examples)
    ends, rows, columns = [], [], []
    for text, prompt in zip(completions, prompts, strict=True):
        text_steps = split(text, model.separator)
        ids, last = tokenize(model.tokenizer, [step for step, _ in text_steps], model.separator)
        ends.append([end for _, end in text_steps])
        rows.append(prompt + ids)
        columns.append([len(prompt) + index for index in last])
    rewards = []
    for values, row_ends, row_columns in zip(compute_values(model, rows), ends, columns, strict=True):
        probabilities = [] if values is None else [float(expit(float(values[column]))) for column in row_columns]
        numbers = [2 * p - 1 for p in probabilities] if centred else probabilities
        rewards.append(list(zip(row_ends, numbers, strict=False)))
    return rewards


def split(text: str, separator: str) -> list[tuple[str, int]]:
    """[(step, end in characters), ...]: the text split at separators, without blank pieces and spaces around pieces."""
    pieces, start = [], 0
    for piece in text.split(separator):
        if piece.strip():
            pieces.append((piece.strip(), start + len(piece.rstrip())))
        start += len(piece) + len(separator)
    return pieces


def tokenize(tokenizer: Any, texts: Sequence[str], separator: str) -> tuple[list[int], list[int]]:
    """(token ids of all steps, index of each step's last token); a separator follows each step."""
    ids, last = [], []
    if not texts:
        return ids, last
    for step in tokenizer([text.strip() + separator for text in texts], add_special_tokens=False)['input_ids']:
        ids += step
        last.append(len(ids) - 1)
    return ids, last
