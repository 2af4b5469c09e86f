"""The page of a report in a browser: without a request or an error, at any width, and inert to hostile completions."""

import itertools
import os
import time

import pytest

from grpo_jax.tools import report
from tests.report import runs

SCROLLING = """(async () => {  // the milliseconds of the longest of 40 frames, each a window further down
  let longest = 0, before = performance.now();
  for (let i = 0; i < 40; i++) {
    scrollBy(0, 900);
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    longest = Math.max(longest, now - before);
    before = now;
  }
  return longest;
})()"""


INKED = """[...document.querySelectorAll(".uplot canvas")].map((canvas) => {  // coloured pixels of each picture
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let inked = 0;
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] > 100 && Math.max(...data.slice(i, i + 3)) - Math.min(...data.slice(i, i + 3)) > 40) inked++;
  }
  return inked;
})"""
CONTRAST = """((selector, painted) => {  // of a text and what is behind it, by the formula of WCAG 2
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const pixel = (colors) => {
    for (const color of colors) { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); }
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const element = document.querySelector(selector);
  const behind = [];
  for (let place = element; place; place = place.parentElement) behind.unshift(getComputedStyle(place).backgroundColor);
  if (painted) behind.push(painted);
  const [a, b] = [light(pixel(behind)), light(pixel([...behind, getComputedStyle(element).color]))];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
})"""


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
    return runs.make(tmp_path_factory.mktemp('report') / 'run')


@pytest.fixture
def opened(chromium, workdir):
    """The page of a small run, reported with another one beside it."""
    return at_rollouts(chromium.open(report.write_report([workdir])))


def at_rollouts(page):
    """The page, with the window on its rollouts: far from it they are not filled in."""
    page.evaluate('document.getElementById("rollouts").scrollIntoView({behavior: "instant"})')
    page.settle()
    return page


def texts(page, selector):
    """The texts of the elements that a selector fits."""
    return page.evaluate(f'[...document.querySelectorAll({selector!r})].map((element) => element.textContent)')


def choose(page, name, value):
    page.evaluate(
        f'(() => {{ const field = document.getElementById("rollouts-{name}"); field.value = {value!r};'
        'for (const kind of ["input", "change"]) field.dispatchEvent(new Event(kind)); })()'
    )
    time.sleep(0.25)  # a search waits for the next letter
    page.settle()


CUT = """[...document.querySelectorAll('main *, header *')].filter((element) => {  // what shows only a part of itself
  if (element.closest('.scroll, .completions, select, .u-over') || !element.clientWidth) return false;
  const style = getComputedStyle(element);
  return style.overflowX !== 'visible' && element.scrollWidth > element.clientWidth + 1;
}).map((element) => element.className || element.tagName)"""


@pytest.mark.parametrize('width', [1300, 390])
def test_nothing_is_cut_at_the_edge_of_a_desktop_or_a_phone(chromium, tmp_path, width):
    folders = [
        runs.make(tmp_path / name, algorithm__clip_high=clip) for name, clip in (('a' * 60, 0.2), ('b' * 60, 0.3))
    ]
    for path in (report.write_report(folders), report.write_report(folders[:1])):
        page = chromium.open(path, width=width, height=2000)
        page.evaluate('document.querySelectorAll("details").forEach((details) => { details.open = true; })')
        page.settle()
        assert page.evaluate('document.documentElement.scrollWidth') <= width and page.evaluate(CUT) == []


def test_a_metric_says_what_it_is_where_one_points_and_below_its_picture(opened):
    titles = opened.evaluate('[...document.querySelectorAll(".u-series")].map((row) => row.title).filter(Boolean)')
    assert any(title.startswith('Mean of the total reward') for title in titles)
    assert 'Mean of the total reward' in ' '.join(texts(opened, '.meanings dd'))
    assert 'docs/metrics.md' in ' '.join(texts(opened, '.meanings p'))


@pytest.mark.parametrize('width', [1280, 390])
@pytest.mark.parametrize('dark', [False, True])
def test_the_page_opens_without_error_or_request_and_fits_its_window(chromium, workdir, width, dark):
    page = chromium.open(report.write_report([workdir]), width=width, dark=dark)
    assert page.problems() == [] and page.requests() == []
    assert page.evaluate('document.documentElement.scrollWidth') <= width
    assert page.evaluate('document.querySelectorAll(".uplot canvas").length') >= 5
    picture = page.screenshot()
    assert picture.startswith(b'\x89PNG') and len(picture) > 20_000


@pytest.mark.parametrize('dark', [False, True])
def test_every_curve_is_drawn_and_every_text_can_be_read(chromium, workdir, dark):
    page = at_rollouts(chromium.open(report.write_report([workdir]), dark=dark, height=6000))
    inked = page.evaluate(INKED)
    assert len(inked) >= 5 and min(inked) > 100
    texts = (
        '.verdict',
        '.meaning',
        '.facts dt',
        'nav a',
        '.panel p',
        '.u-value',
        '.status',
        '.diagnoses h2',
        'footer p',
    )
    for text in (*texts, '.verdict-of.right', '.verdict-of.wrong', '.badge', '.timeline dt'):
        assert page.evaluate(f'{CONTRAST}({text!r})') >= 4.5, text
    for paint in ('--heat', '--cold'):
        strongest = f'color-mix(in srgb, {page.evaluate(f"Report.color({paint!r})")} 55%, transparent)'
        assert page.evaluate(f'{CONTRAST}(".token", {strongest!r})') >= 4.5, paint


def test_curves_are_redrawn_in_the_colours_of_the_night(chromium, workdir):
    page = chromium.open(report.write_report([workdir]))
    ink = 'getComputedStyle(document.documentElement).color'
    before = page.evaluate(ink)
    page.call('Emulation.setEmulatedMedia', features=[{'name': 'prefers-color-scheme', 'value': 'dark'}])
    page.settle()
    assert page.evaluate(ink) != before and page.problems() == []


def test_the_page_can_be_printed(opened):
    assert opened.pdf().startswith(b'%PDF') and opened.problems() == []


def test_paper_is_white_at_night(chromium, workdir):
    page = chromium.open(report.write_report([workdir]), dark=True)
    night = page.evaluate('Report.color("--ink")')
    paper = page.evaluate('dispatchEvent(new Event("beforeprint")), Report.color("--ink")')
    assert page.evaluate('dispatchEvent(new Event("afterprint")), Report.color("--ink")') == night != paper


def test_controls_are_labelled_and_headings_do_not_skip(opened):
    without = opened.evaluate(
        '[...document.querySelectorAll("input, select")].filter((field) => !field.labels.length).map((x) => x.id)'
    )
    assert without == []
    headings = '[...document.querySelectorAll("h1, h2, h3")]'
    levels = opened.evaluate(f'{headings}.map((heading) => Number(heading.tagName[1]))')
    assert levels[0] == 1 and all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert all(opened.evaluate('[...document.querySelectorAll(".plot")].map((plot) => plot.ariaLabel)'))


def test_the_numbers_of_a_curve_are_a_table(opened):
    opened.evaluate('document.querySelector(".panel details").open = true')
    opened.settle()
    assert texts(opened, '.numbers tbody tr:first-child td')[0] == '0'


def test_a_prompt_has_its_completions_beside_it_with_reward_and_advantage(opened):
    assert texts(opened, '.status') == ['3 of 3 prompts, 12 completions, 25 % of them right']
    assert texts(opened, '.group:first-child .completion .text')[:2] == ['w0 0<end>', 'w0 1<end>']
    head = texts(opened, '.group:first-child .completion:first-child .head')[0]
    assert '✓ right' in head and 'reward 1' in head and 'advantage +0.75' in head


def test_search_filter_and_sort(opened):
    choose(opened, 'search', 'PROMPT 2')
    assert texts(opened, '.status') == ['1 of 3 prompts, 4 completions, 25 % of them right']
    choose(opened, 'search', 'w1 2')
    assert texts(opened, '.group .text') == ['w1 2<end>']
    choose(opened, 'search', '')
    choose(opened, 'filter', 'right')
    assert texts(opened, '.status') == ['3 of 3 prompts, 3 completions, 100 % of them right']
    choose(opened, 'filter', 'truncated')
    assert texts(opened, '.group .text') == ['w0 3<end>', 'w1 3<end>', 'w2 3<end>']
    choose(opened, 'search', 'nowhere')
    assert texts(opened, '.groups') == ['Nothing fits this search and filter.']
    choose(opened, 'search', '')
    choose(opened, 'filter', 'all')
    choose(opened, 'sort', 'low')
    assert '✗ wrong' in texts(opened, '.group .completion .head')[0]


@pytest.mark.parametrize('coloring', ['logprob', 'advantage', 'ratio', 'entropy', 'kl'])
def test_tokens_are_coloured_and_say_their_numbers(opened, coloring):
    choose(opened, 'coloring', coloring)
    painted = opened.evaluate('[...document.querySelectorAll(".token")].filter((x) => x.style.backgroundColor).length')
    assert painted > 0
    opened.evaluate('document.querySelector(".token").click()')
    # the logprobs are -0.5 by the sampler, -0.4 by the old policy, -0.6 by the reference
    detail = texts(opened, '.detail')[0]
    assert 'logprob \u22120.5' in detail and 'probability 0.607' in detail and 'ratio 1.11' in detail
    assert 'kl 0.0187' in detail and 'entropy 1' in detail and 'advantage +0.75' in detail  # e^-0.2 + 0.2 - 1


def test_the_slider_goes_through_the_steps_and_the_place_is_kept(opened):
    assert texts(opened, '.slider output') == ['step 2']
    choose(opened, 'step', '0')
    choose(opened, 'sort', 'long')
    assert texts(opened, '.slider output') == ['step 0']
    opened.call('Page.reload')
    time.sleep(0.5)
    opened.settle()
    assert texts(opened, '.slider output') == ['step 0']
    assert opened.evaluate('document.getElementById("rollouts-sort").value') == 'long'


def test_keys_go_from_prompt_to_prompt_and_from_step_to_step(opened):
    press = 'document.dispatchEvent(new KeyboardEvent("keydown", {{key: "{}", bubbles: true}}))'
    opened.evaluate('document.body.focus()')
    for key in 'jj':
        opened.evaluate('(document.activeElement ?? document.body).' + press.format(key).removeprefix('document.'))
    opened.settle()
    place = '[...document.querySelectorAll(".group")].indexOf(document.activeElement)'
    assert opened.evaluate(place) == 1
    opened.evaluate('document.body.' + press.format('[').removeprefix('document.'))
    opened.settle()
    assert texts(opened, '.slider output') == ['step 0']


@pytest.mark.parametrize('split', [False, True])
def test_hostile_completions_are_inert(chromium, tmp_path, split):
    folder = runs.make(tmp_path / 'run')
    rows = [runs.hostile_row(text) for text in runs.HOSTILE.values()]
    runs.write(folder, name='rollouts/000002.jsonl', rows=rows)
    path = report.write_report([folder], **({'inline_bytes': 0} if split else {}))
    page = at_rollouts(chromium.open(path, height=6000))  # all of them are in the window
    assert page.problems() == [] and page.evaluate('document.title') == 'run · report'
    assert page.evaluate('document.querySelectorAll("#browser img, #browser svg, #browser script").length') == 0
    assert page.evaluate('({}).prompt === undefined && [].length === 0')
    shown = ''.join(texts(page, '.prompt'))
    assert '</script><script>' in shown and '{{ 7 * 7 }}' in shown
    # controls stand as pictures of themselves, and nothing turns the direction of the text
    assert not set(shown) & set('\x00\x1b\x9b\u2028\u202e') and '␛[31mred' in shown and '⟨202e⟩' in shown


def test_a_long_completion_is_shown_piece_by_piece(chromium, tmp_path):
    folder = runs.make(tmp_path / 'run')
    row = {'prompt': 'p', 'answer': '', 'completion': 'y' * (1 << 20), 'reward': 0.0}
    runs.write(folder, name='rollouts/000002.jsonl', rows=[row])
    page = at_rollouts(chromium.open(report.write_report([folder])))
    assert [len(text) for text in texts(page, '.text')] == [4000]
    page.evaluate('document.querySelector(".rest").click()')
    assert [len(text) for text in texts(page, '.text')] == [44_000]
    assert '1,004,576 characters' in texts(page, '.rest')[0]


def test_steps_beside_the_page_are_loaded_as_they_are_shown(chromium, tmp_path):
    folder = runs.make(tmp_path / 'run')
    page = chromium.open(report.write_report([folder], inline_bytes=100))
    page.settle()
    assert texts(page, '.status') == ['3 of 3 prompts, 12 completions, 25 % of them right']
    assert [os.path.basename(url).split('?')[0] for url in page.requests()] == ['rollouts-0-2.js']
    choose(page, 'step', '0')
    assert len(page.requests()) == 2 and page.problems() == []
    os.remove(os.path.join(folder, 'report_rollouts', 'rollouts-0-2.js'))
    choose(page, 'step', '1')  # is still known
    assert '12 completions' in texts(page, '.status')[0]


def test_five_thousand_rollouts_browse_smoothly_in_less_than_15_mb(chromium, tmp_path):
    folder = runs.make(tmp_path / 'run')
    rows = [row for group in range(625) for row in runs.groups(group, size=8, tokens=20)]
    runs.write(folder, name='rollouts/000002.jsonl', rows=rows)
    path = report.write_report([folder])
    assert os.path.getsize(path) < 15e6 and len(rows) == 5000
    page = at_rollouts(chromium.open(path))
    assert '5,000 completions' in texts(page, '.status')[0]
    shown = page.evaluate('document.querySelectorAll(".completion").length')
    assert 0 < shown < 500  # only what is near the window
    began = time.monotonic()
    choose(page, 'sort', 'surprise')
    choose(page, 'filter', 'wrong')
    longest = page.evaluate(SCROLLING)
    assert time.monotonic() - began < 15 and longest < 1000, longest
    assert page.evaluate('document.querySelectorAll(".completion").length') < 500 and page.problems() == []


def test_a_followed_page_keeps_up_with_the_run_where_the_reader_is(chromium, tmp_path):
    folder = runs.make(tmp_path / 'run', steps=2, evaluated=False)
    path = report.write_report([folder], stamp=1)
    page = chromium.open(path)
    top = 'document.getElementById("policy").getBoundingClientRect().top'
    page.evaluate(f'scrollTo({{top: scrollY + {top} + 40, behavior: "instant"}})')
    assert page.evaluate(top) == pytest.approx(-40, abs=1)
    runs.make(folder)
    report.write_report([folder])  # the last one, which follows nothing
    with open(os.path.join(folder, 'report_stamp.js'), 'w', encoding='utf8') as file:
        file.write('reportStamp(2);\n')
    for _ in range(40):
        time.sleep(0.1)
        if page.evaluate('window.Report === undefined && typeof Report !== "undefined" && Report.data?.stamp === 0'):
            break
    page.settle()
    assert page.evaluate('Report.data.stamp') == 0
    assert page.evaluate(top) == pytest.approx(-40, abs=3)  # though a section came before it
