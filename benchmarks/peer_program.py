"""What benchmarks.tpu_peers is told of a peer's program: tunix_child.py and maxtext_child.py call it."""

import importlib.metadata
import json
import os
import time

import jax


def attention_block(case):
    """Columns of a block of splash attention: the most, up to 1,024, that divide a row of the case."""
    return max(n for n in range(128, 1025, 128) if not (case['queries'] + case['tokens']) % n)


def compile_and_write(lowered, packages, folder, options=None):
    """Compiles a Lowered; folder gets compiled.txt, and child.json: versions, figures, the compiler's refusal if any.

    packages are those whose versions are told beside jax's and libtpu's; options are the compiler's.
    """
    facts = {name: importlib.metadata.version(name) for name in (*packages, 'jax', 'libtpu')}
    facts['constraints'] = lowered.as_text().count('sharding_constraint')
    started = time.process_time()
    try:
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        facts['error'] = str(error)
    facts['seconds'] = time.process_time() - started
    if 'error' not in facts:
        memory = compiled.memory_analysis()
        facts['arguments'], facts['temporaries'] = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        facts['outputs'] = memory.output_size_in_bytes - memory.alias_size_in_bytes
        facts['peak'] = memory.peak_memory_in_bytes
        with open(os.path.join(folder, 'compiled.txt'), 'w', encoding='utf8') as file:
            file.write(compiled.as_text())
    with open(os.path.join(folder, 'child.json'), 'w', encoding='utf8') as file:
        json.dump(facts, file)
