"""Kernels that make the plan of tokens at default positions, and transpose any plan.

There are few labels and positions already ascend, so this is a counting sort: count the tokens of
each block, sum the counts, and move each token to its place. The sort also stores how many keys of
a class come before each position; the ends of every run are then looked up there.

Shapes: P plan rows, T queries, S keys, L tokens of either; PARTS labels, or classes and padding.
"""

# Triton compiles these functions, not Python, so a type checker cannot check them.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count_kernel(
    parts, counts, length, num_blocks, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """counts [P, blocks, PARTS]: how many tokens of each part are in each block of parts [P, L]."""
    program = tl.program_id(0)
    block, row = program % num_blocks, (program // num_blocks).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    part = tl.load(parts + row * length + token, mask=token < length, other=PARTS)
    for index in tl.static_range(PARTS):
        found = tl.sum((part == index).to(tl.int32), axis=0)
        tl.store(counts + (row * num_blocks + block) * PARTS + index, found)


@triton.jit
def scan_kernel(
    counts, starts, offsets, num_blocks,
    PARTS: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """starts [P, blocks, PARTS]: places of a block's first tokens; offsets [P, LISTED + 1].

    Parts from LISTED on (padding) come after all others.
    """
    row = tl.program_id(0).to(tl.int64)
    counts += row * num_blocks * PARTS
    starts += row * num_blocks * PARTS
    begin = 0
    for index in tl.static_range(PARTS):
        if index <= LISTED:
            tl.store(offsets + row * (LISTED + 1) + index, begin)
        for first in range(0, num_blocks, BLOCK):
            block = first + tl.arange(0, BLOCK)
            here = block < num_blocks
            count = tl.load(counts + block * PARTS + index, mask=here, other=0)
            before = tl.cumsum(count, axis=0) - count
            tl.store(starts + block * PARTS + index, begin + before, mask=here)
            begin += tl.sum(count, axis=0)
    if PARTS == LISTED:
        tl.store(offsets + row * (LISTED + 1) + LISTED, begin)


@triton.jit
def place_kernel(
    parts, starts, order, places, before, length, num_blocks, shift,
    PARTS: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """order, places [P, L] of the sorted tokens; optionally before [P, L + 1, LISTED].

    before[i] is the index that a token of each part would get if it came just before token i.
    """
    program = tl.program_id(0)
    block, row = program % num_blocks, (program // num_blocks).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    here = token < length
    part = tl.load(parts + row * length + token, mask=here, other=PARTS)
    starts += (row * num_blocks + block) * PARTS
    for index in tl.static_range(PARTS):
        mine = part == index
        count = mine.to(tl.int32)
        place = tl.load(starts + index) + tl.cumsum(count, axis=0) - count
        if index < LISTED:
            tl.store(order + row * length + place, token, mask=mine)
            tl.store(places + row * length + place, token + shift, mask=mine)
            if before is not None:
                line = (row * (length + 1) + token) * LISTED + index
                tl.store(before + line, place, mask=here)
                tl.store(before + line + LISTED, place + count, mask=token == length - 1)
        else:
            tl.store(order + row * length + place, -1, mask=mine)
            tl.store(places + row * length + place, 0, mask=mine)


@triton.jit
def runs_kernel(
    labels, order, before, reach, plateaus, run_lo, run_hi, run_flat,
    num_queries, num_keys, shift, num_blocks, CLASSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """run_lo, run_hi and, with plateaus, run_flat [P, T, C], by sorted query."""
    program = tl.program_id(0)
    block, row = program % num_blocks, (program // num_blocks).to(tl.int64)
    place = block * BLOCK + tl.arange(0, BLOCK)
    here = place < num_queries
    query = tl.load(order + row * num_queries + place, mask=here, other=0)
    label = tl.load(labels + row * num_queries + query, mask=here, other=0).to(tl.int32)
    position = query + shift
    before += row * (num_keys + 1) * CLASSES
    for c in tl.static_range(CLASSES):
        first = tl.load(reach + label * CLASSES + c, mask=here, other=0)
        lo = tl.load(before + tl.maximum(position - first, 0) * CLASSES + c, mask=here, other=0)
        hi = tl.load(before + (position + 1) * CLASSES + c, mask=here, other=0)
        to = (row * num_queries + place) * CLASSES + c
        tl.store(run_lo + to, lo, mask=here)
        tl.store(run_hi + to, hi, mask=here)
        if plateaus is not None:
            level = tl.load(plateaus + label * CLASSES + c, mask=here, other=0)
            at = tl.maximum(position - level, 0)
            flat = tl.load(before + at * CLASSES + c, mask=here, other=0)
            tl.store(run_flat + to, flat, mask=here)


@triton.jit
def first_beyond(ends, key, first, last, steps, CLASSES: tl.constexpr):
    """The first of the queries [first, last) whose end is beyond the key; `ends` ascend."""
    for _ in range(0, steps):
        searching = first < last
        middle = (first + last) // 2
        beyond = tl.load(ends + middle * CLASSES, mask=searching, other=0) > key
        last = tl.where(searching & beyond, middle, last)
        first = tl.where(searching & ~beyond, middle + 1, first)
    return first


@triton.jit
def readers_kernel(
    query_offsets, key_offsets, run_lo, run_hi, run_flat, read_from, read_to, flat_to,
    num_queries, num_keys, num_blocks, steps,
    LABELS: tl.constexpr, CLASSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The transposed plan: runs of the sorted queries for each sorted key and label, [P, S, R].

    Runs of one label only move up with the query, so a binary search finds each end.
    """
    program = tl.program_id(0)
    block, row = program % num_blocks, (program // num_blocks).to(tl.int64)
    key = block * BLOCK + tl.arange(0, BLOCK)
    here = key < num_keys
    c = tl.zeros([BLOCK], tl.int32)
    for index in tl.static_range(1, CLASSES):
        c += (key >= tl.load(key_offsets + row * (CLASSES + 1) + index)).to(tl.int32)
    column = row * num_queries * CLASSES + c
    for m in tl.static_range(LABELS):
        first = tl.load(query_offsets + row * (LABELS + 1) + m) + tl.zeros([BLOCK], tl.int32)
        last = tl.load(query_offsets + row * (LABELS + 1) + m + 1) + tl.zeros([BLOCK], tl.int32)
        to = (row * num_keys + key) * LABELS + m
        begin = first_beyond(run_hi + column, key, first, last, steps, CLASSES)
        tl.store(read_from + to, begin, mask=here)
        end = first_beyond(run_lo + column, key, first, last, steps, CLASSES)
        tl.store(read_to + to, end, mask=here)
        if run_flat is not None:
            level = first_beyond(run_flat + column, key, first, last, steps, CLASSES)
            tl.store(flat_to + to, level, mask=here)
