"""Asks services over HTTP for the parts judge and http: many requests at once, and failed ones again.

An answer is stored by the hash of its request, so that no equal request is sent twice. A refused request (a status like
400) or an unreadable answer raises Refused, which counts against the completion. A service that cannot be reached
raises Outage, and the completion lacks the part.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
import contextlib
import hashlib
import json
import os
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from grpo_jax.errors import NO_VALUE, BadInput
from grpo_jax.ranges import Count, Free, Natural, NotNegative, Seconds, Share
from grpo_jax.rewards.custom import RewardError
from grpo_jax.rewards.resources import Services
from grpo_jax.rewards.scoring import LONGEST, Refused, pause_before
from grpo_jax.rewards.verdicts import Store

VERDICTS, UNANSWERED = 'verdicts.jsonl', 'unanswered.jsonl'  # files in a workdir
MOST_BYTES = 2**20  # of an answer
GATHERING_SECONDS = 0.05  # for which a completion waits for others to share its request
AGAIN = (408, 409, 425, 429)  # statuses after which a request is sent again; from 500 on all are
OF_SETTINGS = (401, 402, 403, 404, 405, 407)  # statuses that show wrong settings, and say nothing of the completion


class Service(NamedTuple):
    """Where a service is, and how much a run may ask it."""

    url: Free[str] = ''  # http or https, without a password
    model: str = ''  # the model to ask, which also names the service in the store; '': the url names it there
    # environment variable that holds the key, or a whole Authorization header; '': none
    key: Free[str] = ''
    at_once: Free[Count] = 64  # requests
    timeout: Free[Seconds] = 60.0  # seconds of a request
    retries: Free[Natural] = 4  # times that a request is sent again
    deadline: Free[Seconds] = 600.0  # seconds after which a completion lacks the part
    store: Free[str] = ''  # file of verdicts, which runs may share; '': verdicts.jsonl in the workdir
    most_calls: Free[Natural] = 0  # verdicts that the store may hold; 0: any number
    most_cost: Free[NotNegative] = 0.0  # of all verdicts in the store; 0: any cost
    labels: Free[str] = ''  # JSONL of prompt, completion and label, for the service's self-test; '': none
    agreement: Free[Share] = 0.8  # share of the labels with which the service must agree


class Outage(RewardError):
    """Raised where a service gave no answer to a request."""


# (JSON of an answer, number of completions) -> [(what the store keeps of each, or Refused; its cost)]
Unpack = Callable[[Any, int], Sequence[tuple[Any, float]]]


def check(name: str, service: Service) -> None:
    """Raises BadInput for options of the part `name` with which no request can be sent."""
    key, address = f'reward.options.{name}', service.url.partition('?')[0]
    if '@' in address:  # the url is written to config.json and to messages
        raise BadInput(f'{key}.url', NO_VALUE, f'has a password; put it in a variable, which {key}.key names')
    with contextlib.suppress(ValueError):
        url = urlsplit(service.url)
        if url.scheme in ('http', 'https') and url.hostname and (url.port or 1):
            address = ''
    if address or not service.url:
        raise BadInput(f'{key}.url', service.url, 'is no address of a service; give http://HOST:PORT/PATH')
    if service.key and not service.key.isidentifier():  # the value may be the key itself, so the message leaves it out
        raise BadInput(f'{key}.key', NO_VALUE, 'is no name; name the variable of the environment that holds the key')
    if service.store and not os.path.isdir(os.path.dirname(os.path.abspath(service.store))):
        raise BadInput(f'{key}.store', service.store, 'lies in a folder that does not exist; make the folder')
    if service.labels and not os.path.isfile(service.labels):
        raise BadInput(f'{key}.labels', service.labels, "is no file; give a JSONL of labelled rows, or ''")


def client(
    services: Services, workdir: str, name: str, service: Service, pack: Callable, unpack: Unpack, batch: int = 1
) -> 'Client':
    """The Client of the part `name`, created by the first call and then kept in `services`.

    Raises BadInput where the environment lacks the service's key. Other arguments: as of Client.
    """
    if name not in services:
        services[name] = Client(workdir, name, service, pack, unpack, batch, services.stores)
    return services[name]


class Question(NamedTuple):
    """A completion that waits for the service's answer."""

    key: str  # hash of the request
    row: dict[str, Any]  # what the service is told of the completion
    about: dict[str, Any]  # further fields of the record that is stored
    record: asyncio.Future  # of the record, once the service has answered


class Client:
    """Asks a service for verdicts on completions, on one event loop."""

    def __init__(
        self, workdir: str, name: str, service: Service, pack: Callable, unpack: Unpack, batch: int, stores: bool
    ):
        """name: of the part; pack: `ask`'s rows -> the body of a request; unpack: reads the answer; batch: the most
        completions of a request; stores: see Services.
        """
        self._name, self._service, self._pack, self._unpack, self._batch = name, service, pack, unpack, batch
        self._authorization = _read_key(name, service.key)
        self.store = Store(os.path.abspath(service.store or os.path.join(workdir, VERDICTS)), stores)
        self._unanswered = Store(os.path.join(os.path.abspath(workdir), UNANSWERED))
        self._outages: dict[tuple[int, str], str] = {}  # (step, key) -> the reason, until `settle`
        self._asked: dict[str, asyncio.Task] = {}  # key -> its request under way
        self._gathered: list[Question] = []  # completions of the next request, which is sent when the timer ends
        self._timer: Any = None
        self._tasks: set[asyncio.Task] = set()
        self._under_way = 0  # completions that wait for an answer
        self._slots, self._session = asyncio.Semaphore(service.at_once), None
        self.counts: Counter = Counter()  # calls, stored, retries, cost: since the last take_counts

    async def ask(self, row: dict[str, Any], about: dict[str, Any], step: int | None) -> Any:
        """The service's answer on a completion; from the store where that has one.

        row: what the service is told of the completion, a JSON object; about: further fields of the stored record;
        step: of the run, None outside of steps. Raises Refused, Outage, and BadInput where the budget is spent.
        """
        named = self._service.model or self._service.url
        key = hashlib.sha256(json.dumps([self._name, named, row], sort_keys=True).encode()).hexdigest()[:32]
        record = self.store.get(key)
        if record is not None:
            self.counts['stored'] += 1
        else:
            if step is not None and (missed := self._unanswered.get(f'{step} {key}')):
                raise self._outage(missed['why'])  # as in this step before the run was killed
            if key not in self._asked:  # completions of a group may be equal
                self._asked[key] = asyncio.ensure_future(self._fetch(key, row, about))
                self._asked[key].add_done_callback(lambda _: self._asked.pop(key))
            try:
                record = await asyncio.shield(self._asked[key])
            except Outage as outage:
                if step is not None:
                    self._outages[step, key] = outage.args[2]
                raise
        if 'refused' in record:
            raise Refused(record['refused'])
        return record['answer']

    def settle(self, step: int) -> None:
        """Records which requests of steps up to `step` had no answer, before the step learns without these verdicts.

        A resumed run then raises the same Outages for them. Raises CannotWrite for an error of the disk.
        """
        for asked_at, key in [moment for moment in self._outages if moment[0] <= step]:
            self._unanswered.put(f'{asked_at} {key}', {'why': self._outages.pop((asked_at, key))})

    def take_counts(self) -> dict[str, float]:
        """{name: number} of requests (calls), stored verdicts, retries and cost since the last call."""
        counts, self.counts = self.counts, Counter()
        return {name: counts[name] for name in ('calls', 'stored', 'retries', 'cost')}

    def _outage(self, why):
        """The Outage that names the service and the reason `why`."""
        return Outage(f'reward.options.{self._name}.url', self._service.url.partition('?')[0], why)

    def _spent(self, option, most):
        """The BadInput for a spent budget. option: most_calls or most_cost; most: its value."""
        remedy = f'is spent by the verdicts in {self.store.path}; raise it, and the same command goes on'
        return BadInput(f'reward.options.{self._name}.{option}', most, remedy)

    async def _fetch(self, key, row, about):
        """Puts a completion in the next request; returns the answer's stored record. Raises Outage and BadInput."""
        loop, most = asyncio.get_running_loop(), self._service.most_calls
        if most and self.store.count + self._under_way >= most:
            raise self._spent('most_calls', most)
        self._gathered.append(Question(key, row, about, future := loop.create_future()))
        if len(self._gathered) == 1:
            self._timer = loop.call_later(GATHERING_SECONDS, self._send_gathered)
        if len(self._gathered) == self._batch:
            self._send_gathered()
        self._under_way += 1
        try:
            return await future
        finally:
            self._under_way -= 1

    def _send_gathered(self):
        """Sends one request for all gathered completions."""
        self._timer.cancel()
        questions, self._gathered = self._gathered, []
        until = asyncio.get_running_loop().time() + self._service.deadline
        self._keep(asyncio.ensure_future(self._exchange(questions, until)))

    def _keep(self, task):
        """Holds a reference to a task until the task ends, since the event loop holds none."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _exchange(self, questions, until):
        """Sends one request for `questions`, and sets the record or the exception of each.

        If several completions are refused together, each is asked alone. until: the loop's time of the deadline.
        """
        try:
            async with asyncio.timeout_at(until), self._slots:
                try:
                    answers = await self._post(questions[0].key, [question.row for question in questions], until)
                except Refused as refusal:
                    answers = [(refusal, 0.0)]
                if len(answers) == len(questions):  # stored before the next request, which the budget may forbid
                    for question, answer in zip(questions, answers, strict=True):
                        question.record.set_result(self._store_answer(question, *answer))
                    return
            # asked alone, each completion shows whether it is the refused one
            await asyncio.gather(*(self._exchange([question], until) for question in questions))
        except Exception as error:
            if isinstance(error, TimeoutError):
                error = self._outage(f'gave no answer within {self._service.deadline:g} s; mend the service')
            for question in questions:
                if not question.record.done():
                    question.record.set_exception(error)

    def _store_answer(self, question, answer, cost):
        """Stores the record of an answer, or of a Refused, and returns it."""
        self.counts['cost'] += cost
        content = {'refused': str(answer)} if isinstance(answer, Refused) else {'answer': answer}
        record = {'service': self._service.model or self._name} | question.about | content | {'cost': cost}
        return self.store.put(question.key, record)

    async def _post(self, key, rows, until):
        """Sends a request, again after failures that may pass; returns (answer or Refused, cost) for each completion.

        key: of the first completion, on which the pauses depend; rows: of the completions; until: the loop's time after
        which nothing is sent again. Raises Refused, Outage, and BadInput where the budget is spent.
        """
        service, content = self._service, json.dumps(self._pack(rows)).encode()
        why, asked_pause = '', 0.0
        for attempt in range(service.retries + 1):
            if attempt:
                pause = max(asked_pause, _pause(key, attempt))
                if asyncio.get_running_loop().time() + pause > until:
                    break
                await asyncio.sleep(pause)
            if service.most_cost and self.store.cost >= service.most_cost:
                raise self._spent('most_cost', service.most_cost)
            self.counts['calls'] += 1
            self.counts['retries'] += attempt > 0
            try:
                async with asyncio.timeout(service.timeout):
                    status, asked_pause, text = await self._send(content)
            except TimeoutError:
                why, asked_pause = f'gave no answer in {service.timeout:g} s', 0.0
                continue
            except OSError as error:
                why, asked_pause = str(error), 0.0
                continue
            why = f'answered with status {status}: {" ".join(text.split())[:LONGEST]!r}'
            if status == 200:
                return self._unpack(_read_json(text), len(rows))
            if 400 <= status < 500 and status not in AGAIN + OF_SETTINGS:
                raise Refused(why)
            if status < 500 and status not in AGAIN:
                break
        raise self._outage(f'{why}; mend the service, and the same command goes on')

    async def _send(self, content):
        """(status, seconds of its Retry-After header, text) of the response to a request with the body `content`.

        The text ends after MOST_BYTES, and the service's key is masked. Raises OSError where the connection fails.
        """
        import httpx2  # takes a third of a second

        headers = {'Content-Type': 'application/json', 'Accept-Encoding': 'identity'}
        if self._authorization:
            headers['Authorization'] = self._authorization
        answer = b''
        try:
            if self._session is None:
                self._session = httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=None))
                self._keep(asyncio.ensure_future(_close_at_end(self._session)))
            async with self._session.stream('POST', self._service.url, content=content, headers=headers) as response:
                async for part in response.aiter_raw():
                    answer += part
                    if len(answer) > MOST_BYTES:
                        break
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise OSError(self._hide(f'cannot be asked ({type(error).__name__}: {error})')) from None
        if not {'content-length', 'transfer-encoding'} & {*response.headers} and not answer.rstrip().endswith(b'}'):
            raise OSError('broke off its answer')  # without a length, only an unfinished text shows it
        asked = response.headers.get('Retry-After', '')  # a date in the header is ignored
        text = self._hide(answer.decode(errors='replace'))
        return response.status_code, float(asked) if asked.isdecimal() else 0.0, text

    def _hide(self, text):
        """A text with *** in place of the service's key."""
        secret = self._authorization.rpartition(' ')[2]
        return text.replace(secret, '***') if secret else text


async def _close_at_end(session):
    """Closes a session's connections when the event loop cancels its tasks."""
    try:
        while True:
            await asyncio.sleep(3600)  # a waiting task is kept by the loop even if the client is gone
    finally:
        await session.aclose()


def _read_key(name, variable):
    """The Authorization header with the key in a variable of the environment; '' where none is named."""
    key = os.environ.get(variable, '').strip() if variable else ''
    if variable and not (key and key.isascii() and key.isprintable()):
        remedy = 'names no variable of the environment with a key in it; export it'
        raise BadInput(f'reward.options.{name}.key', NO_VALUE, remedy)
    return f'Bearer {key}' if key and ' ' not in key else key


def _read_json(text):
    """The value of a JSON text; raises Refused for any other text, and for one of more than MOST_BYTES."""
    if len(text) > MOST_BYTES:
        raise Refused(f'the answer has more than {MOST_BYTES} bytes')
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Refused(f'the answer is no JSON: {" ".join(text.split())[:LONGEST]!r}') from None


def _pause(key, attempt):
    """Seconds to wait before attempt `attempt`, from 1: doubled each time, times a factor in [0.5, 1.5] by the key."""
    spread = int(hashlib.sha256(f'{key} {attempt}'.encode()).hexdigest()[:8], 16) / 2**32
    return pause_before(attempt - 1) * (0.5 + spread)
