'use strict';
// The browser of rollouts: a prompt's completions side by side; only those near the window are in the page.
(() => {
  const {make, number, signed, visible} = Report;
  const NEAR = '1500px';
  const ORDER = new Intl.Collator('en', {numeric: true});

  const mean = (values) => values.reduce((sum, x) => sum + x, 0) / values.length;
  const rewards = (rows) => rows.map((row) => row.r).filter((r) => r !== null && r !== undefined);
  const meanReward = (rows) => (rewards(rows).length ? mean(rewards(rows)) : -Infinity);
  const textOf = (row) => row.c ?? row.k.join('');
  const lengthOf = (row) => row.n ?? row.k?.length ?? textOf(row).length;
  const surprise = (row) => (row.l?.length ? -mean(row.l.map((x) => x ?? 0)) : 0);
  const deviation = (rows) => {
    const values = rewards(rows);
    return values.length ? Math.sqrt(mean(values.map((r) => (r - mean(values)) ** 2))) : 0;
  };

  // name -> [label, key of a group's rows]; the greatest key comes first
  const SORTS = {
    order: ['in the order of the step', null],
    high: ['highest reward', (rows) => meanReward(rows)],
    low: ['lowest reward', (rows) => -meanReward(rows)],
    varied: ['most varied reward', deviation],
    long: ['longest', (rows) => mean(rows.map(lengthOf))],
    short: ['shortest', (rows) => -mean(rows.map(lengthOf))],
    surprise: ['least likely', (rows) => mean(rows.map(surprise))],
    prompt: ['prompt', null],
  };
  // name -> [label, which groups, which of their rows]
  const FILTERS = {
    all: ['all', () => true, () => true],
    right: ['right completions', () => true, (row) => row.v === true],
    wrong: ['wrong completions', () => true, (row) => row.v === false],
    truncated: ['truncated completions', () => true, (row) => row.t === true],
    mixed: ['prompts with right and wrong', (rows) => rows.some((row) => row.v === true) && rows.some((row) => row.v === false), () => true],
    solved: ['prompts that are all right', (rows) => rows.every((row) => row.v === true), () => true],
    unsolved: ['prompts that are all wrong', (rows) => rows.every((row) => row.v === false), () => true],
  };

  // texts from scripts beside the page, by key
  const waiting = new Map();
  window.reportRollouts = (key, text) => waiting.get(key)?.(JSON.parse(text));

  function fetchBeside(key) {
    return new Promise((resolve, reject) => {
      waiting.set(key, resolve);
      const source = `${Report.data.stem}_rollouts/${key}.js?${Report.data.stamp}`;
      const script = make('script', {src: source, on: {error: () => reject(new Error(`${source} is not there`))}});
      document.head.append(script);
    });
  }

  function makeSource(index) {
    const steps = index.flatMap((run, number) => run.steps.map((step) => ({run: number, step, key: `rollouts-${number}-${step}`})));
    const loaded = new Map(); // the last ones that were shown
    return {
      steps: (run) => steps.filter((entry) => entry.run === run),
      async load(entry) {
        if (!loaded.has(entry.key)) {
          const groups = Report.data.split ? await fetchBeside(entry.key) : Report.json(entry.key);
          for (const group of groups) group.step = entry.step;
          loaded.set(entry.key, groups);
        }
        return loaded.get(entry.key);
      },
    };
  }

  function choose(groups, state) {
    const query = state.query.trim().toLowerCase();
    const [, ofGroup, ofRow] = FILTERS[state.filter];
    const chosen = [];
    for (const group of groups) {
      if (!ofGroup(group.rows)) continue;
      let rows = group.rows.filter(ofRow);
      if (query && ![group.prompt, group.answer, String(group.id)].some((text) => text.toLowerCase().includes(query))) {
        rows = rows.filter((row) => textOf(row).toLowerCase().includes(query));
      }
      if (rows.length) chosen.push({group, rows});
    }
    const key = SORTS[state.sort][1];
    if (state.sort === 'prompt') chosen.sort((a, b) => ORDER.compare(a.group.prompt, b.group.prompt));
    if (key) {
      for (const item of chosen) {
        item.key = key(item.rows);
        if (state.sort !== 'varied') item.rows = [...item.rows].sort((a, b) => key([b]) - key([a]) || 0);
      }
      chosen.sort((a, b) => b.key - a.key || 0);
    }
    return chosen;
  }

  // a term of the reward, [value, weight], or a part alone
  function weighted(term) {
    if (!Array.isArray(term)) return number(term);
    const [value, weight] = term;
    if (weight === 0) return `${number(value)}, not paid`;
    return weight === 1 ? number(value) : `${number(weight)} \u00d7 ${number(value)}`;
  }

  function card(row, place, view) {
    const verdict = {true: ['right', '\u2713 right'], false: ['wrong', '\u2717 wrong']}[row.v] ?? ['', 'not judged'];
    const head = make('div', {class: 'head'}, make('span', {class: `verdict-of ${verdict[0]}`, text: verdict[1]}));
    head.append(make('span', {text: `reward ${number(row.r)}`}));
    const advantage = Array.isArray(row.a) ? (row.a.length ? mean(row.a.map((x) => x ?? 0)) : null) : row.a;
    if (advantage !== null && advantage !== undefined) {
      head.append(make('span', {text: `${Array.isArray(row.a) ? 'mean ' : ''}advantage ${signed(advantage)}`}));
    }
    head.append(make('span', {text: `${lengthOf(row)} ${row.n === undefined && !row.k ? 'characters' : 'tokens'}`}));
    if (row.t) head.append(make('span', {class: 'badge', text: 'truncated'}));
    if (row.u) head.append(make('span', {class: 'badge', text: `learned from ${visible(row.u.join(' and ')) || 'no reward'}`}));
    const parts = Object.entries(row.w ?? row.p ?? {});
    const list = make('dl', {class: 'parts'}, ...parts.map(([name, term]) => make('div', {}, make('dt', {text: visible(name)}), make('dd', {text: weighted(term)}))));
    const element = make('li', {class: 'completion', 'aria-label': `Completion ${place + 1}`}, head);
    if (parts.length > 1 || (parts.length && weighted(parts[0][1]) !== number(row.r))) element.append(list);
    element.append(...Report.completion(row, view.coloring, view.scale));
    return element;
  }

  function fill(article, item, view) {
    const {group, rows} = item;
    const right = group.rows.filter((row) => row.v === true).length;
    const judged = group.rows.filter((row) => row.v !== undefined).length;
    const heading = make('h3', {}, make('span', {class: 'where', text: `${view.all ? `step ${group.step}, ` : ''}prompt ${group.id ?? ''}`}));
    if (judged) heading.append(make('span', {class: 'rate', text: `${right} of ${group.rows.length} right`}));
    const prompt = make('div', {class: 'prompt', dir: 'auto'});
    const messages = group.chat?.length ? group.chat : [['', group.prompt]];
    for (const [role, content] of messages) {
      if (role) prompt.append(make('span', {class: 'role', text: visible(role)}));
      prompt.append(make('p', {text: visible(content.slice(0, 20000)) + (content.length > 20000 ? ' \u2026' : '')}));
    }
    const answer = make('p', {class: 'answer'}, make('span', {text: 'answer '}), make('b', {text: visible(group.answer.slice(0, 2000))}));
    const cards = make('ol', {class: 'completions'}, ...rows.map((row, place) => card(row, place, view)));
    article.replaceChildren(heading, prompt, ...(group.answer ? [answer] : []), cards);
    article.style.minHeight = '';
  }

  // a list whose items have content only near the window
  function makeList(root) {
    const items = new Map();
    let view = null;
    const watcher = new IntersectionObserver((entries) => {
      for (const {target, isIntersecting} of entries) {
        if (isIntersecting && !target.firstChild) fill(target, items.get(target), view);
        else if (!isIntersecting && target.firstChild && !target.contains(document.activeElement)) {
          target.style.minHeight = `${target.offsetHeight}px`;
          target.replaceChildren();
        }
      }
    }, {rootMargin: NEAR});
    return (chosen, next) => {
      watcher.disconnect();
      items.clear();
      view = next;
      const across = Math.max(1, Math.floor(root.clientWidth / 260));
      const articles = chosen.map((item) => {
        const article = make('article', {class: 'group', tabindex: -1});
        const lines = Math.min(12, Math.ceil(Math.max(...item.rows.map(lengthOf)) / 12));
        article.style.minHeight = `${110 + Math.ceil(item.rows.length / across) * (70 + 20 * lines)}px`;
        items.set(article, item);
        return article;
      });
      root.replaceChildren(...articles);
      if (!articles.length) root.append(make('p', {class: 'empty', text: 'Nothing fits this search and filter.'}));
      for (const article of articles) watcher.observe(article);
    };
  }

  function field(label, control) {
    return make('label', {class: 'field'}, make('span', {text: label}), control);
  }

  function select(name, options, state, changed) {
    const control = make('select', {id: `rollouts-${name}`, on: {change: () => { state[name] = control.value; changed(); }}});
    control.fillWith = (entries) => {
      control.replaceChildren(...entries.map(([value, text]) => make('option', {value, text})));
      if (!entries.some(([value]) => value === String(state[name]))) state[name] = entries[0][0];
      control.value = state[name];
    };
    control.fillWith(options);
    return control;
  }

  function legend(name, scale) {
    const coloring = Report.colorings[name];
    if (!coloring) return [];
    const ends = coloring.ends ?? [number(-scale), signed(scale)];
    const bar = make('span', {class: `scale ${coloring.diverging ? 'diverging' : coloring.reversed ? 'falling' : 'rising'}`});
    return [make('span', {text: `${coloring.label}: ${ends[0]}`}), bar, make('span', {text: ends[1]})];
  }

  function count(chosen, groups) {
    const rows = chosen.flatMap((item) => item.rows);
    const judged = rows.filter((row) => row.v !== undefined);
    const right = judged.filter((row) => row.v).length;
    const share = judged.length ? `, ${Math.round((100 * right) / judged.length)} % of them right` : '';
    return `${chosen.length.toLocaleString('en')} of ${groups.length.toLocaleString('en')} prompts, ${rows.length.toLocaleString('en')} completions${share}`;
  }

  Report.rollouts = (root) => {
    const index = Report.data.rollouts;
    if (!index.some((run) => run.steps.length)) {
      root.append(make('p', {class: 'empty', text: 'The run has written no rollouts yet, or none at all: config.log.rollouts says every how many steps.'}));
      return;
    }
    const source = makeSource(index);
    const runs = index.map((run, number) => [String(number), run.name]).filter((_, number) => index[number].steps.length);
    const state = Report.recall('rollouts', {run: runs[0][0], step: null, query: '', filter: 'all', sort: 'order', coloring: 'logprob', all: false});
    if (!runs.some(([value]) => value === state.run)) state.run = runs[0][0];
    const slider = make('input', {type: 'range', id: 'rollouts-step', min: 0, step: 1});
    const shownStep = make('output', {for: 'rollouts-step'});
    const whole = make('input', {type: 'checkbox', id: 'rollouts-all'});
    const search = make('input', {type: 'search', id: 'rollouts-search', placeholder: 'prompt, answer or completion'});
    const status = make('p', {class: 'status', role: 'status'});
    const key = make('p', {class: 'legend'});
    const body = make('div', {class: 'groups'});
    const show = makeList(body);

    const entries = () => source.steps(Number(state.run));
    const position = () => {
      const steps = entries().map((entry) => entry.step);
      return state.step === null ? steps.length - 1 : Math.max(0, steps.findLastIndex((step) => step <= state.step));
    };
    let turn = 0; // a late answer to an older request is dropped
    async function update() {
      const mine = ++turn;
      const all = entries();
      const at = position();
      Object.assign(slider, {max: all.length - 1, disabled: all.length < 2 || state.all});
      slider.value = at;
      slider.setAttribute('aria-valuetext', `step ${all[at].step}`);
      shownStep.textContent = state.all ? `all ${all.length} dumps` : `step ${all[at].step}`;
      Report.remember('rollouts', state);
      let groups = [];
      try {
        for (const entry of state.all ? all : [all[at]]) groups = groups.concat(await source.load(entry));
      } catch (error) {
        status.textContent = `${error.message}: it must lie beside this page.`;
        return;
      }
      if (mine !== turn) return;
      const colorings = [['none', 'nothing'], ...Report.available(groups).map((name) => [name, Report.colorings[name].label])];
      const wanted = state.coloring;
      color.fillWith(colorings);
      state.coloring = wanted; // a step without these numbers does not change the choice
      const scale = Report.advantageScale(groups);
      const chosen = choose(groups, state);
      status.textContent = count(chosen, groups);
      key.replaceChildren(...legend(color.value, scale));
      show(chosen, {coloring: color.value, scale, all: state.all});
    }
    let timer = 0;
    search.addEventListener('input', () => {
      state.query = search.value;
      clearTimeout(timer);
      timer = setTimeout(update, 150);
    });
    slider.addEventListener('input', () => {
      const at = Number(slider.value);
      state.step = at === entries().length - 1 ? null : entries()[at].step;
      update();
    });
    whole.addEventListener('change', () => { state.all = whole.checked; update(); });
    whole.checked = state.all;
    search.value = state.query;
    const color = select('coloring', [['none', 'nothing'], ...Object.entries(Report.colorings).map(([name, x]) => [name, x.label])], state, update);
    const labelled = (table) => Object.entries(table).map(([name, [label]]) => [name, label]);
    const controls = make('form', {class: 'controls', role: 'search', on: {submit: (event) => event.preventDefault()}});
    if (runs.length > 1) controls.append(field('Run', select('run', runs, state, update)));
    controls.append(
      make('div', {class: 'field wide'}, make('label', {for: 'rollouts-step', text: 'Step'}), make('div', {class: 'slider'}, slider, shownStep, make('label', {class: 'check'}, whole, 'all steps'))),
      field('Search', search),
      field('Show', select('filter', labelled(FILTERS), state, update)),
      field('Sort by', select('sort', labelled(SORTS), state, update)),
      field('Colour tokens by', color),
    );
    root.append(controls, status, key, body);
    document.addEventListener('keydown', (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest('input, select, textarea')) return;
      if (event.key === '/') { event.preventDefault(); search.focus(); }
      else if (event.key === 'j' || event.key === 'k') move(event.key === 'j' ? 1 : -1);
      else if ((event.key === '[' || event.key === ']') && !slider.disabled) {
        slider.value = Number(slider.value) + (event.key === ']' ? 1 : -1);
        slider.dispatchEvent(new Event('input'));
      }
    });
    function move(by) {
      const articles = [...body.querySelectorAll('article')];
      const now = articles.findIndex((article) => article.contains(document.activeElement));
      const next = articles[Math.max(0, Math.min(articles.length - 1, now + by))];
      next?.focus({preventScroll: true});
      next?.scrollIntoView({block: 'start'});
    }
    Report.ready = update();
  };
})();
