"""What a config and a workdir stand for: the checked settings, the model, its tokenizer and the devices."""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import logging
import os
from typing import Any

import jax

from grpo_jax import data, rewards, sampler
from grpo_jax.algorithms import Algorithm
from grpo_jax.errors import BadInput
from grpo_jax.hosts import files, json_file, lock, processes
from grpo_jax.learner import Observed, Optimizers, build_optimizer, learning_rates
from grpo_jax.learner.programs import Learner, make_learner
from grpo_jax.models import families, hf, lora, transformer
from grpo_jax.run import checkpoint, console, environment, observers, steering
from grpo_jax.run.origins import check_paths, record_origins, recorded_origins, with_digests
from grpo_jax.run.settings import Settings
from grpo_jax.sampler import stops
from grpo_jax.sampler.engine import Engine
from grpo_jax.sampler.programs import make_sampler
from grpo_jax.sharding import compiled, specs
from grpo_jax.sharding import mesh as meshes
from grpo_jax.sharding.batches import Shapes
from grpo_jax.sharding.mesh import Devices
from grpo_jax.text import during

logger = logging.getLogger('grpo_jax')


@dataclasses.dataclass(frozen=True)
class Experiment:
    """An opened experiment; everything that can be wrong with the input has been checked."""

    config: Any  # as it is recorded
    settings: Settings
    workdir: str
    folder: str  # of the model
    model_config: transformer.ModelConfig
    tokenizer: Any  # None where the devices are not here: programs do not depend on it
    sampling: sampler.Sampling  # with the tokenizer's ids
    devices: Devices
    reward_functions: rewards.RewardFunctions
    changes: Sequence[steering.Change] = ()  # of the config to that of the workdir, all of them allowed
    steered: steering.Steering | None = None  # what the command may do where the workdir has another config
    samplers: dict = dataclasses.field(default_factory=dict)  # built so far, by what sets them apart
    datasets: dict = dataclasses.field(default_factory=dict)  # loaded so far, by split

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh of its devices."""
        return self.devices.mesh

    @property
    def pad_token(self) -> int:
        """The token that fills a row after its end."""
        return self.sampling.pad_token

    @property
    def key(self):
        """The run's random key."""
        return jax.random.key(self.settings.seed)

    def shapes(self, prompts: int, group_size: int) -> Shapes:
        """The Shapes of that many prompts and completions of each."""
        return Shapes(prompts, group_size, self.settings.data.max_prompt_tokens, self.settings.sampling.max_tokens)

    def compiling(self, later: compiled.Later) -> 'Experiment':
        """The same, but that `later` compiles what is made of it from now on."""
        return dataclasses.replace(self, devices=self.devices._replace(later=later))

    def sampler(self, shapes: Shapes, greedy: int = 0) -> Engine:
        """The sampler of those shapes, built once; the last `greedy` completions of each prompt are greedy."""
        if (shapes, greedy) not in self.samplers:
            sampling = self.sampling._replace(greedy=greedy)
            self.samplers[shapes, greedy] = make_sampler(
                self.model_config, self.devices, shapes, sampling, self.automata()
            )
        return self.samplers[shapes, greedy]

    def automata(self):
        """Tables of sampler.stops for the strings that end a completion or its thinking; abstract without a tokenizer.

        Their shapes do not depend on the tokenizer.
        """
        if self.tokenizer is None:
            return stops.abstract_automata(self.sampling, self.model_config.vocab_size)
        return stops.make_automata(self.sampling, self.tokenizer, self.model_config.vocab_size)

    def learner(self, algorithm: Algorithm, shapes: Shapes, collected: Any) -> Learner:
        """The Learner of the run; collected is what run.collect keeps in the state."""
        settings = self.settings
        updates = settings.steps * settings.learning.updates
        optimizers = Optimizers(
            build_optimizer(settings.optimizer, updates),
            build_optimizer(settings.critic_optimizer, updates),
            learning_rates(settings.optimizer, updates),
        )
        return make_learner(
            self.model_config, algorithm, optimizers, self.devices, shapes, settings.learning,
            collected | observers.abstract_aux(settings.cadence, shapes),
            Observed(outcomes=True, reference=settings.cadence.kl_observe > 0),
        )  # fmt: skip

    def load(self, split: str) -> data.Dataset:
        """The Dataset of a split, read once."""
        if split not in self.datasets:
            with during(f'reading the {split} split of {self.settings.data.name}'):
                self.datasets[split] = data.load(
                    self.settings.data, split, self.tokenizer, self.reward_functions.needs_answer
                )
        return self.datasets[split]

    def check_splits(self) -> None:
        """Loads both splits; BadInput where most of the test split's prompts are in the train split."""
        data.check_shared(self.load('train'), self.load('test'))

    def whole_params(self) -> Any:
        """Float32 parameters of the model on the mesh: drawn, or read from its folder."""
        shardings = specs.params(transformer.param_table(self.model_config), self.mesh)
        if self.settings.model.random_init:
            with during('drawing the weights'):
                return jax.jit(transformer.init, static_argnums=1, out_shardings=shardings)(self.key, self.model_config)
        return hf.load_params(self.weights_folder(), self.model_config, shardings)

    def weights_folder(self) -> str:
        """The folder of the model's weights, which a workdir's own does not have."""
        return hf.find(self.settings.model.path) if self.settings.model.lora.rank else self.folder

    def params(self) -> Any:
        """The policy's first parameters on the mesh: those of the model, and adapters where the config has some."""
        return checkpoint.adapt(self, self.whole_params())

    def abstract_trained(self) -> Any:
        """The abstract parameters that are trained, which a checkpoint has."""
        model = self.settings.model
        return lora.split(lora.abstract_params(self.model_config, model.lora, model.dtype, self.mesh))[0]


def open_experiment(
    config,
    workdir: str,
    folder: str | None = None,
    functions: Mapping | None = None,
    origins: Sequence[data.Origin] = (),
    head: bool = False,
    steered: steering.Steering | None = None,
) -> Experiment:
    """Experiment of a config in a workdir; BadInput for whatever does not fit. Writes nothing: see claim.

    folder replaces config.model.path, for a workdir that holds its model already; functions are rewards by name;
    origins are those of the data that another run reads, for one that is to read the same and is not begun yet. head:
    the model may be a reward model. steered: what the command may do where the workdir has another config.
    """
    console.install()
    settings = Settings.from_config(config)
    changes = _check_workdir(config, workdir, steered)
    settings = settings._replace(data=data.locate(settings.data, recorded_origins(workdir) or origins))
    saved = bool(checkpoint.steps(workdir))
    read = settings.model.lora.rank or not saved  # in each start, where they stay frozen
    weights = folder is None and not settings.model.random_init and read
    begun = _begun_model(workdir, changes) if saved else ''
    folder = folder or begun or hf.find(settings.model.path)
    model_config, tokenizer = families.load_config(folder), hf.load_tokenizer(folder)
    check_context(settings, folder)
    if weights:
        hf.check_weights(hf.find(settings.model.path) if begun else folder, model_config, head)
    mesh = meshes.make(settings.mesh)
    specs.params(lora.policy_table(model_config, settings.model.lora), mesh)  # raises where an axis does not divide
    if not (saved or (steered and steered.branch)):  # whose checkpoints have the adapters
        checkpoint.check_adapters(settings.model.lora, model_config)
    stop_tokens = hf.stop_tokens(folder, tokenizer, model_config.vocab_size)
    pad_token = stop_tokens[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    sampling = settings.sampling.for_tokenizer(tokenizer, stop_tokens, pad_token)
    reward_functions = rewards.build(settings.rewards, settings.sampling.max_tokens, functions)
    devices = Devices(mesh)
    experiment = Experiment(
        config,
        settings,
        workdir,
        folder,
        model_config,
        tokenizer,
        sampling,
        devices,
        reward_functions,
        changes,
        steered,
    )
    check_paths(experiment, steered)
    return experiment


def _begun_model(workdir, changes):
    """The workdir's copy of the files of the model that its run was begun with, or '' where it has none or another."""
    copy, begun = os.path.join(workdir, 'model'), os.path.isfile(os.path.join(workdir, 'config.json'))
    changed = any(change.key == 'model.path' for change in changes)
    return copy if begun and os.path.isdir(copy) and not changed else ''


def check_context(settings: Settings, folder: str):
    """BadInput when prompts and completions are longer than the model in the folder can read."""
    columns = settings.data.max_prompt_tokens + settings.sampling.max_tokens
    most = families.context_length(folder)
    if columns > most:
        raise BadInput(
            'data.max_prompt_tokens + rollout.max_tokens',
            columns,
            f"is beyond the model's context of {most} positions; lower one",
        )


def claim(experiment, step: int | None = 0):
    """Makes the workdir this experiment's: config.json, data.json, environment.json, the model's folder but weights.

    Called when everything else has been checked, so that a refused config leaves no trace. CannotWrite when the disk
    refuses a file. step: that the run goes on from, with which amendments are recorded. config.json comes last: until
    then the workdir is as it was.
    """
    lock.check(experiment.workdir, settled=True)
    with files.writing(experiment.workdir):
        os.makedirs(experiment.workdir, exist_ok=True)
        if processes.is_first():
            environment.record(experiment.workdir)
            hf.copy_files(experiment.folder, os.path.join(experiment.workdir, 'model'))
    record_origins(experiment.workdir, with_digests(experiment))
    steering.record(experiment.workdir, step or 0, experiment.changes)
    json_file.write(os.path.join(experiment.workdir, 'config.json'), experiment.config.to_dict())


def agree(experiment, step, built, examples):
    """Waits until every process is ready for the first step; RuntimeError when they are not about to do the same.

    step: of the newest checkpoint, or None; built: the programs by name; examples: those that it learns from.
    """
    values = {
        'step': step,
        'commits of the data': [origin.commit for origin in experiment.settings.data.origins],
        'data': compiled.hashed(repr([(e.id, e.prompt, e.answer, e.messages) for e in examples])),
    }
    if processes.several():  # a hash takes tracing, which one process leaves for later
        values |= {f'program {name}': program.hash for name, program in built.items()}
    with during('waiting for the other processes'):
        processes.agree('the start', values | dict(_flat(experiment.config.to_dict(), 'config.')))


def _flat(tree, prefix):
    """(dotted name, value) of the leaves of nested dicts."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f'{prefix}{name}.')
        else:
            yield prefix + name, value


def _check_workdir(config, workdir, steered):
    """The Changes of a config to that with which workdir was begun; BadInput where the run cannot go on with them."""
    if os.path.exists(workdir) and not os.path.isdir(workdir):
        raise BadInput('--workdir', workdir, 'is a file; name a folder')
    changes = steering.changes(workdir, recorded_config(config))
    steering.check(changes, workdir, steered)
    return changes


def recorded_config(config):
    """The config as config.json gives it back: lists for tuples."""
    return json.loads(json.dumps(config.to_dict()))
