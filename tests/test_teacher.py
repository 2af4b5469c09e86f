"""On-policy distillation: a small student learns from a larger teacher, and who cannot teach is refused."""

import json
import os
import re
import shutil

import jax
import numpy as np
import pytest

from grpo_jax import train
from grpo_jax.errors import BadInput
from grpo_jax.run.open import open_run
from grpo_jax.tools import export
from tests import small_model, tiny_run


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    """(folder of a teacher, folder of a smaller student without weights)."""
    folder = tmp_path_factory.mktemp('models')
    teacher = small_model.write_drawn(folder / 'teacher', seed=5, num_hidden_layers=3)
    return teacher, small_model.write(folder / 'student')


def config(folders, **changes):
    """A tiny run in which the student, drawn, learns from the teacher."""
    teacher, student = folders
    own = dict(preset='opd', teacher__path=teacher, model__path=student, evaluation__samples=1)
    return tiny_run.config(**own | changes)


def differences(rows):
    return [row['kl_teacher'] for row in rows]


def test_a_student_comes_nearer_to_its_teacher_and_resumes_exactly(folders, tmp_path):
    changes = dict(optimizer__learning_rate=1e-2, rollout__group_size=8)
    state, straight = train.run(config(folders, steps=8, **changes), str(tmp_path / 'straight')), tmp_path / 'straight'
    rows = tiny_run.rows(straight)
    assert np.mean(differences(rows)[-2:]) < 0.85 * np.mean(differences(rows)[:2])

    train.run(config(folders, steps=4, **changes), str(tmp_path / 'cut'))
    moved = shutil.copytree(folders[0], str(tmp_path / 'moved'))
    changes |= dict(teacher__path=moved, teacher__park=True)  # where its weights lie and wait changes nothing
    resumed = train.run(config(folders, steps=8, **changes), str(tmp_path / 'cut'))
    jax.tree.map(np.testing.assert_array_equal, state.params, resumed.params)
    assert differences(tiny_run.rows(tmp_path / 'cut')) == differences(rows)

    other = small_model.write_drawn(tmp_path / 'other', seed=6, num_hidden_layers=3)
    shutil.copy(os.path.join(other, 'model.safetensors'), moved)
    with pytest.raises(BadInput, match=r'teacher\.path.*other weights'):
        train.run(config(folders, steps=9, **changes), str(tmp_path / 'cut'))


@pytest.mark.parametrize(
    'changes',
    [
        dict(algorithm__regularizers=('distill',), algorithm__teacher_coef=0.0, algorithm__teacher_top_k=8),
        dict(preset='opd_reward', learner__minibatches=2, learner__pack_columns=64),
    ],
    ids=['top 8 as a loss', 'with a reward, packed'],
)
def test_other_forms_run(request, folders, tmp_path, changes):
    if 'learner__pack_columns' in changes:
        request.getfixturevalue('long')
    train.run(config(folders, steps=6, optimizer__learning_rate=1e-2, rollout__group_size=8, **changes), str(tmp_path))
    found = differences(tiny_run.rows(tmp_path))
    assert np.mean(found[-2:]) < np.mean(found[:2])


def refused(run_config, tmp_path, words):
    with pytest.raises(BadInput, match=words):
        open_run(run_config, str(tmp_path / 'run'))
    assert not (tmp_path / 'run').exists()


def edit(folder, name, **values):
    """Changes fields of a JSON file of a folder."""
    path = os.path.join(folder, name)
    with open(path, encoding='utf8') as file:
        content = json.load(file)
    with open(path, 'w', encoding='utf8') as file:
        json.dump(content | values, file)


def test_who_cannot_teach_is_refused(folders, tmp_path):
    refused(config(folders, teacher__path=''), tmp_path, r'^teacher\.path is empty.*name it$')
    refused(config(folders, teacher__path=str(tmp_path / 'none')), tmp_path, r'teacher\.path.*none')
    refused(
        config(folders, preset='dr_grpo'), tmp_path, 'nothing reads what a teacher says; set algorithm.teacher_coef'
    )
    refused(config(folders, preset='dr_grpo', teacher__path='', teacher__park=True), tmp_path, r'teacher\.park = True')
    refused(config(folders, algorithm__teacher_top_k=5), tmp_path, 'teacher_top_k = 5: nothing reads it')
    wide = dict(algorithm__regularizers=('distill',), algorithm__teacher_top_k=1000)
    refused(config(folders, **wide), tmp_path, "is above the policy's 99 tokens")
    refused(config(folders, teacher__dtype='float8'), tmp_path, r"teacher\.dtype = 'float8'")


def test_a_teacher_of_other_tokens_or_of_shorter_texts_is_refused(folders, tmp_path):
    other = str(tmp_path / 'other')
    shutil.copytree(folders[0], other)
    with open(os.path.join(other, 'tokenizer.json'), encoding='utf8') as file:
        text = file.read()
    first, second = re.findall(r'"(\d)": (\d+)', text)[:2]
    swapped = text.replace(f'"{first[0]}": {first[1]}', f'"{first[0]}": {second[1]}').replace(
        f'"{second[0]}": {second[1]}', f'"{second[0]}": {first[1]}'
    )
    with open(os.path.join(other, 'tokenizer.json'), 'w', encoding='utf8') as file:
        file.write(swapped)
    refused(config(folders, teacher__path=other), tmp_path, f"'{first[0]}' is the policy's {first[1]}, and the teacher")
    short = str(tmp_path / 'short')
    shutil.copytree(folders[0], short)
    edit(short, 'config.json', max_position_embeddings=16)
    refused(config(folders, teacher__path=short), tmp_path, 'reads 16 positions')
    damaged = str(tmp_path / 'damaged')
    shutil.copytree(folders[0], damaged)
    os.truncate(os.path.join(damaged, 'model.safetensors'), 1000)
    refused(config(folders, teacher__path=damaged), tmp_path, 'damaged')


def test_a_teacher_raises_a_student_above_what_rewards_alone_do(long, tmp_path):
    # in 100 steps from one cold start: 0.09 of the sums right by rewards alone, 0.60 by opd, 0.85 over all 99 tokens
    sums = dict(data__options={'digits': 1, 'count': 200, 'blurts': 0.0, 'wrong': 0.0}, evaluation__samples=1)
    taught = tiny_run.config(steps=1, supervised__updates=200, supervised__batch=32, **sums)
    train.run(taught, str(tmp_path / 'taught'))
    export.export(str(tmp_path / 'taught'), str(tmp_path / 'teacher'), 'float32')
    student = small_model.write(tmp_path / 'student')
    edit(student, 'config.json', hidden_size=64, num_hidden_layers=2, intermediate_size=128)
    own = dict(
        model__path=student, supervised__updates=60, supervised__batch=32, steps=100, data__prompts_per_step=16,
        optimizer__learning_rate=2e-3, rollout__group_size=8, **sums,
    )  # fmt: skip
    whole = dict(algorithm__regularizers=('distill',), algorithm__teacher_coef=0.0, algorithm__teacher_top_k=99)
    right = {}
    for name, preset, changes in [('dr_grpo', 'dr_grpo', {}), ('opd', 'opd', {}), ('whole', 'opd', whole)]:
        teacher = {} if preset == 'dr_grpo' else {'teacher__path': str(tmp_path / 'teacher')}
        train.run(tiny_run.config(preset=preset, **own, **teacher, **changes), str(tmp_path / name))
        right[name] = np.mean([row['reward'] for row in tiny_run.rows(tmp_path / name)[-20:]])
    assert right['dr_grpo'] + 0.2 < right['opd'] < right['whole']
