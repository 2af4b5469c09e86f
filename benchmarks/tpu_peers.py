"""Updates and sampling of this project and of its peers beside each other, compiled by one libtpu for TPUs not here.

python -m benchmarks.tpu_peers --tunix=PYTHON --maxtext=PYTHON [--model=0.5B] [--topology=v5e:2x2] [--only=update]

The one PYTHON has google-tunix 0.1.7 and runs tunix_child.py, the other maxtext 0.2.5 and runs maxtext_child.py; both
have jax[tpu], and either may be left out. The reader of preflight reads all texts. An update is 64 rows of 256
+ 1,024 tokens over fsdp, full vocabulary, float32 master weights and AdamW, bfloat16 computation; MaxText's is that of
training on text, with a loss over all 1,280. Its figures are those of all its microbatches, a decode program's those of
a step, per chip. The fewest microbatches that fit are found by compiling one, two, four and so on. --keep=FOLDER keeps
the peers' texts, and what lies there is not compiled again. Exit status 1 when a peer's text lacks its shardings.
"""

import argparse
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

os.environ |= {'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', 'JAX_PLATFORMS': 'cpu'}

from grpo_jax.configs import gsm8k
from grpo_jax.tools.preflight import compiler, hlo, hlo_collectives
from grpo_jax.tools.preflight import plan as plans

ROWS, GROUP, QUERIES, TOKENS, MEAN = 64, 8, 256, 1024, 300
HERE = os.path.dirname(os.path.abspath(__file__))
# microbatches of updates by (model, topology): usual ones, and those without recomputing, a row a chip (0: do not fit)
MICROBATCHES = {('0.5B', 'v5e:2x2'): (8, 16), ('7B', 'v5e:4x4'): (4, 0), ('7B', 'v5p:2x2x2'): (8, 0)}
FEWEST, FEW = 0, (1, 2, 4, 8, 16)  # microbatches: as few as fit, and those that are tried


class Case(NamedTuple):
    """A program of the peer, and its settings."""

    program: str  # update, decode
    model: str
    topology: str
    microbatches: int
    flash: bool = False  # splash attention
    peer: str = 'tunix'  # or maxtext
    remat: str = 'NONE'
    tiling: int = 1  # parts of the tokens whose logits exist at once, which MaxText can cut
    weights: str = 'float32'
    replicated: bool = False  # weights are whole on every chip, Tunix's sharding for sampling
    group: int = GROUP
    rows: int = ROWS
    queries: int = QUERIES
    tokens: int = TOKENS


class Row(NamedTuple):
    """A line of the table."""

    head: tuple[str, ...]  # program, settings, lengths, rows of a microbatch on all chips
    recommended: bool
    fits: bool
    measured: compiler.Measured  # seconds are those of the CPU
    logits: bool  # see has_logits
    untold: bool  # whether it has kernels that do not tell their operations, which are not counted then


def tunix_cases(model, topology):
    """[(Case, whether its settings are the ones to recommend)]: by default nothing is recomputed or in kernels."""
    usual, least = MICROBATCHES[model, topology]
    cases = [(Case('update', model, topology, cut, True, remat='DECODER'), True) for cut in (usual, FEWEST)]
    default, whole = Case('decode', model, topology, 1), {'weights': 'bfloat16', 'replicated': True}
    more = [Case('update', model, topology, usual, remat='DECODER'), Case('update', model, topology, least), default]
    return cases + ([(case, False) for case in more] + [(default._replace(**whole), True)]) * bool(least)


def maxtext_cases(model, topology):
    """[(Case, whether its settings are the ones to recommend)]; its default recomputes, and logits are whole."""
    usual = Case('update', model, topology, MICROBATCHES[model, topology][0], True, 'maxtext', 'FULL')
    in_parts = usual._replace(microbatches=FEWEST, tiling=8)
    return [(usual, True), (in_parts, True), (usual._replace(remat='MINIMAL'), False)]


CASES = {'tunix': tunix_cases, 'maxtext': maxtext_cases}


def first_that_fits(rows):
    """The first of the Rows that fits, or the last."""
    row = None
    for row in rows:
        if row.fits:
            break
    return row


def peer_rows(peer, python, model, topology, only, keep):
    """Rows of a peer's cases, compiled by its Python."""
    plan, here = planned(model, topology), versions()

    def row(case, recommended):
        told, text = compile_peer(python, case, keep)
        if not here.items() <= told.items():
            print(f'versions differ: {told}', file=sys.stderr)
        return peer_row(case, recommended, told, text, plan)

    for case, recommended in CASES[peer](model, topology):
        if only in case.program:
            cuts = (case.microbatches,) if case.microbatches else FEW
            yield first_that_fits(row(case._replace(microbatches=cut), recommended) for cut in cuts)


def compile_peer(python, case, keep):
    """(what the peer's child tells of a case, compiled text); the text is '' when the compiler refuses it."""
    folder = pathlib.Path(keep, '-'.join(map(str, case)).replace(':', '_'))
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / 'child.json').exists():
        child = os.path.join(HERE, f'{case.peer}_child.py')
        command = [python, '-P', child, json.dumps(case._asdict()), folder]  # -P: no file beside it hides a module
        environment = os.environ | {'PYTHONPATH': os.path.dirname(HERE)}
        with open(folder / 'log', 'w', encoding='utf8') as log:
            if subprocess.call(command, stdout=log, stderr=log, env=environment):
                raise RuntimeError(f'{child} failed for {case}; see {log.name}')
    told = json.loads((folder / 'child.json').read_text('utf8'))
    return told, '' if 'error' in told else (folder / 'compiled.txt').read_text('utf8')


def peer_row(case, recommended, told, text, plan):
    """Row of a peer's case; RuntimeError as in `guard`."""
    lengths, kernels = 'any', 'splash' if case.flash else 'xla'
    tiles = f', logits in {case.tiling} parts' if case.tiling > 1 else ''
    settings = f'padded, {kernels}, remat {case.remat.lower()}{tiles}, {case.microbatches} microbatches'
    if case.program == 'decode':
        lengths, settings = 'all alive', f'weights {case.weights}, {"whole" if case.replicated else "sharded"}'
    if text:
        guard(text, told, not case.replicated)
    fields = {name: told.get(name, 0) for name in ('arguments', 'outputs', 'temporaries', 'peak', 'seconds')}
    fields['refused'] = 0 if text else compiler.needed_bytes(told['error'])
    rows = case.rows // case.microbatches
    head, tokens = (f'{case.peer} {case.program}', settings, lengths, str(rows)), rows * case.tokens // plan.mesh.size
    times = case.microbatches if case.peer == 'tunix' else 1  # MaxText's program loops over them
    return make_row(head, recommended, fields, text, plan, tokens, times=times)


def guard(text, told, gathered):
    """RuntimeError where a peer's shardings are not in its text: what was compiled is then not what it would run.

    gathered: its weights are sharded, so that there must be collectives.
    """
    program = hlo.parse(text)
    inputs = [i for i in program.computations[program.entry].values() if i.op == 'parameter']
    if not told['constraints']:
        raise RuntimeError('the peer has constrained no sharding')
    if not any('sharding={devices=[' in i.attributes for i in inputs):
        raise RuntimeError('no input of the peer is sharded')
    if gathered and not any(f' {op}' in text for op in hlo_collectives.SENT):
        raise RuntimeError('the weights of the peer are sharded, and it has no collectives')


def planned(model, topology, mean=0, **learner):
    """plans.PlannedRun of the same update here, with the settings of configs/gsm8k.py and these of the learner."""
    config = gsm8k.get_config()
    config.model.path, config.mesh.fsdp = f'Qwen/Qwen2.5-{model}', len(plans.topology.devices(topology))
    config.data.prompts_per_step = prompts = max(ROWS // GROUP, config.mesh.fsdp)  # a chip has one at least
    config.rollout.group_size, config.data.max_prompt_tokens = ROWS // prompts, QUERIES
    config.rollout.max_tokens = config.algorithm.fixed_length = TOKENS
    config.learner.update(learner)
    return plans.make(config, topology, mean_tokens=mean)


def our_rows(model, topology, only):
    """Rows of the project's updates, and of its decoding where the weights are small."""
    usual, least = MICROBATCHES[model, topology]
    compiled = {}

    def padded(cut, remat='full'):
        plan = planned(model, topology, microbatches=cut, pack_columns=0, remat=remat)
        settings = f'padded, splash, remat {remat}, {cut} microbatches'
        return our_row('update', settings, 'any', ROWS // cut, plan, remat == 'full', compiled)

    if only in 'update':
        yield padded(usual)
        yield first_that_fits(padded(cut) for cut in FEW)
        if least:
            yield padded(usual, 'dots')
            yield padded(least, 'none')
        for columns, lengths, mean in ((-1, 'equal', 0), (-1, f'mean {MEAN}', MEAN), (4352, 'equal', 0)):
            plan = planned(model, topology, mean, pack_columns=columns)
            settings = f'packed in {plan.learner.sizes.columns}, splash, remat full'
            yield our_row('update', settings, lengths, 'packed', plan, True, compiled)
    if least and only in 'decode':
        plan = planned(model, topology, microbatches=usual)
        yield our_row('decode', 'weights bfloat16, whole', 'all alive', ROWS, plan, True, compiled)


def our_row(program, settings, lengths, rows, plan, recommended, compiled):
    """Row of the project; compiled: what was compiled before, by key, to which this adds."""
    name = 'learner.update' if program == 'update' else 'rollout: decode'
    job = next(job for job in plans.list_jobs(plan)[0] if job.name.startswith(name) and job.runs)
    lowered, started = job.trace().lower(), time.process_time()
    key = compiler.cache_key(lowered.as_text(), plan.topology, 1)
    if key not in compiled:
        fields, text = compiler.compile_and_measure(lowered)
        compiled[key] = fields | {'seconds': time.process_time() - started}, text
    own_rows, columns = plan.microbatch()
    tokens = own_rows * (columns if plan.learner.sizes else TOKENS)
    head = f'here {program}', settings, lengths, str(rows)
    return make_row(head, recommended, *compiled[key], plan, tokens, job.text_trip_counts[program == 'decode' :])


def make_row(head, recommended, fields, text, plan, tokens, trip_counts=(), times=1):
    """Row of a text; trip_counts are those of loops whose text has none, but for a decode program's over its steps.

    fields: as of compiler.compile_and_measure, of CPU-seconds. tokens: see has_logits. times: runs in an update.
    """
    if head[0].endswith('decode'):  # one pass of the loop is what two take more than one
        read, twice = (compiler.read_movement(text, plan.mesh.size, 1, (n, *trip_counts)) for n in (1, 2))
        read['within'] = {op: size - read['within'].get(op, 0) for op, size in twice['within'].items()}
        read |= {name: twice[name] - read[name] for name in ('traffic', 'multiplied')}
        logits = False
    else:
        read, c = compiler.read_movement(text, plan.mesh.size, 1, trip_counts), plan.run.model.config
        read['within'] = {op: size * times for op, size in read['within'].items()}
        read |= {name: read[name] * times for name in ('traffic', 'multiplied')}
        logits = has_logits(text, c.vocab_size, c.width, tokens, plan.mesh.size)
    measured = compiler.Measured(**fields, **read, flops=0, cached=False)
    untold = text.count('"tpu_custom_call"') > text.count('"flops":"')  # an estimate a kernel
    return Row(head, recommended, measured.in_use <= plan.chip.memory > measured.refused, measured, logits, untold)


def has_logits(text, vocabulary, width, tokens, devices):
    """Whether an array has a chip's `tokens` of a microbatch by the vocabulary, or more of them by a part of it."""
    cuts = {vocabulary // n for n in range(1, devices + 1) if vocabulary % n == 0}
    scopes = hlo.parse(text).computations.values() if text else ()
    every = {array.dims for scope in scopes for i in scope.values() for array in i.arrays}
    return any(cuts & set(dims) and width not in dims and math.prod(dims) >= tokens * vocabulary for dims in every)


def table_row(row):
    """A line of the table, in Markdown."""
    m = row.measured
    if m.refused:
        return f'| {" | ".join(row.head)} | refused: {m.refused / 2**30:.2f} |' + ' |' * 5 + f' {m.seconds:.0f} |'
    kinds = ', '.join(f'{op} {size / 1e9:.3g}' for op, size in m.within.items() if size >= 5e6)
    return (
        f'| {" | ".join(row.head)} | {m.in_use / 2**30:.2f}{"" if row.fits else ": too much"} | {m.peak / 2**30:.2f} '
        f'| {m.multiplied / 1e12:.3g}{" + kernels" if row.untold else ""} '
        f'| {m.traffic / 1e9:.4g} | {sum(m.within.values()) / 1e9:.3g}'
        f'{f": {kinds}" if kinds else ""} | {"yes" if row.logits else "no"} | {m.seconds:.0f} |'
    )


def figures(row):
    """{name: figure} of those that are better when they are lower; 0: not known."""
    m, products = row.measured, 0 if row.untold else row.measured.multiplied
    sizes = {'in use': m.in_use, 'products': products, 'HBM': m.traffic, 'sent': m.collective_bytes[0]}
    return sizes | {'CPU-seconds': m.seconds}


def worse(ours, theirs):
    """The figures in which a row of the project is more than 5 % above a peer's, as ratios."""
    mine, other = figures(ours), figures(theirs)
    return [f'{name} {mine[name] / other[name]:.2f} x' for name in mine if mine[name] > 1.05 * other[name] > 0]


def compare(rows):
    """Prints in what the project's rows are worse than each of the peer's for the same program."""
    for ours in rows:
        own, _, program = ours.head[0].partition(' ')
        for theirs in (
            row for row in rows if own == 'here' != row.head[0].split()[0] and row.head[0].endswith(program)
        ):
            less, more = figures(theirs)['HBM'] / figures(ours)['HBM'], ', '.join(worse(ours, theirs)) or 'nothing'
            print(f'{" ".join(ours.head)} beside {" ".join(theirs.head)}: HBM {less:.2f} x less; 5 % above: {more}')


def versions():
    """{name: version} of what compiles."""
    return {name: importlib.metadata.version(name) for name in ('jax', 'libtpu')}


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    defaults = {'model': '0.5B', 'topology': 'v5e:2x2', 'only': '', 'keep': '', **dict.fromkeys(CASES, '')}
    for name, default in defaults.items():
        parser.add_argument(f'--{name}', default=default)
    arguments = parser.parse_args()
    case, keep = (arguments.model, arguments.topology, arguments.only), arguments.keep or tempfile.mkdtemp()
    print(
        f'Qwen2.5-{case[0]} on {case[1]}, {versions()}; rows of a microbatch on all chips; GiB in use and at the peak\n'
    )
    print('| program | settings | lengths | rows | in use | peak | TFLOP | HBM GB | sent GB | [B,T,V] | CPU-s |')
    print('|' + '---|' * 11, flush=True)
    pythons = {peer: python for peer in CASES if (python := getattr(arguments, peer))}
    peers = (peer_rows(peer, python, *case, keep) for peer, python in pythons.items())
    rows = []
    for row in itertools.chain(our_rows(*case), *peers):
        rows.append(row)
        print(table_row(row), flush=True)
    compare([row for row in rows if row.fits and row.recommended])


if __name__ == '__main__':
    main()
