'use strict';
// Elements, texts and the page's memory. Texts of the data are only inserted by textContent.
const Report = {};

(() => {
  // control characters, and marks that change the direction of text, are shown as symbols
  const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]/gu;

  function name(character) {
    const code = character.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    return code === 0x7f ? '\u2421' : `\u27e8${code.toString(16).padStart(4, '0')}\u27e9`;
  }

  Report.visible = (text) => text.replace(HIDDEN, name);

  Report.make = (tag, options = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(options)) {
      if (value === undefined || value === false) continue;
      if (key === 'text') element.textContent = value;
      else if (key === 'on') for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
      else element.setAttribute(key, value === true ? '' : value);
    }
    element.append(...children);
    return element;
  };

  Report.number = (value, digits = 3) => {
    if (value === null || value === undefined) return '\u2013';
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1).replace('.0e', 'e').replace('e+', 'e').replaceAll('-', '\u2212');
    const text = Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(digits + (size >= 1000))));
    return text.replace('-', '\u2212');
  };

  Report.signed = (value) => (value > 0 ? '+' : '') + Report.number(value);

  Report.color = (variable) => getComputedStyle(document.documentElement).getPropertyValue(variable).trim();

  Report.json = (id) => JSON.parse(document.getElementById(id).textContent);

  const PLACE = `grpo_jax report ${location.pathname}`;

  function remembered() {
    try {
      return JSON.parse(sessionStorage.getItem(PLACE)) || {};
    } catch {
      return {};
    }
  }

  Report.recall = (key, otherwise) => ({...otherwise, ...remembered()[key]});

  Report.remember = (key, value) => {
    try {
      sessionStorage.setItem(PLACE, JSON.stringify({...remembered(), [key]: value}));
    } catch {
      // without storage, the page begins at the top
    }
  };
})();
