"""A teacher's program and the policy's logprobs of other tokens, held against logits over the whole vocabulary."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.collect.policies import Teacher
from grpo_jax.learner import Learning, logprobs, packing
from grpo_jax.learner.programs import make_teacher
from grpo_jax.models import transformer
from grpo_jax.sharding import batches, specs
from tests.algorithms import fixture
from tests.learner.test_sharding import SHAPES, make_mesh

TOP_K = 5


@pytest.fixture(scope='module')
def teacher(tiny):
    """(ModelConfig, params) of a model that is wider than the policy, with more tokens."""
    c = dataclasses.replace(tiny[0], width=32, vocab_size=tiny[0].vocab_size + 16, heads=8, kv_heads=8)
    return c, jax.jit(transformer.init, static_argnums=1)(jax.random.key(5), c)


def dense(params, rollout, c):
    """Log-probabilities f32[B, C, V] of every token in each place."""
    queries = rollout.prompt_mask.shape[1]
    mask = jnp.concatenate([rollout.prompt_mask, rollout.completion_mask], 1)
    hidden = transformer.forward(params, rollout.tokens, transformer.positions_of(mask), mask, c)
    return jax.nn.log_softmax(transformer.unembed(params, hidden[:, queries - 1 : -1], c))


def asked(teacher, rollout, vocab_size, shape=(1, 1, 1, 1), **options):
    """The teacher's fields of a rollout on a mesh of that shape."""
    c, params = teacher
    mesh = make_mesh(shape)
    method = fixture.algorithm('opd', regularizers=('distill',), teacher_top_k=TOP_K)
    learning = Learning(**dict(chunk=16, pack_columns=0) | options)
    program = make_teacher(c, method, mesh, SHAPES, learning, vocab_size)
    params = jax.device_put(params, specs.params(transformer.param_table(c), mesh))
    packed = None
    if learning.pack_columns:
        sizes = packing.PackSizes(1, 64, 64, 2, 6, 10, whole_groups=False)  # blocks of a CPU
        packed = packing.pack(np.asarray(rollout.prompt_mask), np.asarray(rollout.completion_mask), sizes, 1)
        packed = jax.device_put(packed, specs.replicated(mesh))
    teacher = Teacher(program, params, jax.tree.map(lambda x: x.sharding, params), '')
    return jax.device_get(teacher.score(batches.put_rows(rollout, mesh), packed))


def test_a_teacher_knows_its_likeliest_tokens_of_the_policys_vocabulary(tiny, teacher, wide_experience):
    rollout, known = wide_experience.rollout, tiny[0].vocab_size
    fields, every = asked(teacher, rollout, known), np.asarray(dense(teacher[1], rollout, teacher[0]))
    mask, sampled = np.asarray(rollout.completion_mask), np.asarray(rollout.tokens[:, 6:])
    own = np.take_along_axis(every, sampled[..., None], -1)[..., 0]
    np.testing.assert_allclose(fields['teacher_logprobs'], np.where(mask, own, 0), atol=1e-5)
    order = np.argsort(-every[..., :known], -1)[..., :TOP_K]
    np.testing.assert_array_equal(fields['teacher_ids'][mask], order[mask])
    np.testing.assert_allclose(fields['teacher_top'][mask], np.take_along_axis(every, order, -1)[mask], atol=1e-5)
    assert not fields['teacher_top'][~mask].any()


@pytest.mark.parametrize('changes', [dict(shape=(1, 2, 2, 2)), dict(shape=(2, 1, 1, 4)), dict(pack_columns=64)])
def test_meshes_and_packed_rows_change_nothing(tiny, teacher, wide_experience, changes):
    rollout, known = wide_experience.rollout, tiny[0].vocab_size
    expected, fields = asked(teacher, rollout, known), asked(teacher, rollout, known, **changes)
    for name, values in expected.items():
        np.testing.assert_allclose(fields[name], values, atol=1e-5, err_msg=name)


def test_the_policys_logprobs_of_the_teachers_tokens(tiny, wide_experience):
    c, params = tiny
    rollout, head = wide_experience.rollout, logprobs.Head(1.0, 16)
    ids = jax.random.randint(jax.random.key(0), (*rollout.completion_mask.shape, TOP_K), 0, c.vocab_size)
    output = logprobs.padded_logprobs(params, rollout, c, head, 'none', ids)
    expected = jnp.take_along_axis(dense(params, rollout, c), ids, -1)
    np.testing.assert_allclose(
        output.top_logprobs, jnp.where(rollout.completion_mask[..., None], expected, 0), atol=1e-5
    )
