"""How the consumer warps share a streamed tile along K, as templates/slices.cuh has it.

Warp w multiplies slice w, an eighth of K, of every tile. A chunk holds as many whole slices as fit,
a power of two; a slice that is larger than a chunk takes several. A `TileStream` says it from both
ends: the chunks as the producer sends for them, and what each warp takes of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from mkc.compiler.place import CONSUMER_WARPS


@dataclass(frozen=True, slots=True)
class Slicing:
    """The fragments of a tile as slices; per_k: of each k-block, two where gate and up go together.

    slice: fragments of a slice, the last ones may be short or empty; sharers: slices in a chunk.
    """

    fragments: int
    slice: int
    sharers: int
    per_k: int
    chunk_fragments: int

    @property
    def run(self) -> int:
        """Fragments of a run of chunks that is as long as its slices."""
        return self.slice * self.sharers

    @property
    def chunks(self) -> int:
        """Chunks of the tile, by which all warps count on to the next tile."""
        whole, rest = divmod(self.fragments, self.run)
        return whole * -(-self.slice // self.chunk_fragments) + -(-rest // self.chunk_fragments)


def slicing_of(k_blocks: int, per_k: int, chunk_fragments: int) -> Slicing:
    """The slicing of a tile of `k_blocks` k-blocks."""
    part, sharers = -(-k_blocks // CONSUMER_WARPS) * per_k, CONSUMER_WARPS
    while sharers > 1 and part * sharers > chunk_fragments:
        sharers //= 2
    return Slicing(k_blocks * per_k, part, sharers, per_k, chunk_fragments)


@dataclass(frozen=True, slots=True)
class Share:
    """What a warp takes of a chunk: fragments [begin, begin + size) of the tile, from `offset` on.

    arrivals: with which it gives the chunk back; a chunk is free after CONSUMER_WARPS of them.
    """

    chunk: int
    offset: int
    begin: int
    size: int
    arrivals: int


@dataclass(frozen=True, slots=True)
class TileStream:
    """chunks: (first fragment, fragments) in ring order; shares: of each warp, in its own order;
    counted: chunks by which the warps' count of chunks moves on."""

    fragments: int
    per_k: int
    chunk_fragments: int
    chunks: tuple[tuple[int, int], ...]
    shares: tuple[tuple[Share, ...], ...]
    counted: int


def tile_stream(slicing: Slicing) -> TileStream:
    """A tile as producer and warps stream it."""
    return TileStream(
        slicing.fragments,
        slicing.per_k,
        slicing.chunk_fragments,
        _sent(slicing),
        tuple(_taken(slicing, warp) for warp in range(CONSUMER_WARPS)),
        slicing.chunks,
    )


def _sent(slicing: Slicing) -> tuple[tuple[int, int], ...]:
    """`RingProducer::issue_tile`."""
    chunks, begin, left_of_run = [], 0, slicing.run
    while begin < slicing.fragments:
        size = min(left_of_run, slicing.chunk_fragments, slicing.fragments - begin)
        chunks.append((begin, size))
        begin, left_of_run = begin + size, left_of_run - size
        left_of_run = left_of_run or slicing.run
    return tuple(chunks)


def _taken(slicing: Slicing, warp: int) -> tuple[Share, ...]:
    """`slice_of` and `multiply_slice`: a sharer takes its chunk even if it has nothing in it."""
    run = warp // slicing.sharers
    first = run * slicing.run
    if first >= slicing.fragments:
        return ()
    begin = min(warp * slicing.slice, slicing.fragments)
    end = min(begin + slicing.slice, slicing.fragments)
    chunk_of_slice = run * -(-slicing.slice // slicing.chunk_fragments)
    shares: list[Share] = []
    while begin < end or not shares:
        at = begin - first
        chunk, offset = divmod(at, slicing.chunk_fragments)
        stop = min(end, first + (chunk + 1) * slicing.chunk_fragments)
        arrivals = CONSUMER_WARPS // slicing.sharers
        shares.append(Share(chunk_of_slice + chunk, offset, begin, stop - begin, arrivals))
        begin = stop
    return tuple(shares)
