"""The report of a run: its files as one page, which opens in any browser. See docs/report.md."""

from grpo_jax.tools.report.write import follow as follow
from grpo_jax.tools.report.write import write_report as write_report
