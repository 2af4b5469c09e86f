"""A language model as a judge: a rubric, asked over HTTP of a service of OpenAI's kind, like vLLM or llama.cpp."""

from collections.abc import Mapping
import contextlib
import hashlib
import json
import re
from typing import Annotated, Any

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
NAME = re.compile(r'\{(\w+)\}')  # in a rubric
MARKS = re.compile(r'[*_`#"\'$\[\]{}]|\\boxed')  # around a verdict
# what the last line of an answer may be: Score: 7/10
VERDICT = re.compile(
    r'(?:[\w ]{1,40}[:=])?\s*'
    r'(?:(?P<word>yes|no)|(?P<number>[-+]?\d+(?:\.\d+)?)(?:\s*/\s*(?P<most>\d+(?:\.\d+)?))?)\s*\.?',
    re.IGNORECASE,
)
Price = Annotated[tuple[NotNegative, NotNegative], 'the prices of a million tokens that are read, and written']


def check(*, service: remote.Service, rubric: str = RUBRIC, low: float = 0.0, high: float = 10.0, body: str = '{}'):
    """Raises BadInput for options with which the judge cannot be asked."""
    remote.check('judge', service)
    if '{completion}' not in rubric:
        raise BadInput('reward.options.judge.rubric', rubric, 'must have {completion}, where the text is to stand')
    if low >= high:
        raise BadInput('reward.options.judge.low', low, f'must be below high, which is {high:g}')
    try:
        sound = isinstance(json.loads(body), dict)
    except ValueError:
        sound = False
    if not sound:
        raise BadInput('reward.options.judge.body', body, 'must be a JSON object, like {"seed": 1}')


async def reward(
    completion: str,
    example: Example,
    *,
    service: remote.Service,
    services: dict,
    workdir: str,
    step: int | None,
    rubric: str = RUBRIC,
    system: str = '',
    verdict: Annotated[str, OneOf(('number', 'json', 'yes_no'))] = 'number',
    field: str = 'score',
    low: Annotated[float, Range(least=-1e6, most=1e6)] = 0.0,
    high: Annotated[float, Range(least=-1e6, most=1e6)] = 10.0,
    temperature: Annotated[float, Range(least=0, most=2)] = 0.0,
    max_tokens: Count = 512,
    body: str = '{}',
    prices: Price = (0.0, 0.0),
) -> float:
    """The judge's verdict as a number in [0, 1].

    rubric: the message to the judge, with {prompt}, {completion}, {answer} and columns of the data in their places;
    system: the system message; verdict: how the last line, or the JSON object, of the answer reads: a number from low
    to high, the number or truth value in `field` of an object, or yes and no; body: JSON object of further fields of
    the request, of which null removes one; prices: of a million tokens that are read, and written. Others: as in
    remote. Raises Refused for another answer.
    """
    client = remote.client(services, workdir, 'judge', service, lambda rows: rows[0], _unpacker(prices))
    messages = [{'role': 'user', 'content': fill(rubric, completion, example)}]
    if system:
        messages = [{'role': 'system', 'content': system}, *messages]
    fields = {'model': service.model, 'temperature': temperature, 'max_tokens': max_tokens} | json.loads(body)
    request = {'messages': messages} | {name: value for name, value in fields.items() if value is not None}
    digest = hashlib.sha256(json.dumps([rubric, system]).encode()).hexdigest()[:16]
    about = {'rubric': digest, 'temperature': temperature, 'id': example.id}
    return read_verdict(await client.ask(request, about, step), verdict, low, high, field)


def fill(rubric: str, completion: str, example: Example) -> str:
    """The rubric with texts in the place of {prompt}, {completion}, {answer} and columns; a text's own {} stay.

    Of a chat, {prompt} is all its messages. Raises BadInput for a name that the example lacks.
    """
    prompt = '\n\n'.join(f'{m["role"]}: {m["content"]}' for m in example.messages) or example.prompt
    texts: dict[str, Any] = example.meta | {'prompt': prompt, 'completion': completion, 'answer': example.answer}
    if missing := [name for name in NAME.findall(rubric) if name not in texts]:
        have = ', '.join(sorted(map(str, texts)))
        raise BadInput(
            'reward.options.judge.rubric', rubric, f'names {missing[0]}, and example {example.id} has {have}'
        )
    return NAME.sub(lambda found: str(texts[found[1]]), rubric)


def read_verdict(answer: str, verdict: str, low: float, high: float, field: str) -> float:
    """The verdict in a judge's answer, behind its thinking, as a number in [0, 1]; arguments as of reward.

    Raises Refused where the last line is no verdict: a number somewhere in a sentence is none.
    """
    text = answer.rpartition('</think>')[2].strip()
    value: Any = None
    if verdict == 'json':
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            value = json.loads(text[text.find('{') : text.rfind('}') + 1])[field]
    elif match := VERDICT.fullmatch(MARKS.sub('', text.rpartition('\n')[2]).strip()):
        word, number, most = match.group('word', 'number', 'most')
        if verdict == 'yes_no' and word:
            value = word.lower() == 'yes'
        elif verdict == 'number' and number and float(most or high) == high:
            value = float(number)
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, (int, float)) and low <= value <= high:
        return (value - low) / (high - low)
    raise Refused(f'the answer has no verdict: {" ".join(text.split())[-200:]!r}')


def _unpacker(prices):
    """The function that reads a service's answer, see remote.Unpack; prices: as of reward."""

    def unpack(content, _):
        usage = content.get('usage') if isinstance(content, Mapping) else None
        usage = usage if isinstance(usage, Mapping) else {}
        tokens = [usage.get(name) for name in ('prompt_tokens', 'completion_tokens')]
        counts = [n if isinstance(n, int) and 0 <= n <= 1e9 else 0 for n in tokens]
        cost = sum(n * price / 1e6 for n, price in zip(counts, prices, strict=True))
        try:
            choice = content['choices'][0]
            answer = choice['message']['content']
        except (LookupError, TypeError):
            return [(Refused('the answer has no choices[0].message.content'), cost)]
        if not isinstance(answer, str) or choice.get('finish_reason') == 'length':
            return [(Refused('the answer is no text, or was cut; raise reward.options.judge.max_tokens'), cost)]
        return [(answer, cost)]

    return unpack
