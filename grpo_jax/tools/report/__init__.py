"""The report of a run: what its files say, as one page that opens in any browser. See docs/report.md."""

from grpo_jax.tools.report.write import watch as watch
from grpo_jax.tools.report.write import write_report as write_report
