"""XRPO's rounds and exemplars (arXiv 2510.06672): samples a step in rounds, each for the prompts that gain most.

In-context seeding: if no completion of a prompt is right, the prompt is sampled again after exemplars, which are
other prompts with right completions. Exemplars come from the same step, so nothing is kept between steps. Completions
of a seeded prompt are learned from with the exemplars before it, and compared with the prompt's other completions. In
the paper exemplars come from a corpus; here they are the policy's own.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxtyping import Int
import numpy as np

from grpo_jax import data
from grpo_jax.collect import allocate
from grpo_jax.collect.draw import Collect, Drawer, count_sizes
from grpo_jax.collect.select import concatenate, split_groups
from grpo_jax.data import Dataset, pick
from grpo_jax.data.prompt_format import PromptFormat, encode_prompt, write_messages
from grpo_jax.example import Example

BETWEEN = '\n'  # stands between a completion and the next prompt, where there is no chat


def make_rounds(drawer: Drawer, prompt_format: PromptFormat) -> Collect:
    """Makes collect(state, progress) -> (Draw, TrainState), which samples a step in rounds (see allocate.explore)."""
    options, unit, queries = drawer.options, drawer.shapes.group_size, drawer.shapes.queries
    pad_token, thinking_start = drawer.sampling.pad_token, drawer.sampling.thinking_start
    rounds = drawer.shapes.prompts // drawer.prompts

    def collect(state, progress):
        step = int(state.step)
        chosen, aux = drawer.choose(step, dict(state.aux))
        unseeded, earlier = data.pick(drawer.dataset, chosen.indices), drawer.number_first_samples(chosen.indices)

        def draw_round(carry, owners, first, blocks):
            """Samples one unit for each owner, see `draw` of allocate.explore; carry: (draws, seeded completions)."""
            draws, seeded = carry
            prompts_of_round = data.pick(unseeded, owners)
            if options.seeding and blocks[0]:
                prompts_of_round, count = seed_unsolved(
                    drawer.tokenizer, prompt_format, queries, unseeded, owners, blocks, options.seeding
                )
                seeded += count * unit
            _, prompts = data.prompts(prompts_of_round, range(len(owners)), queries, pad_token, thinking_start)
            first = np.int32(np.asarray(first) + earlier[owners])
            draw = drawer.sample(state, [unseeded.examples[i] for i in owners], prompts, progress, first=first)
            groups = split_groups(draw._replace(examples=prompts_of_round.examples), step, options.gate)
            return groups, ([*draws, draw], seeded)

        blocks, (draws, seeded) = allocate.explore(
            draw_round, ([], 0), drawer.prompts, rounds, unit, options.exploration
        )
        sizes = unit * np.array([len(group) for group in blocks])
        draw = concatenate([block for group in blocks for block in group], drawer.mesh)
        draw = draw._replace(
            sizes=sizes,
            counts=count_sizes(sizes, seeded),
            stats=draws[-1].stats,
            streams=[stream for each_draw in draws for stream in each_draw.streams],
        )
        draw, aux = drawer.count_passes(draw, chosen, aux)
        return draw, state.replace(aux=aux)

    return collect


def seed_unsolved(
    tokenizer: Any,
    prompt_format: PromptFormat,
    longest: int,
    unseeded: Dataset,
    owners: Int[np.ndarray, ' S'],
    blocks: Sequence[Sequence],
    count: int,
) -> tuple[Dataset, int]:
    """Returns (the Dataset of the owners' prompts, some with exemplars before them; how many prompts have exemplars).

    longest: most tokens of a prompt. unseeded: the step's P prompts. owners: for each of S places of a round, the
    number of its prompt. blocks: for each of the P prompts, its select.Groups so far. count: most exemplars.

    A prompt is seeded if all its completions so far are wrong, some other prompt is solved, and at least one exemplar
    fits into `longest` tokens.
    """
    prompts, seeded = pick(unseeded, owners), 0
    solved = [
        Solved(example, tokens, text)
        for example, tokens, group in zip(unseeded.examples, unseeded.tokens, blocks, strict=True)
        for text in [find_shortest_right(group)]
        if text is not None
    ]
    wrong = [all(np.all(block.rewarded.correct == 0) for block in group) for group in blocks]
    seeds: dict[int, Any] = {}
    for owner in {int(owner) for owner in owners if wrong[owner]} if solved else ():
        example, tokens = unseeded.examples[owner], unseeded.tokens[owner]
        exemplars = find_nearest(solved, tokens, count)
        while exemplars and owner not in seeds:
            prompt = add_exemplars(tokenizer, prompt_format, example, exemplars, longest)
            seeds |= {owner: prompt} if prompt else {}
            exemplars = exemplars[1:]  # the farthest is given up first
    all_tokens = list(prompts.tokens)
    for place, owner in enumerate(owners.tolist()):
        if owner in seeds:
            prompts.examples[place], all_tokens[place] = seeds[owner]
            seeded += 1
    return prompts._replace(tokens=all_tokens), seeded


class Solved(NamedTuple):
    """A prompt with a right completion."""

    example: Example
    tokens: Sequence[int]  # of the prompt
    completion: str


def find_shortest_right(blocks: Sequence[Any]) -> str | None:
    """The text of the right completion with the fewest tokens, the first of equals; None if no completion is right.

    blocks: select.Groups of one prompt.
    """
    texts, lengths, correct = (
        np.concatenate([getattr(block.rewarded, name) for block in blocks]) for name in ('texts', 'lengths', 'correct')
    )
    right_lengths = np.where(correct == 1, lengths, np.inf)
    row = int(np.argmin(right_lengths))
    return str(texts[row]) if np.isfinite(right_lengths[row]) else None


def find_nearest(solved: Sequence[Solved], tokens: Sequence[int], count: int) -> list[Solved]:
    """The `count` solved prompts that are most similar to the prompt with these tokens, by rising similarity.

    Similarity is the Jaccard index of the sets of distinct tokens. The last one will stand next to the prompt.
    """
    distinct = set(tokens)
    shared = [len(distinct & set(x.tokens)) / len(distinct | set(x.tokens)) for x in solved]
    order = np.argsort([-share for share in shared], kind='stable')
    return [solved[i] for i in order[:count]][::-1]


def add_exemplars(
    tokenizer: Any, prompt_format: PromptFormat, example: Example, exemplars: Sequence[Solved], longest: int
) -> tuple[Example, list[int]] | None:
    """(Example with the exemplars before its prompt, its token ids); None if it has more than `longest` tokens.

    In a chat, each exemplar is a message of the user and one of the assistant, behind the system message.
    """
    untemplated = prompt_format._replace(template='{prompt}')  # the template is around each prompt already
    if prompt_format.chat:
        system, turns = _split_system(write_messages(example.prompt, prompt_format, example.messages))
        before = []
        for solved in exemplars:
            _, chat = _split_system(write_messages(solved.example.prompt, prompt_format, solved.example.messages))
            begun = chat.pop()['content'] if chat[-1]['role'] == 'assistant' else ''  # the completion continues it
            before += [*chat, {'role': 'assistant', 'content': begun + solved.completion}]
        seeded = example._replace(messages=(*system, *before, *turns))
        last = next(message['content'] for message in reversed(turns) if message['role'] == 'user')
        tokens = encode_prompt(tokenizer, last, untemplated, seeded.messages)
    else:
        template = prompt_format.template
        texts = [template.replace('{prompt}', solved.example.prompt) + solved.completion for solved in exemplars]
        seeded = example._replace(prompt=BETWEEN.join([*texts, template.replace('{prompt}', example.prompt)]))
        tokens = encode_prompt(tokenizer, seeded.prompt, untemplated)
    return None if len(tokens) > longest else (seeded, tokens)


def _split_system(messages):
    """(messages of the system or developer, all other messages)."""
    system = [message for message in messages if message['role'] in ('system', 'developer')]
    return system, [message for message in messages if message not in system]
