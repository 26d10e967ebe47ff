"""Which tokens the next step computes, and what becomes of the tokens that came back.

Running sequences decode first, one token each; then prefill chunks fill the token budget; then the most urgent waiting
sequences are admitted as blocks allow. The work of a step is array operations over slots; Python objects are touched
only when a sequence is seated, preempted or ends. No torch.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from headrace.engine import displacement
from headrace.engine.block_pool import BlockPool
from headrace.engine.errors import InvalidRequest
from headrace.engine.guide import Outcome
from headrace.engine.layout import StepLayout
from headrace.engine.plan import Ints, StepPlan
from headrace.engine.prefix_tree import PrefixTree
from headrace.engine.priorities import Priorities
from headrace.engine.readings import ReadOff
from headrace.engine.request import EngineStats, FinishReason, StepOutput
from headrace.engine.sequence import Sequence, SequenceStatus
from headrace.engine.sharers import Sharers
from headrace.engine.slots import Slots
from headrace.engine.waiting import WaitingQueue

LOOKAHEAD = 64
"""Waiting sequences that may be passed over in one step because a running one is filling their prefix."""

PLANNED = 8192
"""Waiting sequences of one priority and deadline that are ordered by prompt at a time."""

NOT_FINITE = (
    "the model computed values that are not finite numbers: its weights are damaged, or too large for the dtype it runs in;"
    " check them, or set HEADRACE_DTYPE to bfloat16 or float32, and report it if that does not help"
)

_NONE: Ints = np.empty(0, np.int32)


class _Seat(Enum):
    """What came of trying to seat a waiting sequence."""

    TAKEN = auto()
    WAIT = auto()
    FULL = auto()


@dataclass(slots=True)
class _Chunks:
    """Prefill chunks of the step being made, and the tokens that may still be added."""

    budget: int
    slots: list[int] = field(default_factory=list)
    lens: list[int] = field(default_factory=list)


class Scheduler:
    """Owns the waiting queue, the slots and the block pool; the only one that takes and gives back blocks."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_slots: int,
        max_context: int,
        max_batched_tokens: int,
        prefix_cache: bool = True,
        merge_prefixes: bool = True,
        priorities: Priorities | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self.max_batched_tokens = max(max_batched_tokens, max_slots)
        self.prefix_cache = prefix_cache
        self.tree = PrefixTree(block_size)
        self.pool = BlockPool(num_blocks, self.tree)
        self.slots = Slots(max_slots, max_context, block_size)
        self._priorities = priorities or Priorities(())
        self._clock = clock
        self._waiting = WaitingQueue(PLANNED)
        self._by_id: dict[str, Sequence] = {}
        self._leavers: dict[tuple[int, int], Sequence] = {}
        merging = prefix_cache and merge_prefixes
        self._layout = StepLayout(self.slots, Sharers(self.slots, self.pool) if merging else None)
        self._ended = StepOutput()
        self._preemptions = self._queries = self._hits = 0
        self._prompt_tokens = self._generated = 0

    # -- requests in and out ------------------------------------------------------------------------------------

    def add(self, seq: Sequence, *, held: bool = False) -> None:
        """Queue a new sequence. Its id must not be in use; it must fit the pool when alone. held: until ``release``."""
        self._by_id[seq.id] = seq
        if not held:
            self._waiting.push(seq)

    def release(self, seq: Sequence, error: InvalidRequest | None = None) -> None:
        """Let a held sequence wait like others, or end it: there is an error. Nothing if it has ended meanwhile."""
        if seq.status is SequenceStatus.FINISHED:
            return
        if error is None:
            self._waiting.push(seq)
        else:
            self._end(seq, FinishReason.ABORT, error=error)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended, or an ending has not been reported."""
        return bool(self._by_id or self._ended)

    def abort(self, request_id: str) -> None:
        """End a sequence now, wherever it stands; unknown ids are ignored."""
        if seq := self._by_id.get(request_id):
            self._end(seq, FinishReason.ABORT)

    def finish(self, request_id: str, at_token: int) -> None:
        """End a sequence whose text is complete after its first ``at_token`` generated tokens."""
        if seq := self._by_id.get(request_id):
            self._end(seq, FinishReason.STOP, keep=seq.prompt_len + at_token)

    def take_ended(self) -> StepOutput:
        """Sequences that ended outside a step (aborted, finished by the text side)."""
        ended, self._ended = self._ended, StepOutput()
        return ended

    # -- one step -----------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run before a step in flight is read back (or at all)."""
        self._seat_urgent()
        decodes = self._decodes()
        chunks = _Chunks(self.max_batched_tokens - len(decodes))
        partial = self._partial_prefills()
        newcomer = self._waiting.head()
        while partial and (
            newcomer is None or self._at(partial[0]).request.priority <= newcomer.request.priority
        ):
            self._chunk(partial.pop(0), chunks)
        self._admit(chunks)
        for slot in partial:
            self._chunk(slot, chunks)
        if not len(decodes) and not chunks.slots:
            return None
        return self._layout.plan(decodes, np.array(chunks.slots, np.int32), np.array(chunks.lens, np.int32))

    def retire(
        self,
        plan: StepPlan,
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.int32] | None = None,
        read: ReadOff | None = None,
    ) -> StepOutput:
        """Take in the sampled tokens of a finished step, [K] in the order of ``plan.sample_rows``; -1: none could be chosen.

        logprobs: those of ``plan.logprob_rows``, a line for each as ``Sequence.logprobs`` keeps them. read: what
        ``plan.readings`` asked for.
        """
        s, slots = self.slots, plan.slots[plan.sample_rows]
        if read is not None:
            self._fail(self._layout.reader.retire(plan.number, read))
        if logprobs is not None:
            self._fail(self._note_logprobs(plan, slots, logprobs))
        self._fail(self._whose(slots, plan.epochs, np.flatnonzero(tokens < 0)))
        same = s.epoch[slots] == plan.epochs
        for i in np.flatnonzero(~same).tolist():
            self._retire_leaver((int(slots[i]), int(plan.epochs[i])), int(tokens[i]))
        slots, new = slots[same], tokens[same].astype(np.int32)
        s.tokens[slots, s.retired[slots]] = new
        s.retired[slots] += 1
        s.in_flight[slots] -= 1
        self._generated += int(np.count_nonzero(s.generates[slots]))
        stop_ids = s.stop_ids[slots, : int(s.num_stop_ids[slots].max(initial=0))]
        stopped = (new[:, None] == stop_ids).any(1) & (s.retired[slots] > s.no_stop_before[slots])
        self._note_first_tokens(slots)
        output = self.take_ended()
        for i in np.flatnonzero(s.stream[slots] & ~stopped).tolist():
            output.tokens.append((self._at(slots[i]).id, [int(new[i])]))
        ending = stopped | (s.retired[slots] == s.limit[slots])
        guided = np.flatnonzero(s.guided[slots])
        for i, slot in zip(guided.tolist(), slots[guided].tolist(), strict=True):
            seq = self._at(slot)
            if seq.guide is not None and seq.guide.outcome is not None:
                ending[i] &= not self._follow_guide(seq, int(s.retired[slot]), stopped=stopped[i])
        for i in np.flatnonzero(ending).tolist():
            reason = FinishReason.STOP if stopped[i] else FinishReason.LENGTH
            self._end(self._at(slots[i]), reason, stop_token=int(new[i]) if stopped[i] else None)
        output.extend(self.take_ended())
        return output

    def stats(self) -> EngineStats:
        """A snapshot of queues, blocks and totals."""
        s = self.slots
        spare = s.num_blocks[s.active] * self.block_size - (s.known[s.active] - 1)
        return EngineStats(
            running=s.running,
            waiting=len(self._by_id) - s.running,
            blocks_total=self.pool.num_blocks,
            blocks_free=self.pool.free,
            blocks_cached=self.pool.cached,
            blocks_live=self.pool.live,
            block_size=self.block_size,
            prefix_queries=self._queries,
            prefix_hits=self._hits,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated,
            steps=self._layout.steps,
            wasted_tokens=int(np.maximum(spare, 0).sum()),
        )

    def check(self) -> None:
        """Assert what must hold between steps: no block is lost, and each is counted once for each sequence that holds it."""
        self.pool.check()
        held = np.zeros(self.pool.num_blocks, np.int32)
        for slot in np.flatnonzero(self.slots.active).tolist():
            np.add.at(held, self.slots.blocks(slot), 1)
        assert (held == self.pool.references()).all(), "a reference is not held by any running sequence"

    # -- decode -------------------------------------------------------------------------------------------------

    def _decodes(self) -> Ints:
        """Slots that feed a single token, each with a block to write it to; the least urgent make way if blocks end."""
        s = self.slots
        while True:
            ready = s.active & (s.computed >= s.prefill) & (s.computed < s.known) & (s.known < s.limit)
            rows = np.flatnonzero(ready).astype(np.int32)
            short = rows[s.computed[rows] >= s.num_blocks[rows] * self.block_size]
            if len(short) <= self.pool.available:
                break
            self._preempt(self._least_urgent())
        if len(short):
            self._append_blocks(short, self.pool.take(len(short)))
        return rows

    def _append_blocks(self, slots: Ints, blocks: Ints) -> None:
        """One more block for each of these slots."""
        s = self.slots
        index = s.num_blocks[slots]
        s.block_tables[slots, index] = blocks
        s.num_blocks[slots] += 1
        self._layout.grow(slots, index, blocks)

    # -- prefill ------------------------------------------------------------------------------------------------

    def _partial_prefills(self) -> list[int]:
        """Slots whose prompt is not fully computed, most urgent first."""
        s = self.slots
        partial = np.flatnonzero(s.active & (s.computed < s.prefill)).tolist()
        return sorted(partial, key=lambda slot: self._at(slot).urgency)

    def _chunk(self, slot: int, chunks: _Chunks) -> None:
        """Schedule as much of a slot's prompt as the budget allows; its full blocks can be shared from now on.

        Even in this very step: every layer writes all its keys and values before any row attends to them.
        """
        s, size = self.slots, self.block_size
        start = int(s.computed[slot])
        length = min(int(s.prefill[slot]) - start, chunks.budget)
        if length <= 0:
            return
        chunks.budget -= length
        chunks.slots.append(slot)
        chunks.lens.append(length)
        for node in self._at(slot).nodes[start // size : (start + length) // size]:
            if node is not None:
                node.ready = True

    def _admit(self, chunks: _Chunks) -> None:
        """Seat waiting sequences, most urgent first, while slots, blocks and budget last.

        One whose next block is just being filled by a running sequence is passed over: soon it can share it.
        The first that does not fit ends the search, so that nothing small overtakes it for ever.
        """
        passed: list[Sequence] = []
        while self._waiting.head() and self.slots.free and chunks.budget > 0 and len(passed) < LOOKAHEAD:
            seq = self._waiting.pop()
            seat = self._seat(seq)
            if seat is _Seat.TAKEN:
                self._chunk(seq.slot, chunks)
                continue
            passed.append(seq)
            if seat is _Seat.FULL:
                break
        self._waiting.put_back(passed)

    def _seat_urgent(self) -> None:
        """Seat newcomers that outrank somebody who runs, and who runs makes way where no slot or no block is free.

        As many as the step can begin to compute. Before decodes are chosen, because who makes way is none of them.
        """
        passed: list[Sequence] = []
        while (
            (newcomer := self._waiting.head()) is not None
            and self._goes_first(newcomer)
            and len(passed) < LOOKAHEAD
        ):
            seat = self._seat(self._waiting.pop(), make_way=True)
            if seat is not _Seat.TAKEN:
                passed.append(newcomer)
            if seat is _Seat.FULL:
                break
        self._waiting.put_back(passed)

    def _goes_first(self, newcomer: Sequence) -> bool:
        """Whether it may push somebody back, and those who go before it leave it some of the step's tokens."""
        s, priority = self.slots, newcomer.request.priority
        lower = s.active & (s.priority > priority)
        if not self._priorities[priority].preempts or not lower.any():
            return False
        ahead = s.active & ~lower
        unread = int(np.maximum(s.prefill - s.computed, 0)[ahead].sum())
        return unread == 0 or unread < self.max_batched_tokens - s.running

    def _seat(self, seq: Sequence, *, make_way: bool = False) -> _Seat:
        """Give a sequence a slot and blocks for all its tokens, if they are there and this is the moment.

        make_way: less urgent sequences give up theirs, if then they are there.
        """
        if seq.in_flight:
            return _Seat.WAIT
        s, size, priority = self.slots, self.block_size, seq.request.priority
        shared, parent = _NONE, 0
        if self.prefix_cache:
            match = self.tree.match(seq.request.salt, seq.tokens, seq.need_from)
            if match.pending:
                return _Seat.WAIT
            shared, parent = np.array(match.blocks, np.int32), match.parent
        need = -(-len(seq.tokens) // size) - len(shared)
        missing = need + self.pool.cached_among(shared) + self._kept(priority) - self.pool.available
        if make_way:
            missing += self._short()
        no_slot = s.free <= int(self._priorities.reserved_above(priority) * s.max_slots)
        full = missing > 0 or no_slot
        if full and not (make_way and self._displace(priority, missing, shared)):
            return _Seat.FULL
        self.pool.share(shared)
        blocks = np.concatenate([shared, self.pool.take(need)])
        slot = s.seat(seq, displaceable=seq.displaced < self._priorities[priority].max_preemptions)
        s.block_tables[slot, : len(blocks)] = blocks
        s.num_blocks[slot] = len(blocks)
        s.computed[slot] = len(shared) * size
        seq.status = SequenceStatus.RUNNING
        if self.prefix_cache:
            seq.nodes, seq.tail = [None] * len(shared), parent
            self._grow_nodes(seq, len(seq.tokens) // size, seq.tokens, ready=False)
        self._note_admission(seq, len(shared) * size)
        return _Seat.TAKEN

    def _grow_nodes(self, seq: Sequence, upto: int, tokens: Ints, *, ready: bool) -> None:
        """Make the sequence's full blocks, up to block ``upto``, known to the prefix tree."""
        size, known = self.block_size, len(seq.nodes)
        blocks = self.slots.blocks(seq.slot)[known:upto].tolist()
        nodes, seq.tail = self.tree.insert(seq.tail, tokens[known * size : upto * size], blocks, ready=ready)
        seq.nodes += nodes

    def _kept(self, priority: int) -> int:
        """Blocks that a newcomer leaves: for those as urgent who run, whose recomputation it is not worth, to grow in,
        and for more urgent ones to come. Alone it may have all."""
        s = self.slots
        growing = int(np.count_nonzero(s.active & (s.priority <= priority)))
        reserved = int(self._priorities.reserved_above(priority) * self.pool.num_blocks)
        return max(min(growing, self.pool.num_blocks // 50), reserved) if s.running else 0

    def _short(self) -> int:
        """Running sequences whose next token needs another block."""
        s = self.slots
        return int(np.count_nonzero(s.active & (s.computed >= s.num_blocks * self.block_size)))

    def _note_admission(self, seq: Sequence, cached: int) -> None:
        self._layout.seat(seq)
        if seq.scheduled_at is None:
            self._queries += seq.prompt_len
            self._hits += min(cached, seq.prompt_len)
            seq.scheduled_at = self._clock()
            seq.cached_tokens = cached
            self._prompt_tokens += seq.prompt_len

    # -- making way ---------------------------------------------------------------------------------------------

    def _displace(self, priority: int, missing: int, shared: Ints) -> bool:
        """Push back as many less urgent sequences as a newcomer needs, if that helps it."""
        leavers = displacement.victims(self.slots, self.pool, priority, missing, shared)
        for leaver in leavers:
            leaver.displaced += 1
            self._preempt(leaver)
        return bool(leavers)

    def _least_urgent(self) -> Sequence:
        """Whom to preempt when running sequences need more blocks than there are."""
        s = self.slots
        rows = np.flatnonzero(s.active)
        return self._at(rows[np.lexsort((s.arrival[rows], s.priority[rows]))[-1]])

    def _preempt(self, seq: Sequence) -> None:
        """Take a running sequence's slot and blocks; it waits again and recomputes prompt and generated tokens."""
        slot, epoch = seq.slot, int(self.slots.epoch[seq.slot])
        self._leave(seq)
        seq.status = SequenceStatus.WAITING
        seq.preemptions += 1
        self._preemptions += 1
        if seq.in_flight:
            self._leavers[slot, epoch] = seq
        self._waiting.put_back([seq])

    def _leave(self, seq: Sequence) -> None:
        """Give back slot and blocks; what has been computed of whole blocks stays findable until evicted."""
        s, size, slot = self.slots, self.block_size, seq.slot
        blocks = s.blocks(slot).copy()
        full = int(min(s.computed[slot], s.retired[slot] - 1)) // size
        if self.prefix_cache:
            for node in seq.nodes[full:]:
                if node is not None and not node.ready:
                    self.tree.forget(node.block)
            self._grow_nodes(seq, full, s.tokens[slot], ready=True)
        seq.nodes = []
        s.vacate(seq)
        self.pool.release(blocks)

    # -- endings ------------------------------------------------------------------------------------------------

    def _end(
        self,
        seq: Sequence,
        reason: FinishReason,
        *,
        stop_token: int | None = None,
        keep: int | None = None,
        error: InvalidRequest | None = None,
    ) -> None:
        """Take a sequence out for good and report its completion with the next output."""
        if seq.status is SequenceStatus.RUNNING:
            self._leave(seq)
        seq.status = SequenceStatus.FINISHED
        del self._by_id[seq.id]
        self._ended.completions.append(seq.completion(reason, self._clock(), stop_token, keep, error))

    def _fail(self, spoilt: Iterable[Sequence | None]) -> None:
        """End sequences of which the model computed what is no finite number.

        No block that they computed or read is found again, since nobody knows in which of them it began.
        """
        for seq in spoilt:
            if seq is None or seq.status is SequenceStatus.FINISHED:
                continue
            self._end(seq, FinishReason.ABORT, error=InvalidRequest(NOT_FINITE, code="non_finite_values"))
            tokens = np.append(seq.tokens, np.int32(-1))  # a match ends before the last token
            self.pool.forget(self.tree.match(seq.request.salt, tokens, len(tokens)).blocks)

    def _follow_guide(self, seq: Sequence, length: int, *, stopped: bool) -> bool:
        """End a sequence, or put it back, if its guide says so now that it has ``length`` tokens. Whether it did."""
        guide = seq.guide
        outcome = guide.due(length) if guide else None
        if guide is None or outcome is None or (stopped and outcome is not Outcome.FAILED):
            return False
        match outcome:
            case Outcome.COMPLETE:
                self._end(seq, FinishReason.STOP)
            case Outcome.CLOSED:
                self._end(seq, FinishReason.LENGTH)
            case Outcome.BACK if guide.forced:
                self._put_back(seq, guide.length)
                guide.resume()
            case Outcome.BACK:  # it was complete at that length
                self._end(seq, FinishReason.LENGTH, keep=guide.length)
            case Outcome.FAILED:
                self._end(seq, FinishReason.ABORT, error=_too_complex(seq))
        return True

    def _put_back(self, seq: Sequence, length: int) -> None:
        """Drop a sequence's tokens from ``length`` on, those in flight included, and let it go on from there.

        It keeps its slot if the block that it writes to next is not in the prefix tree; otherwise it waits for new ones.
        """
        del seq.logprobs[length - seq.prompt_len :]
        if seq.status is SequenceStatus.RUNNING:
            if (length - 1) // self.block_size >= len(seq.nodes):
                self.slots.rewind(seq.slot, length)
                return
            self._leave(seq)
            seq.status = SequenceStatus.WAITING
            self._waiting.put_back([seq])
        seq.tokens = seq.tokens[:length]
        seq.in_flight = 0

    def _retire_leaver(self, tenancy: tuple[int, int], token: int) -> None:
        """A token of a sequence that has left its slot: still wanted if it was preempted, dropped if it has ended."""
        seq = self._leavers.get(tenancy)
        if seq is None:
            return
        seq.in_flight -= 1
        if not seq.in_flight:
            del self._leavers[tenancy]
        if seq.status is SequenceStatus.FINISHED:
            return
        seq.tokens = np.append(seq.tokens, np.int32(token))
        if seq.first_token_at is None:
            seq.first_token_at = self._clock()
        stopped = token in seq.stop_ids and len(seq.tokens) > seq.no_stop_before
        if self._follow_guide(seq, len(seq.tokens), stopped=stopped):
            self._leavers.pop(tenancy, None)
            return
        if seq.request.stream and not stopped:
            self._ended.tokens.append((seq.id, [token]))
        if stopped:
            self._end(seq, FinishReason.STOP, stop_token=token)
        elif len(seq.tokens) >= seq.limit:
            self._end(seq, FinishReason.LENGTH)

    def _note_logprobs(
        self, plan: StepPlan, slots: Ints, logprobs: NDArray[np.int32]
    ) -> list[Sequence | None]:
        """Hand each line to its sequence, wherever it is by now; those of sequences that have ended are dropped.

        Returns whose are NaN.
        """
        rows = plan.logprob_rows
        whose = self._whose(slots, plan.epochs, rows)
        for seq, line in zip(whose, logprobs.copy(), strict=True):
            if seq is not None:
                seq.logprobs.append(line)
        return [whose[i] for i in np.flatnonzero(np.isnan(logprobs[:, 0].view(np.float32)))]

    def _whose(self, slots: Ints, epochs: Ints, rows: NDArray[np.integer]) -> list[Sequence | None]:
        """The tenants of these rows' slots, wherever they are by now; None for one that ended where it was."""
        s = self.slots
        tenancies = zip(slots[rows].tolist(), epochs[rows].tolist(), strict=True)
        return [
            s.sequence[slot] if s.epoch[slot] == epoch else self._leavers.get((slot, epoch))
            for slot, epoch in tenancies
        ]

    def _note_first_tokens(self, slots: Ints) -> None:
        s = self.slots
        for slot in slots[s.unsampled[slots]].tolist():
            s.unsampled[slot] = False
            seq = self._at(slot)
            if seq.first_token_at is None:
                seq.first_token_at = self._clock()

    def _at(self, slot: int) -> Sequence:
        seq = self.slots.sequence[slot]
        assert seq is not None, "an empty slot was scheduled"
        return seq


def _too_complex(seq: Sequence) -> InvalidRequest:
    assert seq.request.grammar is not None
    param = seq.request.grammar.param
    return InvalidRequest(
        f"{param} is too complex: what may come next could not be found within the limits of a step",
        param=param,
        code="grammar_too_complex",
    )
