'use strict';
// The curves: one uPlot a panel, drawn again when colours change.
(() => {
  const {make, number, color} = Report;
  const COLORS = 8;
  const HEIGHT = 205;
  const DASHES = [[], [6, 4], [2, 3]];
  const drawn = new Map(); // element -> uPlot

  const colorOf = (index) => color(`--c${index % COLORS}`);
  const faded = (paint, share) => `color-mix(in srgb, ${paint} ${share}%, transparent)`;

  function range(panel, low, high) {
    if (low === null || high === null) return [0, 1];
    if (panel.stacked) low = 0;
    const span = high - low || Math.abs(high) * 0.1 || 1;
    const room = 0.06 * span;
    const least = low >= 0 && low - room < 0 ? 0 : low - room;
    return [least, high <= 1 && high > 0.9 && low >= 0 ? 1 : high + room];
  }

  // the panel's lines as uPlot's columns, and its series
  function columns(panel, several) {
    const tables = panel.lines.map((line) => {
      const table = [line.steps, line.values];
      if (line.low) table.push(line.low, line.high);
      return table;
    });
    const data = uPlot.join(tables);
    const series = [{label: 'step', value: (_, x) => (x === null ? '' : number(x, 6))}];
    const bands = [];
    panel.lines.forEach((line, place) => {
      const index = several ? line.variant : place;
      const paint = colorOf(index);
      const single = line.steps.length < 2;
      const common = {points: {show: panel.points || single, size: 6, fill: paint}, stroke: paint, spanGaps: true};
      series.push({
        ...common,
        meaning: line.meaning,
        label: several ? Report.data.variants[line.variant] : line.name,
        width: 1.75,
        dash: DASHES[Math.floor(index / COLORS) % DASHES.length],
        value: (_, y) => number(y),
      });
      if (line.low) {
        const at = series.length;
        const edge = {...common, width: 0, points: {show: false}, class: 'edge'};
        series.push({...edge, label: 'least'}, {...edge, label: 'greatest'});
        if (!panel.points) bands.push({series: [at + 1, at], fill: faded(paint, 20)});
      }
    });
    return {data, series, bands};
  }

  function stacked(panel) {
    const tables = panel.lines.map((line) => [line.steps, line.values]);
    const raw = uPlot.join(tables);
    const data = [raw[0]];
    raw.slice(1).forEach((values, place) => {
      const below = place ? data[place] : null;
      data.push(values.map((y, i) => (y ?? 0) + (below ? below[i] : 0)));
    });
    const series = [{label: 'step', value: (_, x) => (x === null ? '' : number(x, 6))}];
    const bands = [];
    panel.lines.forEach((line, place) => {
      const paint = colorOf(place);
      const fill = faded(paint, 45);
      series.push({
        label: line.name, meaning: line.meaning, stroke: paint, width: 1, points: {show: raw[0].length < 2},
        fill: place ? undefined : fill, value: (u, _, at, i) => (i === null ? '' : number(raw[at][i])),
      });
      if (place) bands.push({series: [place + 1, place], fill});
    });
    return {data, series, bands};
  }

  function whiskers(panel) {
    return (plot) => {
      if (!panel.points) return;
      const context = plot.ctx;
      let at = 1;
      for (const line of panel.lines) {
        if (line.low) {
          context.save();
          context.strokeStyle = plot.series[at].stroke(plot, at);
          context.lineWidth = 1.25 * devicePixelRatio;
          context.beginPath();
          line.steps.forEach((step, i) => {
            if (line.low[i] === null) return;
            const x = Math.round(plot.valToPos(step, 'x', true));
            const ends = [line.low[i], line.high[i]].map((y) => plot.valToPos(y, 'y', true));
            context.moveTo(x, ends[0]);
            context.lineTo(x, ends[1]);
            for (const y of ends) {
              context.moveTo(x - 3 * devicePixelRatio, y);
              context.lineTo(x + 3 * devicePixelRatio, y);
            }
          });
          context.stroke();
          context.restore();
          at += 2;
        }
        at += 1;
      }
    };
  }

  // a thin line at each step with a diagnosis or an event
  function marks(plot) {
    const context = plot.ctx;
    const {left, top, width, height} = plot.bbox;
    context.save();
    context.strokeStyle = color('--warn');
    context.globalAlpha = 0.4;
    context.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const mark of Report.data.marks) {
      const x = plot.valToPos(mark.step, 'x', true);
      if (x < left || x > left + width) continue;
      context.beginPath();
      context.moveTo(x, top);
      context.lineTo(x, top + height);
      context.stroke();
    }
    context.restore();
  }

  // without a pointer, the legend shows the last values
  function rest(plot) {
    if (plot.cursor.idx === null || plot.cursor.idx === undefined || plot.cursor.left < 0) {
      plot.setLegend({idx: plot.data[0].length - 1}, false);
    }
  }

  function draw(panel, place) {
    drawn.get(place)?.destroy();
    const width = place.clientWidth;
    if (!width) return;
    const several = Report.data.variants.length > 1;
    const {data, series, bands} = panel.stacked ? stacked(panel) : columns(panel, several);
    const positive = panel.logarithmic && panel.lines.every((line) => line.values.some((y) => y > 0));
    if (positive) for (const values of data.slice(1)) values.forEach((y, i) => { if (!(y > 0)) values[i] = null; });
    const ink = color('--muted');
    const grid = {stroke: color('--grid'), width: 1};
    const axis = {stroke: ink, grid, ticks: {...grid, size: 4}, font: `11px ${color('--sans')}`};
    const plot = new uPlot({
      width, height: HEIGHT, series, bands,
      padding: [8, 10, 0, 0],
      scales: {
        x: {time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high])},
        y: positive ? {distr: 3} : {range: (_, low, high) => range(panel, low, high)},
      },
      axes: [
        {...axis, size: 26, space: 60, label: 'step', labelSize: 18, labelFont: axis.font, values: (_, ticks) => ticks.map((x) => (Number.isInteger(x) ? number(x, 6) : ''))},
        {...axis, size: 48, space: 32, values: (_, ticks) => ticks.map((y) => (y === null ? '' : number(y)))},
      ],
      cursor: {sync: {key: 'steps'}, drag: {x: true, y: false}, points: {size: 6}},
      legend: {show: true, live: true},
      hooks: {draw: [whiskers(panel), marks], ready: [rest], setCursor: [rest]},
    }, data, place);
    plot.root.querySelectorAll('.u-series').forEach((row, i) => { row.title = plot.series[i].meaning ?? ''; });
    drawn.set(place, plot);
  }

  function summary(panel) {
    const several = Report.data.variants.length > 1;
    const parts = panel.lines.map((line) => {
      const name = several ? `${line.name} of ${Report.data.variants[line.variant]}` : line.name;
      const last = line.steps.length - 1;
      const ends = [0, last].map((i) => `${number(line.values[i])} at step ${number(line.steps[i], 6)}`);
      return last ? `${name} ${ends[0]}, ${ends[1]}` : `${name} ${ends[0]}`;
    });
    return `${panel.title}: ${parts.join('; ')}`;
  }

  function table(panel) {
    const several = Report.data.variants.length > 1;
    const {data} = columns({...panel, stacked: false}, several);
    const heads = ['step'];
    for (const line of panel.lines) {
      heads.push(several ? Report.data.variants[line.variant] : line.name);
      if (line.low) heads.push('from', 'to');
    }
    const rows = data[0].map((_, i) => make('tr', {}, ...data.map((values) => make('td', {text: number(values[i], 6)}))));
    return make('table', {}, make('thead', {}, make('tr', {}, ...heads.map((text) => make('th', {scope: 'col', text})))), make('tbody', {}, ...rows));
  }

  // what each metric of a panel is, by docs/metrics.md
  function meanings(panel) {
    const known = new Map(); // meaning -> names
    for (const {name, meaning} of panel.lines.filter((line) => line.meaning)) known.set(meaning, (known.get(meaning) ?? new Set()).add(name));
    if (!known.size) return [];
    const page = Report.data.docs ? make('a', {href: Report.data.docs, text: 'docs/metrics.md'}) : 'docs/metrics.md';
    const list = make('dl', {}, ...[...known].map(([text, names]) => make('div', {}, make('dt', {text: [...names].join(', ')}), make('dd', {text}))));
    return [make('div', {class: 'meanings'}, list, make('p', {}, 'More in ', page, '.'))];
  }

  function figure(panel) {
    const place = make('div', {class: 'plot', role: 'img', 'aria-label': summary(panel)});
    const scroll = make('div', {class: 'scroll numbers', tabindex: 0, role: 'region', 'aria-label': `Numbers of ${panel.title}`});
    const numbers = make('details', {class: 'numbers', on: {toggle: () => {
      if (numbers.open && !scroll.firstChild) scroll.append(table(panel));
    }}}, make('summary', {text: 'What it is, and its numbers'}), ...meanings(panel), scroll);
    const caption = make('figcaption', {}, make('h3', {text: panel.title}));
    if (panel.note) caption.append(make('p', {text: panel.note}));
    return [make('figure', {class: 'panel'}, caption, place, numbers), place];
  }

  // whether a panel is one constant number, which needs no chart
  function constant(panel) {
    return panel.lines.every((line) => line.values.length > 1 && line.values.every((y) => y === line.values[0]) &&
      (!line.low || panel.points));
  }

  function unchanged(panels) {
    if (!panels.length) return [];
    const values = new Map();
    const titles = new Map();
    for (const line of panels.flatMap((panel) => panel.lines)) {
      values.set(line.name, [...new Set([...(values.get(line.name) ?? []), number(line.values[0])])]);
      titles.set(line.name, line.meaning);
    }
    const list = make('dl', {}, ...[...values].map(([name, texts]) => make('div', {title: titles.get(name)}, make('dt', {text: name}), make('dd', {text: texts.join(', ')}))));
    return [make('div', {class: 'unchanged'}, make('p', {text: 'The same in all steps:'}), list)];
  }

  Report.charts = (root, nav) => {
    const places = [];
    for (const section of Report.data.sections) {
      const id = section.heading.toLowerCase().replace(/[^a-z]+/g, '-');
      const grid = make('div', {class: 'grid'});
      const still = section.panels.filter(constant);
      for (const panel of section.panels.filter((panel) => !still.includes(panel))) {
        const [element, place] = figure(panel);
        grid.append(element);
        places.push([panel, place]);
      }
      const heading = make('h2', {id: `${id}-heading`, text: section.heading});
      const more = section.heading === 'More' && Report.data.sections.length > 1;
      const body = more ? make('details', {class: 'more'}, make('summary', {text: `${section.panels.length - still.length} other metrics`}), grid) : grid;
      root.append(make('section', {id, 'aria-labelledby': heading.id}, heading, body, ...unchanged(still)));
      if (more) body.addEventListener('toggle', () => Report.redraw());
      nav(id, section.heading);
    }
    if (!Report.data.sections.length) root.append(make('p', {class: 'empty', text: 'No step is done yet, so there is no curve.'}));
    Report.redraw = () => places.forEach(([panel, place]) => draw(panel, place));
    Report.redraw();
    let width = root.clientWidth;
    new ResizeObserver(() => requestAnimationFrame(() => {
      if (root.clientWidth === width) return;
      width = root.clientWidth;
      Report.redraw();
    })).observe(root);
    for (const swatch of document.querySelectorAll('.swatch')) {
      swatch.style.backgroundColor = `var(--c${swatch.dataset.variant % COLORS})`;
    }
  };
})();
