"""Trains a policy by GRPO or another preset. START HERE: run(config, workdir) builds everything, then loops over steps.

The same command goes on with a run that was stopped.

Examples:
    python -m grpo_jax.train --config=arithmetic --workdir=runs/arithmetic
    python -m grpo_jax.train --config=gsm8k:dapo --workdir=runs/gsm8k --config.rollout.group_size=16 --profile=3:5
"""

# Where the parts of a step are:
#   its settings     run/config_file.py (Parser, read_config): flags and files; run/settings.py (from_config), with the
#                    options of each package: typed values; run/open.py (open_run): which contradict each other
#   its devices      run/open.py (open_mesh; make_mesh_check: what a mesh divides), sharding/mesh.py (choose, make);
#                    what lies on them how: sharding/specs.py (params, by the axes that models/transformer.py
#                    (param_table) names; over_rows), learner/programs.py (_abstract_state)
#   a model family   models/hf/families.py (FAMILIES: what differs from Llama), models/hf/load.py (load_params)
#   its prompts      collect/draw.py (Drawer, choose), data/order.py (walk); made of rows by data/dataset.py (load),
#                    data/records.py (read_prompt), data/prompt_format.py (encode_prompt); those that retire:
#                    collect/draw.py (find_retired)
#   without waiting  collect/carry.py (make_carry), collect/schedule.py (sample_ahead), collect/pending.py (Pending)
#   the decode loop  sampler/engine.py (Engine, sample) on the host, sampler/decode.py (decode_segment) on the device;
#                    its noise: collect/draw.py (sample: the run's key), sampler/generate.py (row_keys),
#                    sampler/decode.py (_choose_token); its keys and values: models/cache.py (Chunk),
#                    sampler/schedule.py (make_schedule); stop strings and thinking: sampler/stops.py, and
#                    the forced end of thinking: sampler/decode.py (_written_tokens)
#   sampler weights  sampler/programs.py (send, _convert_weights); on devices of its own: sharding/sides.py (Sides), of
#                    other processes: sampler/serve.py (RemoteEngine), hosts/transport.py (Link)
#   rewards          rewards/build.py (build) of what config.reward names, rewards/scoring.py (RewardStream),
#                    rewards/custom.py (load_file) of your own; rewards/__init__.py says what one may take and return;
#                    rewards/math/verifier.py and rewards/code/verifier.py (reward); what a part that failed counts:
#                    rewards/scoring.py (FAILURES, _add_up)
#   the advantage    learner/experience.py (make_experience), algorithms/host_advantages.py (compute_advantages);
#                    grpo chooses algorithms/advantages.py (group_norm); of dead groups collect/select.py (find_dead)
#   the loss         learner/programs.py (Update), learner/update.py (make_gradient), algorithms/losses.py
#                    (token_losses; prepare: their weights). Preset NAME chooses its pieces in
#                    configs/algorithms/NAME.py: grpo chooses algorithms/surrogates.py (clip), algorithms/kl.py (k3) and
#                    algorithms/weights.py (sequence_mean). Corrections, like algorithms/corrections.py (truncated),
#                    multiply the loss; grpo chooses none
#   a new term       of the loss: a function in algorithms/regularizers.py (entropy_bonus), which says what it may read.
#                    What the head has not yet: types.py (HeadOutput, HEAD_BY_TOKEN), learner/logprobs.py (_read_logits)
#   pieces' numbers  defaults and ranges are their arguments, as in algorithms/surrogates.py (clip); bound by
#                    algorithms/algorithm.py (make), checked by algorithms/checks.py (_check_numbers)
#   the critic       its targets: learner/critic.py (critic_targets), of algorithms/group_math.py
#                    (generalized_advantages); its update: learner/update.py (update), learner/critic.py
#                    (update_critic); its values: learner/programs.py (Learner)
#   microbatches     learner/packing.py (pack: how many; cut_minibatch), learner/descent.py (accumulate); who attends to
#                    whom in a packed row: models/attention.py (PackedMask)
#   agreement        of sampler and learner: algorithms/losses.py (metrics: sampler_gap_*), run/observers.py
#                    (fresh_gap_*)
#   the optimizer    learner/descent.py (descend); an adaptive kl_coef: algorithms/algorithm.py (adapt)
#   a skipped update learner/descent.py (descend), run/loop.py (finish), run/checkpoint.py (dump_bad_batch)
#   adapters         models/lora.py (policy_table, split, join), models/linear.py (matmul), run/open.py
#                    (make_whole_policy), tools/export.py (export); in the sampler: models/lora.py (merge, inspect),
#                    run/measure.py (sampler_metrics); in a checkpoint: run/checkpoint.py (save)
#   the reference    collect/policies.py: the first (load_reference), a new one (make_renewal)
#   a diagnosis      its signs and advice: diagnose/groups.py (dead_run), diagnose/policy.py (entropy_collapse), ...;
#                    thresholds: diagnose/options.py (DiagnoseOptions); which speak: diagnose/monitors.py
#                    (new_diagnoses); who prints and records it: run/loop.py (Monitors)
#   figures          evaluate.py (complete; report: evaluation.json), figures.py (compute_figures; summarize: their
#                    intervals), statistics.py; of the log: run/measure.py (assess)
#   a dry run        for absent chips: tools/preflight/plan.py (make, list_jobs), tools/preflight/verdict.py
#                    (compile_and_check); their figures: sharding/chips.py (lookup), tools/preflight/topology.py
#                    (find_gpu, devices)
#   a refusal        errors.py (BadInput; Checks collects several), run/open.py (open_run)
#   a signal         run/signals.py (SignalThread, Signals), run/loop.py (finish); the exit status: run/cli.py (run),
#                    errors.py
#   the workdir      its owner: run/loop.py (owns_workdir), hosts/lock.py (own)
#   processes        what keeps them alike: run/loop.py (barrier, finish), hosts/processes.py (exchange_stop)
#   a checkpoint     types.py (TrainState) lists what is in it, run/loop.py (finish) says when,
#                    run/checkpoint.py (save; restore, which passes damaged ones over), run/open.py (open_state)

from collections.abc import Callable, Mapping, Sequence
import os
from typing import Any

from absl import flags
import jax
import numpy as np

from grpo_jax import data, evaluate, rewards, supervised
from grpo_jax.algorithms import pieces
from grpo_jax.collect import demonstrations
from grpo_jax.collect.options import READ_FROM_DATA
from grpo_jax.collect.policies import load_reference, make_logprobs, make_renewal
from grpo_jax.collect.select import find_dead, make_collector
from grpo_jax.errors import BadInput, Checks
from grpo_jax.example import Example
from grpo_jax.hosts import json_file
from grpo_jax.learner.experience import abstract_history, drop_truncated, make_experience, read_history
from grpo_jax.learner.programs import Learner
from grpo_jax.rewards import gold
from grpo_jax.run import branch, checkpoint, cli
from grpo_jax.run.console import print_outcome
from grpo_jax.run.loop import Shell, barrier, check_rewarded, owns_workdir, serves_sampler
from grpo_jax.run.measure import make_measure, make_speeds
from grpo_jax.run.observers import make_observers
from grpo_jax.run.open import Run, make_run_learner, make_workdir, open_changes, open_state, open_training
from grpo_jax.run.rows import read_rows
from grpo_jax.run.steering import Steering, check_programs
from grpo_jax.sharding.compiled import BackgroundCompiler, Executable
from grpo_jax.text import escape
from grpo_jax.types import Experience, Rollout, TrainState


@owns_workdir  # holds its lock until the end
@serves_sampler  # processes that have only devices of the sampler's do not run it: they sample, and return None
def run(
    config, workdir, algorithm=None, functions=None, profile=None, steering=None, on_step=None, examples=None
) -> TrainState:
    """Trains a policy and returns its last TrainState; called again with the same workdir, it resumes.

    algorithm: an Algorithm in place of the config's, for example from a notebook; functions: rewards by name, which
    config.reward.parts may list; profile: (first, last) step of a trace in workdir/profile; steering: what to do when
    the run was begun with another config, like Steering(amend=True) or Steering(branch=folder); on_step(step, row) is
    called after each step with its row of metrics.jsonl; an exception in it ends the run, saved; examples: {'train':
    rows, 'test': rows} in place of the config's data: dicts, whose columns are read like those of files, or Examples.
    After a signal, the step in progress is finished and saved, and Stopped is raised; a command that has not finished
    a step yet ends at once. Raises BadInput before any device work when a setting cannot work. Found later are a wrong
    checkpoint.best, programs that differ from a resumed run's, and what only steps show, like rewards that never come.
    """
    # Model, tokenizer, rewards, mesh; data to learn from and to be evaluated on. What is wrong with them is refused at
    # once; the makers of the participants below refuse what only they can find.
    run, splits = open_training(config, workdir, algorithm, functions, steering, examples=examples)
    settings, algorithm = run.settings, run.algorithm  # the config's values, typed; `algorithm`, or the config's

    # The participants of a step, made once. What is learned from step to step is in the TrainState, not in them.
    collector = make_collector(run, splits)  # the next prompts, their completions, rewards on their way
    # What is kept in TrainState.aux, as shapes: the collector's place in the data, rewards so far for a baseline, ...
    aux = collector.aux | abstract_history(algorithm, len(collector.examples))
    learner = make_run_learner(run, aux)  # packs rows, scores with policy and reference, updates; adds its own to aux
    logprob_stage = make_logprobs(run, learner, collector.engine)  # by a forward pass, or by the decode steps again
    to_experience = make_experience_stage(run, collector.examples, learner.pack)  # rewards become advantages
    observers = make_observers(run, learner)  # before an update: what is measured of the policy for the log alone
    measure, speeds = make_measure(run), make_speeds(run)  # what completions are like; what a step takes of the machine
    evaluator = evaluate.make_evaluator(run, splits.test, 'test')  # samples held-out prompts, with noise of its own

    # A step's programs, compiled below. All hosts must have the same; an evaluation's change nothing that is learned.
    programs = collector.programs | learner.programs | observers.programs | logprob_stage.programs
    # Only with steering.branch=FOLDER: run.workdir is FOLDER then, and begins with what fits of the state in workdir.
    branch.make_branch(run, workdir, learner)

    with (
        run.rewards,  # the threads and processes that judge
        BackgroundCompiler() as compiler,  # compiles while weights are read
        Shell(run.workdir, settings.checkpoint.keep, settings.checkpoint.best) as shell,  # its checkpoints and files
    ):
        # All hosts have the same newest step, config, data, programs and files of the user's, or the run ends here.
        barrier(shell.newest, settings.recorded, settings.data.origins, programs, run.contents.digests)
        compiler.add(executables(collector, learner, observers, evaluator, logprob_stage))
        if shell.newest is not None or not settings.supervised.updates:
            compiler.start()  # else the cold start starts them one by one, between its updates
        # The newest checkpoint, put on the mesh; where a setting was amended, the parts that it shapes begin anew.
        state = open_state(run, shell.checkpoints, learner.abstract_state, learner.initial)
        # Without one, the model's policy, or what the cold start, a run of its own, makes of it.
        state = state or make_first_state(run, learner, splits.train, collector.examples, functions, steering, compiler)
        compiler.wait('the programs of a step and an evaluation')
        check_programs(run.workdir, settings.recorded, programs)  # refuses changed code of users' pieces, warns of ours
        make_workdir(run, int(state.step))  # config.json and what else tells of the run, now that all is checked
        record_programs(run.workdir, programs, logprob_stage.records)  # their hashes, and the teacher's digest
        # A new reference is read from a checkpoint, which is saved first, so that a resumed run has the same one.
        renew_reference = make_renewal(run, shell.checkpoints, learner.abstract_state)
        loop = shell.open_loop(run, state, settings.steps, title='train', profile=profile, on_step=on_step)

        for step in loop.steps():
            loop.evaluate_if_due(step, settings.evaluation.every, evaluator, state)

            with loop.stage('sample'):  # rewards are computed on the host while other rows still decode
                state, renewal = renew_reference(state)  # at the steps that collection.reference_every names
                draw, state = collector.collect(state, loop.show_progress)

            with loop.stage('reward'):  # logprobs first: the devices compute them while the last rewards are awaited
                packed = learner.pack(draw.rollout)  # rows without padding; None where the config pads them
                logprobs = logprob_stage.compute(state, draw.rollout, packed)
                rewarded = draw.finish_rewards()
                # advantages, in the experience; rows that are dropped are packed out, and rewards are shaped
                state, experience, packed, rewarded, row = to_experience(state, draw, packed, rewarded, logprobs)

            with loop.stage('observe'):  # the state keeps the probe: right completions, whose likelihood is watched
                state, observed = observers.observe(state, experience, packed, draw)

            with loop.stage('update'):  # only here do parameters change
                state, updated = learner.update(state, experience, packed)
                # all are metrics by name; left to right, so that the host measures while the devices update
                row |= measure(step, draw, rewarded, experience) | renewal | observed | jax.device_get(updated)

            loop.dump_if_due(step, draw, rewarded, experience)  # completions and what was learned from them
            loop.log(step, row, speeds(draw, loop.seconds))
            loop.finish(step, state, row, experience)  # saves, the experience too where an update was skipped; may stop

        loop.evaluate(settings.steps, evaluator, state)
    print_outcome(run.workdir)  # the evaluations, and the curve
    return state


def check(config, workdir, algorithm=None, functions=None, steering=None, examples=None) -> tuple[Run, data.Splits]:
    """Checks what `run` would refuse with these arguments, and returns (Run, splits); writes and compiles nothing.

    Raises BadInput for all that would end the run before its first step, and that can be found without programs and
    weights: failures of the gold self-test too, but not a teacher's changed weights, nor changed programs. Services
    that judge are asked.
    """
    with Checks() as checks:
        run, splits = open_training(config, workdir, algorithm, functions, steering, checks, examples, stores=False)
        checks(gold.check, run.rewards, splits.train.examples)
    settings, begun = run.settings, checkpoint.steps(run.workdir) or (steering and steering.branch)
    with Checks() as checks, run.rewards:
        if settings.supervised.updates and not begun:
            fields, tokenizer = ('demonstration',), run.model.tokenizer
            checks(demonstrations.find, splits.train, tokenizer, fields, settings.data, settings.sampling)
        collector = checks(make_collector, run, splits)
        checks(make_run_learner, run, collector.aux)
        checks(evaluate.make_evaluator, run, splits.test, 'test')
    return run, splits


def make_first_state(
    run: Run,
    learner: Learner,
    train: data.Dataset,
    examples: Sequence[Example],
    functions: Mapping[str, Callable] | None,
    steering: Steering | None,
    compiler: BackgroundCompiler,
) -> TrainState:
    """Returns a Run's first TrainState: the model's policy, after the cold start if the config has one.

    train: the train split; examples: the examples that the run learns from, whose gold answers are checked first;
    functions, steering: as given to run; compiler: goes on after the cold start's programs.
    """
    gold.check(run.rewards, examples)
    policy = supervised.cold_start(run, train, functions, steering, compiler.step)
    return load_reference(
        learner.initial(policy), learner.abstract_state, run.settings.reference.path, run.model.config
    )


def make_experience_stage(
    run: Run, examples: Sequence[Example], pack: Callable[[Rollout], Any]
) -> Callable[..., tuple[TrainState, Experience, Any, rewards.Rewards, dict[str, Any]]]:
    """Makes the stage of a step in which rewards become advantages, a function to_experience.

    to_experience(state, draw, packed rows of its rollout, Rewards, logprobs by name) returns (TrainState with these
    rewards in its history, Experience, packed rows of the Experience, Rewards with what was learned from, metrics by
    name). It adds the config's length terms to the rewards, and packs rows again when dead groups or truncated
    completions are dropped. It raises BadInput when no completion has been rewarded for several steps, and
    RewardsMissing as rewards.check_missing does.
    """
    algorithm, gate, reward_functions = run.algorithm, run.settings.collection.gate, run.rewards
    places = {example.id: place for place, example in enumerate(examples)}
    drops_truncated = run.settings.collection.truncated == 'drop'
    # whether completions need a reward to teach
    judged = algorithm.source not in READ_FROM_DATA and not pieces.property_of(algorithm.advantage, 'unrewarded')

    def to_experience(state, draw, packed, rewarded, logprobs):
        rewards.check_missing(reward_functions, int(state.step), rewarded)
        if judged:
            check_rewarded(run.workdir, int(state.step), rewarded)
        grouping = draw.grouping
        shaped = rewards.shape_rewards(reward_functions, rewarded, grouping)
        dead = find_dead(gate, rewarded, grouping)
        prompt_places = np.array([places[example.id] for example in draw.prompts])
        state, baselines = read_history(algorithm, state, prompt_places, shaped)
        inputs = {'dead': dead, **baselines} | rewards.advantage_inputs(
            reward_functions, draw.examples, rewarded, shaped, draw.fetch_tokens, run.model.tokenizer, grouping
        )
        experience, row = make_experience(algorithm, state, draw.rollout, logprobs, shaped, inputs, run.mesh, grouping)
        rewarded = rewarded._replace(learned=grouping.gather(shaped))
        if 'step_rewards' in algorithm.advantage_reads:
            rewarded = rewarded._replace(step_rewards=grouping.gather(inputs['step_rewards']()))
        if drops_truncated:
            experience = drop_truncated(experience)
        if algorithm.drops_dead_groups or drops_truncated:
            packed = pack(experience.rollout)
        row |= {name: np.mean(values) for name, values in baselines.items()}
        return state, experience, packed, rewarded, row

    return to_experience


def executables(collector, learner, observers, evaluator, logprob_stage) -> list[Executable]:
    """Returns all programs of a step and of an evaluation, in the order of compilation."""
    engines = [*collector.programs.values()], [evaluator.engine]
    sampling, evaluating = ([e for engine in some for e in engine.programs.executables] for some in engines)
    programs = learner.programs | observers.programs  # which may share one
    return [*sampling, *programs.values(), *evaluating, *logprob_stage.programs.values()]


def record_programs(workdir: str, programs: Mapping[str, Any], records: Mapping[str, Any]) -> None:
    """Writes programs.json, {program: hash} to compare runs by, and a file for each of records, {file: content}."""
    hashes = {name: program.hash for name, program in programs.items()}
    for name, content in {**records, 'programs.json': hashes}.items():
        json_file.write(os.path.join(workdir, name), content)


def is_finished(config, workdir, algorithm=None) -> bool:
    """Whether workdir holds a finished run of exactly this config; raises BadInput when it has more steps."""
    paths = [os.path.join(workdir, name) for name in ('config.json', 'metrics.jsonl', 'evaluations.jsonl')]
    if not all(os.path.isfile(path) for path in paths):
        return False
    same = not open_changes(config, workdir, algorithm)
    steps, evaluations = len(read_rows(paths[1])), read_rows(paths[2])
    planned = json_file.read_object(paths[0])['steps'] if config.data.epochs else config.steps
    if steps > planned:
        raise BadInput('steps', planned, f'{workdir} has {steps} steps already; use another --workdir')
    return same and steps == planned and bool(evaluations) and evaluations[-1]['step'] == steps


def main():
    """Runs the command."""
    values, steering, profile = flags.FLAGS, cli.read_steering(), cli.parse_steps(flags.FLAGS.profile)
    if values.check:
        check(values.config, values.workdir, steering=steering)
        print(f'check: nothing is wrong; {escape(values.workdir)} was not touched')
        return
    run(values.config, values.workdir, profile=profile, steering=steering)


if __name__ == '__main__':
    cli.define_flags()
    cli.define_steering()
    flags.DEFINE_string('profile', None, 'FIRST:LAST, the steps of a trace for TensorBoard in WORKDIR/profile.')
    flags.DEFINE_bool('check', False, 'Say all that is wrong with config, data, rewards and workdir; train nothing.')
    cli.run(main)
