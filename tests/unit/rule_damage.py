"""Ways to damage what a plan streams and the rules for its dynamic work, drawn by hypothesis.

Streams and rules are the same for all plans of a model and so are no part of a plan's data: these
damages are of what the kernel and the compiler would do with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hypothesis import assume
from hypothesis import strategies as st

from mkc.compiler import rules
from mkc.compiler.plan import Plan
from mkc.compiler.rules import AttentionUnit
from mkc.compiler.slices import Share, TileStream
from mkc.compiler.verify_ring import tile_streams
from mkc.compiler.verify_rules import Rules
from plan_damage import Draw, replaced


def _stream(draw: Draw, plan: Plan) -> TileStream:
    return draw(st.sampled_from([stream for _, stream in tile_streams(plan)]))  # type: ignore[no-any-return]


def _share(draw: Draw, stream: TileStream) -> tuple[int, int, Share]:
    places = [(w, n) for w, shares in enumerate(stream.shares) for n in range(len(shares))]
    warp, number = draw(st.sampled_from(places))
    return warp, number, stream.shares[warp][number]


def _with_share(stream: TileStream, warp: int, number: int, *shares: Share) -> TileStream:
    own = stream.shares[warp]
    changed = (*own[:number], *shares, *own[number + 1 :])
    return replace(stream, shares=replaced(stream.shares, warp, changed))


def chunk_missing(draw: Draw, plan: Plan) -> TileStream:
    stream = _stream(draw, plan)
    at = draw(st.integers(0, len(stream.chunks) - 1))
    return replace(stream, chunks=stream.chunks[:at] + stream.chunks[at + 1 :])


def chunk_twice(draw: Draw, plan: Plan) -> TileStream:
    stream = _stream(draw, plan)
    at = draw(st.integers(0, len(stream.chunks) - 1))
    return replace(stream, chunks=stream.chunks[: at + 1] + stream.chunks[at:])


def stream_shifted(draw: Draw, plan: Plan) -> TileStream:
    """All chunks from one on come from elsewhere in the tile, by fragments or by a whole chunk."""
    stream = _stream(draw, plan)
    at = draw(st.integers(0, len(stream.chunks) - 1))
    shift = draw(st.sampled_from([-1, 1])) * draw(st.sampled_from([1, 2, stream.chunks[at][1]]))
    moved = tuple((begin + shift, size) for begin, size in stream.chunks[at:])
    return replace(stream, chunks=stream.chunks[:at] + moved)


def chunk_resized(draw: Draw, plan: Plan) -> TileStream:
    stream = _stream(draw, plan)
    at = draw(st.integers(0, len(stream.chunks) - 1))
    begin, size = stream.chunks[at]
    more = draw(st.sampled_from([-size, -1, 1, stream.chunk_fragments]))
    return replace(stream, chunks=replaced(stream.chunks, at, (begin, size + more)))


def chunks_joined(draw: Draw, plan: Plan) -> TileStream:
    """Two chunks sent for as one, larger than a slot or with too many sharers."""
    stream = _stream(draw, plan)
    assume(len(stream.chunks) > 1)
    at = draw(st.integers(0, len(stream.chunks) - 2))
    joined = (stream.chunks[at][0], stream.chunks[at][1] + stream.chunks[at + 1][1])
    return replace(stream, chunks=(*stream.chunks[:at], joined, *stream.chunks[at + 2 :]))


def wrong_arrivals(draw: Draw, plan: Plan) -> TileStream:
    stream = _stream(draw, plan)
    warp, number, share = _share(draw, stream)
    arrivals = draw(st.integers(0, 9).filter(lambda count: count != share.arrivals))
    return _with_share(stream, warp, number, replace(share, arrivals=arrivals))


def share_missing(draw: Draw, plan: Plan) -> TileStream:
    """A sharer that does not give its chunk back, with fragments in it or without."""
    stream = _stream(draw, plan)
    warp, number, _ = _share(draw, stream)
    return _with_share(stream, warp, number)


def share_twice(draw: Draw, plan: Plan) -> TileStream:
    stream = _stream(draw, plan)
    warp, number, share = _share(draw, stream)
    return _with_share(stream, warp, number, share, share)


def share_moved(draw: Draw, plan: Plan) -> TileStream:
    """Fragments beside the warp's own, another place in the chunk, or another chunk."""
    stream = _stream(draw, plan)
    warp, number, share = _share(draw, stream)
    assume(share.size)
    name = draw(st.sampled_from(["begin", "offset", "size", "chunk"]))
    by = draw(st.sampled_from([-1, 1]))
    return _with_share(stream, warp, number, replace(share, **{name: getattr(share, name) + by}))


def wrong_chunk_count(draw: Draw, plan: Plan) -> TileStream:
    """Warps count on by another number of chunks than the producer sends for."""
    stream = _stream(draw, plan)
    return replace(stream, counted=stream.counted + draw(st.sampled_from([-1, 1])))


STREAM_DAMAGE: list[Callable[[Draw, Plan], TileStream]] = [
    chunk_missing,
    chunk_twice,
    stream_shifted,
    chunk_resized,
    chunks_joined,
    wrong_arrivals,
    share_missing,
    share_twice,
    share_moved,
    wrong_chunk_count,
]


def window_edge(draw: Draw, plan: Plan) -> Rules:
    """The oldest token in the window is off by one or more."""
    assume(any(layer.window for layer in plan.spec.layers))
    by = draw(st.integers(-20, 20).filter(bool))

    def first_token(position: int, window: int | None) -> int:
        return rules.first_token(position, None if window is None else max(1, window + by))

    return Rules(first_token=first_token)


def window_of_splits(draw: Draw, plan: Plan) -> Rules:
    """Pages are dealt for another window than their chunks are."""
    assume(any(layer.window for layer in plan.spec.layers))
    by = draw(st.integers(-20, -1))

    def units(
        rank: int,
        sms: int,
        positions: Sequence[int | None],
        window: int | None,
        heads: int,
        most: int,
    ) -> list[AttentionUnit]:
        near = None if window is None else max(1, window + by)
        return rules.attention_units(rank, sms, positions, near, heads, most)

    return Rules(attention_units=units)


def chunk_edge(draw: Draw, plan: Plan) -> Rules:
    """A split begins or ends a chunk early or late."""
    begin_by, end_by = draw(
        st.sampled_from([(0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, -1), (1, -1), (-1, 1)])
    )

    def span(
        unit: AttentionUnit, position: int, window: int | None, tokens: int
    ) -> tuple[int, int]:
        begin, end = rules.chunk_span(unit, position, window, tokens)
        return begin + begin_by, end + end_by

    return Rules(chunk_span=span)


def wrong_units(draw: Draw, plan: Plan) -> Rules:
    """One field of every split is wrong, or a rank has none."""
    field = draw(st.sampled_from(["kv_head", "split", "first_page", "end_page", "is_last", "none"]))
    by, chosen = draw(st.sampled_from([-1, 1])), draw(st.integers(0, plan.target.sms - 1))

    def units(
        rank: int,
        sms: int,
        positions: Sequence[int | None],
        window: int | None,
        heads: int,
        most: int,
    ) -> list[AttentionUnit]:
        found = rules.attention_units(rank, sms, positions, window, heads, most)
        if field == "none":
            return [] if rank == chosen else found
        if field == "is_last":
            return [replace(unit, is_last=not unit.is_last) for unit in found]
        return [replace(unit, **{field: getattr(unit, field) + by}) for unit in found]

    used = plan.tiling.kv_heads * plan.tiling.max_splits
    assume(field != "none" or chosen < min(used, plan.tiling.kv_heads))
    return Rules(attention_units=units)


def wrong_active_count(draw: Draw, plan: Plan) -> Rules:
    by = draw(st.integers(-2, 2).filter(bool))
    return Rules(
        ffn_up_tasks=lambda rank, sms, active, width: rules.ffn_up_tasks(
            rank, sms, max(0, active + by), width
        )
    )


def wrong_task_stride(draw: Draw, plan: Plan) -> Rules:
    """Ranks deal tiles as if there were more or fewer SMs."""
    by = draw(st.integers(-2, 3).filter(bool))
    assume(plan.target.sms + by > 0)
    most = max(layer.matrices * layer.width_tiles for layer in plan.tiling.layers)
    assume(most > min(plan.target.sms, plan.target.sms + by))
    return Rules(
        ffn_up_tasks=lambda rank, sms, active, width: rules.ffn_up_tasks(
            rank, sms + by, active, width
        )
    )


def wrong_first_task(draw: Draw, plan: Plan) -> Rules:
    by = draw(st.integers(1, 5))
    return Rules(
        ffn_up_tasks=lambda rank, sms, active, width: rules.ffn_up_tasks(
            rank + by, sms, active, width
        )
    )


def wrong_expert_list(draw: Draw, plan: Plan) -> Rules:
    """Active experts in another order, one of them missing, or one twice."""
    assume(any(layer.slots > 1 for layer in plan.tiling.layers))
    how = draw(st.sampled_from(["reversed", "missing", "twice"]))

    def listed(chosen: Sequence[Sequence[int]]) -> list[int]:
        found = rules.active_experts(chosen)
        if how == "reversed":
            return found[::-1]
        return found[1:] if how == "missing" else found + found[:1]

    return Rules(active_experts=listed)


RULE_DAMAGE: list[Callable[[Draw, Plan], Rules]] = [
    window_edge,
    window_of_splits,
    chunk_edge,
    wrong_units,
    wrong_active_count,
    wrong_task_stride,
    wrong_first_task,
    wrong_expert_list,
]
