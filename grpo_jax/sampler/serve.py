"""A sampler whose devices belong to other processes of the job: they serve the learner's side.

The learner's side runs the loop. For a rollout it sends a request of host arrays, and the policy in the sampler's form;
after each segment it gets the rows that have ended, and at last the whole Rollout. All requests go through the thread
of the Link, in one order in all processes of the learner's side.
"""

from collections.abc import Mapping
import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.errors import BadInput
from grpo_jax.hosts import processes, transport
from grpo_jax.models import lora
from grpo_jax.sampler.engine import Engine, Sent, Stats, make_sampler
from grpo_jax.sharding import mesh as meshes
from grpo_jax.sharding.sides import make_sides
from grpo_jax.types import Rollout


class RemoteEngine:
    """The Sampler whose rollouts other processes sample; it takes and returns host arrays."""

    def __init__(self, engine: Engine, shapes: Any, automata: Mapping[str, Any], *options: Any):
        """engine: this process's, which sends the policy. shapes, automata, options: the arguments of make_sampler."""
        self.schedule, self.programs, self.mesh, self.send = engine.schedule, engine.programs, engine.mesh, engine.send
        spec, sides = engine.programs.spec, engine.programs.sides
        assert sides is not None, 'the sampler has devices of its own'
        section = {**sides.learner.shape, 'sampler': sides.sampler.size}
        self._sides, self._group_size = sides, shapes.group_size
        self._link = link = transport.current()  # None where nothing is sampled, as in a check
        if link is not None:
            sides.submit = link.start
            made_of = section, spec.model_config, shapes, spec.sampling, automata, options
            self._made = link.start(lambda: _ask(link, ('make', made_of)))  # (its number there, its hash)
            link.start(lambda: _ask(link, ('compile', self._made.result()[0])))

    def compile(self) -> 'RemoteEngine':
        """Returns itself, since the other processes are compiling already. Raises BadInput outside of a training."""
        if self._link is None:
            count, remedy = self.mesh.size, 'has devices of other processes, which sample only for a training; use 0'
            raise BadInput('mesh.sampler', count, remedy)
        return self

    @property
    def hash(self) -> str:
        """As Engine.hash: one hash of the other processes' programs."""
        return self._made.result()[1]

    def put(self, tree: Any) -> Any:
        """Returns the host arrays as they are, since `sample` and `go_on` here take host arrays."""
        return tree

    def __call__(self, *arguments: Any, **options: Any) -> Rollout:
        """As Engine.__call__: samples, and returns the Rollout alone, as host arrays."""
        return self.sample(*arguments, **options)[0]

    def sample(self, params: Any, prompts: Any, key: Any, step: Any, **options: Any) -> tuple[Rollout, Stats]:
        """As Engine.sample, on the devices of the other processes; returns host arrays."""
        return self._request('sample', params, (prompts,), key, step, **options)

    def go_on(
        self, params: Any, rollout: Rollout, prompts: Any, key: Any, step: Any, until: Any = None, **options: Any
    ) -> tuple[Rollout, Stats]:
        """As Engine.go_on; returns host arrays. until: can be pickled, like an Enough."""
        return self._request('go_on', params, (rollout, prompts), key, step, until=until, **options)

    def _request(self, method, params, rows, key, step, *, finished=None, progress=None, **options):
        """Has the other processes call their Engine's `method`, and returns its (Rollout, Stats) as host arrays.

        rows: the method's arguments over rows. finished and progress are called here after each segment, as by Engine.
        """
        sent, (number, _) = self.send(params).policy, self._made.result()
        link: Any = self._link
        share = processes.share(len(rows[-1].ids))  # of the prompts, whose rows this process judges
        own = range(share.start * self._group_size, share.stop * self._group_size)
        each_time, once = _sent_form(self.programs.spec)
        trained, frozen = (sent, None) if once is None else lora.split(sent)

        def request():
            crosses = once is not None and not self._sides.crossed
            asked = Request(number, method, rows, np.asarray(jax.random.key_data(key)), int(step), options)
            with self._sides.sampling():
                link.send(('rollout', asked._replace(followed=bool(finished or progress), crosses=crosses)))
                link.weights.send(trained, each_time)
                if crosses:
                    link.weights.send(frozen, once)
                    self._sides.crossed = True
                while True:
                    results, ended, counts = zip(*link.receive(), strict=True)
                    if results[0] is not None:
                        return results[0]
                    for row in itertools.chain(*ended):
                        if finished and row[0] in own:
                            finished(*row)
                    if progress:
                        progress(*counts[0])

        return link.run(request)


class Request(NamedTuple):
    """A rollout that the learner's side asks for, in the form that is sent to the sampler's processes."""

    number: int  # of the engine
    method: str  # of the engine: sample or go_on
    rows: tuple  # its arguments that are host arrays over rows, the Prompts last
    key: np.ndarray
    step: int
    options: dict[str, Any]
    followed: bool = False  # whether the rows that have ended are sent after each segment
    crosses: bool = False  # whether the frozen weights, which no step changes, are sent too


def _sent_form(spec):
    """(abstract weights that are sent for each rollout, weights that are sent once, or None), on the sampler's mesh."""
    return lora.split(spec.abstract_params) if spec.sampling.lora.rank else (spec.abstract_weights, None)


def _ask(link, order):
    """Sends an order to the sampler's processes, and returns their answer."""
    link.send(order)
    return link.receive()[0]


def serve_rollouts() -> None:
    """Samples rollouts for the learner's side until that side ends; raises the Stopped that ended it, if one did."""
    link: Any = transport.current()
    engines, lasting = [], None
    while True:
        order, content = link.receive()[0]
        if order == 'end':
            if content is not None:
                raise content
            return
        if order == 'make':
            section, config, shapes, sampling, automata, (block, segment, carried) = content
            sides = make_sides(section, meshes.make(section), jax.devices())
            assert sides is not None, 'the section names them'
            sizes = dict(block=block, segment=segment, carried=carried)
            engines.append(make_sampler(config, sides, shapes, sampling, automata, **sizes))
            link.send((len(engines) - 1, engines[-1].hash))
        elif order == 'compile':
            engines[content].compile()
            link.send()
        else:
            engine = engines[content.number]
            (each_time, once), source = _sent_form(engine.programs.spec), engine.programs.sides.learner
            policy = link.weights.receive(each_time, source)
            if content.crosses:
                lasting = link.weights.receive(once, source)
            policy = policy if once is None else lora.join(policy, lasting)
            result = _sample(link, engine, content, policy)
            link.send((result if link.is_first else None, [], ()))


def _sample(link, engine, request, policy):
    """(Rollout, Stats) of a Request, as host arrays; sends, after each segment, the rows that have ended in it."""
    ended, options = [], dict(request.options)

    def report(*counts):
        link.send((None, [*ended], counts))
        ended.clear()

    if 'given' in options:
        options['given'] = engine.put(options['given'])
    if request.followed:
        options |= dict(finished=lambda *row: ended.append(row), progress=report)
    rows, key = map(engine.put, request.rows), jax.random.wrap_key_data(request.key)
    rollout, stats = getattr(engine, request.method)(Sent(policy), *rows, key, request.step, **options)
    return processes.fetch(rollout), dataclasses.replace(stats, inspection=processes.fetch(stats.inspection))
