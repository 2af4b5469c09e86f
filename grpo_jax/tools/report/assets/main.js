'use strict';
// Puts the page together. When a run is followed, each new report opens at the place of the reader.
(() => {
  Report.data = Report.json('report-data');
  const links = document.getElementById('sections');
  const nav = (id, text) => links.append(Report.make('li', {}, Report.make('a', {href: `#${id}`, text})));
  for (const [id, text] of [['variants', 'Runs'], ['differences', 'What differs']]) {
    if (document.getElementById(id)) nav(id, text);
  }
  Report.charts(document.getElementById('charts'), nav);
  nav('timeline', 'Timeline');
  nav('rollouts', 'Rollouts');
  Report.rollouts(document.getElementById('browser'));

  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => Report.redraw());
  const onPaper = (on) => { // charts are drawn before the print styles apply
    document.documentElement.toggleAttribute('data-print', on);
    Report.redraw();
  };
  addEventListener('beforeprint', () => onPaper(true));
  addEventListener('afterprint', () => onPaper(false));

  // the section that was at the top comes back to the top; earlier sections may have grown
  const {id, top} = Report.recall('place', {id: null, top: 0});
  Report.remember('place', {id: null, top: 0});
  if (id || top) {
    history.scrollRestoration = 'manual';
    Promise.resolve(Report.ready).then(() => requestAnimationFrame(() => {
      const start = document.getElementById(id)?.getBoundingClientRect().top;
      scrollTo({top: start === undefined ? top : start + scrollY - top, behavior: 'instant'});
    }));
  }

  if (!Report.data.stamp) return;
  window.reportStamp = (stamp) => {
    if (stamp === Report.data.stamp) return;
    const above = [...document.querySelectorAll('main section')].findLast((section) => section.getBoundingClientRect().top <= 0);
    if (above) Report.remember('place', {id: above.id, top: above.getBoundingClientRect().top});
    else Report.remember('place', {id: null, top: scrollY});
    location.reload();
  };
  setInterval(() => {
    if (document.hidden) return;
    const script = Report.make('script', {src: `${Report.data.stem}_stamp.js?${Date.now()}`, on: {load: () => script.remove(), error: () => script.remove()}});
    document.head.append(script);
  }, 2000);
})();
