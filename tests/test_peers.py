"""What benchmarks.tpu_peers reads off a peer's compiled text, and when it refuses the text."""

import types

import pytest

from benchmarks import tpu_peers
from grpo_jax.sharding import chips

# one chip of four: its quarter of a matrix [32, 128] is gathered, and multiplied with 8 tokens to logits [8, 32]
TEXT = """HloModule peer
ENTRY %main (w: f32[8,128], x: f32[8,128]) -> f32[8,32] {
  %w = f32[8,128]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}
  %x = f32[8,128]{1,0} parameter(1), sharding={replicated}
  %whole = f32[32,128]{1,0} all-gather(%w), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %logits = f32[8,32]{1,0} dot(%x, %whole), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
"""
QUARTER, WHOLE, TOKENS, LOGITS = 8 * 128 * 4, 32 * 128 * 4, 8 * 128 * 4, 8 * 32 * 4  # bytes
TOLD = {'constraints': 1, 'arguments': 100, 'outputs': 20, 'temporaries': 3, 'peak': 110, 'seconds': 7}
CASE = tpu_peers.Case('update', '0.5B', 'v5e:2x2', microbatches=2, rows=16, tokens=4)
PLAN = types.SimpleNamespace(
    mesh=types.SimpleNamespace(size=4),
    chip=chips.Chip(memory=123),
    run=types.SimpleNamespace(model=types.SimpleNamespace(config=types.SimpleNamespace(vocab_size=32, width=128))),
)


def test_a_peers_update_is_its_step_times_its_microbatches():
    row = tpu_peers.peer_row(CASE, True, TOLD, TEXT, PLAN)
    assert row.measured.traffic == 2 * (QUARTER + WHOLE + TOKENS + WHOLE + LOGITS)
    assert row.measured.within == {'all-gather': 2 * 3 * QUARTER}  # to three others
    assert row.measured.multiplied == 2 * (2 * 8 * 32 * 128)
    assert row.measured.in_use == 123 and row.fits  # a step's arguments, results and temporaries, of one microbatch


def test_logits_of_all_tokens_of_a_chips_microbatch_are_seen():
    # 16 rows in 2 microbatches over 4 chips: 2 rows of 4 tokens on each, which are the 8 of the text
    assert tpu_peers.peer_row(CASE, True, TOLD, TEXT, PLAN).logits
    assert not tpu_peers.peer_row(CASE._replace(tokens=8), True, TOLD, TEXT, PLAN).logits
    assert not tpu_peers.has_logits(TEXT.replace('f32[8,32]', 'f32[4,32]'), 32, 128, 8, 4)


def test_what_the_compiler_refuses_does_not_fit():
    told = {'error': 'RESOURCE_EXHAUSTED: Used 2.0K of 1.0K hbm', 'constraints': 1, 'seconds': 7}
    row = tpu_peers.peer_row(CASE, True, told, '', PLAN)
    assert not row.fits
    assert row.measured.refused == 2048
    assert 'refused: 0.00' in tpu_peers.table_row(row)


@pytest.mark.parametrize(
    'told, old, new, message',
    [
        (TOLD | {'constraints': 0}, '', '', 'constrained no sharding'),
        (TOLD, 'devices=[4,1]<=[4]', 'replicated', 'no input'),
        (TOLD, 'all-gather', 'broadcast', 'no collectives'),
    ],
)
def test_a_text_without_the_peers_shardings_is_refused(told, old, new, message):
    with pytest.raises(RuntimeError, match=message):
        tpu_peers.peer_row(CASE, True, told, TEXT.replace(old, new) if old else TEXT, PLAN)


def test_what_is_more_than_5_percent_above_a_peer_is_named():
    theirs = tpu_peers.peer_row(CASE, True, TOLD, TEXT, PLAN)
    ours = theirs._replace(measured=theirs.measured._replace(temporaries=13, seconds=7.3))
    assert tpu_peers.worse(ours, theirs) == ['in use 1.08 x']  # 133 beside 123, and 7.3 s beside 7
