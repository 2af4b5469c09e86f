// MathJax also reads $...$, as GitHub does
window.MathJax = { tex: { inlineMath: [['$', '$']] } };
