"""Opens a Run from a config and a workdir, checks it, makes its parts, and records it in the workdir.

The parts are data sets, sampler, learner, weights and state. Functions that make a part, complete a Run or record it
take the whole Run; no others do.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import contextlib
import dataclasses
import filecmp
import glob
import logging
import math
import os
import sys
from typing import Any, NamedTuple

import jax

from grpo_jax import algorithms, data, diagnose, ranges, rewards
from grpo_jax.algorithms import Algorithm, pieces
from grpo_jax.algorithms.checks import SECTIONS
from grpo_jax.collect import policies
from grpo_jax.collect.demonstrations import SFT
from grpo_jax.collect.options import CollectOptions
from grpo_jax.errors import NO_VALUE, UNMADE, BadInput, Checks
from grpo_jax.hosts import files, json_file, lock, processes
from grpo_jax.learner import ExtraMetrics, Optimizers, build_optimizer, learning_rates
from grpo_jax.learner.programs import Learner, check_sizes, make_learner, without_frozen
from grpo_jax.models import hf, lora, transformer
from grpo_jax.models.abstract import abstract_trained
from grpo_jax.models.hf import families, peft
from grpo_jax.ranges import Kind
from grpo_jax.rewards import gold
from grpo_jax.run import checkpoint, config_file, console, digest, rows, steering
from grpo_jax.run.observers import abstract_probe
from grpo_jax.run.settings import Settings, recorded_form
from grpo_jax.run.steering import Steering
from grpo_jax.run.writer import FILES
from grpo_jax.sampler import stops
from grpo_jax.sampler.engine import Sampler, make_sampler
from grpo_jax.sharding import compiled, specs
from grpo_jax.sharding import mesh as meshes
from grpo_jax.sharding.batches import Shapes
from grpo_jax.sharding.mesh import ROW_AXES
from grpo_jax.sharding.sides import Sides, make_sides
from grpo_jax.text import during
from grpo_jax.types import TrainState

logger = logging.getLogger('grpo_jax')
MAKING = 'branching'  # a folder in a branch's workdir that holds the branch until it is complete
NOWHERE = os.path.join(os.devnull, 'nowhere')  # the workdir of a Run that has none; no file can lie there
# files and folders that a run or a branch may write before config.json; a folder holds a run once config.json is there
WRITTEN = (
    *(lock.FILE, MAKING, checkpoint.FOLDER, checkpoint.DAMAGED, checkpoint.COLD_START, checkpoint.BAD),
    *('model', 'data.json', steering.CONTENTS, steering.ENVIRONMENT, rows.EVENTS, 'programs.json', 'teacher.json'),
    *('verdicts.jsonl', 'unanswered.jsonl'),
    *('profile', *FILES, 'tensorboard', 'rollouts'),
)


class Model(NamedTuple):
    """The policy's model: its config, tokenizer and files."""

    config: transformer.ModelConfig
    tokenizer: Any  # None where programs are only compiled, which do not depend on it
    folder: str  # of its config.json and tokenizer; the copy in a workdir has no weights


@dataclasses.dataclass(frozen=True)
class Run:
    """An opened run, whose config, model files and workdir have been checked."""

    settings: Settings  # sampling with the tokenizer's ids; data with the commits of the hub that are read
    algorithm: Any  # the Algorithm; None where none is needed, as in an evaluation
    model: Model
    mesh: jax.sharding.Mesh
    rewards: rewards.RewardFunctions
    workdir: str
    sides: Sides | None = None  # where mesh.sampler gives the sampler devices of its own
    contents: steering.Contents = steering.NO_CONTENTS  # of its data and the user's files, where it trains


def open_training(
    config: Any,
    workdir: str,
    algorithm: Algorithm | None = None,
    functions: Mapping | None = None,
    steered: Steering | None = None,
    outer: Checks | None = None,
    examples: Mapping[str, Iterable] | Iterable | None = None,
    stores: bool = True,
) -> tuple[Run, data.Splits]:
    """(Run, splits) of a training whose config, data and rewards were checked; the rewards were called on an example.

    examples: rows by split, or rows to learn from, in place of the config's data; stores: whether verdicts of services
    are stored. Other arguments: as in open_run.
    """
    with Checks(outer) as check:
        config = config if examples is None else make_python_config(config)
        run = open_run(config, workdir, algorithm, functions, steered, check)
        if examples is not None and run.settings.data is not UNMADE:
            run = dataclasses.replace(run, settings=run.settings.with_rows(examples))
        splits = open_splits(run, check)
        check(data.warn_of_count, splits.train, run.settings.data.prompts_per_step)
        tried = check(gold.try_out, run.rewards, splits.train.examples, stores)
        settings = check(run.settings.with_steps, check(len, splits.train.examples), run.algorithm)
        check(refuse_fewer_steps, settings.steps, max(checkpoint.steps(run.workdir), default=0))
        read = UNMADE if UNMADE in splits else splits._asdict()
        contents = check(steering.read_contents, run.workdir, run.settings.recorded, read, functions, steered)
    return dataclasses.replace(run, rewards=tried, settings=settings, contents=contents), splits


def open_run(
    config: Any,
    workdir: str,
    algorithm: Algorithm | None = None,
    functions: Mapping | None = None,
    steered: Steering | None = None,
    outer: Checks | None = None,
) -> Run:
    """The Run of a training in workdir, or the Run of its branch; writes nothing, compiles nothing, reads no data.

    algorithm: in place of the config's; functions: reward functions by name; steered: allowed changes of the config,
    and the branch, see train.run. Raises BadInput for all in the config that cannot work; outer: Checks that collect it
    instead, so that the Run may have UNMADE parts.
    """
    steered = steered or Steering()
    with Checks(outer) as check:
        whole = check(make_whole_config, config, algorithm)
        config = config if whole is UNMADE else whole
        open_it = _open_branch if steered.branch else open_config
        run = open_it(config, workdir, functions=functions, steered=steered, outer=check)
        check(_check_pending, run.workdir, check(recorded_form, config))
        algorithm = make_algorithm(config, algorithm, check)
        pieces_changed = check(steering.piece_changes, run.workdir, check(algorithms.describe_pieces, algorithm))
        check(steering.check, pieces_changed, run.workdir, steered)
        if any(part is UNMADE for part in (algorithm, *run.settings)):
            return run  # the rest compares them with one another
        run = open_algorithm(run, algorithm, check)
        settings, model = run.settings, run.model
        unread = check(settings.find_unread, algorithm, run.rewards)
        defaults = recorded_form(config_file.read_defaults())
        check(steering.refuse_unread, unread, settings.recorded, defaults, run.workdir, steered.flags)
        if algorithm.needs_teacher and settings.teacher.path:
            columns, size = settings.data.max_prompt_tokens + settings.sampling.max_tokens, model.config.vocab_size
            check(policies.check_teacher_model, settings.teacher.path, model.tokenizer, size, columns, run.mesh)
        check(settings.log.tracking.check)
        done = checkpoint.steps(run.workdir)
        if settings.supervised.updates and not (done or (steered.branch and not _is_begun(run.workdir))):
            check(check_sizes, SFT, run.mesh, *settings.supervised_sizes(), 'supervised.batch')
    return run


def open_config(
    config: Any,
    workdir: str,
    *,
    folder: str | None = None,
    functions: Mapping | None = None,
    origins: Sequence[data.Origin] = (),
    head: bool = False,
    steered: Steering | None = None,
    outer: Checks | None = None,
) -> Run:
    """The Run of a config in a workdir, without an algorithm; writes nothing.

    folder: the model's files, in place of config.model.path; functions: reward functions by name; origins: the data
    that a new run is to read, where the workdir records none; head: whether the model may be a reward model; steered:
    allowed changes of the config; outer: as in open_run. Raises BadInput for all that is wrong with the workdir, the
    config, the model's files, the mesh and the rewards.
    """
    console.install()
    processes.start_devices()
    with Checks(outer) as check:
        if not workdir:
            check.keep(BadInput('--workdir', workdir, 'names no folder; name one'))
            workdir = NOWHERE  # '' would be the current folder
        check(_check_workdir, workdir)
        changes = check(steering.changes, workdir, check(recorded_form, config))
        check(steering.check, changes, workdir, steered)  # first: another run's folder may explain all other errors
        settings = Settings.from_config(config, check)
        source, columns = settings.model, settings.data.max_prompt_tokens + settings.sampling.max_tokens
        located = check(data.locate, settings.data, check(steering.recorded_origins, workdir) or origins)
        model = check(_read_model, source, workdir, folder, changes, head)
        check(check_context, columns, model.folder)
        if settings.mesh is UNMADE or settings.mesh.get('data', 1):
            mesh = check(meshes.make, settings.mesh)
        else:  # choosing a mesh needs all settings that it must divide
            mesh = UNMADE
        if mesh is not UNMADE or not any(part is UNMADE for part in (*settings, model)):
            chosen = check(open_mesh, settings, model.config, workdir, head)
            settings = settings if chosen is UNMADE else chosen
            mesh = check(meshes.make, chosen.mesh)
        both = check(make_sides, settings.mesh, mesh, jax.devices())
        check(specs.params, check(lora.policy_table, model.config, source.lora), mesh)  # an axis may not divide
        # a run with checkpoints reads its adapters there
        if source.lora.path and not (checkpoint.steps(workdir) or (steered and steered.branch)):
            check(peft.check, source.lora.path, model.config, source.lora)
        sampling = check(_add_tokens, settings.sampling, model, settings.data)
        most = sys.maxsize if sampling is UNMADE else sampling.max_tokens  # which only shaping by length reads
        reward_functions = check(rewards.build, settings.rewards, most, functions, workdir)
        check(_check_model_path, changes, workdir, model.folder, source.random_init, steered)
    return Run(settings._replace(data=located, sampling=sampling), None, model, mesh, reward_functions, workdir, both)


def _check_workdir(workdir):
    """Raises BadInput if workdir is a file, or a folder that holds no run but other things than a run writes."""
    if os.path.exists(workdir) and not os.path.isdir(workdir):
        raise BadInput('--workdir', workdir, 'is a file; name a folder')
    names = [] if _is_begun(workdir) or not os.path.isdir(workdir) else os.listdir(workdir)
    if others := [name for name in names if name[0] != '.' and name.removesuffix('.writing') not in WRITTEN]:
        raise BadInput('--workdir', workdir, f'holds no run, but other things, like {min(others)}; name a new folder')


def _check_pending(workdir, recorded):
    """Raises BadInput if the config, as JSON, amends shapes of completions that the newest checkpoint has pending."""
    for step in checkpoint.steps(workdir)[:1]:
        amended = steering.keys_amended_since(workdir, step, steering.changes(workdir, recorded))
        with contextlib.suppress(checkpoint.Damaged):  # the run says so, and goes on from an earlier one
            checkpoint.check_reshaping(checkpoint.recorded_pending(checkpoint.path_of(workdir, step)), amended)


def _read_model(source, workdir, folder, changes, head):
    """The Model of a ModelSource; BadInput where its weights are read and do not fit. Arguments: as in open_config."""
    saved = bool(checkpoint.steps(workdir))
    # weights are read at the first start, and with adapters, which leave them frozen, at each start
    reads_weights = folder is None and not source.random_init and (source.lora.rank or not saved)
    # the workdir's copy of the model's files is used while the run goes on with the same model
    begun, other_model = os.path.join(workdir, 'model'), any(change.key == 'model.path' for change in changes)
    if other_model or not (saved and _is_begun(workdir) and os.path.isdir(begun)):
        begun = ''
    folder = folder or begun or hf.find(source.path)
    model = Model(families.load_config(folder), hf.load_tokenizer(folder), folder)
    if reads_weights:
        hf.check_weights(hf.find(source.path) if begun else folder, model.config, head)
    return model


def _add_tokens(sampling, model, options):
    """The Sampling with token ids of a Model's tokenizer; options: DataOptions, with thinking 'off' no budget of it."""
    end = data.find_template_end(model.tokenizer, options.prompt_format)
    stop_tokens = hf.stop_tokens(model.folder, model.tokenizer, model.config.vocab_size, end and end.token)
    pad_token = stop_tokens[0] if model.tokenizer.pad_token_id is None else model.tokenizer.pad_token_id
    if options.prompt_format.thinking == 'off':
        sampling = sampling._replace(thinking_tokens=0, thinking_start='', thinking_text='')
    return sampling.for_tokenizer(model.tokenizer, stop_tokens, pad_token)


def _is_begun(workdir):
    """Whether a workdir holds a run: config.json is written last."""
    return os.path.isfile(os.path.join(workdir, 'config.json'))


def open_mesh(settings: Settings, model_config: transformer.ModelConfig, workdir: str, head: bool = False) -> Settings:
    """The Settings with the run's mesh, chosen where config.mesh.data is 0; prints it, and how many devices are idle.

    A run goes on with the mesh in its config.json while there are as many devices and it divides model and batch,
    unless config.mesh has an axis above 1. Where no mesh over all devices divides them, one process takes as many
    devices as it can, on TPUs a divisor of their number. head: as in open_config.
    """
    section, devices = settings.mesh, meshes.devices_here()
    sizes, count = meshes.sizes_of(section), len(devices) - section.get('sampler', 0)
    used = math.prod(sizes.values())
    if section.get('data', 1):
        if used < count:
            logger.warning('mesh: %d of %d devices; with mesh.data=0 the others are not idle', used, count)
        return settings
    dealt = settings.dealt(labels=head)
    fits = make_mesh_check(model_config, settings.model.lora, settings.teacher.path, dealt)
    recorded, how = steering.value_of(steering.recorded_config(workdir), 'mesh'), 'chosen'
    recorded = recorded and meshes.sizes_of(recorded)
    if used == 1 and recorded and math.prod(recorded.values()) == count and fits(recorded):
        sizes, how = recorded, f'as recorded in {workdir}'
    else:
        counts = range(count, 0, -1) if jax.process_count() == 1 else [count]
        if devices[0].platform == 'tpu':  # the first n devices are a block of the slice where n divides the count
            counts = [n for n in counts if count % n == 0]
        sizes = meshes.choose(section, model_config, counts, meshes.count_slices(devices), fits)
    if idle := count - math.prod(sizes.values()):
        # why the first mesh over all devices does not fit
        whole = next(iter(meshes.list_meshes(section, model_config, count)), sizes)
        shards = math.prod(whole[axis] for axis in ROW_AXES)
        wrong = ' and '.join(f'{name} = {number}' for name, number in dealt.items() if number % shards)
        how += f'; {idle} are idle' + (f': make {wrong} a multiple of {shards} to use them' if wrong else '')
    if count > 1 and processes.speaks():
        axes = ' x '.join(f'{axis} {size}' for axis, size in sizes.items() if size > 1)
        how += f'; {len(devices) - count} for the sampler' * (count < len(devices))
        console.console.print(f'mesh: {axes or "one"} of {count} devices, {how}')
    return settings.with_mesh(sizes)


def make_mesh_check(
    model_config: transformer.ModelConfig, adapters: lora.LoraOptions, teacher: str, dealt: Mapping[str, int]
) -> Callable[[Mapping[str, int]], bool]:
    """Returns fits({axis: size}) -> bool: whether a mesh divides policy, teacher, and each count of `dealt` evenly.

    teacher: its folder, '' without one; a folder that is not on this machine is not checked. dealt: of
    Settings.dealt: prompts of a step, rows of a microbatch, ... Memory is not looked at.
    """
    tables = [lora.policy_table(model_config, adapters)]
    if os.path.isdir(teacher):
        tables.append(transformer.param_table(families.load_config(teacher)))

    def fits(sizes):
        shards = math.prod(sizes[axis] for axis in ROW_AXES)
        with contextlib.suppress(BadInput):  # an axis does not divide a matrix
            for table in tables:
                specs.params(table, jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes)))
            return all(count % shards == 0 for count in dealt.values())
        return False

    return fits


def check_context(columns: int, folder: str, budget: str = 'rollout.max_tokens') -> None:
    """Raises BadInput if `columns` tokens exceed the context of a folder's model; budget: a key, for the message."""
    most = families.context_length(folder)
    if columns > most:
        remedy = f"is beyond the model's context of {most} positions; lower one"
        raise BadInput(f'data.max_prompt_tokens + {budget}', columns, remedy)


def _check_model_path(changes, workdir, folder, random_init, steered):
    """Raises BadInput when model.path was changed and leads to another model than the run began with.

    changes: the config's; folder: the folder of the new path; random_init: config.model.random_init; steered: as in
    open_config. Files of config and tokenizer are compared, and weights too until the run has a checkpoint.
    """
    change = next((change for change in changes if change.key == 'model.path'), None)
    if change is None:
        return
    copy, names = os.path.join(workdir, 'model'), hf.config_files(folder)
    same = os.path.isdir(copy) and names == hf.config_files(copy)
    same = same and filecmp.cmpfiles(copy, folder, names, shallow=False)[0] == names
    if same and not (random_init or checkpoint.steps(workdir)):
        old, new = (
            sorted(map(os.path.basename, glob.glob(f'{glob.escape(path)}/*.safetensors')))
            for path in (change.old, folder)
        )
        same = old == new and filecmp.cmpfiles(change.old, folder, new, shallow=False)[0] == new
    if not same:
        steering.refuse([change], workdir, steered)


def _open_branch(config, workdir, functions, steered, outer):
    """The Run of the branch that `steered` names, whether it exists already or is new; workdir: its parent."""
    branch = steered.branch
    places = os.path.realpath(workdir), os.path.realpath(branch)
    if os.path.commonpath(places) in places:
        raise BadInput('--branch', branch, f'and {workdir} must not lie in one another; name a folder beside it')
    if os.path.exists(os.path.join(branch, 'config.json')):
        parents = [row['parent'] for row in rows.recorded_events(branch) if row['event'] == 'branched']
        if os.path.abspath(workdir) not in parents:
            raise BadInput('--branch', branch, f'holds a run that was not begun from {workdir}; name a new folder')
        return open_config(config, branch, functions=functions, steered=steered, outer=outer)
    names = {*os.listdir(branch)} if os.path.isdir(branch) else {''} if os.path.lexists(branch) else set()
    if MAKING not in names and names - {lock.FILE}:
        raise BadInput('--branch', branch, 'is there and holds no run; name a new folder')
    if not _is_begun(workdir):
        raise BadInput('--workdir', workdir, 'holds no run (no config.json); name one for --branch to begin from')
    if not checkpoint.steps(workdir):
        raise BadInput('--workdir', workdir, 'holds no finished checkpoint; train this run first, or name another')
    changes = steering.changes(workdir, recorded_form(config))
    inherited = [change for change in changes if change.kind == Kind.INHERITED]
    if inherited:
        steering.refuse(inherited, workdir, steered)
    other_model = any(change.key == 'model.path' for change in changes)
    folder = hf.find(config.model.path) if other_model else os.path.join(workdir, 'model')
    origins = steering.recorded_origins(workdir)
    with Checks(outer) as check:
        run = open_config(
            config, branch, folder=folder, functions=functions, origins=origins, steered=steered, outer=check
        )
        source = run.settings.model
        trained = check(abstract_trained, run.model.config, source.lora, source.dtype, run.mesh)
        check(checkpoint.check_params, workdir, trained, '--branch', branch)
    return run


def make_algorithm(config: Any, algorithm: Algorithm | None = None, outer: Checks | None = None) -> Algorithm:
    """The Algorithm of a run, `algorithm` or the config's; BadInput where it cannot work. outer: as in open_run."""
    with Checks(outer) as check:
        section = Settings.from_config(config, check).algorithm
        collection = check(ranges.checked, CollectOptions, config.get('collection'), 'collection')
        algorithm = algorithm or check(algorithms.make, section, collection)
        return check(_add_collection, algorithm, collection)


def _add_collection(algorithm, collection):
    """The Algorithm with the choices of config.collection; BadInput where it was given other choices of its own."""
    collected = {name: collection[name] for name in SECTIONS}
    for name, value in collected.items():
        given = getattr(algorithm, name)
        if given not in (value, Algorithm._field_defaults[name]):
            raise BadInput(f'collection.{name}', value, f'the given algorithm has {given!r}; set the config to that')
    return algorithm._replace(**collected)


def make_whole_config(config: Any, algorithm: Algorithm | None = None) -> Any:
    """A copy of a config with the numbers of pieces in users' files, or with a given Algorithm in place of its own."""
    config = config.copy_and_resolve_references()
    if 'algorithm' not in config:  # which the settings refuse
        return config
    section = config.algorithm
    numbers = algorithms.to_section(algorithm) if algorithm else algorithms.file_numbers(section)
    with section.unlocked(), section.ignore_type():
        section.update({key: x for key, x in numbers.items() if algorithm or key not in section})
    return config


def make_python_config(config: Any) -> Any:
    """A copy of a config for rows that come from Python: its data set is `files`, whose options, if any, stay.

    Options that only the data set before has are left out.
    """
    config = config.copy_and_resolve_references()
    with config.unlocked(), config.ignore_type():
        section, options = config.data, config.data.options.to_dict()
        if section.name != 'files':
            own, other = data.options_of('files'), data.options_of(section.name)
            options = {key: value for key, value in options.items() if key in own and key not in other}
        section.update(name='files', path='', revision='')
        section.options = options | {'folder': data.PYTHON}
    return config


def open_changes(config: Any, workdir: str, algorithm: Algorithm | None = None) -> list[steering.Change]:
    """The Changes of config and pieces that a start in workdir would make there; algorithm: as given to open_run."""
    config = make_whole_config(config, algorithm)
    described = algorithms.describe_pieces(make_algorithm(config, algorithm))
    changes = steering.changes(workdir, Settings.from_config(config).recorded)
    return [*changes, *steering.piece_changes(workdir, described)]


def open_algorithm(run: Run, algorithm: Algorithm, outer: Checks | None = None) -> Run:
    """The Run with an Algorithm; BadInput for what does not fit it, warnings for doubts. outer: as in open_run."""
    settings, learning, model = run.settings, run.settings.learning, run.model
    section, shapes, lora_rank = settings.algorithm, settings.step_shapes(algorithm), settings.model.lora.rank
    kept = algorithm.keeps_reference or settings.log.kl_every > 0
    with Checks(outer) as check:
        check(_check_rewards, settings.rewards, run.rewards, algorithm)
        if section.critic_warmup and not algorithm.needs_values:
            remedy = f'advantage {section.advantage} has no critic; use 0'
            check.keep(BadInput('algorithm.critic_warmup', section.critic_warmup, remedy))
        check(check_sizes, algorithm, run.mesh, shapes, learning)
        check(policies.check_sides, run.sides, algorithm.source, settings.data.prompts_per_step)
        check(policies.check_decoded, learning, settings.sampling, settings.collection, algorithm)
        check(_check_allocation, settings.collection.allocation, learning.minibatches, section.weights, algorithm)
        sizes = {'group_size': shapes.group_size, 'prompts': shapes.prompts, 'updates': learning.updates}
        for warning in check(algorithms.check_run, algorithm, **sizes):
            logger.warning(warning)
        for line in check(diagnose.advise, settings.config, model.config):
            logger.warning(line)
        if lora_rank and algorithm.needs_values:
            remedy = 'a critic would be a second model, trained as a whole; use 0, or another preset'
            check.keep(BadInput('model.lora.rank', lora_rank, remedy))
        if lora_rank and settings.collection.reference == 'polyak':
            remedy = 'the mean of two adapters is not that of their weights; use hard or frozen'
            check.keep(BadInput('collection.reference', 'polyak', remedy))
        source, path = settings.model, settings.reference.path
        check(policies.check_reference, path, kept, run.workdir, source, model.config, run.mesh)
        check(policies.check_teacher, settings.teacher, algorithm, model.config.vocab_size)
    if section.weights == 'fixed_length' and section.fixed_length != settings.sampling.max_tokens:
        logger.warning(
            'losses are divided by algorithm.fixed_length = %d; Dr. GRPO divides by rollout.max_tokens, '
            'which is --config.algorithm.fixed_length=%d here',
            section.fixed_length,
            settings.sampling.max_tokens,
        )
    if 'reference' in learning.offload and not kept:
        logger.warning('learner.offload names the reference, and this algorithm keeps none')
    return dataclasses.replace(run, algorithm=algorithm)


def _check_allocation(allocation: str, minibatches: int, weights: str, algorithm: Algorithm):
    """Raises BadInput where groups of unequal sizes do not suit the loss; with allocation `equal` all is well.

    A loss that reads group_ids, of pairs or of whole groups, is refused. Weights that average over groups are refused
    with several minibatches, which cut the larger groups apart. weights: their name, for the message.
    """
    if allocation == 'equal':
        return
    if 'group_ids' in algorithm.reads:
        raise BadInput(
            'collection.allocation', allocation, 'a loss of pairs or whole groups needs groups of one size; use equal'
        )
    if minibatches > 1 and 'group_ids' in pieces.reads(algorithm.weights):
        raise BadInput(
            'learner.minibatches',
            minibatches,
            f'cuts the larger groups of collection.allocation={allocation!r} apart, and algorithm.weights={weights!r} '
            "averages over whole ones; use 1, or algorithm.weights='token_mean'",
        )


def _check_rewards(options: rewards.RewardOptions, functions: rewards.RewardFunctions, algorithm: Algorithm):
    """Raises BadInput where the algorithm reads verdicts or step rewards that none gives, or skips a shaped reward."""
    reads, name = algorithm.advantage_reads, pieces.name_of(algorithm.advantage)
    if algorithm.needs_steps and not functions.steps:
        remedy = f'is empty, and advantage {name} needs rewards of steps; name a reward that has them, like calculator'
        raise BadInput('reward.step_rewards', NO_VALUE, remedy)
    if 'correct' in reads | algorithm.reads and not (options.verifies_all or algorithm.source == 'pairs'):
        raise BadInput(
            'reward.verifier',
            NO_VALUE,
            'is empty, and the algorithm reads which completions are correct; name a part of the reward here, '
            'and set reward.correct_at to its least value of a correct completion',
        )
    reads_total = bool({'rewards', 'token_rewards'} & reads) or options.steps_with_outcome
    for name in ('length_shaping', 'truncated_reward'):
        if getattr(options, name) and not reads_total:
            raise BadInput(
                f'reward.{name}',
                getattr(options, name),
                f'is a term of the total reward, and the advantage reads {" and ".join(sorted(reads))}; leave it out',
            )


# the parts of a Run


def open_split(run: Run, split: str, train: data.Dataset | None = None) -> data.Dataset:
    """The tokenized Dataset of a split, 'train' or 'test'; the train split, with a warning, if there is no test split.

    train: the train split, if it was read already.
    """
    options = run.settings.data
    # where the rewards were refused, nobody knows which rows need an answer
    needs_answer = (lambda example: False) if run.rewards is UNMADE else run.rewards.needs_answer
    try:
        with during(f'reading the {split} split of {options.name}'):
            return data.load(options, split, run.model.tokenizer, needs_answer)
    except data.MissingSplit as missing:
        if split == 'train':
            raise
        where = '' if options.test_split in ('', 'test') else f' ({missing})'  # a default, which no user has chosen
        remedy = 'Set data.held_out=0.05, or name a split or file in data.test_split'
        logger.warning('no test split: evaluations are of prompts of the train split%s. %s', where, remedy)
    return train or open_split(run, 'train')


def open_splits(run: Run, outer: Checks | None = None) -> data.Splits:
    """The train and test splits; raises BadInput when most test prompts are in the train split too.

    outer: as in open_run; the splits are UNMADE where the Run's data options or model are.
    """
    with Checks(outer) as check:
        readable = UNMADE if UNMADE in (run.settings.data, run.model) else run
        train = check(open_split, readable, 'train')
        splits = data.Splits(train, check(open_split, readable, 'test', train))
        check(data.check_shared, splits.train, splits.test)
        check(data.warn_of_prompts, train)
    return splits


def make_run_learner(run: Run, aux: dict[str, Any]) -> Learner:
    """The Learner of a Run; aux: ShapeDtypeStructs of further arrays in TrainState.aux, which begin as zeros."""
    settings, algorithm, ages = run.settings, run.algorithm, run.settings.collection.is_asynchronous
    shapes, updates = settings.step_shapes(algorithm), settings.steps * settings.learning.updates
    optimizers = Optimizers(
        build_optimizer(settings.optimizer, updates),
        build_optimizer(settings.critic_optimizer, updates) if algorithm.needs_values else None,
        learning_rates(settings.optimizer, updates),
    )
    return make_learner(
        run.model.config, algorithm, optimizers, run.mesh, shapes, settings.learning,
        aux | abstract_probe(settings.log, shapes),
        ExtraMetrics(outcomes=True, reference=not algorithm.needs_reference and settings.log.kl_every > 0, ages=ages),
    )  # fmt: skip


def make_run_sampler(run: Run, shapes: Shapes, greedy: int = 0, carried: int = 0) -> Sampler:
    """The Sampler of a Run for these Shapes; a prompt's last `greedy` completions are greedy. See make_sampler."""
    sampling, vocab_size = run.settings.sampling._replace(greedy=greedy), run.model.config.vocab_size
    automata = stops.abstract_automata(sampling, vocab_size)  # only shapes, which do not depend on the tokenizer
    if run.model.tokenizer is not None:
        automata = stops.make_automata(sampling, run.model.tokenizer, vocab_size)
    return make_sampler(run.model.config, run.sides or run.mesh, shapes, sampling, automata, carried=carried)


def make_weights(run: Run) -> Any:
    """The float32 parameters of a Run's model, sharded over the mesh: drawn at random, or read from its folder."""
    source, config = run.settings.model, run.model.config
    shardings = specs.params(transformer.param_table(config), run.mesh)
    if source.random_init:
        key = jax.random.key(run.settings.seed)
        with during('drawing the weights'):
            return jax.jit(transformer.init, static_argnums=1, out_shardings=shardings)(key, config)
    # with adapters a resumed run reads the frozen weights again, which the copy in the workdir lacks
    return hf.load_params(hf.find(source.path) if source.lora.rank else run.model.folder, config, shardings)


def make_policy(run: Run, weights: Any = None) -> Any:
    """The policy's first parameters on the mesh, with its adapters; weights: float32, in place of the model's."""
    source, config = run.settings.model, run.model.config
    weights = make_weights(run) if weights is None else weights
    if not source.lora.rank:
        return weights
    trained = abstract_trained(config, source.lora, source.dtype, run.mesh)
    shardings = jax.tree.map(lambda x: x.sharding, trained)
    if source.lora.path:
        adapters = peft.load_adapters(source.lora.path, config, source.lora, shardings)
    else:
        draw = jax.jit(lora.init, static_argnums=(1, 2), out_shardings=shardings)
        adapters = draw(jax.random.key(run.settings.seed), config, source.lora)
    return lora.join(adapters, lora.freeze(weights, source.lora, source.dtype))


def make_whole_policy(run: Run, trained: Any, path: str, workdir: str = '') -> Any:
    """The policy of a checkpoint: its trained parameters, joined with the frozen weights where it has adapters.

    trained: read from the checkpoint; path: the checkpoint's folder; workdir: of its run, run.workdir without it.
    Frozen weights are not in checkpoints: they are read from config.model.path or the cold start, or drawn again.
    Raises BadInput when their digest differs from the checkpoint's. All processes must call it.
    """
    source, config = run.settings.model, run.model.config
    if not source.lora.rank:
        return trained
    cold_start = os.path.join(workdir or run.workdir, checkpoint.COLD_START)
    if source.random_init and checkpoint.steps(cold_start):
        table = transformer.param_table(config)
        weights = checkpoint.read_params(cold_start, compiled.abstract_params(table, run.mesh))[0]
    else:
        weights = make_weights(run)
    frozen = lora.freeze(weights, source.lora, source.dtype)
    if digest.hash_tree(frozen) != checkpoint.recorded_frozen(path):
        raise BadInput(
            'model.random_init' if source.random_init else 'model.path',
            source.random_init or source.path,
            f'has other weights, or in another model.dtype, than those that the adapters of {path} were trained on; '
            'bring them back, or use another --workdir',
        )
    return lora.join(trained, frozen)


def open_state(
    run: Run, checkpoints: Any, abstract: TrainState, initial: Callable[[Any], TrainState] | None = None
) -> TrainState | None:
    """The TrainState of the newest sound checkpoint, from which a Run resumes; None without checkpoints.

    checkpoints: a CheckpointManager; abstract: ShapeDtypeStructs with the state's shardings; initial(trained
    parameters) -> a first state: its parts replace the checkpoint's if their config keys were amended since, or if
    config.log keeps other parts now. Raises BadInput as checkpoint.restore does. All processes must call it.
    """

    def read(path, abstract):
        """The TrainState in a checkpoint's folder, with initial values in parts that amendments or logging reset."""
        if initial is None:
            return checkpoint.read_tree(path, abstract)
        changes = steering.changes(run.workdir, run.settings.recorded) + run.contents.changes
        amended = steering.keys_amended_since(run.workdir, int(os.path.basename(path)), changes)
        checkpoint.check_reshaping(abstract.pending, amended)
        if not amended and not checkpoint.differs_in_observed(path, abstract):
            return checkpoint.read_tree(path, abstract)
        return checkpoint.read_fitting(path, abstract, initial, checkpoint.parts_to_reset(amended))

    state = checkpoint.restore(checkpoints, without_frozen(abstract), read)
    if state is None:
        return None
    path = checkpoint.path_of(run.workdir, int(state.step))
    return state.replace(params=make_whole_policy(run, state.params, path))


def refuse_fewer_steps(steps: int, done: int) -> None:
    """Raises BadInput when a run has done more than `steps`: its last evaluation would be of another step."""
    if done > steps:
        raise BadInput('steps', steps, f'the run has {done} already; use that many or more')


# the record in a workdir


def make_workdir(run: Run, step: int | None, folder: str = '') -> None:
    """Records a Run in its workdir: environment, model's config and tokenizer, data, pieces, amendments, config.json.

    step: the step that the run goes on from, for events; folder: written to in place of the workdir. Call it after
    all checks, so that a refused config changes nothing. config.json is written last: without it a folder holds no run.
    Raises CannotWrite when the disk refuses a file.
    """
    workdir, settings = folder or run.workdir, run.settings
    lock.check(workdir, settled=True)
    with files.writing(workdir):
        os.makedirs(workdir, exist_ok=True)
        if processes.is_first():
            steering.record_environment(workdir)
            hf.copy_files(run.model.folder, os.path.join(workdir, 'model'))
    steering.record_origins(workdir, settings.data.origins)
    steering.record(workdir, step or 0, steering.changes(workdir, settings.recorded) + run.contents.changes)
    if run.contents.digests:
        json_file.write(os.path.join(workdir, steering.CONTENTS), run.contents.digests)
    if run.algorithm is not None:
        json_file.write(os.path.join(workdir, steering.PIECES), algorithms.describe_pieces(run.algorithm))
    json_file.write(os.path.join(workdir, 'config.json'), settings.recorded)
