"""What the mathematics verifier reads at the end of completions, and what it pays that is no answer."""

# ruff: noqa: RUF001

import itertools
import os
import time

import pytest

from grpo_jax.data import math as problems
from grpo_jax.rewards import math
from grpo_jax.rewards.math import echo, extraction, spelling
from grpo_jax.types import Example
from grpo_jax.workers import Died, Expired, Pool
from tests.rewards.endings import ENDINGS, GOLDS, UNIVERSAL

SOLUTION = 'Janet sells 16 - 3 - 4 = 9 eggs a day.\nShe makes 9 * 2 dollars every day.\n'


class NoPool(Pool):
    """For answers that must be decided without algebra."""

    def __init__(self):
        super().__init__(1, deadline=1.0, memory_gib=1.0)

    def call_cached(self, function, *args):
        raise AssertionError(f'{function.__name__}{args}')


def example(gold, problem='How much?'):
    return Example(problem, gold, 0, {})


@pytest.mark.parametrize('before', ['', SOLUTION])
def test_right_numbers_are_read_at_every_ending_and_wrong_ones_are_not_paid(before):
    assert len(ENDINGS) > 100
    refused = [end for end in ENDINGS if math.reward(before + end, example('18'), pool=NoPool()) != 1]
    paid = [end for end in ENDINGS if math.reward(before + end.replace('18', '17'), example('18'), pool=NoPool()) != 0]
    assert not refused and not paid


@pytest.mark.parametrize(
    'completion, expected',
    [
        ('3 people share 54 dollars so each gets 18', '18'),
        ('The cost is 5 for each of the 3 friends, so 15 in all.', '15'),
        ('If x is 5 then the total comes to 18', '18'),
        ('He has 3 boxes of 6 eggs, which makes 18.', '18'),
        ('The answer is -18.', '-18'),
        ('Answer -18', '-18'),
        ('The answer is 5 million people.', '5000000'),
        ('x = 18\nNote that the total is 20.', '20'),
        ('5 is wrong', '5is wrong'),
        ('The roots are $1$ and $-2$.', '1, -2'),
        ('So the day is\nSunday', 'Sunday'),
        ('$18 - $3 = $15', '15'),
        ('4:30', '4:30'),
        ('The ratio is $7:32$.', '7:32'),
    ],
)
def test_other_numbers_of_the_last_line_do_not_mislead(completion, expected):
    assert math.extract(completion) == expected


def test_a_word_at_the_end_answers_a_word_alone():
    assert math.reward('18\nBoom', example('18'), pool=NoPool()) == 1
    assert math.reward('It has 18 legs.\nSpider', example('Spider'), pool=NoPool()) == 1


@pytest.mark.parametrize('number', range(len(ENDINGS)))
def test_every_ending_is_judged_fast(number):
    # 1,500 a second where this was written, a third of that on slow machines; the best of three, since others use them
    text, seconds = SOLUTION * 3 + ENDINGS[number], []
    for _ in range(3):
        began = time.thread_time()
        for _ in range(10):
            spelling._canonicalize.cache_clear()
            spelling._respell.cache_clear()
            math.reward(text, example('18'), pool=NoPool())
        seconds.append((time.thread_time() - began) / 10)
    assert min(seconds) < 1 / 500


# what is right of the answers that fit no problem, by gold
RIGHT = {
    '5': ['5', '5 cm', '5 dollars', '5 cents', r'\$5', r'5\%', r'\approx 5', r'\boxed{\boxed{5}}', '-(-5)', '5-0'],
    '18': ['18', '18=18', r'\approx 18', '\u224818', '~18', 'about 18'],
    '0': ['0', 'x=0', '0=0'],
    '1': ['1', 'x=1', '1=1', r'\boxed{1}'],
}


def pays(gold, text, pool, problem='How much?'):
    try:
        return math.reward(f'\\boxed{{{text}}}', example(gold, problem), pool=pool) == 1
    except (Expired, Died):
        return False


class Sceptic(NoPool):
    """Refuses what takes algebra."""

    def call_cached(self, function, *args):
        return False


def test_answers_that_fit_every_problem_fit_none():
    assert len(set(UNIVERSAL)) > 260 and len(set(GOLDS)) >= 60
    for gold, right in RIGHT.items():
        paid = {text for text in UNIVERSAL if pays(gold, text, Sceptic())}
        assert paid <= set(right) and gold in paid
    most = {gold: sum(pays(gold, text, Sceptic()) for text in UNIVERSAL) for gold in GOLDS}
    assert max(most.values()) <= 12


def test_thinking_does_not_count_where_an_answer_follows():
    for thinking in (r'<think>\boxed{18}</think>', r'I think \boxed{18}.</think>', '<think>#### 18</think>'):
        for end, expected in [
            ('The answer is 17.', 0),
            (r'\boxed{17}', 0),
            ('17', 0),
            (r'so \boxed{18}', 1),
            ('', 1),  # no answer follows
            ('\nDone.', 1),
        ]:
            assert math.reward(thinking + end, example('18'), pool=NoPool()) == expected, (thinking, end)
    assert math.strict(r'<think>\boxed{18}</think> The answer is 18.', example('18'), pool=NoPool()) == 0
    assert math.reward(r'<think>so \boxed{18}', example('18'), pool=NoPool()) == 1  # thinking that never ended
    assert math.reward(r'<think>a</think>17<think>\boxed{18}</think>', example('18'), pool=NoPool()) == 0


@pytest.mark.parametrize(
    'problem, gold, answer, expected',
    [
        (r'Simplify $\frac{6}{8}$.', r'\frac{3}{4}', r'\frac{6}{8}', 0),
        (r'Simplify $\frac{6}{8}$.', r'\frac{3}{4}', r'\dfrac68', 0),
        (r'Simplify $\frac{6}{8}$.', r'\frac{3}{4}', r'x = \frac{6}{8}', 0),
        (r'Simplify $\frac{6}{8}$.', r'\frac{3}{4}', r'\frac34', 1),
        (r'Simplify $\frac{6}{8}$.', r'\frac{3}{4}', '0.75', 1),
        ('What is $2^3+5$?', '13', '2^{3} + 5', 0),
        ('What is 3 + 5 * 2?', '13', '3+5*2', 0),
        ('What is 3 + 5 * 2?', '13', '13', 1),
        (r'Write $0.\overline{3}$ as a fraction.', r'\frac13', r'0.\overline{3}', 0),
        ('Write 0.25 as a fraction.', r'\frac14', '0.25', 1),  # a plain number is no formula
        (r'What is half of $\frac{2}{2}$, or $\frac{1}{2}$?', '0.5', r'\frac12', 1),
        (r'Let $f(x) = 2x+3$. What is $f$?', '2x+3', '2x + 3', 1),  # the gold one, as it is written
        (r'Which of $\sqrt{2}$ and $\sqrt{3}$?', r'\sqrt{2}', r'\sqrt2', 1),
    ],
)
def test_repeating_the_problem_is_no_answer(problem, gold, answer, expected):
    assert math.reward(f'\\boxed{{{answer}}}', example(gold, problem), pool=NoPool()) == expected


def test_no_gold_answer_counts_as_repeating_its_problem(real):
    examples = problems.examples('math500', folder=os.path.join(real, 'math'))
    assert not [e.answer for e in examples if echo.is_echo(e.answer, e.prompt, e.answer)]
    texts = [(e, extraction.answer(e.meta['demonstration'])) for e in examples]
    assert not [text for e, text in texts if echo.is_echo(text, e.prompt, e.answer)]


def test_boxing_a_formula_of_the_problem_pays_on_no_competition_problem(real):
    paid = []
    for e in problems.examples('math500', folder=os.path.join(real, 'math')):
        formulas = [next(filter(None, match)) for match in echo.FORMULA.findall(e.prompt)]
        for formula in formulas:
            # that are not the gold answer, but have its value
            if not echo.is_plain(formula) and spelling.canonicalize(formula) != extraction.gold_answer(e.answer):
                paid += [formula] if pays(e.answer, formula, Sceptic(), e.prompt) else []
    assert not paid


def test_equal_answers_in_two_spellings_are_the_same():
    for one, other in [('18', r'18\text{dollar}'), ('1/2', '1/2'), ('x=5', '5'), ('1,2', '2, 1'), ('e', 'E')]:
        assert math.same(one, other) and math.same(other, one)
    for one, other in itertools.combinations(['18', '17', r'18\text{cm}', 'x', r'\sqrt{324}'], 2):
        assert math.same(one, other) == ({one, other} == {'18', r'18\text{cm}'})


def test_gold_answers_that_are_half_open_or_money_are_read_without_a_box():
    for gold in [
        '[5.8,6)',
        r'(-\infty,-3) \cup [0,\infty)',
        r'\$23{,}000',
        r'-\$0.50',
        'AB=9, CD=4',
        r'- \frac 32',
        'AB = 18',
    ]:
        assert math.reward(gold, example(gold), pool=NoPool()) == 1
    assert math.reward(r'\$\dfrac23 \approx \$0.68', example(r'\$\dfrac23 \approx \$0.67'), pool=NoPool()) == 0


@pytest.mark.parametrize('problem', ['\\(' * 10**4, '$' * 10**5, '-' * 10**5, '(1 ' * 10**5, '$ a ' * 10**5])
def test_large_problems_are_read_in_no_time(problem):
    began = time.thread_time()
    assert not echo.is_echo('x^2+1', problem, '5')
    assert time.thread_time() - began < 1


# kinds of answers: gold answers, each with completions that are right and that are wrong
KINDS = {
    'what is taken back': {
        '6': (
            ['The answer is 5? No, it is 6.', 'The answer is 5. Actually, no: 6.', 'Answer: 5\n\nCorrection: 6'],
            ['The answer is 6. Wait, that is wrong. It is 5.', 'Answer: 6\n\nHmm, I made a mistake. It should be 5.']
            + ['So it is 6. No, that is not right.', 'The answer is 6. That is incorrect.', '答案是6。不对，应该是5。'],
        ),
        'B': (
            ['The answer is C? No, B.', 'The answer is A. Actually, it must be B.'],
            ['The answer is B. Sorry, it is C.'],
        ),
    },
    'powers of units of another script': {
        '30': (
            [r'\boxed{30 \, \text{м}^2}', r'\boxed{30 м^{3}}', 'Ответ: 30 см²', r'**Ответ:** $30 \text{ м}^2$.'],
            [r'\boxed{2 \, \text{м}^2}', r'\boxed{30\text{м}2}', r'\boxed{3 \text{м}^3}'],
        )
    },
    'what breaks off': {
        '7': (
            ['The answer is 7, because the', 'So 7 are left.\nThanks to all'],
            ['First, 3 + 4 = 7. Next, we multiply by', 'Let x = 7. Then', 'She has 7 apples. Then she'],
        )
    },
    'one number of a list': {
        '7': ([], ['We have 5, 6, 7.', 'It is one of 5, 6, or 7.', 'The values are 5, 6, and 7.', 'It may be 6, or 7.'])
    },
    'one number of an expression': {
        '5': (
            [
                'So there are 5 in all.',
                'So it costs $5.',
                'It takes 5 h.',
                'He made $5 more than Ann.',
                'So x - 3 = 5.',
            ],
            [
                'So the area is 5pi.',
                'The area is 5π.',
                'There are 5^2 ways.',
                'So we get 5(x+1).',
                'It equals 5+x.',
                'It is 5i.',
            ]
            + [
                'So it is sqrt(5).',
                'The length is 5√3.',
                'We get 3 * 5 eggs.',
                'It is |x - 5|.',
                'There are 5 × 10^3 cells.',
            ]
            + [
                'The limit is 5/x.',
                'It is 5 divided by 2.',
                'It is 5 to the power of 2.',
                'Nearly 5',
                'over 5',
                '5 plus 2 apples',
            ],
        ),
        '5000': (['So it is 5 × 10^3 m.', 'It is 5e3 in all.', 'There are 5·10^3 cells.'], []),
        r'\frac{\sqrt2}{2}': (['The answer is sqrt(2)/2.', r'\boxed{\sin 45^\circ}'], [r'\boxed{\sin 45}']),
    },
    'quantities of several units': {
        '90 minutes': (
            ['1 hour 30 minutes', 'It takes 1 hr. and 30 min.', r'\boxed{1\text{ hour }30\text{ minutes}}'],
            ['1 hour 40 minutes', '30 minutes', '1 hour 30 feet'],
        ),
        '30': ([], ['1 hour 30 minutes', 'It takes 1 hour and 30 minutes.']),
        '1 hour 30 minutes': (['1 hour 30 minutes', '1.5 hours', '90 minutes'], ['30 minutes', '1 hour']),
        '2 dollars and 50 cents': (['$2.50', '250 cents'], ['50 cents']),
    },
    'coordinates by name': {
        '(3,4)': (['x=3, y=4', r'\boxed{y=4, x=3}', r'\boxed{\langle 3,4\rangle}'], ['y=3, x=4', r'\boxed{x=4, y=3}']),
        '(5,3)': ([r'\boxed{n=5, k=3}'], [r'\boxed{n=3, k=5}']),
        '(1,-2)': ([], ['[1,-2]', r'\boxed{[5,-3]}']),  # empty intervals are equal
    },
    'options': {
        'C': (
            [
                'I choose C.',
                'La réponse est C.',
                'La respuesta correcta es C.',
                'Die Antwort ist (C).',
                'Ответ — C.',
                'C, not B',
            ]
            + ['So it must be C.', 'C is right.'],
            ['C is wrong.', 'Option C is false.', 'C can be ruled out.', '(C) cannot be.', '不选C', 'C는 틀렸습니다'],
        ),
        'A, C': (['A and C', r'\boxed{AC}', '(A) and (C)', 'C, A'], ['A or C', 'A', r'\boxed{ABC}', r'\boxed{CA}']),
        'ABD': ([r'\boxed{A, B, D}', 'ABD'], [r'\boxed{A, B}', r'\boxed{A, B, C}']),
        'CBAD': ([], [r'\boxed{A, B, C, D}']),  # an order
    },
    'answers in words': {
        'New York': (
            ['New York', 'The city is New York.', 'The answer is new york.'],
            ['York', 'It is not New York.', 'New York or Rome'],
        ),
        r'\text{Evelyn}': (['The winner is Evelyn.'], ['It is not true that she is Evelyn.', 'Evelyn or Ann']),
        'Yes': (['Yes, because 4 is even.', 'Yes.'], ['No, yes', 'It is not yes']),
        'No': (['No, it is not.', 'No.'], ['Yes, no']),
        'all real numbers': (['The answer is all real numbers.', 'all real numbers'], ['not all real numbers']),
    },
    'signs and LaTeX': {
        '5/2': (['2½', 'She needs 2½ cups.', r'\boxed{\Large\frac52}', r'\boxed{\textcolor{red}{\frac52}}'], ['2⅓']),
        '2': ([], ['She needs 2½ cups.']),
        r'\sqrt5': (
            [r'\boxed{\mathbf{\sqrt{5}}}', r'\boxed{\mathrm{\sqrt5}}', r'\boxed{\ \sqrt{5}\ }'],
            [r'\boxed{\mathbf{5}}'],
        ),
        '(2,5]': ([r'\boxed{]2,5]}'], [r'\boxed{]2,5[}']),
        r'3\ln 2': ([r'\boxed{3 ln(2)}', r'\boxed{ln 8}'], [r'\boxed{ln 9}']),
        '2.5': (['€2,50'], ['2:50']),
        r'\infty': ([r'\boxed{+\infty}'], [r'\boxed{\infty+1}', r'\boxed{-\infty}']),
        '10^{12}': (['10¹²'], ['10¹¹']),
        '12': (
            ['十二', '十二个苹果'],
            ['不选12', '不到12', 'It is 16, up from 12.', 'None of the 12', 'ไม่ใช่ 12', '二十'],
        ),
    },
}


@pytest.fixture(scope='module')
def pool():
    pool = Pool(1, deadline=60.0, memory_gib=2.0)
    yield pool
    pool.close()


@pytest.mark.parametrize('kind', KINDS)
def test_kinds_of_answers_are_judged_as_a_mathematician_does(kind, pool):
    refused, paid = [], []
    for gold, (right, wrong) in KINDS[kind].items():
        refused += [(gold, text) for text in right if math.reward(text, example(gold), pool=pool) != 1]
        paid += [(gold, text) for text in wrong if math.reward(text, example(gold), pool=pool) != 0]
    assert not refused and not paid


def test_many_blank_lines_take_no_time():
    began = time.thread_time()
    assert math.reward('\n' * 10**5 + 'to', example('5'), pool=NoPool()) == 0
    assert time.thread_time() - began < 1
