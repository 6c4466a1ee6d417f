"""Keys and values as one list per (row, routing group, class), in pages of one growing pool.

A class is a regime; sinks are one more class. Positions ascend in every list, so the keys of a
class that a query may read are one slice, and keys that no later query can read are at the front. A
page holds keys of one list; an empty page can be used by any list. Nothing is copied when a list
grows. When the pool runs out of pages, it grows by an eighth.

    k_pool   [P, heads, D, page]   keys, transposed: a page's scores are sums of rows
    v_pool   [P, heads, page, D]
    table    [lists, 2 + W]        begin and end of a list (places in its pages), and its pages
    marks    [P, 2, page]          position and slot of each key
    free     [1 + P]               how many pages are free, and which
    progress [B, 4]                tokens seen, last position, horizon, last evicted slot
    biases   [P, biased, page]     of the query heads of a group, where keys have a bias

The slot of a token is its index among all tokens of its row, including padding. The horizon is the
first query position from which no evicted key can be reached. The pools are on the device of the
model; everything else is on the CPU, as the native kernels (csrc/lists.h) require.

Shapes: B rows, Gr routing groups, C classes, P pages, D head dim, S keys, N keys of all lists.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mosar.kernels.decode import State
from mosar.model.cache.ordered_keys import outlives_inference_mode

PAGE = 32
SEEN, LAST, HORIZON, EVICTED = range(4)
_NO_PROGRESS = torch.tensor([[0, -1, 0, -1]])


class StoredKeys(NamedTuple):
    """All keys, list by list, in the order of each list; each field is [N]."""

    lists: Tensor
    """Index of the list."""
    page: Tensor
    at: Tensor
    """Place within the page."""
    row: Tensor
    position: Tensor
    slot: Tensor


class RegimeLists:
    """The lists of one layer; a method that raises has not changed any of them."""

    @outlives_inference_mode
    def __init__(
        self,
        rows: int,
        groups: int,
        classes: int,
        heads: int,
        dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        biased: int = 0,
    ):
        """biased: query heads of a group whose keys have a bias."""
        self.groups, self.classes = groups, classes
        self.k_pool = torch.empty(0, heads, dim, PAGE, dtype=dtype, device=device)
        self.v_pool = torch.empty(0, heads, PAGE, dim, dtype=dtype, device=device)
        self.table = torch.zeros(rows * groups * classes, 2, dtype=torch.int32)
        self.marks = torch.zeros(0, 2, PAGE, dtype=torch.int32)
        self.free = torch.zeros(1, dtype=torch.int32)
        self.progress = _NO_PROGRESS.repeat(rows, 1)
        self.biases = torch.empty(0, biased, PAGE, dtype=torch.float64, device=device)

    @property
    def rows(self) -> int:
        return self.progress.shape[0]

    @property
    def state(self) -> State:
        pools = self.k_pool, self.v_pool
        return *pools, self.table, self.marks, self.free, self.progress, self.biases

    @property
    def counts(self) -> Tensor:
        """The number of stored keys, [B, Gr, C] int64."""
        lengths = (self.table[:, 1] - self.table[:, 0]).long()
        return lengths.view(self.rows, self.groups, self.classes)

    @property
    def allocated_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state)

    @property
    def key_bytes(self) -> int:
        """Bytes of one key with its value, position and slot, in one group."""
        _, heads, dim, _ = self.k_pool.shape
        return 2 * heads * dim * self.k_pool.element_size() + 8 + 8 * self.biases.shape[1]

    def stored_keys(self) -> StoredKeys:
        begin, end = self.table[:, 0].long(), self.table[:, 1].long()
        lists, page, at = self._places(begin, end - begin)
        position, slot = self.marks[page, :, at].long().unbind(dim=1)
        return StoredKeys(lists, page, at, lists // (self.groups * self.classes), position, slot)

    def _places(self, begin: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """List, page and place of the given number of keys of each list, from `begin` on."""
        lists = torch.repeat_interleave(counts)
        start = counts.cumsum(0) - counts
        place = torch.arange(len(lists)) - start[lists] + begin[lists]
        return lists, self.table[lists, 2 + place // PAGE].long(), place % PAGE

    @outlives_inference_mode
    def append(
        self,
        k: Tensor,
        v: Tensor,
        classes: Tensor,
        positions: Tensor,
        slots: Tensor,
        keep: Tensor,
        of_key: Tensor | None = None,
    ) -> None:
        """Adds k, v [B, Hkv, S, D], where `keep` is True, to the ends of their lists.

        classes, keep [B, Gr, S] (on the CPU), positions [B, S], slots [S], of_key [B, Hq, S].
        """
        row, group, column = keep.nonzero(as_tuple=True)
        lists = (row * self.groups + group) * self.classes + classes[row, group, column]
        lists, order = torch.sort(lists, stable=True)
        row, group, column = row[order], group[order], column[order]
        counts = torch.bincount(lists, minlength=len(self.table))
        end = self.table[:, 1].long()
        self._take_pages(_pages(end), _pages(end + counts))
        _, page, at = self._places(end, counts)
        self.table[:, 1] += counts.int()
        self.marks[page, 0, at] = positions[row, column].int()
        self.marks[page, 1, at] = slots[column].int()
        device = self.k_pool.device
        page, at, row, group, column = (x.to(device) for x in (page, at, row, group, column))
        for pool, new in ((self.k_pool.mT, k), (self.v_pool, v)):
            split = new.unflatten(1, (self.groups, -1))
            pool[page, :, at] = split[row, group, :, column].to(pool.dtype)
        if of_key is not None:
            split = of_key.unflatten(1, (self.groups, -1))
            self.biases[page, :, at] = split[row, group, :, column]

    @outlives_inference_mode
    def evict(self, limits: Tensor, reach: Tensor) -> None:
        """Drops the keys that a query at limits [B] can no longer reach; reach [C] int64."""
        keys = self.stored_keys()
        out_of_reach = keys.position + reach[keys.lists % self.classes] + 1
        dead = out_of_reach <= limits[keys.row]
        if not dead.any():
            return
        self.note_eviction(keys.row[dead], out_of_reach[dead], keys.slot[dead])
        # The keys to drop are the first ones of a list.
        self.table[:, 0] += torch.bincount(keys.lists[dead], minlength=len(self.table)).int()
        for index in (self.table[:, 0] >= PAGE).nonzero()[:, 0].tolist():
            entry = self.table[index]
            emptied, used = int(entry[0]) // PAGE, int(_pages(entry[1]))
            self._give_back(entry[2 : 2 + emptied])
            entry[2 : 2 + used - emptied] = entry[2 + emptied : 2 + used].clone()
            entry[:2] -= emptied * PAGE

    def note_eviction(self, row: Tensor, out_of_reach: Tensor, slot: Tensor) -> None:
        """Records that keys of these rows [N] were evicted, and the new horizon."""
        for column, values in ((HORIZON, out_of_reach), (EVICTED, slot)):
            self.progress[:, column] = self.progress[:, column].scatter_reduce(
                0, row, values, "amax"
            )

    @outlives_inference_mode
    def crop(self, length: int) -> None:
        """Drops every key from slot `length` on."""
        lists, _, _, row, position, slot = self.stored_keys()
        gone = slot >= length
        # Each token is in one list of every group.
        first_group = gone & (lists // self.classes % self.groups == 0)
        self.progress[:, SEEN] -= torch.bincount(row[first_group], minlength=self.rows)
        last = self.progress[:, HORIZON] - 1
        self.progress[:, LAST] = last.scatter_reduce(0, row[~gone], position[~gone], "amax")
        before = _pages(self.table[:, 1])
        self.table[:, 1] -= torch.bincount(lists[gone], minlength=len(self.table)).int()
        empty = self.table[:, 0] == self.table[:, 1]
        self.table[empty, :2] = 0
        after = _pages(self.table[:, 1])
        for index in (after < before).nonzero()[:, 0].tolist():
            self._give_back(self.table[index, 2 + int(after[index]) : 2 + int(before[index])])
        if not length:
            # If no key is left, no evicted key can be missed.
            self.progress[:] = _NO_PROGRESS
        self.shrink()

    def newest_biases(self) -> Tensor:
        """The bias of each row's newest key in every group, 0 if there is none, [B * Gr, biased].

        The newest key is always stored: any query at the next position reads it.
        """
        keys = self.stored_keys()
        order = torch.argsort(keys.slot)
        member, device = (keys.lists // self.classes)[order], self.biases.device
        newest = self.biases.new_zeros(self.rows * self.groups, self.biases.shape[1])
        place = torch.full((len(newest),), -1)
        place.scatter_reduce_(0, member, torch.arange(len(member)), "amax")
        found = order[place[place >= 0]]
        values = self.biases[keys.page[found].to(device), :, keys.at[found].to(device)]
        newest[(place >= 0).to(device)] = values
        return newest

    def last_positions(self, length: int) -> Tensor:
        """The last position before slot `length` of each row, -1 if no key is left, [B]."""
        keys = self.stored_keys()
        kept = keys.slot < length
        nothing = torch.full((self.rows,), -1)
        return nothing.scatter_reduce(0, keys.row[kept], keys.position[kept], "amax")

    @outlives_inference_mode
    def select_rows(self, rows: Tensor) -> None:
        """Selects rows [B']; repeated rows are copied, rows that are not selected are freed."""
        per_row = self.groups * self.classes
        first = torch.full((self.rows,), -1)
        for new, old in reversed(list(enumerate(rows.tolist()))):
            first[old] = new
        again = first[rows] != torch.arange(len(rows))
        used = _pages(self.table[:, 1]).view(-1, per_row).sum(dim=1)
        # Free pages first, because the copies can use them.
        for old in (first < 0).nonzero()[:, 0].tolist():
            for entry in self.table[old * per_row : (old + 1) * per_row]:
                self._give_back(entry[2 : 2 + int(_pages(entry[1]))])
        self.reserve(int(used[rows[again]].sum()))
        table = self.table.view(-1, per_row, self.table.shape[1])[rows].flatten(0, 1)
        self.table, self.progress = table, self.progress[rows]
        for new in again.nonzero()[:, 0].tolist():
            for entry in table[new * per_row : (new + 1) * per_row]:
                source = entry[2 : 2 + int(_pages(entry[1]))].long()
                copy = self._pop(len(source)).long()
                entry[2 : 2 + len(source)] = copy.int()
                for pool in (self.k_pool, self.v_pool, self.marks, self.biases):
                    pool[copy.to(pool.device)] = pool[source.to(pool.device)]
        self.shrink()

    @outlives_inference_mode
    def gather(self, slots: int | None = None) -> tuple[Tensor, ...]:
        """All keys in the order of their slots; with `slots`, each in the column of its slot.

        k and v [B * Gr, heads, S, D], with zeros where there is no key; their biases
        [B * Gr, biased, S]; classes, positions and valid [B * Gr, S] on the CPU.
        """
        keys = self.stored_keys()
        order = torch.argsort(keys.lists // self.classes * (1 << 32) + keys.slot)
        keys = StoredKeys(*(x[order] for x in keys))
        member, members = keys.lists // self.classes, self.rows * self.groups
        counts = torch.bincount(member, minlength=members)
        start = counts.cumsum(0) - counts
        column = torch.arange(len(member)) - start[member] if slots is None else keys.slot
        length = int(counts.max()) if slots is None else slots

        to = tuple(x.to(self.k_pool.device) for x in (member, column))
        page, at = (x.to(self.k_pool.device) for x in (keys.page, keys.at))
        gathered = []
        for pool in (self.k_pool.mT, self.v_pool, self.biases):
            values = pool[page, :, at]
            padded = pool.new_zeros(members, length, *values.shape[1:])
            gathered.append(padded.index_put_(to, values).transpose(1, 2))
        for values in (keys.lists % self.classes, keys.position, torch.ones_like(member).bool()):
            padded = values.new_zeros(members, length)
            gathered.append(padded.index_put_((member, column), values))
        return tuple(gathered)

    @outlives_inference_mode
    def reserve(self, pages: int, width: int = 0) -> None:
        """Grows the pool until `pages` are free, and the table to `width` pages per list."""
        missing = pages - int(self.free[0])
        if missing > 0:
            total = self.k_pool.shape[0]
            self._resize(size_with_reserve(total + missing), torch.arange(total))
        if width > self.table.shape[1] - 2:
            width = max(width, (self.table.shape[1] - 2) * 3 // 2)
            grown = self.table.new_zeros(len(self.table), 2 + width)
            grown[:, : self.table.shape[1]] = self.table
            self.table = grown

    def make_room(self) -> None:
        """Makes room for one more token in every list."""
        self.reserve(self.rows * self.groups, int(self.table[:, 1].max()) // PAGE + 1)

    @outlives_inference_mode
    def shrink(self) -> None:
        """Returns memory if far more pages are free than after growing."""
        total, used = self.k_pool.shape[0], self.k_pool.shape[0] - int(self.free[0])
        if total <= size_with_reserve(used) + used // 8:
            return
        in_use = torch.arange(self.table.shape[1] - 2) < _pages(self.table[:, 1:2])
        pages = self.table[:, 2:][in_use].long()
        self.table[:, 2:][in_use] = torch.arange(used, dtype=torch.int32)
        self._resize(size_with_reserve(used), pages)

    def _resize(self, total: int, pages: Tensor) -> None:
        """A pool of `total` pages that starts with these pages; free pages stay free."""
        kept = len(pages)
        free = self.free[1 : 1 + int(self.free[0])] if kept == self.k_pool.shape[0] else None
        new = torch.arange(kept, total, dtype=torch.int32)
        # The pages that will be used first are on top.
        stack = new.flip(0) if free is None else torch.cat([new.flip(0), free])
        for name in ("k_pool", "v_pool", "marks", "biases"):
            old = getattr(self, name)
            make = torch.zeros if name == "marks" else torch.empty
            grown = make((total, *old.shape[1:]), dtype=old.dtype, device=old.device)
            grown[:kept] = old[pages.to(old.device)] if free is None else old
            setattr(self, name, grown)
        self.free = torch.zeros(1 + total, dtype=torch.int32)
        self.free[0] = len(stack)
        self.free[1 : 1 + len(stack)] = stack

    def _take_pages(self, before: Tensor, after: Tensor) -> None:
        """Gives each list the pages from index `before` to index `after` [lists]."""
        counts = after - before
        self.reserve(int(counts.sum()), int(after.max()))
        lists = torch.repeat_interleave(counts)
        start = counts.cumsum(0) - counts
        column = torch.arange(len(lists)) - start[lists] + before[lists]
        self.table[lists, 2 + column] = self._pop(len(lists))

    def _pop(self, count: int) -> Tensor:
        height = int(self.free[0])
        self.free[0] = height - count
        return self.free[1 + height - count : 1 + height].flip(0)

    def _give_back(self, pages: Tensor) -> None:
        height = int(self.free[0])
        self.free[1 + height : 1 + height + len(pages)] = pages
        self.free[0] = height + len(pages)


def size_with_reserve(pages: int) -> int:
    """The size of a pool for this many pages: an eighth more, so that it rarely has to grow."""
    return pages + max(4, pages // 8)


def _pages(end: Tensor) -> Tensor:
    """The number of pages of a list with this end."""
    return (end + PAGE - 1) // PAGE
