"""The run-time check of signatures while tests run: beartype, for which an int is a float."""

import inspect

from beartype import BeartypeConf, beartype
import jaxtyping

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
jaxtyped = jaxtyping.jaxtyped


def jaxtyped_if_checked(*, typechecker):
    """What jaxtyping.jaxtyped returns, but leaves a function alone in which there is nothing to check.

    The import hook decorates functions within functions anew at each call of the outer one, and most have no types.
    """

    def decorate(function):
        if not inspect.isclass(function) and (jaxtyping.config.jaxtyping_disable or not function.__annotations__):
            return function
        return jaxtyped(function, typechecker=typechecker)

    return decorate
