"""One cause, one diagnosis: symptoms wait behind what explains them, and a remedy that was taken is judged."""

import json

import pytest

from grpo_jax import diagnose
from grpo_jax.diagnose import MONITORS
from grpo_jax.run.rows import append_event, recorded_events
from tests.diagnose import streams
from tests.diagnose.streams import RUN, from_step, rows
from tests.diagnose.test_live import judged

# a policy that one update has broken, from step 3 on: every symptom of it
BROKEN = dict(
    reward=from_step(3, 0.0, 0.4), groups_all_right=from_step(3, 0.0, 0.2), groups_all_wrong=from_step(3, 1.0, 0.1),
    dead_groups=from_step(3, 1.0, 0.2), advantage_abs=from_step(3, 0.0, 0.3), entropy=from_step(3, 0.004, 0.4),
    truncated=from_step(3, 1.0, 0.0), length=from_step(3, 64.0, 20.0), repetitive=from_step(3, 1.0, 0.0),
)  # fmt: skip
BROKEN['reward/numeric'] = BROKEN['reward']


def spoken(table, context=RUN):
    """(step, monitor) of all diagnoses."""
    return [(diagnosis.step, diagnosis.monitor) for diagnosis in diagnose.history(table, context)]


def test_a_broken_policy_has_one_diagnosis_whose_symptoms_wait():
    table = rows(30, **BROKEN)
    assert spoken(table) == [(4, 'large_updates')]
    seen = {name for name, monitor in MONITORS.items() if monitor.judge(table[:9], RUN)}
    assert {'dead_run', 'entropy_collapse', 'truncation', 'repetition'} < seen  # each would have had a remedy


def test_a_symptom_whose_cause_is_gone_is_told_for_itself():
    recovered = {'reward': lambda step: 0.0 if 3 <= step < 12 else 0.4, 'truncated': BROKEN['truncated']}
    table = rows(30, **recovered, length=from_step(3, 40.0, 20.0))
    told = spoken(table, RUN._replace(options=RUN.options._replace(repeat_after=5)))
    assert told[:2] == [(4, 'large_updates'), (17, 'truncation')]  # 5 steps after step 11, the last bad one


def test_the_same_symptoms_without_a_fall_are_told_for_themselves():
    """Nothing was broken: the completions never ended, and no answer was ever right."""
    never = rows(6, **streams.DEAD, groups_all_right=0.0, truncated=1.0)
    assert {'dead_run', 'truncation'} <= {monitor for _, monitor in spoken(never)}


def test_causes_are_monitors_and_go_round_in_no_circle():
    def causes(name):
        found = set(MONITORS[name].because)
        return found.union(*map(causes, found))

    assert all(cause in MONITORS for monitor in MONITORS.values() for cause in monitor.because)
    assert not [name for name in MONITORS if name in causes(name)]


def test_what_has_no_cause_among_the_others_comes_first():
    table = rows(30, **BROKEN, sampler_gap_mean=from_step(4, 0.5, 1e-6), retired=from_step(4, 0.95, 0.0))
    last = [diagnosis.monitor for diagnosis in diagnose.new_diagnoses(table[:7], RUN)]
    assert [bool(MONITORS[name].because) for name in last] == sorted(bool(MONITORS[name].because) for name in last)


def amended(workdir, table, key, new, monitor='truncation', remedy='--amend --config.rollout.max_tokens=24'):
    """Files of a run of `table` whose diagnosis was answered by an amendment after its last step."""
    with open(workdir / 'metrics.jsonl', 'w', encoding='utf8') as file:
        file.writelines(json.dumps(row) + '\n' for row in table)
    append_event(workdir, 4, 'diagnosis', monitor=monitor, remedy=remedy)
    append_event(workdir, len(table), 'amended', key=key, old=12, new=new)


@pytest.mark.parametrize('helps', [True, False])
def test_after_an_amendment_the_run_says_whether_it_helped(helps, tmp_path, capsys):
    """patience = 3 steps later, once, in the console and in events.jsonl."""
    before = rows(6, truncated=from_step(3, 0.4, 0.0))
    after = rows(14, truncated=lambda step: 0.4 if 3 <= step < 6 or not helps else 0.0)[6:]
    amended(tmp_path, before, 'rollout.max_tokens', 24)
    judged(tmp_path, 'say', after)
    (event,) = [row for row in recorded_events(tmp_path) if row['event'] == 'remedy']
    assert (event['step'], event['monitor'], event['helped']) == (8, 'truncation', helps)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith('remedy at step 8: ')]
    assert ('truncation is gone: that helped' in line) == helps
    assert ('truncation is still there (truncated 0.40 to 0.40 in steps 7 to 8' in line) != helps


def test_an_amendment_of_something_else_answers_no_diagnosis(tmp_path):
    amended(tmp_path, rows(6, truncated=0.4), 'optimizer.learning_rate', 1e-5)
    judged(tmp_path, 'say', rows(14)[6:])
    assert not [row for row in recorded_events(tmp_path) if row['event'] == 'remedy']


@pytest.mark.parametrize(
    ('gate', 'words'), [('reward', 'the same reward'), ('outcome', 'right, or all are wrong'), ('none', 'no advantage')]
)
def test_dead_run_says_what_is_so_and_names_the_gate(gate, words):
    table = rows(3, **streams.DEAD | {'reward': 0.23}, groups_all_right=0.0, groups_all_wrong=1.0)
    context = RUN._replace(gate=gate, terms=('format',))
    diagnosis = MONITORS['dead_run'].judge(table, context)
    assert f'collection.gate={gate}' in diagnosis.seen and ('the same reward' in diagnosis.seen) == (gate == 'reward')
    assert words in diagnosis.seen or gate == 'none'
    gated = diagnosis.remedy == '--branch=DIR --config.collection.gate=reward'
    assert gated == (gate == 'outcome')  # rewards differ, and only the gate keeps them from teaching
    if gated:
        assert 'reward 0.23, reward_std 0.40' in diagnosis.evidence


def test_a_part_that_leads_where_all_are_wrong_is_named():
    context = RUN._replace(parts=(('numeric', 1.0), ('format', 0.2)), terms=('format',))
    flat = {'reward': 0.2, 'reward/numeric': 0.05, 'advantage_all_wrong': 0.7}
    diagnosis = MONITORS['unverified_advantage'].judge(rows(10, **flat), context)
    assert 'format' in diagnosis.seen and diagnosis.remedy == '--branch=DIR --config.collection.gate=outcome'
