"""Proof that the ring brings every fragment to the one warp that needs it, and takes chunks back.

For every kind of tile of the model `check_ring` walks the chunks that the producer sends for and
what each warp takes of them (`slices`), and shows: chunks part the tile, each fits a slot and none
parts a gate fragment from its up fragment; shares part the tile, each lies in the chunk and at the
offset where the warp looks for it; the arrivals on each chunk add up to those of its barrier; a
warp takes chunks in ascending order, and all warps count on by the chunks that were sent for.
K and V come in pairs of chunks, one warp's each, of whole token tiles; a page is whole chunks.

Parity: a barrier tells two rounds of the ring apart, not more, so nobody may be a round ahead.

- *A warp on `full`.* It waits for chunk n, of round k, only after the producer has said that n was
  sent for. The producer sent for it after chunk n - slots was given back by all its sharers, who
  had waited for it to land: so round k - 1 of the slot's `full` is over. Round k + 1 cannot be over
  before chunk n + slots is sent for, which waits for this very warp's arrivals on n. So the barrier
  is in round k or k + 1, and its parity tells which.
- *A warp on `empty`.* It gives n back after n landed, in round k of `empty`: round k - 1 was over
  when n was sent for, and round k ends with the last sharer, of whom it is one. That holds because
  sharers wait for a chunk even if they have nothing in it, and give it back once.
- *The producer on `empty`.* Round k - 1 of the slot ends before it goes on, and round k cannot end
  before chunk n, which it has not sent for yet.
- *The producer on `full`, for its window.* It waits for chunk n - window to land. The next chunk of
  that slot is n - window + slots >= n, not sent for yet, as the window is at most the ring.
- *Deposits.* Tile d's buffer was last used by tile d - 2. A warp opens it after round d/2 - 1 of
  `collected` is over; round d/2 cannot be over before this warp has closed its part of d. The warp
  that finishes d has closed d itself, so round d/2 - 1 of `deposited` is over, and round d/2 + 1
  waits for its own collection of d.
"""

from __future__ import annotations

from collections.abc import Iterator

from mkc.compiler.place import CONSUMER_WARPS
from mkc.compiler.plan import Plan
from mkc.compiler.proof import Property, VerifyError
from mkc.compiler.rules import tiles_of_chunk
from mkc.compiler.slices import TileStream, slicing_of, tile_stream
from mkc.compiler.tile import FRAGMENT_EDGE, PAGE_TOKENS


def check_ring(plan: Plan) -> list[Property]:
    """Shows that chunks, shares and arrivals of every kind of tile are right.

    Raises VerifyError MKC304 (a chunk is never given back, or too early), MKC305 (exceeds a slot)
    or MKC306 (a fragment is not multiplied exactly once).
    """
    streams = dict(tile_streams(plan))
    for name, stream in streams.items():
        check_stream(name, stream)
    _check_same_slices(plan)
    _check_pages(plan)
    shares = sum(len(shares) for stream in streams.values() for shares in stream.shares)
    return [
        Property(
            "ring",
            "for each kind of tile, chunks part the tile and fit a slot, the warps' shares part it "
            "too and lie where the warps look, and each chunk gets its barrier's arrivals, so no "
            "warp is a round of the ring ahead of its parity",
            shares,
        ),
    ]


def tile_streams(plan: Plan) -> Iterator[tuple[str, TileStream]]:
    """(name, stream) of every kind of tile that the plan's programs stream."""
    tiling = plan.tiling
    size = tiling.chunk_fragments
    yield "router, qkv and head", tile_stream(slicing_of(tiling.hidden_tiles, 1, size))
    yield "gate and up", tile_stream(slicing_of(tiling.hidden_tiles, 2, size))
    yield "out", tile_stream(slicing_of(tiling.attention_tiles, 1, size))
    for width in sorted({layer.width_tiles for layer in tiling.layers}):
        yield f"down of {width} k-blocks", tile_stream(slicing_of(width, 1, size))


def check_stream(name: str, stream: TileStream) -> None:
    """Shows one kind of tile. Raises VerifyError as `check_ring` does."""
    end = 0
    for number, (begin, size) in enumerate(stream.chunks):
        what = f"chunk {number} of a tile of {name}"
        if begin != end or size <= 0:
            raise VerifyError("MKC306", f"{what} begins at fragment {begin}, not at {end}")
        if size > stream.chunk_fragments:
            raise VerifyError("MKC305", f"{what} has {size} fragments, more than a slot")
        if begin % stream.per_k or size % stream.per_k:
            raise VerifyError("MKC306", f"{what} parts a k-block's fragments")
        end = begin + size
    if end != stream.fragments:
        raise VerifyError("MKC306", f"the chunks of {name} end at {end} of {stream.fragments}")
    if stream.counted != len(stream.chunks):
        raise VerifyError(
            "MKC304", f"warps count {stream.counted} chunks of {name}, {len(stream.chunks)} come"
        )
    _check_shares(name, stream)


def _check_shares(name: str, stream: TileStream) -> None:
    arrivals = [0] * len(stream.chunks)
    end = 0
    for warp, shares in enumerate(stream.shares):
        last = -1
        for share in shares:
            what = f"warp {warp}'s share of chunk {share.chunk} of {name}"
            if not last < share.chunk < len(stream.chunks):
                raise VerifyError("MKC304", f"{what} comes behind chunk {last}, or does not exist")
            last = share.chunk
            begin, size = stream.chunks[share.chunk]
            if share.begin != end or share.size < 0 or share.size % stream.per_k:
                raise VerifyError("MKC306", f"{what} begins at fragment {share.begin}, not {end}")
            end += share.size
            inside = share.offset >= 0 and share.offset + share.size <= size
            if share.size and not (inside and begin + share.offset == share.begin):
                raise VerifyError("MKC306", f"{what} lies elsewhere in the chunk")
            arrivals[share.chunk] += share.arrivals
    if len(stream.shares) != CONSUMER_WARPS or end != stream.fragments:
        raise VerifyError("MKC306", f"the warps take {end} of {stream.fragments} of {name}")
    for number, count in enumerate(arrivals):
        if count != CONSUMER_WARPS:
            raise VerifyError(
                "MKC304",
                f"chunk {number} of {name} is given back {count} of {CONSUMER_WARPS} times",
            )


def _check_same_slices(plan: Plan) -> None:
    """A warp multiplies the k-blocks of the layer input that its own STAGE brought."""
    hidden = plan.tiling.hidden_tiles
    staged = -(-hidden // CONSUMER_WARPS)
    for name, stream in tile_streams(plan):
        if not name.startswith(("router", "gate")):
            continue
        for warp, shares in enumerate(stream.shares):
            first = min(warp * staged, hidden)
            own = range(first, min(first + staged, hidden))
            for share in shares:
                blocks = range(
                    share.begin // stream.per_k, (share.begin + share.size) // stream.per_k
                )
                if blocks and not (blocks[0] in own and blocks[-1] in own):
                    raise VerifyError(
                        "MKC303", f"warp {warp} multiplies {blocks} of {name}, it staged {own}"
                    )


def _check_pages(plan: Plan) -> None:
    tiling = plan.tiling
    tiles = tiles_of_chunk(tiling.chunk_fragments, tiling.head_tiles)
    if tiles <= 0 or PAGE_TOKENS // FRAGMENT_EDGE % tiles:
        raise VerifyError(
            "MKC305",
            f"a page of {PAGE_TOKENS} tokens is no whole number of chunks of "
            f"{tiling.chunk_fragments} fragments with heads of {tiling.head_tiles} tiles",
        )
