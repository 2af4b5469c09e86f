"""XRPO's rounds and exemplars (arXiv 2510.06672): a step's completions in rounds, each where they are wanted most.

In-context seeding: a prompt that no completion has solved is asked again behind solved ones. The exemplars come from
the same step, so that nothing is kept between steps. A seeded prompt is a prompt like others: its completions are
sampled, scored and learned from behind the exemplars, and compared with the other completions of its prompt. The
paper's exemplars come from a corpus; these are the policy's own.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxtyping import Int
import numpy as np

from grpo_jax import data
from grpo_jax.collect import allocate
from grpo_jax.collect.draw import Draw, Drawer, Progress, count_sizes
from grpo_jax.collect.select import concatenate, split_groups
from grpo_jax.data import Dataset, pick
from grpo_jax.data.prompt_format import PromptFormat, encode_prompt, write_messages
from grpo_jax.example import Example
from grpo_jax.types import TrainState

BETWEEN = '\n'  # a completion and the prompt after it, where there is no chat


def make_rounds(
    drawer: Drawer, prompt_format: PromptFormat
) -> Callable[[TrainState, Progress], tuple[Draw, TrainState]]:
    """(state, progress) -> (Draw, TrainState): a step in rounds, each for the prompts that want it most."""
    options, unit, queries = drawer.options, drawer.shapes.group_size, drawer.shapes.queries
    rounds = drawer.shapes.prompts // drawer.prompts

    def collect(state, progress):
        step = int(state.step)
        chosen, aux = drawer.choose(step, dict(state.aux))
        plain, earlier = data.pick(drawer.dataset, chosen.indices), drawer.earlier_samples(chosen.indices)

        def draw_round(carry, owners, first, blocks):
            draws, seeded = carry
            asked = data.pick(plain, owners)
            if options.seeding and blocks[0]:
                asked, more = seed_unsolved(
                    drawer.tokenizer, prompt_format, queries, plain, owners, blocks, options.seeding
                )
                seeded += more * unit
            _, prompts = data.prompts(asked, range(len(owners)), queries, drawer.pad_token)
            first = np.int32(np.asarray(first) + earlier[owners])
            draw = drawer.sample(state, [plain.examples[i] for i in owners], prompts, progress, first=first)
            groups = split_groups(draw._replace(examples=asked.examples), step, options.gate)
            return groups, ([*draws, draw], seeded)

        blocks, (draws, seeded) = allocate.explore(
            draw_round, ([], 0), drawer.prompts, rounds, unit, options.exploration
        )
        sizes = unit * np.array([len(own) for own in blocks])
        draw = concatenate([block for own in blocks for block in own], drawer.mesh)
        draw = draw._replace(
            sizes=sizes,
            counts=count_sizes(sizes, seeded),
            stats=draws[-1].stats,
            streams=[stream for one in draws for stream in one.streams],
        )
        draw, aux = drawer.count_passes(draw, chosen, aux)
        return draw, state.replace(aux=aux)

    return collect


def seed_unsolved(
    tokenizer: Any,
    prompt_format: PromptFormat,
    longest: int,
    plain: Dataset,
    owners: Int[np.ndarray, ' S'],
    blocks: Sequence[Sequence],
    count: int,
) -> tuple[Dataset, int]:
    """(what is asked of the owners' prompts, how often with exemplars): where none so far is right, up to `count`.

    plain are the step's prompts, and blocks the select.Groups that each has so far. Without any solved prompt, and
    where exemplars are too long for `longest` tokens of a prompt, it is asked as it is.
    """
    asked, seeded = pick(plain, owners), 0
    solved = [
        Solved(example, tokens, text)
        for example, tokens, own in zip(plain.examples, plain.tokens, blocks, strict=True)
        for text in [shortest_right(own)]
        if text is not None
    ]
    wrong = [all(np.all(block.rewarded.correct == 0) for block in own) for own in blocks]
    seeds: dict[int, Any] = {}
    for owner in {int(owner) for owner in owners if wrong[owner]} if solved else ():
        example, tokens = plain.examples[owner], plain.tokens[owner]
        exemplars = nearest(solved, tokens, count)
        while exemplars and owner not in seeds:
            one = seed(tokenizer, prompt_format, example, exemplars, longest)
            seeds |= {owner: one} if one else {}
            exemplars = exemplars[1:]  # the least near goes first
    for place, owner in enumerate(owners.tolist()):
        if owner in seeds:
            asked.examples[place], asked.tokens[place] = seeds[owner]
            seeded += 1
    return asked, seeded


class Solved(NamedTuple):
    """A prompt with a right completion."""

    example: Example
    tokens: Sequence[int]  # of the prompt
    completion: str


def shortest_right(blocks: Sequence[Any]) -> str | None:
    """The text of the right completion of fewest tokens, the first of equals, in select.Groups; None without any."""
    texts, lengths, correct = (
        np.concatenate([getattr(block.rewarded, name) for block in blocks]) for name in ('texts', 'lengths', 'correct')
    )
    counted = np.where(correct == 1, lengths, np.inf)
    row = int(np.argmin(counted))
    return str(texts[row]) if np.isfinite(counted[row]) else None


def nearest(solved: Sequence[Solved], tokens: Sequence[int], count: int) -> list[Solved]:
    """The `count` prompts that share most of their distinct tokens with a prompt, the nearest last, as it is read."""
    own = set(tokens)
    shared = [len(own & set(other.tokens)) / len(own | set(other.tokens)) for other in solved]
    order = np.argsort([-share for share in shared], kind='stable')
    return [solved[i] for i in order[:count]][::-1]


def seed(
    tokenizer: Any, prompt_format: PromptFormat, example: Example, exemplars: Sequence[Solved], longest: int
) -> tuple[Example, list[int]] | None:
    """(Example whose prompt or chat holds the exemplars, its token ids); None where it is longer than `longest`.

    In a chat each exemplar is a turn of its user and one of the assistant, behind the system message.
    """
    if prompt_format.chat:
        system, turns = _split_system(write_messages(example.prompt, prompt_format, example.messages))
        before = []
        for one in exemplars:
            _, own = _split_system(write_messages(one.example.prompt, prompt_format, one.example.messages))
            begun = own.pop()['content'] if own[-1]['role'] == 'assistant' else ''  # which the completion goes on with
            before += [*own, {'role': 'assistant', 'content': begun + one.completion}]
        seeded = example._replace(messages=(*system, *before, *turns))
        plain = prompt_format._replace(template='{prompt}')  # the template is around each prompt already
        asked = next(message['content'] for message in reversed(turns) if message['role'] == 'user')
        tokens = encode_prompt(tokenizer, asked, plain, seeded.messages)
    else:
        texts = [prompt_format.template.replace('{prompt}', one.example.prompt) + one.completion for one in exemplars]
        own = prompt_format.template.replace('{prompt}', example.prompt)
        seeded = example._replace(prompt=BETWEEN.join([*texts, own]))
        tokens = encode_prompt(tokenizer, seeded.prompt, prompt_format._replace(template='{prompt}'))
    return None if len(tokens) > longest else (seeded, tokens)


def _split_system(messages):
    """(the system's messages, the others)."""
    system = [message for message in messages if message['role'] in ('system', 'developer')]
    return system, [message for message in messages if message not in system]
