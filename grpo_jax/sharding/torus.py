"""How chips that share an array lie in the torus of a TPU slice, so that it is gathered and scattered side by side."""

from collections.abc import Sequence

import jax
import numpy as np

Groups = list[list[int]]


def stages(mesh: jax.sharding.Mesh, axis: str) -> list[Groups]:
    """Groups of places along the axis, one list for each side of the torus that the axis spans, the inner one first.

    An array of which each place has a part is gathered in these stages: first within each group of the first list, and
    so on. In the reverse order it is scattered. Devices that do not say where they lie are one group.
    """
    along = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1)
    devices = along.reshape(-1, along.shape[-1])[0]
    return lines([(*getattr(device, 'coords', ()), getattr(device, 'core_on_chip', 0)) for device in devices])


def lines(places: Sequence[tuple[int, ...]]) -> list[Groups]:
    """The stages of an axis whose chips lie at these coordinates; one of all chips where they are no grid of lines."""
    count = len(places)
    for size in (n for n in range(count, 1, -1) if count % n == 0):
        blocks = [places[i : i + size] for i in range(0, count, size)]
        varied = {i for block in blocks for i, along in enumerate(zip(*block, strict=True)) if len(set(along)) > 1}
        if len(varied) == 1:
            break
    else:
        return [[list(range(count))]] * (count > 1)
    side = varied.pop()
    at = [{place[side]: b * size + i for i, place in enumerate(block)} for b, block in enumerate(blocks)]
    if any(set(block) != set(at[0]) or len(block) < size for block in at):
        return [[list(range(count))]]
    across = lines([block[0][:side] + block[0][side + 1 :] for block in blocks])
    outer = [[[at[b][place] for b in group] for group in groups for place in sorted(at[0])] for groups in across]
    return [[list(range(i, i + size)) for i in range(0, count, size)], *outer]
