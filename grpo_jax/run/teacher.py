"""On-policy distillation: a teacher's logprobs of what the policy has sampled.

A teacher is another model with the policy's tokenizer. It never changes, so no checkpoint holds it: each start of a run
reads it from config.teacher.path, and the workdir knows the digest of the weights that the run began with.
"""

import contextlib
import os
from typing import Any

import jax

from grpo_jax.algorithms import Algorithm
from grpo_jax.errors import BadInput
from grpo_jax.hosts import json_file
from grpo_jax.learner.programs import make_teacher
from grpo_jax.models import families, hf, transformer
from grpo_jax.models.lora import OFF
from grpo_jax.run import digest
from grpo_jax.sharding import batches, compiled, specs
from grpo_jax.types import Rollout

RECORD = 'teacher.json'  # in the workdir
NEEDED = "set algorithm.teacher_coef, or algorithm.regularizers=('distill',), as the presets opd and opd_reward do"


class Teacher:
    """The teacher of a run on the devices, or in the hosts' memory until it is used; nobody without programs."""

    def __init__(self, programs: dict[str, compiled.Executable], params: Any = None, park: bool = False):
        """programs by name: one, or none; params: float32, on the mesh; park: they wait in the hosts' memory."""
        self.programs, self._park = programs, park
        self._digest = digest.combined(params) if programs else ''
        self._shardings = jax.tree.map(lambda x: x.sharding, params)
        self._params = jax.device_put(params, specs.in_host(self._shardings)) if park else params

    def __call__(self, rollout: Rollout, packed: Any) -> dict[str, jax.Array]:
        """Fields of Experience by name: the teacher's logprobs of a rollout, and of its likeliest tokens if asked for.

        {} of nobody.
        """
        if not self.programs:
            return {}
        params = jax.device_put(self._params, self._shardings) if self._park else self._params
        return self.programs['teacher'](params, rollout, packed)

    def recognize(self, workdir: str, path: str) -> None:
        """BadInput when the run in workdir began with a teacher of other weights; path is config.teacher.path."""
        record = os.path.join(workdir, RECORD)
        if self.programs and os.path.isfile(record) and json_file.read_object(record).get('digest') != self._digest:
            raise BadInput(
                'teacher.path',
                path,
                f'has other weights than those that the run in {workdir} began with; bring them back, or use another '
                '--workdir',
            )

    def record(self, workdir: str, path: str) -> None:
        """Writes which teacher the run in workdir learns from."""
        if self.programs:
            json_file.write(os.path.join(workdir, RECORD), {'path': path, 'digest': self._digest})


def load_teacher(experiment: Any, algorithm: Algorithm, shapes: batches.Shapes) -> Teacher:
    """The Teacher of a run; BadInput when its weights are not those that the run began with."""
    source = experiment.settings.teacher
    if not algorithm.needs_teacher:
        return Teacher({})
    folder = hf.find(source.path)
    model_config = families.load_config(folder)
    program = make_program(experiment, algorithm, shapes, model_config)
    params = hf.load_params(folder, model_config, specs.params(transformer.param_table(model_config), experiment.mesh))
    teacher = Teacher({'teacher': program}, params, source.park)
    teacher.recognize(experiment.workdir, source.path)
    return teacher


def make_program(
    experiment: Any, algorithm: Algorithm, shapes: batches.Shapes, model_config: transformer.ModelConfig
) -> compiled.Executable:
    """The Executable of learner.programs.make_teacher for such a model as the teacher of a run."""
    learning = experiment.settings.learning._replace(lora=OFF, dtype=experiment.settings.teacher.dtype)
    return make_teacher(
        model_config, algorithm, experiment.devices, shapes, learning, experiment.model_config.vocab_size
    )


def check(experiment: Any, algorithm: Algorithm) -> None:
    """BadInput where algorithm and config.teacher do not go together; nothing of the teacher is read."""
    source, vocab_size = experiment.settings.teacher, experiment.model_config.vocab_size
    if not algorithm.needs_teacher:
        for key, value in source._asdict().items():
            if value != type(source)._field_defaults[key]:
                raise BadInput(f'teacher.{key}', value, f'nothing reads what a teacher says; {NEEDED}, or leave it out')
        return
    if not source.path:
        raise BadInput('teacher.path', '', 'the algorithm learns from a teacher; name its folder or hub name')
    if algorithm.teacher_top_k > vocab_size:
        raise BadInput(
            'algorithm.teacher_top_k', algorithm.teacher_top_k, f"is above the policy's {vocab_size} tokens; use less"
        )


def check_model(experiment: Any, algorithm: Algorithm) -> None:
    """BadInput when the model in config.teacher.path cannot teach the policy; of its weights only headers are read."""
    if not algorithm.needs_teacher:
        return
    path = experiment.settings.teacher.path
    with _as_teacher(path):
        folder = hf.find(path)
        hf.check_weights(folder, load_config(experiment, folder))
        taught = hf.load_tokenizer(folder).get_vocab()
    for token, number in sorted(experiment.tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if taught.get(token) != number:
            other = 'does not know it' if token not in taught else f'has {taught[token]} for it'
            raise BadInput(
                'teacher.path',
                path,
                f"is for other tokens: {token!r} is the policy's {number}, and the teacher's tokenizer {other}; choose "
                'a teacher with the same tokenizer',
            )


def load_config(experiment: Any, folder: str) -> transformer.ModelConfig:
    """The ModelConfig of a teacher's folder; BadInput where its sizes do not fit those of the policy and the mesh."""
    settings, known = experiment.settings, experiment.model_config.vocab_size
    with _as_teacher(settings.teacher.path):
        model_config, context = families.load_config(folder), families.context_length(folder)
        specs.params(transformer.param_table(model_config), experiment.mesh)  # raises where an axis does not divide
    if model_config.vocab_size < known:
        raise BadInput(
            'teacher.path',
            settings.teacher.path,
            f'has {model_config.vocab_size} tokens and the policy {known}; a teacher must know all of them',
        )
    columns = settings.data.max_prompt_tokens + settings.sampling.max_tokens
    if columns > context:
        raise BadInput(
            'teacher.path',
            settings.teacher.path,
            f'reads {context} positions, and data.max_prompt_tokens + rollout.max_tokens are {columns}; lower one',
        )
    return model_config


@contextlib.contextmanager
def _as_teacher(path):
    """What is wrong with a model is said of teacher.path."""
    try:
        yield
    except BadInput as error:
        name = 'teacher.path' if error.args[0] == 'model.path' else error.args[0]
        raise BadInput(name, path if name == 'teacher.path' else error.args[1], error.args[2]) from None
