"""The run-time check of signatures while tests run: beartype, for which an int is a float."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
