"""A language model as a judge: it gets a rubric over HTTP, from a server with OpenAI's API like vLLM or llama.cpp."""

import contextlib
import functools
import hashlib
import json
import re
from typing import Annotated, Any, NamedTuple

from grpo_jax.errors import BadInput
from grpo_jax.example import Example
from grpo_jax.ranges import Count, NotNegative, OneOf, Range
from grpo_jax.rewards import remote
from grpo_jax.rewards.scoring import Refused

READS_ANSWERS = False  # it judges without a gold answer
RUBRIC = (
    'Grade this solution from 0 to 10.\n\nProblem:\n{prompt}\n\nSolution:\n{completion}\n\n'
    'Answer with the number alone.'
)
TOKENS = ('prompt_tokens', 'completion_tokens')  # fields of an answer's usage: tokens read, and tokens written
NAME = re.compile(r'\{(\w+)\}')  # in a rubric
MARKS = re.compile(r'[*_`#"\'$\[\]{}]|\\boxed')  # around a verdict
# what the last line of an answer may be: Score: 7/10
VERDICT = re.compile(
    r'(?:[\w ]{1,40}[:=])?\s*'
    r'(?:(?P<word>yes|no)|(?P<number>[-+]?\d+(?:\.\d+)?)(?:\s*/\s*(?P<most>\d+(?:\.\d+)?))?)\s*\.?',
    re.IGNORECASE,
)
Price = Annotated[tuple[NotNegative, NotNegative], 'the prices of a million tokens that are read, and written']
Grade = Annotated[float, Range(least=-1e6, most=1e6)]


class Judging(NamedTuple):
    """What a judge is asked, and how its answer is read."""

    rubric: str = RUBRIC  # the message, with {prompt}, {completion}, {answer} and columns of the data in their places
    system: str = ''  # the system message; '': none
    # how the last line of an answer reads: a number, or yes and no; or a JSON object in it
    verdict: Annotated[str, OneOf(('number', 'json', 'yes_no'))] = 'number'
    field: str = 'score'  # of the object, a number or a truth value
    low: Grade = 0.0  # the number that is worth 0
    high: Grade = 10.0  # the number that is worth 1
    temperature: Annotated[float, Range(least=0, most=2)] = 0.0
    max_tokens: Count = 512  # of an answer
    body: str = '{}'  # JSON object of further fields of the request; null removes one
    prices: Price = (0.0, 0.0)  # of a million tokens that are read, and written


def check(*, service: remote.Service, judging: Judging):
    """Raises BadInput for options with which the judge cannot be asked."""
    remote.check('judge', service)
    body: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        body = json.loads(judging.body)
    wrong = {
        'rubric': ('{completion}' not in judging.rubric, 'must have {completion}, where the text is to stand'),
        'low': (judging.low >= judging.high, f'must be below high, which is {judging.high:g}'),
        'body': (not isinstance(body, dict), 'must be a JSON object, like {"seed": 1}'),
    }
    for option, (is_wrong, remedy) in wrong.items():
        if is_wrong:
            raise BadInput(f'reward.options.judge.{option}', getattr(judging, option), remedy)


async def reward(
    completion: str,
    example: Example,
    *,
    service: remote.Service,
    judging: Judging,
    services: remote.Services,
    workdir: str,
    step: int | None,
) -> float:
    """The judge's verdict as a number in [0, 1]; raises Refused for an answer without one."""
    unpack = functools.partial(_unpack, prices=judging.prices)
    client = remote.client(services, workdir, 'judge', service, lambda rows: rows[0], unpack)
    messages = [{'role': 'user', 'content': fill(judging.rubric, completion, example)}]
    if judging.system:
        messages = [{'role': 'system', 'content': judging.system}, *messages]
    fields = {'model': service.model, 'temperature': judging.temperature, 'max_tokens': judging.max_tokens}
    fields |= json.loads(judging.body)
    request = {'messages': messages} | {name: value for name, value in fields.items() if value is not None}
    digest = hashlib.sha256(json.dumps([judging.rubric, judging.system]).encode()).hexdigest()[:16]
    about = {'rubric': digest, 'temperature': judging.temperature, 'id': example.id}
    return read_verdict(await client.ask(request, about, step), judging)


def fill(rubric: str, completion: str, example: Example) -> str:
    """The rubric with texts in place of {prompt}, {completion}, {answer} and columns; braces in these texts stay.

    For a chat, {prompt} is all messages of the chat. Raises BadInput for a name that the example lacks.
    """
    prompt = '\n\n'.join(f'{m["role"]}: {m["content"]}' for m in example.messages) or example.prompt
    texts: dict[str, Any] = example.meta | {'prompt': prompt, 'completion': completion, 'answer': example.answer}
    if missing := [name for name in NAME.findall(rubric) if name not in texts]:
        have = ', '.join(sorted(map(str, texts)))
        raise BadInput(
            'reward.options.judge.rubric', rubric, f'names {missing[0]}, and example {example.id} has {have}'
        )
    return NAME.sub(lambda name: str(texts[name[1]]), rubric)


def read_verdict(answer: str, judging: Judging) -> float:
    """The verdict in a judge's answer, after its thinking, as a number in [0, 1].

    Raises Refused where the last line is no verdict; a number within a sentence is no verdict.
    """
    kind, low, high = judging.verdict, judging.low, judging.high
    text = answer.rpartition('</think>')[2].strip()
    value: Any = None
    if kind == 'json':
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            value = json.loads(text[text.find('{') : text.rfind('}') + 1])[judging.field]
    elif match := VERDICT.fullmatch(MARKS.sub('', text.rpartition('\n')[2]).strip()):
        word, number, most = match.group('word', 'number', 'most')
        if kind == 'yes_no' and word:
            value = word.lower() == 'yes'
        elif kind == 'number' and number and float(most or high) == high:
            value = float(number)
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, (int, float)) and low <= value <= high:
        return (value - low) / (high - low)
    raise Refused(f'the answer has no verdict: {" ".join(text.split())[-200:]!r}')


def _unpack(content: Any, _: int, prices: tuple[float, float]):
    """[(text of a judge's answer or Refused, cost)], see remote.Unpack. prices: as in Judging."""
    usage = content.get('usage') if isinstance(content, dict) else None
    tokens = [usage.get(name) if isinstance(usage, dict) else 0 for name in TOKENS]
    cost = sum(n * price / 1e6 for n, price in zip(tokens, prices, strict=True) if isinstance(n, int) and 0 < n < 1e9)
    try:
        choice = content['choices'][0]
        answer, cut = choice['message']['content'], choice.get('finish_reason') == 'length'
    except (LookupError, TypeError):
        answer, cut = None, False
    if cut or not isinstance(answer, str):
        why = 'was cut at max_tokens' if cut else 'has no text in choices[0].message.content'
        return [(Refused(f'the answer {why}'), cost)]
    return [(answer, cost)]
