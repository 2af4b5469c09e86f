"""Schedule: the sizes of a rollout on one shard, every choice that the engine makes, and the programs it can reach.

All are pure functions of plain numbers. The engine asks a Schedule what to do next. `reachable_programs` follows the
same choices from the first batch on, so all programs that the engine can ask for are known before anything runs.
"""

from typing import NamedTuple

from grpo_jax.errors import BadInput


class BatchSize(NamedTuple):
    """The size of a DecodeBatch on one shard."""

    prompts: int  # in the prompt cache: one for each group or, after the batch has shrunk, one for each row
    rows: int
    chunks: int  # the batch has the first `chunks` of Schedule.chunks


class ProgramKey(NamedTuple):
    """Kind and sizes of a sampler program, which identify the program; the sizes are for one shard."""

    kind: str  # of programs.PROGRAMS
    prompts: int = 0  # in the prompt cache that the program makes or reads
    rows: int = 0
    columns: tuple[int, ...] = ()  # of each chunk that the program makes or reads
    survivors: int = 0  # rows that stay when a batch shrinks

    def __str__(self):
        sizes = [f'{self.rows} rows'] * bool(self.rows) + [f'{self.prompts} prompts'] * bool(self.prompts)
        text = ' of '.join(sizes) + f' x {"+".join(map(str, self.columns))}' * bool(self.columns)
        words = [self.kind, f'{self.survivors} of' * bool(self.survivors), text]
        return ' '.join(word for word in words if word)


WEIGHTS, STATE, REMAINING, FINISH = (ProgramKey(kind) for kind in ('weights', 'state', 'remaining', 'finish'))
# not of every rollout: to replay (learner.old_logprobs='decode'), to go on after a pause, and where there are adapters;
# with mesh.sampler the last one sends the adapters
GIVEN_STATE, RESUMED_STATE, INSPECT, ADAPTERS = (
    ProgramKey(kind) for kind in ('given state', 'resumed state', 'inspect', 'adapters')
)


class Schedule(NamedTuple):
    """The sizes of one shard's rollout; all that happens is a function of the sizes and the completions' lengths."""

    prompts: int  # of the step
    group: int
    chunks: tuple[int, ...]  # columns of the chunks, in order; together at least max_tokens
    rows: tuple[int, ...]  # numbers of rows that a decode batch may have after it has shrunk, falling
    segment: int  # decode steps between two visits of the host
    prompt_columns: int  # that a prompt takes in the prompt cache
    column_bytes: int  # keys and values of one column of one row, all layers
    budget: int  # bytes of cache; 0: unlimited
    carried: int = 0  # of the prompts, those whose rows may have tokens of earlier steps; all rows decode in one batch

    @property
    def whole_batch(self) -> BatchSize:
        """The batch of all rows in all columns."""
        return BatchSize(self.prompts, self.prompts * self.group, len(self.chunks))

    def bytes(self, prompts: int, rows: int, chunks: int) -> int:
        """Bytes of a cache with `prompts` prompts, and `rows` rows in the first `chunks` chunks."""
        return self.column_bytes * (prompts * self.prompt_columns + rows * sum(self.chunks[:chunks]))

    def copy_bytes(self, rows: int, chunks: int) -> int:
        """Bytes that shrinking to `rows` rows needs besides the cache: the smaller copy of its largest piece."""
        return self.column_bytes * rows * max(*self.chunks[:chunks], self.prompt_columns)

    def peak_bytes(self, prompts: int, rows: int, chunks: int) -> int:
        """Bytes of a cache with the copy that is made when it shrinks to the next smaller size, or when it opens."""
        fewer = max((n for n in self.rows if n < rows), default=0)
        shrinking = self.bytes(prompts, rows, chunks) + self.copy_bytes(fewer, chunks)
        return max(shrinking, self.opening_bytes) if rows == self.prompts * self.group else shrinking

    @property
    def opening_bytes(self) -> int:
        """Bytes while the batch of all rows opens: the batch, and a second chunk where carried rows are prefilled."""
        return self.bytes(self.prompts, self.prompts * self.group, 1) + self.bytes(0, self.carried * self.group, 1)

    def fits(self, prompts: int, rows: int, chunks: int) -> bool:
        """Whether a cache of this size stays within the budget, also while the cache shrinks."""
        return not self.budget or self.peak_bytes(prompts, rows, chunks) <= self.budget

    def fresh_batch(self) -> BatchSize:
        """The batch that new prompts begin in, with one chunk: as many prompts as fit, a divisor of all prompts.

        Raises BadInput when the budget does not hold one group in one chunk, or one row at full length.
        """
        fitting = [n for n in range(1, self.prompts + 1) if self.prompts % n == 0 and self.fits(n, n * self.group, 1)]
        if not fitting or not self.fits(1, 1, len(self.chunks)):
            least = max(self.peak_bytes(1, self.group, 1), self.peak_bytes(1, 1, len(self.chunks)))
            remedy = f'holds not even one group; at least {least / 2**30:.3g} GiB are needed'
            raise BadInput('rollout.cache_gib', self.budget / 2**30, remedy)
        return BatchSize(fitting[-1], fitting[-1] * self.group, 1)

    def resumed_batches(self, chunks: int) -> list[BatchSize]:
        """The batches of `chunks` chunks in which preempted rows may go on, the largest first."""
        sizes = (self.prompts * self.group, *self.rows)
        return [BatchSize(n, n, chunks) for n in sizes if self.fits(n, n, chunks)]

    def resumed_batch(self, unfinished: int, longest: int) -> BatchSize:
        """The batch that unfinished rows go on in, all or as many as fit; the longest of them has `longest` tokens."""
        chunks = next(n for n in range(1, len(self.chunks) + 1) if sum(self.chunks[:n]) > longest)
        fitting = self.resumed_batches(chunks)
        return min(
            (size for size in fitting if size.rows >= unfinished), key=lambda size: size.rows, default=fitting[0]
        )

    def smaller_batches(self, size: BatchSize) -> list[BatchSize]:
        """The batches that a batch may shrink to, the largest first.

        A smaller batch has a copy of the prompt for each row; long prompts can take more bytes than the rows save.
        """
        sizes = [BatchSize(n, n, size.chunks) for n in self.rows if n < size.rows]
        return [smaller for smaller in sizes if self.fits(*smaller)]

    def shrunk_batch(self, size: BatchSize, live: int) -> BatchSize:
        """The smallest batch that holds the live rows: the batch itself when no smaller one fits."""
        return [size, *(smaller for smaller in self.smaller_batches(size) if smaller.rows >= live)][-1]

    def admitting_batch(self, size: BatchSize) -> BatchSize:
        """The largest batch that still fits when it gets another chunk: this batch or a smaller one."""
        if self.fits(size.prompts, size.rows, size.chunks + 1):
            return size
        rows = next(n for n in self.rows if n < size.rows and self.fits(n, n, size.chunks + 1))
        return BatchSize(rows, rows, size.chunks)

    def wake_key(self, size: BatchSize) -> ProgramKey:
        """The program that lets a batch's paused rows go on; size: the batch's size."""
        return ProgramKey('wake', size.prompts, size.rows)

    def key(self, kind: str, size: BatchSize) -> ProgramKey:
        """The program that makes ('open', 'resume', 'carry') or decodes ('decode') a batch of that size."""
        return ProgramKey(kind, size.prompts, size.rows, self.chunks[: size.chunks])

    def add_key(self, size: BatchSize) -> ProgramKey:
        """The program that makes the last chunk for a batch of that size."""
        return ProgramKey('add', rows=size.rows, columns=self.chunks[size.chunks - 1 : size.chunks])

    def shrink_keys(self, size: BatchSize, smaller: BatchSize) -> list[ProgramKey]:
        """The programs that shrink a batch; none where the sizes are the same.

        The first chooses the rows that stay; the others copy these rows' part of the prompt cache and of each chunk.
        """
        if size == smaller:
            return []
        choose = ProgramKey('choose', size.prompts, size.rows, survivors=smaller.rows)
        prompts = choose._replace(kind='gather')
        return [choose, prompts, *(prompts._replace(prompts=0, columns=(n,)) for n in self.chunks[: size.chunks])]


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
    """Makes the Schedule of a shard with these sizes (prompts, group size, max tokens).

    A batch may shrink to half its rows `halvings` times, or more often until a cache of full length fits the budget; a
    rollout of at most two segments shrinks for the budget alone. If all rows fit at full length, there is one chunk.
    Else columns grow by doubling, and the first chunk has two blocks (of `block` columns), since XLA copies a chunk of
    one block. Other arguments: see Schedule.
    """
    prompts, group, max_tokens = sizes
    columns, total = -(-max_tokens // block) * block, prompts * group
    whole = Schedule(prompts, group, (columns,), (), segment, prompt_columns, column_bytes, budget)
    chunks, rows, size = [columns], [], total
    if not whole.fits(*whole.whole_batch):
        chunks = [min(2 * block, columns)]
        while sum(chunks) < columns:
            chunks.append(min(sum(chunks), columns - sum(chunks)))
    # a rollout of a segment or two ends before shrinking could pay for the programs
    while size > 1 and ((size * 2**halvings > total and max_tokens > 2 * segment) or not whole.fits(size, size, 1)):
        size = -(-size // 2)
        rows.append(size)
    return whole._replace(chunks=tuple(chunks), rows=tuple(rows))


def let_carry(schedule: Schedule, carried: int) -> Schedule:
    """The Schedule for steps with carried rows: rows of the first `carried` prompts may have tokens of earlier steps.

    All rows decode in one batch. Rows without tokens begin after the longest carried row, so that a second chunk may
    be needed, of as many columns. Most carried rows have ended when a step begins, so that the batch soon shrinks to
    the new rows and a few more. Raises BadInput when the budget does not hold all rows in both chunks.
    """
    columns, new = sum(schedule.chunks), (schedule.prompts - carried) * schedule.group
    few = -(-carried * schedule.group // 8)
    rows = (new + few, *(-(-new // 2**halved) for halved in range(len(schedule.rows)))) if schedule.rows else ()
    schedule = schedule._replace(chunks=(columns, columns), carried=carried, rows=tuple(dict.fromkeys(rows)))
    # each row of a smaller batch has a copy of its prompt: one that outgrew the budget with the second chunk would have
    # to drop live rows
    schedule = schedule._replace(rows=tuple(n for n in schedule.rows if schedule.fits(n, n, len(schedule.chunks))))
    if not schedule.fits(*schedule.whole_batch):
        raise BadInput(
            'rollout.cache_gib',
            schedule.budget / 2**30,
            'does not hold all rows under way at once, as collection.in_flight needs: they take '
            f'{schedule.peak_bytes(*schedule.whole_batch) / 2**30:.3g}; raise it, or lower collection.in_flight',
        )
    return schedule


def reachable_programs(schedule: Schedule) -> list[ProgramKey]:
    """Lists every program that a rollout may need from its first token on, for completions of any lengths."""
    first = schedule.fresh_batch()
    keys = dict.fromkeys((WEIGHTS, STATE, REMAINING, schedule.key('open', first)))
    if schedule.carried:
        keys = dict.fromkeys((WEIGHTS, RESUMED_STATE, REMAINING, schedule.key('carry', first)))
    unvisited, visited = [first], set()
    if not schedule.fits(*schedule.whole_batch):
        for chunks in range(1, len(schedule.chunks) + 1):
            for size in schedule.resumed_batches(chunks):
                keys[schedule.key('resume', size)] = None
                unvisited.append(size)
    while unvisited:
        size = unvisited.pop()
        if size in visited:
            continue
        visited.add(size)
        keys[schedule.key('decode', size)] = None
        if schedule.carried:
            keys[schedule.wake_key(size)] = None
        # between two segments a batch may grow by a chunk, or shrink
        if size.chunks < len(schedule.chunks):
            admitting = schedule.admitting_batch(size)
            grown = admitting._replace(chunks=size.chunks + 1)
            keys |= dict.fromkeys([*schedule.shrink_keys(size, admitting), schedule.add_key(grown)])
            unvisited.append(grown)
        for smaller in schedule.smaller_batches(size):
            keys |= dict.fromkeys(schedule.shrink_keys(size, smaller))
            unvisited.append(smaller)
    return [*keys, FINISH]


def largest_programs(schedule: Schedule) -> list[ProgramKey]:
    """Lists the reachable programs that need most memory, in the order of a rollout.

    A fresh batch grows to all its columns, with as many rows as each chunk allows. Listed are the programs that make it
    grow, and that decode it before each loss of rows, at its full columns, and in the next smaller size. Where rows can
    be preempted, the programs of the largest batch of preempted rows in all columns are listed too.
    """
    size = schedule.fresh_batch()
    keys = [WEIGHTS, STATE, schedule.key('open', size)]
    if schedule.carried:
        keys = [WEIGHTS, RESUMED_STATE, schedule.key('carry', size)]
    while size.chunks < len(schedule.chunks):
        admitting = schedule.admitting_batch(size)
        if admitting != size:
            keys += [schedule.key('decode', size), *schedule.shrink_keys(size, admitting)]
        size = admitting._replace(chunks=size.chunks + 1)
        keys.append(schedule.add_key(size))
    keys.append(schedule.key('decode', size))
    for smaller in schedule.smaller_batches(size)[:1]:
        keys += [*schedule.shrink_keys(size, smaller), schedule.key('decode', smaller)]
    if not schedule.fits(schedule.prompts, schedule.prompts * schedule.group, size.chunks):
        most = schedule.resumed_batches(size.chunks)[0]
        keys += [schedule.key('resume', most), schedule.key('decode', most)]
    return [*dict.fromkeys(keys), FINISH]
