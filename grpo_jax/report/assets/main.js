'use strict';
// Puts the page together, and in a run that is watched takes up each new report where the reader is.
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
  addEventListener('beforeprint', () => Report.redraw());
  addEventListener('afterprint', () => Report.redraw());

  if (!Report.data.stamp) return;
  window.reportStamp = (stamp) => {
    if (stamp === Report.data.stamp) return;
    Report.remember('place', {top: scrollY});
    location.reload();
  };
  setInterval(() => {
    if (document.hidden) return;
    const script = Report.make('script', {src: `report_stamp.js?${Date.now()}`, on: {load: () => script.remove(), error: () => script.remove()}});
    document.head.append(script);
  }, 2000);
  const {top} = Report.recall('place', {top: 0});
  if (top) Promise.resolve(Report.ready).then(() => requestAnimationFrame(() => scrollTo({top, behavior: 'instant'})));
})();
