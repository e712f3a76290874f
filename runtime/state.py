"""`StepState`: all that a decode step reads and writes besides weights and packets.

Kernel and interpreter share it. A row is one sequence's place in the batch. A step feeds
`tokens[row]` at `positions[row]`, attends to that token and those before it that lie in the layer's
window, stores its K and V, and then puts the next token and position in place of the old ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mkc.compiler.place import KvGroup
from mkc.compiler.plan import Plan
from mkc.compiler.rules import first_token
from mkc.compiler.tile import PAGE_TOKENS
from mkc.runtime.packing import (
    pack_k_pages,
    pack_v_pages,
    store_token,
    unpack_k_pages,
    unpack_v_pages,
)

NO_BLOCK = -1
NAN_BYTE = 0xFF  # a bf16 of two such bytes is NaN


def row_blocks(group: KvGroup, pages: int) -> int:
    """Blocks that a row of so many pages needs at once."""
    return pages if group.window is None else min(pages, -(-group.window // PAGE_TOKENS) + 1)


class StepState:
    """Rows, logits and KV pages of one batch, tensors on one device.

    tokens, positions, active, limits: int32 [max_rows]: the token to feed, how many tokens precede
    it in the cache, 1 for a live row, and the position at which the row stops.
    eos_tokens: int32 [n]. logits: float32 [max_rows, vocab].
    pools: per KV group uint8 [blocks, block_bytes]; within a block the order is layer in the group,
    KV head, K before V. page_tables: per KV group int32 [max_rows, max_pages], the block of each
    page of 64 tokens, -1 for none.
    """

    def __init__(
        self,
        plan: Plan,
        max_tokens: int,
        device: torch.device | str = "cpu",
        blocks: Sequence[int] | None = None,
        poison: bool = False,
    ) -> None:
        """Room for rows of up to `max_tokens` tokens.

        blocks: blocks of each KV group, by default enough for all rows. With `poison` every value
        of the pools that is never written is NaN instead of zero.
        """
        rows, groups = plan.tiling.max_rows, plan.layout.kv_groups
        self.plan = plan
        self.device = torch.device(device)
        self.max_pages = -(-max_tokens // PAGE_TOKENS)
        self.tokens, self.positions, self.active, self.limits = (
            torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(4)
        )
        self.eos_tokens = torch.tensor(plan.spec.eos_tokens, dtype=torch.int32, device=device)
        self.logits = torch.zeros(rows, plan.spec.vocab_size, device=device)
        if blocks is None:
            blocks = [rows * row_blocks(group, self.max_pages) for group in groups]
        fill = NAN_BYTE if poison else 0
        self.pools = [
            torch.full((count, group.block_bytes), fill, dtype=torch.uint8, device=device)
            for group, count in zip(groups, blocks, strict=True)
        ]
        self.page_tables = [
            torch.full((rows, self.max_pages), NO_BLOCK, dtype=torch.int32, device=device)
            for _ in groups
        ]
        self._free = [list(range(count)) for count in blocks]

    @property
    def max_tokens(self) -> int:
        """Tokens that a row has room for."""
        return self.max_pages * PAGE_TOKENS

    @property
    def max_rows(self) -> int:
        """Rows that the plan was compiled for."""
        return self.tokens.shape[0]

    def allocate_row(self, row: int, tokens_capacity: int) -> None:
        """Gives a row the blocks for its first `tokens_capacity` tokens, lowest free ones first.

        Where a group has a window, the row's pages take turns in as many blocks as a window can
        touch. Blocks that the row had before are free again. Raises ValueError without room.
        """
        pages = -(-tokens_capacity // PAGE_TOKENS)
        if pages > self.max_pages:
            raise ValueError(f"{tokens_capacity} tokens need {pages} of {self.max_pages} pages")
        self.release_row(row)
        for index, group in enumerate(self.plan.layout.kv_groups):
            count, free = row_blocks(group, pages), self._free[index]
            if count > len(free):
                raise ValueError(f"row {row} needs {count} blocks of group {index}: {len(free)}")
            taken = torch.tensor(free[:count], dtype=torch.int32, device=self.device)
            self._free[index] = free[count:]
            if pages:
                turns = torch.arange(pages, device=self.device) % count
                self.page_tables[index][row, :pages] = taken[turns]

    def release_row(self, row: int) -> None:
        """Makes a row idle and its blocks free."""
        self.active[row] = 0
        for index, table in enumerate(self.page_tables):
            blocks = set(table[row].tolist()) - {NO_BLOCK}
            self._free[index] = sorted([*self._free[index], *blocks])
            table[row] = NO_BLOCK

    def start_row(self, row: int, token: int, position: int, limit: int) -> None:
        """Makes a row live: it feeds `token` at `position` next and stops at position `limit`."""
        self.tokens[row] = token
        self.positions[row] = position
        self.limits[row] = limit
        self.active[row] = 1

    def live_positions(self) -> list[int | None]:
        """Each row's position, None for idle rows, as the rules take them."""
        pairs = zip(self.positions.tolist(), self.active.tolist(), strict=True)
        return [position if active else None for position, active in pairs]

    def pages(self, layer: int, row: int, kv_head: int, page: int) -> tuple[Tensor, Tensor]:
        """Views of a K and a V page, uint8 [page_bytes]. Raises ValueError if it has no block."""
        group, place = self.plan.layout.kv_group_of(layer)
        block = int(self.page_tables[group][row, page])
        if block < 0:
            raise ValueError(f"row {row} has no block for page {page} of layer {layer}")
        k_page, v_page = self._pool(group)[block, place, kv_head].unbind(0)
        return k_page, v_page

    def store_token(
        self, layer: int, row: int, kv_head: int, position: int, key: Tensor, value: Tensor
    ) -> None:
        """Writes a token's `key` and `value`, bf16 [head_dim], to its page."""
        page, slot = divmod(position, PAGE_TOKENS)
        store_token(*self.pages(layer, row, kv_head, page), slot, key, value)

    def load_kv(self, row: int, layer: int, keys: Tensor, values: Tensor, start: int = 0) -> None:
        """Writes the K and V, bf16 [tokens, kv_heads, head_dim], of tokens `start` on.

        Pages that later ones of the same call take the blocks of are left out.
        """
        window = self.plan.spec.layers[layer].window
        end = start + keys.shape[0]
        if end == start:
            return
        kept = max(start, first_token(end, window) // PAGE_TOKENS * PAGE_TOKENS)
        group, _ = self.plan.layout.kv_group_of(layer)
        table = self.page_tables[group][row]
        self.store_kv(layer, table, kept, keys[kept - start :], values[kept - start :])

    def store_kv(self, layer: int, table: Tensor, start: int, keys: Tensor, values: Tensor) -> None:
        """Writes the K and V, bf16 [tokens, kv_heads, head_dim], of tokens `start` on (at least
        one) to the pages whose blocks are table[page]. Raises ValueError if one has no block."""
        end = start + keys.shape[0]
        first, last = start // PAGE_TOKENS, (end - 1) // PAGE_TOKENS
        k_pages, v_pages, blocks = self._gather(layer, table, first, last)
        span = slice(start - first * PAGE_TOKENS, end - first * PAGE_TOKENS)
        k_tokens, v_tokens = (
            pages.transpose(0, 1).flatten(1, 2).contiguous() for pages in (k_pages, v_pages)
        )
        k_tokens[:, span] = keys.transpose(0, 1).to(k_tokens)
        v_tokens[:, span] = values.transpose(0, 1).to(v_tokens)
        group, place = self.plan.layout.kv_group_of(layer)
        pool = self._pool(group)
        pool[blocks, place, :, 0] = pack_k_pages(self._by_page(k_tokens))
        pool[blocks, place, :, 1] = pack_v_pages(self._by_page(v_tokens))

    def read_kv(self, row: int, layer: int) -> tuple[Tensor, Tensor]:
        """K and V, bf16 [tokens, kv_heads, head_dim], of the tokens before the row's position.

        Where the layer has a window, only the last window - 1 of them.
        """
        position = int(self.positions[row])
        first = first_token(position, self.plan.spec.layers[layer].window)
        group, _ = self.plan.layout.kv_group_of(layer)
        return self.read_pages(layer, self.page_tables[group][row], first, position)

    def read_pages(self, layer: int, table: Tensor, first: int, end: int) -> tuple[Tensor, Tensor]:
        """K and V, bf16 [tokens, kv_heads, head_dim], of tokens `first` to `end` - 1, from the
        pages whose blocks are table[page]. Raises ValueError if one has no block."""
        if first == end:
            attention = self.plan.spec.attention
            empty = torch.empty(0, attention.kv_heads, attention.head_dim, device=self.device)
            return empty.bfloat16(), empty.bfloat16()
        first_page, last_page = first // PAGE_TOKENS, (end - 1) // PAGE_TOKENS
        k_pages, v_pages, _ = self._gather(layer, table, first_page, last_page)
        span = slice(first - first_page * PAGE_TOKENS, end - first_page * PAGE_TOKENS)
        keys, values = (pages.transpose(1, 2).flatten(0, 1)[span] for pages in (k_pages, v_pages))
        return keys, values

    def fill_random_kv(self, row: int, tokens: int, seed: int) -> None:
        """Writes normal K and V of spread one for the row's first `tokens` tokens in all layers."""
        generator = torch.Generator(self.device)
        attention = self.plan.spec.attention
        for layer, spec in enumerate(self.plan.spec.layers):
            generator.manual_seed((seed * 4096 + row) * 4096 + layer)
            start = first_token(tokens, spec.window) // PAGE_TOKENS * PAGE_TOKENS
            shape = (tokens - start, attention.kv_heads, attention.head_dim)
            keys, values = (
                torch.empty(shape, device=self.device).normal_(generator=generator).bfloat16()
                for _ in range(2)
            )
            self.load_kv(row, layer, keys, values, start)

    def _pool(self, group: int) -> Tensor:
        """View of a pool: [blocks, layers of the group, kv_heads, K and V, page_bytes]."""
        layers = len(self.plan.layout.kv_groups[group].layers)
        tiling = self.plan.tiling
        return self.pools[group].view(-1, layers, tiling.kv_heads, 2, tiling.page_bytes)

    def _gather(
        self, layer: int, table: Tensor, first: int, last: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """K and V [pages, kv_heads, PAGE_TOKENS, head_dim] of pages first to last; their blocks."""
        group, place = self.plan.layout.kv_group_of(layer)
        blocks = table[first : last + 1].long()
        if blocks.shape[0] != last - first + 1 or bool((blocks < 0).any()):
            raise ValueError(f"no blocks for some of pages {first} to {last} of layer {layer}")
        pages = self._pool(group)[blocks, place]
        head_dim = self.plan.spec.attention.head_dim
        keys = unpack_k_pages(pages[:, :, 0].contiguous(), head_dim)
        values = unpack_v_pages(pages[:, :, 1].contiguous(), head_dim)
        return keys, values, blocks

    def _by_page(self, tokens: Tensor) -> Tensor:
        """[kv_heads, tokens, head_dim] -> [pages, kv_heads, PAGE_TOKENS, head_dim]."""
        heads, _, head_dim = tokens.shape
        return tokens.view(heads, -1, PAGE_TOKENS, head_dim).transpose(0, 1)
