"""A process reward model: the chance that each step of a completion is right, by a model that read it so far.

A step is what stands between two of the model's separators (see rewards.model); it is scored at the separator
behind it. As in training, each step is tokenized by itself.
"""

import math

from grpo_jax.errors import BadInput
from grpo_jax.rewards import model as models

AGGREGATES = {'min': min, 'mean': lambda values: sum(values) / len(values), 'product': math.prod}


def reward(completions, examples, *, folder, dtype, batch, device, park, aggregate):
    """List of one number for each completion's steps: min, mean or product of their chances; None without a step."""
    if aggregate not in AGGREGATES:
        raise BadInput('aggregate of a process reward model', aggregate, f'choose {", ".join(AGGREGATES)}')
    found = steps(
        completions, examples, folder=folder, dtype=dtype, batch=batch, device=device, park=park, centred=False
    )
    return [AGGREGATES[aggregate]([value for _, value in values]) if values else None for values in found]


def steps(completions, examples, *, folder, dtype, batch, device, park, centred):
    """For each completion a list of (end in characters, chance p in [0, 1] that the step is right).

    centred: 2p - 1 instead of p. Of a text longer than the model's context no step is scored. The other options are
    those of rewards.model.load and score.
    """
    model = models.load(folder, dtype, device, park)
    prompts, separator = models.encode_prompts(model, examples), model.texts['separator']
    ends, rows, places = [], [], []
    for text, example in zip(completions, examples, strict=True):
        parted = split(text, separator)
        ids, last = tokenize(model.tokenizer, [step for step, _ in parted], separator)
        prompt = prompts[example.prompt]
        ends.append([end for _, end in parted])
        rows.append(prompt + ids)
        places.append([len(prompt) + place for place in last])
    found = []
    for scores, row_ends, row_places in zip(models.score(model, rows, batch), ends, places, strict=True):
        chances = [] if scores is None else [models.sigmoid(float(scores[place])) for place in row_places]
        values = [2 * p - 1 for p in chances] if centred else chances
        found.append(list(zip(row_ends, values, strict=False)))
    return found


def split(text, separator):
    """(step, end in characters) of each part of a text between separators that is not blank."""
    found, start = [], 0
    for part in text.split(separator):
        if part.strip():
            found.append((part.strip(), start + len(part.rstrip())))
        start += len(part) + len(separator)
    return found


def tokenize(tokenizer, steps_, separator):
    """(token ids, index of each step's last token) of steps with a separator behind each."""
    ids, last = [], []
    if not steps_:
        return ids, last
    for step in tokenizer([step.strip() + separator for step in steps_], add_special_tokens=False)['input_ids']:
        ids += step
        last.append(len(ids) - 1)
    return ids, last
