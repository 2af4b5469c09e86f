"""What is read off a compiled text: loops, bytes of main memory, collectives, products."""

import pytest

from grpo_jax.tools.preflight import hlo, hlo_collectives, products
from grpo_jax.tools.preflight.traffic import Traffic

TEXT = """HloModule test
%body (p: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %p = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %y = f32[8,128]{1,0:T(8,128)} all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %t = (s32[], f32[8,128]{1,0:T(8,128)}) tuple(%i, %y)
}
%condition (p: (s32[], f32[8,128])) -> pred[] {
  %p.1 = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %n = s32[] constant(3)
  ROOT %less = pred[] compare(%i.1, %n), direction=LT
}
%all-reduce-scatter.1 (q: f32[8,128]) -> f32[2,128] {
  %q = f32[8,128]{1,0:T(8,128)} parameter(0)
  %r = f32[8,128]{1,0:T(8,128)} all-reduce(%q), channel_id=2, replica_groups=[1,4]<=[4], to_apply=%add
  ROOT %s = f32[2,128]{1,0:T(8,128)} slice(%r), slice={[0:2], [0:128]}
}
%started (q: f32[2,128]) -> f32[8,128] {
  %q.1 = f32[2,128]{1,0:T(8,128)} parameter(0)
  ROOT %g = f32[8,128]{1,0:T(8,128)} all-gather(%q.1), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}
}
ENTRY %main (a: (s32[], f32[8,128])) -> f32[8,128] {
  %a = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)
  %loop = (s32[], f32[8,128]{1,0:T(8,128)}) while(%a), condition=%condition, body=%body
  %z = f32[8,128]{1,0:T(8,128)} get-tuple-element(%loop), index=1
  %k = f32[2,128]{1,0:T(8,128)} fusion(%z), kind=kCustom, calls=%all-reduce-scatter.1
  %f = f32[8,128]{1,0:T(8,128)} fusion(%k), kind=kCustom, calls=%started
  %h = f32[8,128]{1,0:T(8,128)} fusion(%k), kind=kCustom, calls=%started
  ROOT %copied = f32[8,128]{1,0:T(8,128)} copy(%f)
}
"""
ARRAY = 8 * 128 * 4


def test_collectives_of_a_compiled_text():
    found = {x.op: x for x in hlo_collectives.list_collectives(TEXT, 4)}
    assert found.keys() == {'all-reduce', 'reduce-scatter', 'all-gather'}
    assert found['all-reduce'][1:] == ([[0, 1], [2, 3]], 3, 3 * ARRAY)  # 2 (n - 1) / n, in a loop of 3 turns
    assert found['reduce-scatter'][1:] == ([[0, 1, 2, 3]], 1, 0.75 * ARRAY)
    assert found['all-gather'][1:] == ([[0, 1, 2, 3]], 1, 0.75 * ARRAY)  # once, though two fusions share it


def test_collectives_of_one_channel_that_shard_map_wrote_are_told_apart():
    """By the chain or the name that the parts of a collective share; outside of fusions each is whole."""
    started = TEXT[TEXT.index('%started') : TEXT.index('ENTRY')]
    for share, times in (('chain_id="0"', 1), ('chain_id="1"', 2), ('async_collective_name="all-gather-start.1"', 2)):
        text = TEXT.replace('channel_id=3', 'channel_id=1, frontend_attributes={chain_id="0"}')
        other = started.replace('%started', '%other').replace(
            'channel_id=3', f'channel_id=1, frontend_attributes={{{share}}}'
        )
        text = text.replace('ENTRY', other + 'ENTRY').replace(
            '%h = f32[8,128]{1,0:T(8,128)} fusion(%k), kind=kCustom, calls=%started',
            '%h = f32[8,128]{1,0:T(8,128)} fusion(%k), kind=kCustom, calls=%other',
        )
        found = {x.op: x for x in hlo_collectives.list_collectives(text, 4)}
        assert found['all-gather'][1:] == ([[0, 1, 2, 3]], times, times * 0.75 * ARRAY)
        assert found['all-reduce'].times == 3
    twice = TEXT.replace(
        'ROOT %copied',
        '%again = f32[8,128]{1,0:T(8,128)} all-reduce(%f), channel_id=1, replica_groups={{0,1},{2,3}}\n  ROOT %copied',
    )
    assert {x.op: x.times for x in hlo_collectives.list_collectives(twice, 4)}['all-reduce'] == 4


@pytest.mark.parametrize(
    'text, groups',
    [
        ('{{0,1},{2,3}}', [[0, 1], [2, 3]]),
        ('[2,2]<=[4]', [[0, 1], [2, 3]]),
        ('[2,2]<=[2,2]T(1,0)', [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2] {'a','b'}", [[0, 1, 2, 3]]),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
        ('{}', [[0, 1, 2, 3]]),
    ],
)
def test_groups_of_devices_that_talk(text, groups):
    assert hlo_collectives.replica_groups(f', channel_id=1, replica_groups={text}, to_apply=%add', 4) == groups


@pytest.mark.parametrize(
    'start, step, limit, times',
    [
        (0, 1, 3, 3),
        (1, 1, 3, 2),
        (0, 2, 8, 4),  # a windowed product, unrolled
        (0, 2, 7, 4),
        (5, 1, 3, 0),
    ],
)
def test_a_loop_runs_as_often_as_its_number_takes_steps(start, step, limit, times):
    text = TEXT.replace('ROOT %t = (s32[], f32[8,128]{1,0:T(8,128)}) tuple(%i, %y)', STEP.format(step))
    text = text.replace('%a = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)', ENTERED.format(start))
    program = hlo.parse(text.replace('constant(3)', f'constant({limit})'))
    scope = program.computations[program.entry]
    assert hlo.trip_count(scope['loop'], scope, program.computations) == times


STEP = """%two = s32[] constant({})
  %next = s32[] add(%two, %i)
  ROOT %t = (s32[], f32[8,128]{{1,0:T(8,128)}}) tuple(%next, %y)"""
ENTERED = """%whole = f32[8,128]{{1,0:T(8,128)}} parameter(0)
  %from = s32[] constant({})
  %a = (s32[], f32[8,128]{{1,0:T(8,128)}}) tuple(%from, %whole)"""


CHAIN = """HloModule test
%begin (s: f32[2,128]) -> (f32[2,128], f32[8,128], u32[]) {
  %s = PART parameter(0)
  %g = WHOLE all-gather(%s), GROUPS
  ROOT %c = (PART, WHOLE, FLAG) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}
%beside (s: f32[2,128], g: f32[8,128], u: u32[], x: f32[8,128]) -> (f32[8,128], f32[2,128], f32[8,128], u32[]) {
  %s.1 = PART parameter(0)
  %g.1 = WHOLE parameter(1)
  %u.1 = FLAG parameter(2)
  %x.1 = WHOLE parameter(3)
  %h.1 = WHOLE all-gather(%s.1), GROUPS
  %y.1 = WHOLE negate(%x.1)
  ROOT %t.1 = (WHOLE, PART, WHOLE, FLAG) tuple(%y.1, %s.1, %h.1, %u.1)
}
%end (s: f32[2,128], g: f32[8,128], u: u32[]) -> f32[8,128] {
  %s.2 = PART parameter(0)
  %g.2 = WHOLE parameter(1)
  %u.2 = FLAG parameter(2)
  %h.2 = WHOLE all-gather(%s.2), GROUPS
  ROOT %d = WHOLE custom-call(%s.2, %g.2, %h.2, %u.2), custom_call_target="AsyncCollectiveDone"
}
ENTRY %main (a: f32[2,128], x: f32[8,128]) -> f32[8,128] {
  %a = PART parameter(0)
  %x = WHOLE parameter(1)
  %p = (PART, WHOLE, FLAG) fusion(%a), ALIASES={{0}: (0, {})}, calls=%begin
  %p0 = PART get-tuple-element(%p), index=0
  %p1 = WHOLE get-tuple-element(%p), index=1
  %p2 = FLAG get-tuple-element(%p), index=2
  %q = (WHOLE, PART, WHOLE, FLAG) fusion(%p0, %p1, %p2, %x), ALIASES={LEAVES}, calls=%beside
  %q1 = PART get-tuple-element(%q), index=1
  %q2 = WHOLE get-tuple-element(%q), index=2
  %q3 = FLAG get-tuple-element(%q), index=3
  ROOT %r = WHOLE fusion(%q1, %q2, %q3), ALIASES={{}: (1, {})}, calls=%end
}
"""
for short, text in {
    'WHOLE': 'f32[8,128]{1,0:T(8,128)}',
    'PART': 'f32[2,128]{1,0:T(2,128)}',
    'FLAG': 'u32[]{:S(2)}',
    'GROUPS': 'channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}',
    'ALIASES': 'output_to_operand_aliasing',
    'LEAVES': '{1}: (0, {}), {2}: (1, {}), {3}: (2, {})',
}.items():
    CHAIN = CHAIN.replace(short, text)


def test_buffers_that_fusions_hand_on_beside_a_collective_count_once():
    counted = Traffic(CHAIN)
    # a quarter is read and the whole written where the gather begins; beside it, x is read and its negative written
    assert counted.count_program(()) == ARRAY // 4 + ARRAY + 2 * ARRAY
    assert {name: size for name, size in counted.by_instruction.items() if size} == {'p': 1.25 * ARRAY, 'q': 2 * ARRAY}
    (gather,) = hlo_collectives.list_collectives(CHAIN, 4)
    assert gather[2:] == (1, 0.75 * ARRAY)


def test_traffic_of_a_compiled_text():
    # copy: read and written; the loop's reductions likewise, three times
    traffic = Traffic(TEXT)
    assert traffic.count_program(()) >= (3 * 2 + 2) * ARRAY and traffic.unknown == 0
    unknown = Traffic(TEXT.replace('s32[] constant(3)', 's32[] add(%i.1, %i.1)'))
    assert unknown.count_program((10,)) - traffic.count_program(()) >= 7 * 2 * ARRAY and unknown.unknown == 0
    assert unknown.count_program(()) < traffic.count_program(()) and unknown.unknown == 1


def test_traffic_of_a_kernel_is_what_it_tells():
    kernel = '%copied = f32[8,128]{1,0:T(8,128)} custom-call(%f), custom_call_target="tpu_custom_call", backend_config='
    told = '{"custom_call_config":{"cost_estimate":{"flops":"5","bytes_accessed":"1000"}}}'
    plain = TEXT.replace('ROOT %copied = f32[8,128]{1,0:T(8,128)} copy(%f)', 'ROOT ' + kernel)
    of_plain, of_told = (Traffic(text).count_program(()) for text in (plain, plain.replace(kernel, kernel + told)))
    assert of_plain - of_told == 2 * ARRAY - 1000


MULTIPLIED = """HloModule test
ENTRY %main (a: f32[1], b: f32[1]) -> f32[1] {{
  %a = f32[{a}] parameter(0)
  %b = f32[{b}] parameter(1)
  ROOT %c = f32[{c}] {operation}
}}
"""


@pytest.mark.parametrize(
    'a, b, c, operation, pairs',
    [
        ('7,16', '16,5', '7,5', 'dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}', 7 * 16 * 5),
        ('7,16', '5,16', '7,5', 'convolution(%a, %b), dim_labels=bf_oi->bf', 7 * 16 * 5),
        # 8 rows and 14 heads: the window slides over all heads, and one place of 27 meets each
        (
            '8,7,16,1',
            '16,14,64,1',
            '8,7,14,64',
            'convolution(%a, %b), window={size=1x14 pad=0_0x13_13 rhs_reversal=0x1}, dim_labels=0bf1_i1o0->0b1f',
            8 * 7 * 16 * 14 * 64,
        ),
        # a batch of 8 as a spread axis: of 8 places of the window one meets an element, the others meet zeros
        (
            '8,4,6',
            '8,4,5',
            '8,6,5',
            'convolution(%a, %b), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0fb_0io->0bf',
            8 * 4 * 6 * 5,
        ),
        # a window of 3 on 5 places between margins of 1: 3 * 5 pairs without the two that meet a margin
        (
            '2,5,4',
            '3,4,6',
            '2,5,6',
            'convolution(%a, %b), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f',
            2 * 13 * 24,
        ),
    ],
)
def test_products_of_a_compiled_text(a, b, c, operation, pairs):
    assert products.count(MULTIPLIED.format(a=a, b=b, c=c, operation=operation)) == 2 * pairs
