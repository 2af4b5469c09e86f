"""Where a run's data came from, in data.json; and whether another path leads to the same data and the same model."""

from collections.abc import Sequence
import filecmp
import glob
import os

from grpo_jax import data
from grpo_jax.errors import BadInput
from grpo_jax.hosts import json_file
from grpo_jax.models import hf
from grpo_jax.run import checkpoint, steering
from grpo_jax.sharding import compiled


def record_origins(workdir: str, origins: Sequence[data.Origin]) -> None:
    """Writes workdir/data.json, so that what goes on in there reads the same data: the same commits of the hub.

    Nothing is written of data that are made and not read.
    """
    if any(any(origin) for origin in origins):
        os.makedirs(workdir, exist_ok=True)
        rows = [origin._asdict() for origin in origins]
        rows = [{name: value for name, value in row.items() if value or name != 'digest'} for row in rows]
        json_file.write(os.path.join(workdir, 'data.json'), rows)


def recorded_origins(workdir: str) -> list[data.Origin]:
    """The origins that record_origins wrote; [] for a workdir without."""
    path = os.path.join(workdir, 'data.json')
    origins = json_file.read(path) if os.path.isfile(path) else []
    try:
        return [data.Origin(**origin) for origin in origins]
    except TypeError:
        raise BadInput('origins of the data', path, 'is no list of them; bring it back from a copy') from None


def with_digests(experiment) -> list[data.Origin]:
    """The origins of an experiment; those that are folders with the digest of the examples that the run began with."""
    began = {origin.digest for origin in recorded_origins(experiment.workdir)} - {''}
    origins = experiment.settings.data.origins
    if not any(origin.folder for origin in origins):
        return list(origins)
    digest = min(began) if began else digest_of(experiment.load('train'))
    return [origin._replace(digest=digest) if origin.folder else origin for origin in origins]


def digest_of(dataset: data.Dataset) -> str:
    """A digest of the examples, their order, and the weights of their sources."""
    examples = [(e.id, e.prompt, e.answer, e.messages, e.meta) for e in dataset.examples]
    return compiled.hashed(repr((examples, [weight for weight, _ in dataset.sources])))


def check_paths(experiment, steered: steering.Steering | None) -> None:
    """BadInput when a path of the config was changed to one that leads to something else than the run began with."""
    changed = {change.key: change for change in experiment.changes if change.kind == steering.PATH}
    model = changed.pop('model.path', None)
    other = [] if model is None or _is_same_model(experiment, model.old) else [model]
    if changed and not are_same_data(experiment, experiment.workdir):
        other += changed.values()
    if other:
        steering.refuse(other, experiment.workdir, steered)


def are_same_data(experiment, workdir: str) -> bool:
    """Whether an experiment's data are those of a workdir's data.json: by commits of the hub, else by the examples."""
    origins, began = experiment.settings.data.origins, recorded_origins(workdir)
    if len(origins) == len(began) and all(
        now.commit and now.commit == then.commit for now, then in zip(origins, began, strict=True)
    ):
        return True
    digests = {origin.digest for origin in began} - {''}
    return len(digests) == 1 and digests == {digest_of(experiment.load('train'))}


def _is_same_model(experiment, old):
    """Whether config and tokenizer in the experiment's folder are the run's, and the weights where they are read.

    old: the path that the run began with, whose weights count until there is a checkpoint.
    """
    copy, folder = os.path.join(experiment.workdir, 'model'), experiment.folder
    names = hf.config_files(folder)
    if not os.path.isdir(copy) or names != hf.config_files(copy) or not _are_equal(copy, folder, names):
        return False
    if experiment.settings.model.random_init or checkpoint.steps(experiment.workdir):
        return True
    weights = [sorted(map(os.path.basename, glob.glob(f'{glob.escape(path)}/*.safetensors'))) for path in (old, folder)]
    return weights[0] == weights[1] and _are_equal(old, folder, weights[1])


def _are_equal(one, other, names):
    """Whether the files of these names have the same bytes in two folders."""
    return all(filecmp.cmp(os.path.join(one, name), os.path.join(other, name), shallow=False) for name in names)
