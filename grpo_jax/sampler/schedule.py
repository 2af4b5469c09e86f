"""Schedule: the sizes of a rollout on one shard, every choice that the engine makes, and the programs they can reach.

Pure functions of plain numbers. The engine asks a Schedule what to do next, and `reachable` follows the same
choices from the first batch on, so that what can be asked for is known before anything runs.
"""

from typing import NamedTuple

from grpo_jax.errors import BadInput


class BatchSize(NamedTuple):
    """The size of a DecodeBatch."""

    prompts: int  # of the prompt cache: one a group, or, once rows have been chosen, one a row
    rows: int
    chunks: int  # the first so many of Schedule.chunks


class ProgramKey(NamedTuple):
    """What sets one of the sampler's programs apart; sizes are those of one shard."""

    kind: str
    prompts: int = 0  # of the prompt cache that it makes or reads
    rows: int = 0
    columns: tuple[int, ...] = ()  # of each chunk that it makes or reads
    survivors: int = 0  # rows that are left when a batch shrinks

    def __str__(self):
        sizes = [f'{self.rows} rows'] * bool(self.rows) + [f'{self.prompts} prompts'] * bool(self.prompts)
        text = ' of '.join(sizes) + f' x {"+".join(map(str, self.columns))}' * bool(self.columns)
        words = [self.kind, f'{self.survivors} of' * bool(self.survivors), text]
        return ' '.join(word for word in words if word)


WEIGHTS, STATE, REMAINING, FINISH = (ProgramKey(kind) for kind in ('weights', 'state', 'remaining', 'finish'))
# compiled when they are first needed: of a training run only by learner.old_logprobs = 'decode' (given tokens), and the
# last where there are adapters
GIVEN_STATE, RESUMED_STATE = ProgramKey('given state'), ProgramKey('resumed state')
INSPECT = ProgramKey('inspect')


class Schedule(NamedTuple):
    """Sizes of one shard's rollout; what happens is a function of it and of the completions' lengths."""

    prompts: int  # of the step
    group: int
    chunks: tuple[int, ...]  # columns of the chunks, in order; together at least max_tokens
    rows: tuple[int, ...]  # that a decode batch may have after shrinking, falling
    segment: int  # decode steps between two visits of the host
    prompt_columns: int  # of a prompt in the prompt cache
    column_bytes: int  # keys and values of one column of one row, all layers
    budget: int  # bytes of cache; 0: unlimited

    @property
    def whole(self) -> BatchSize:
        """The batch of all rows in all columns."""
        return BatchSize(self.prompts, self.prompts * self.group, len(self.chunks))

    def bytes(self, prompts: int, rows: int, chunks: int) -> int:
        """Bytes of a cache of that many prompts and rows in the first `chunks` chunks."""
        return self.column_bytes * (prompts * self.prompt_columns + rows * sum(self.chunks[:chunks]))

    def copy_bytes(self, rows: int, chunks: int) -> int:
        """Bytes that shrinking to `rows` rows adds for a moment: the smaller copy of the largest piece."""
        return self.column_bytes * rows * max(*self.chunks[:chunks], self.prompt_columns)

    def peak(self, prompts: int, rows: int, chunks: int) -> int:
        """Bytes of a cache and of the copy that shrinking it to the next smaller size makes."""
        fewer = max((n for n in self.rows if n < rows), default=0)
        return self.bytes(prompts, rows, chunks) + self.copy_bytes(fewer, chunks)

    def fits(self, prompts: int, rows: int, chunks: int) -> bool:
        """Whether that cache and every shrinking of it stay within the budget."""
        return not self.budget or self.peak(prompts, rows, chunks) <= self.budget

    def fresh_batch(self) -> BatchSize:
        """The batch that new prompts begin in: the most prompts, dividing all, whose groups fit in one chunk.

        BadInput when the budget holds not even one group, or not one row at full length.
        """
        fitting = [n for n in range(1, self.prompts + 1) if self.prompts % n == 0 and self.fits(n, n * self.group, 1)]
        if not fitting or not self.fits(1, 1, len(self.chunks)):
            least = max(self.peak(1, self.group, 1), self.peak(1, 1, len(self.chunks)))
            raise BadInput(
                'rollout.cache_gib',
                self.budget / 2**30,
                f'holds not even one group; at least {least / 2**30:.3g} are needed',
            )
        return BatchSize(fitting[-1], fitting[-1] * self.group, 1)

    def resumed_batches(self, chunks: int) -> list[BatchSize]:
        """The batches of preempted rows that fit in that many chunks, the largest first."""
        sizes = (self.prompts * self.group, *self.rows)
        return [BatchSize(n, n, chunks) for n in sizes if self.fits(n, n, chunks)]

    def resumed_batch(self, unfinished: int, longest: int) -> BatchSize:
        """The batch that unfinished rows go on in, all of them or as many as fit; the longest has `longest` tokens."""
        chunks = next(n for n in range(1, len(self.chunks) + 1) if sum(self.chunks[:n]) > longest)
        fitting = self.resumed_batches(chunks)
        return min(
            (size for size in fitting if size.rows >= unfinished), key=lambda size: size.rows, default=fitting[0]
        )

    def smaller_batches(self, size: BatchSize) -> list[BatchSize]:
        """The batches that this one may shrink to, the largest first.

        A smaller batch keeps a copy of the prompt for each row, which with long prompts can be more than it saves.
        """
        sizes = [BatchSize(n, n, size.chunks) for n in self.rows if n < size.rows]
        return [smaller for smaller in sizes if self.fits(*smaller)]

    def shrunk_batch(self, size: BatchSize, live: int) -> BatchSize:
        """The smallest batch that holds the live rows; the batch itself when no smaller one fits."""
        return [size, *(smaller for smaller in self.smaller_batches(size) if smaller.rows >= live)][-1]

    def admitting_batch(self, size: BatchSize) -> BatchSize:
        """The largest batch, this one or a smaller one, that fits with one chunk more."""
        if self.fits(size.prompts, size.rows, size.chunks + 1):
            return size
        rows = next(n for n in self.rows if n < size.rows and self.fits(n, n, size.chunks + 1))
        return BatchSize(rows, rows, size.chunks)

    def open_key(self, size: BatchSize) -> ProgramKey:
        """The program that prefills new prompts."""
        return ProgramKey('open', size.prompts, size.rows, self.chunks[: size.chunks])

    def resume_key(self, size: BatchSize) -> ProgramKey:
        """The program that prefills preempted rows."""
        return ProgramKey('resume', size.prompts, size.rows, self.chunks[: size.chunks])

    def decode_key(self, size: BatchSize) -> ProgramKey:
        """The program that decodes a segment."""
        return ProgramKey('decode', size.prompts, size.rows, self.chunks[: size.chunks])

    def add_key(self, size: BatchSize) -> ProgramKey:
        """The program that makes the last chunk of a batch."""
        return ProgramKey('add', rows=size.rows, columns=self.chunks[size.chunks - 1 : size.chunks])

    def choose_key(self, size: BatchSize, smaller: BatchSize) -> ProgramKey:
        """The program that chooses the rows that are left when a batch shrinks."""
        return ProgramKey('choose', size.prompts, size.rows, survivors=smaller.rows)

    def gather_keys(self, size: BatchSize, smaller: BatchSize) -> list[ProgramKey]:
        """The programs that copy what is left of the prompt cache and of each chunk."""
        prompts = ProgramKey('gather', size.prompts, size.rows, survivors=smaller.rows)
        chunks = self.chunks[: size.chunks]
        return [prompts, *(ProgramKey('gather', 0, size.rows, (n,), smaller.rows) for n in chunks)]

    def shrink_keys(self, size: BatchSize, smaller: BatchSize) -> list[ProgramKey]:
        """All programs that shrink a batch; none where the sizes are the same."""
        if size == smaller:
            return []
        return [self.choose_key(size, smaller), *self.gather_keys(size, smaller)]


def make_schedule(
    sizes: tuple[int, int, int],
    *,
    block: int,
    segment: int,
    halvings: int,
    prompt_columns: int,
    column_bytes: int,
    budget: int,
) -> Schedule:
    """Schedule of a shard of sizes (prompts, group size, max tokens).

    Rows are halved, and where not all rows fit at full length, columns grow by doubling. The first chunk then has 2
    blocks: with one, XLA copies it. Rows are halved `halvings` times, or more often where a full-length cache would not
    fit the budget.
    """
    prompts, group, max_tokens = sizes
    columns, total = -(-max_tokens // block) * block, prompts * group
    whole = Schedule(prompts, group, (columns,), (), segment, prompt_columns, column_bytes, budget)
    chunks, rows, size = [columns], [], total
    if not whole.fits(*whole.whole):
        chunks = [min(2 * block, columns)]
        while sum(chunks) < columns:
            chunks.append(min(sum(chunks), columns - sum(chunks)))
    # a rollout of a segment or two ends before shrinking could pay for the programs
    while size > 1 and ((size * 2**halvings > total and max_tokens > 2 * segment) or not whole.fits(size, size, 1)):
        size = -(-size // 2)
        rows.append(size)
    return whole._replace(chunks=tuple(chunks), rows=tuple(rows))


def reachable(schedule: Schedule) -> list[ProgramKey]:
    """Every program that a rollout from its first token may need, whatever the lengths of its completions."""
    first = schedule.fresh_batch()
    keys = dict.fromkeys((WEIGHTS, STATE, REMAINING, schedule.open_key(first)))
    unvisited, visited = [first], set()
    if not schedule.fits(*schedule.whole):
        for chunks in range(1, len(schedule.chunks) + 1):
            for size in schedule.resumed_batches(chunks):
                keys[schedule.resume_key(size)] = None
                unvisited.append(size)
    while unvisited:
        size = unvisited.pop()
        if size in visited:
            continue
        visited.add(size)
        keys[schedule.decode_key(size)] = None
        # what may happen to a batch between two segments: it grows by a chunk, or shrinks
        if size.chunks < len(schedule.chunks):
            admitting = schedule.admitting_batch(size)
            grown = admitting._replace(chunks=size.chunks + 1)
            keys |= dict.fromkeys([*schedule.shrink_keys(size, admitting), schedule.add_key(grown)])
            unvisited.append(grown)
        for smaller in schedule.smaller_batches(size):
            keys |= dict.fromkeys(schedule.shrink_keys(size, smaller))
            unvisited.append(smaller)
    return [*keys, FINISH]


def largest(schedule: Schedule) -> list[ProgramKey]:
    """The reachable programs that need most memory, in the order of a rollout.

    They decode a fresh batch in all columns that it may reach, the same with as many rows as each further chunk
    allows, or once halved, and, where rows can be preempted, the largest batch of those in all columns.
    """
    size = schedule.fresh_batch()
    keys = [WEIGHTS, STATE, schedule.open_key(size)]
    while size.chunks < len(schedule.chunks):
        admitting = schedule.admitting_batch(size)
        if admitting != size:
            keys += [schedule.decode_key(size), *schedule.shrink_keys(size, admitting)]
        size = admitting._replace(chunks=size.chunks + 1)
        keys.append(schedule.add_key(size))
    keys.append(schedule.decode_key(size))
    for smaller in schedule.smaller_batches(size)[:1]:
        keys += [*schedule.shrink_keys(size, smaller), schedule.decode_key(smaller)]
    if not schedule.fits(schedule.prompts, schedule.prompts * schedule.group, size.chunks):
        most = schedule.resumed_batches(size.chunks)[0]
        keys += [schedule.resume_key(most), schedule.decode_key(most)]
    return [*dict.fromkeys(keys), FINISH]
