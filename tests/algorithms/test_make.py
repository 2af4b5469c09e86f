"""What `make` builds from a config section, and what it refuses."""

import fixture
import pytest

from grpo_jax.errors import BadInput

PIECES = ['advantage', 'ratio', 'surrogate', 'kl', 'weights', 'correction', 'selection']


@pytest.mark.parametrize('piece', PIECES)
def test_unknown_piece_is_refused_with_the_choices(piece):
    with pytest.raises(BadInput, match=rf"algorithm.{piece} = 'nonsense': choose one of [a-z]"):
        fixture.algorithm('grpo', **{piece: 'nonsense'})


def test_unknown_regularizer_is_refused_with_the_choices():
    with pytest.raises(
        BadInput, match=r"regularizers = 'nonsense': choose one of behaviour_k2, distill, entropy_bonus"
    ):
        fixture.algorithm('grpo', regularizers=('llds', 'nonsense'))


@pytest.mark.parametrize(
    'piece, name',
    [('advantage', 'np'), ('ratio', 'jnp'), ('ratio', 'MAX_LOG_RATIO'), ('kl', '_difference'), ('kl', 'jnp')],
)
def test_only_public_functions_of_the_module_are_pieces(piece, name):
    with pytest.raises(BadInput, match=f'algorithm.{piece}'):
        fixture.algorithm('grpo', **{piece: name})


def test_k1_is_refused_as_a_loss():
    with pytest.raises(BadInput, match=r"algorithm.kl = 'k1': .*use k2"):
        fixture.algorithm('grpo', kl='k1')


def test_kl_without_a_coefficient_is_refused():
    with pytest.raises(BadInput, match=r'algorithm.kl_coef = 0.0'):
        fixture.algorithm('grpo', kl='k3', kl_coef=0.0)


def test_coefficient_without_a_kl_is_refused():
    with pytest.raises(BadInput, match=r'algorithm.kl_coef = 0.04'):
        fixture.algorithm('grpo', kl='none', kl_coef=0.04)


def test_unknown_treatment_of_dead_groups_is_refused():
    with pytest.raises(BadInput, match=r"collection.dead_groups = 'revive': choose keep or drop or"):
        fixture.algorithm('grpo', dead_groups='revive')


@pytest.mark.parametrize(
    'preset, kl_coef, dead_groups',
    [('grpo', 0.04, 'keep'), ('dr_grpo', 0, 'keep'), ('dapo', 0, 'resample'), ('rloo', 0.05, 'keep')],
)
def test_preset_has_its_reference_and_its_dead_groups(preset, kl_coef, dead_groups):
    method = fixture.algorithm(preset)
    assert (method.kl_coef, method.dead_groups, method.needs_entropy_gradient) == (kl_coef, dead_groups, False)


def test_entropy_bonus_needs_the_entropy_gradient():
    assert fixture.algorithm('grpo', regularizers=('entropy_bonus',)).needs_entropy_gradient
