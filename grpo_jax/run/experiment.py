"""What a config and a workdir stand for: the checked config, the model, its tokenizer and the mesh."""

import json
import logging
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax import data, rewards, sampler
from grpo_jax.errors import BadInput
from grpo_jax.hosts import json_file, processes
from grpo_jax.learner import optimizer as optimizers
from grpo_jax.learner.programs import make_learner
from grpo_jax.models import hf, transformer
from grpo_jax.run import reference
from grpo_jax.sampler import stops
from grpo_jax.sampler.programs import make_sampler
from grpo_jax.sharding import batches, compiled, specs
from grpo_jax.sharding import mesh as meshes

# settings that may change between a run and its continuation
CHANGEABLE_ON_RESUME = ('steps', 'evaluation', 'checkpoint', 'log')


class Experiment(NamedTuple):
    """An opened experiment; everything that can be wrong with the input has been checked."""

    config: Any
    workdir: str
    folder: str  # of the model
    model_config: transformer.ModelConfig
    tokenizer: Any
    stop_tokens: tuple[int, ...]
    pad_token: int
    mesh: jax.sharding.Mesh
    reward_functions: rewards.RewardFunctions
    samplers: dict  # built so far, by what sets them apart

    ahead = True  # programs are compiled when they are made

    @property
    def dtype(self):
        """The dtype of computation."""
        return jnp.dtype(self.config.model.dtype)

    @property
    def key(self):
        """The run's random key."""
        return jax.random.key(self.config.seed)

    def shapes(self, prompts, group_size):
        """The batches.Shapes of that many prompts and completions of each."""
        return batches.Shapes(prompts, group_size, self.config.data.max_prompt_tokens, self.config.rollout.max_tokens)

    def sampling(self):
        """The sampler.Sampling of config.rollout."""
        return make_sampling(self.config).for_tokenizer(self.tokenizer, self.stop_tokens, self.pad_token)

    def sampler(self, group_size, **changes):
        """The sampler.engine.Engine of data.prompts_per_step prompts; changes replace fields of its Sampling."""
        which = (group_size, *sorted(changes.items()))
        if which not in self.samplers:
            shapes = self.shapes(self.config.data.prompts_per_step, group_size)
            devices = meshes.Devices(self.mesh, self.ahead)
            sampling = self.sampling()._replace(**changes)
            self.samplers[which] = make_sampler(self.model_config, devices, shapes, sampling, self.automata())
        return self.samplers[which]

    def learner(self, algorithm, shapes, collected):
        """The Learner of the run; collected is what collect keeps in the state."""
        config = self.config
        updates = config.steps * config.learner.epochs * config.learner.minibatches
        return make_learner(
            self.model_config,
            algorithm,
            optimizers.make(config.optimizer, updates),
            self.mesh,
            shapes,
            collected=collected,
            critic_optimizer=optimizers.make(config.critic_optimizer, updates),
            value_clip=config.algorithm.value_clip,
            critic_warmup=config.algorithm.critic_warmup,
            **self.learning(),
        )

    def automata(self):
        """Tables of sampler.stops for the strings that end a completion or its thinking."""
        return stops.make_automata(self.sampling(), self.tokenizer, self.model_config.vocab_size)

    def learning(self, **changes):
        """The options of make_learner, from config.learner."""
        learner = self.config.learner
        return (
            dict(
                epochs=learner.epochs,
                minibatches=learner.minibatches,
                microbatches=learner.microbatches,
                pack_columns=learner.pack_columns,
                pack_rows=learner.pack_rows,
                chunk=learner.chunk,
                remat=learner.remat,
                offload=tuple(learner.offload),
                dtype=self.dtype,
                ahead=self.ahead,
                temperature=self.config.rollout.temperature,
            )
            | changes
        )

    def load(self, split):
        """The Dataset of a split."""
        return data.load(self.config.data, split, self.tokenizer)

    def params(self):
        """Float32 parameters on the mesh: drawn, or read from the model's folder."""
        shardings = specs.params(transformer.param_table(self.model_config), self.mesh)
        if self.config.model.random_init:
            return jax.jit(transformer.init, static_argnums=1, out_shardings=shardings)(self.key, self.model_config)
        return hf.load_params(self.folder, self.model_config, shardings)


def open_experiment(config, workdir, folder=None, functions=None):
    """Experiment of a config in a workdir; BadInput for whatever does not fit. Writes nothing: see claim.

    folder replaces config.model.path, for a workdir that holds its model already; functions are rewards by name.
    """
    check(config)
    folder = folder or hf.find(config.model.path)
    c, tokenizer = hf.load_config(folder), hf.load_tokenizer(folder)
    check_context(config, folder)
    if len(tokenizer) > c.vocab_size:
        raise BadInput('model.path', folder, f'its tokenizer has {len(tokenizer)} tokens and the model {c.vocab_size}')
    mesh = meshes.make(config.mesh)
    specs.params(transformer.param_table(c), mesh)  # raises where an axis does not divide
    stop_tokens = hf.stop_tokens(folder, tokenizer)
    pad_token = stop_tokens[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    reward_functions = rewards.make(config.reward, config.rollout.max_tokens, functions)
    _fits_workdir(config, workdir)
    return Experiment(config, workdir, folder, c, tokenizer, stop_tokens, pad_token, mesh, reward_functions, {})


def check_context(config, folder):
    """BadInput when prompts and completions are longer than the model in the folder can read."""
    columns, most = config.data.max_prompt_tokens + config.rollout.max_tokens, hf.context_length(folder)
    if columns > most:
        raise BadInput(
            'data.max_prompt_tokens + rollout.max_tokens',
            columns,
            f"is beyond the model's context of {most} positions; lower one",
        )


def make_sampling(config):
    """The sampler.Sampling of config.rollout, without a tokenizer's ids; BadInput for what cannot work."""
    algorithm = config.algorithm
    corrected = algorithm.correction != 'none' or algorithm.ratio_base == 'sampler'
    return sampler.Sampling.from_config(config.rollout, dtype=config.model.dtype, corrected=corrected)


def check(config):
    """BadInput for a setting that cannot work, whatever the model."""
    make_sampling(config)
    if config.model.dtype not in ('float32', 'bfloat16'):
        raise BadInput('model.dtype', config.model.dtype, 'choose float32 or bfloat16')
    if config.learner.remat not in transformer.REMAT:
        raise BadInput('learner.remat', config.learner.remat, 'choose ' + ', '.join(transformer.REMAT))
    if set(config.learner.offload) - {'optimizer', 'reference'}:
        raise BadInput('learner.offload', config.learner.offload, 'choose from optimizer and reference')
    reference.check(config.collection)
    for name, value, least in [
        ('steps', config.steps, 1),
        ('data.max_prompt_tokens', config.data.max_prompt_tokens, 2),
        ('data.prompts_per_step', config.data.prompts_per_step, 1),
        ('learner.epochs', config.learner.epochs, 1),
        ('learner.minibatches', config.learner.minibatches, 1),
        ('learner.microbatches', config.learner.microbatches, 1),
        ('learner.chunk', config.learner.chunk, 1),
        ('checkpoint.every', config.checkpoint.every, 1),
    ]:
        if value < least:
            raise BadInput(name, value, f'must be at least {least}')


def claim(experiment):
    """Makes the workdir this experiment's: config.json, and the model's folder without weights.

    Called when everything else has been checked, so that a refused config leaves no trace.
    """
    os.makedirs(experiment.workdir, exist_ok=True)
    if processes.is_first():
        hf.copy_files(experiment.folder, os.path.join(experiment.workdir, 'model'))
    json_file.write(os.path.join(experiment.workdir, 'config.json'), experiment.config.to_dict())


def agree(experiment, step, built, examples):
    """Waits until every process is ready for the first step; RuntimeError when they are not about to do the same.

    step: of the newest checkpoint, or None; built: the programs by name; examples: those that it learns from.
    """
    values = {'step': step, 'data': compiled.hashed(repr([(e.id, e.prompt, e.answer) for e in examples]))}
    values |= {f'program {name}': program.hash for name, program in built.items()}
    processes.agree('the start', values | dict(_flat(experiment.config.to_dict(), 'config.')))


def _flat(tree, prefix):
    """(dotted name, value) of the leaves of nested dicts."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f'{prefix}{name}.')
        else:
            yield prefix + name, value


def _fits_workdir(config, workdir):
    """BadInput when workdir was begun with another config."""
    path = os.path.join(workdir, 'config.json')
    if os.path.exists(workdir) and not os.path.isdir(workdir):
        raise BadInput('--workdir', workdir, 'is a file; name a folder')
    if os.path.exists(path):
        for name, (old, new) in _differences(json_file.read(path), recorded_config(config)).items():
            if name.split('.')[0] not in CHANGEABLE_ON_RESUME:
                raise BadInput(name, new, f'was {old!r} when {workdir} was begun; use that, or another --workdir')
            logging.warning('%s: was %r, now %r', name, old, new)


def recorded_config(config):
    """The config as config.json gives it back: lists for tuples."""
    return json.loads(json.dumps(config.to_dict()))


def _differences(old, new, prefix=''):
    """Dotted key -> (old, new) where two nested dicts differ."""
    found = {}
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= _differences(a, b, f'{prefix}{key}.')
        elif a != b:
            found[f'{prefix}{key}'] = (a, b)
    return found
