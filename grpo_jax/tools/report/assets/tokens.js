'use strict';
// A completion token by token, coloured by a number of each token.
(() => {
  const {make, number, signed, visible} = Report;
  const FIRST = {tokens: 1000, characters: 4000}; // what is shown of a completion at once

  const spread = (value) => Math.max(-1, Math.min(1, value));
  const list = (row, key) => (Array.isArray(row[key]) ? row[key] : null);
  const known = (value) => value !== null && value !== undefined;

  // name -> {label, ends, of(row, i): number or null, share(value, scale): -1 to 1}
  const COLORINGS = {
    logprob: {
      label: 'log-probability', ends: ['\u22124 or less', '0'], reversed: true,
      of: (row, i) => list(row, 'l')?.[i],
      share: (value) => spread(-value / 4),
    },
    advantage: {
      label: 'advantage', diverging: true,
      of: (row, i) => list(row, 'k') && (Array.isArray(row.a) ? row.a[i] : row.a),
      share: (value, scale) => spread(value / scale),
    },
    step: {
      label: 'reward of a step', diverging: true, ends: ['\u22121 or less', '1 or more'],
      of: (row, i) => list(row, 's')?.[i],
      share: (value) => spread(value),
    },
    ratio: {
      label: 'ratio of the policy to the sampler', diverging: true, ends: ['0.74 or less', '1.35 or more'],
      of: (row, i) => {
        const [now, then] = [list(row, 'o')?.[i], list(row, 'l')?.[i]];
        return known(now) && known(then) ? Math.exp(now - then) : null;
      },
      share: (value) => spread(Math.log(value) / 0.3),
    },
    entropy: {
      label: 'entropy', ends: ['0', '3 nats or more'],
      of: (row, i) => list(row, 'e')?.[i],
      share: (value) => spread(value / 3),
    },
    kl: {
      label: 'KL from the reference', ends: ['0', '0.5 nats or more'],
      of: (row, i) => {
        const [reference, policy] = [list(row, 'f')?.[i], (list(row, 'o') ?? list(row, 'l'))?.[i]];
        if (!known(reference) || !known(policy)) return null;
        return Math.exp(reference - policy) - (reference - policy) - 1;
      },
      share: (value) => spread(value / 0.5),
    },
  };
  Report.colorings = COLORINGS;

  // the colourings that any of the rows has numbers for
  Report.available = (groups) => {
    const rows = groups.slice(0, 50).flatMap((group) => group.rows);
    return Object.keys(COLORINGS).filter((name) => rows.some((row) => row.k?.some((_, i) => known(COLORINGS[name].of(row, i)))));
  };

  Report.advantageScale = (groups) => {
    let most = 0;
    for (const group of groups) {
      for (const row of group.rows) {
        for (const value of Array.isArray(row.a) ? row.a : [row.a]) most = Math.max(most, Math.abs(value ?? 0));
      }
    }
    return most || 1;
  };

  function paint(share) {
    const strength = Math.round(Math.abs(share) * 55);
    return strength < 2 ? '' : `color-mix(in srgb, var(${share < 0 ? '--cold' : '--heat'}) ${strength}%, transparent)`;
  }

  function describe(row, i) {
    const parts = [JSON.stringify(visible(row.k[i]))];
    for (const [name, coloring] of Object.entries(COLORINGS)) {
      const value = coloring.of(row, i);
      if (!known(value)) continue;
      parts.push(`${name} ${name === 'advantage' ? signed(value) : number(value)}`);
      if (name === 'logprob') parts.push(`probability ${number(Math.exp(value))}`);
    }
    return parts.join(', ');
  }

  function spans(row, from, to, name, scale, tell) {
    const coloring = COLORINGS[name];
    const fragment = document.createDocumentFragment();
    for (let i = from; i < to; i++) {
      const text = visible(row.k[i]);
      const span = make('span', {class: 'token', text});
      const value = coloring?.of(row, i);
      if (known(value)) span.style.backgroundColor = paint(coloring.share(value, scale));
      span.addEventListener('pointerenter', () => tell(i));
      span.addEventListener('click', () => tell(i));
      fragment.append(span);
    }
    return fragment;
  }

  // the element of a completion's text; more is shown on demand
  Report.completion = (row, name, scale) => {
    const text = row.c ?? row.k.join('');
    const body = make('div', {class: 'text', tabindex: 0, role: 'group', 'aria-label': 'Completion', dir: 'auto'});
    const detail = make('output', {class: 'detail'});
    const by = row.k ? 'tokens' : 'characters';
    const whole = row.k ? row.k.length : text.length;
    let shown = 0;
    const tell = (i) => { detail.textContent = `token ${i + 1}: ${describe(row, i)}`; };
    const button = make('button', {type: 'button', class: 'rest', on: {click: () => add(shown * 10)}});
    function add(count) {
      const end = Math.min(whole, shown + count);
      if (row.k) body.append(spans(row, shown, end, name, scale, tell));
      else body.append(document.createTextNode(visible(text.slice(shown, end))));
      shown = end;
      button.hidden = shown >= whole;
      button.textContent = `Show more: ${(whole - shown).toLocaleString('en')} ${by} are left`;
    }
    add(FIRST[by]);
    if (!whole) body.append(make('em', {text: 'empty'}));
    let chosen = -1; // by keyboard
    body.addEventListener('keydown', (event) => {
      const move = {ArrowRight: 1, ArrowLeft: -1}[event.key];
      if (!move || !row.k || !shown) return;
      event.preventDefault();
      body.children[chosen]?.classList.remove('chosen');
      chosen = Math.max(0, Math.min(shown - 1, chosen + move));
      body.children[chosen].classList.add('chosen');
      tell(chosen);
    });
    return [body, button, detail];
  };
})();
