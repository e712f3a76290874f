"""Pass `tile`: cut every op into tasks that one SM does without interruption.

Everything streamed is made of *fragments*: 16 x 16 bf16 values, 512 bytes, stored as the registers
of one `mma.m16n8k16` A operand. A *tile* is 16 rows of a matrix (32 for gate and up, which belong
together); its fragments lie one after the other along K. The ring moves *chunks* of up to
`chunk_fragments` fragments.
"""

from __future__ import annotations

from dataclasses import dataclass

from mkc.compiler.errors import LoweringError
from mkc.compiler.ops import ffn_matrices
from mkc.compiler.program import LAYER_BITS
from mkc.compiler.spec import ExpertFfn, ModelSpec
from mkc.compiler.target import Target

FRAGMENT_EDGE = 16
FRAGMENT_BYTES = 512
PAGE_TOKENS = 64
MERGE_DIMS = 32
MAX_EXPERTS = 128
MAX_EXPERTS_PER_TOKEN = 8
MAX_ROWS = 8


@dataclass(frozen=True, slots=True)
class LayerTiling:
    """FFN tiles of one layer. A dense FFN is one matrix that every row uses with weight 1.

    width_tiles: tiles of 16 hidden values per matrix; matrices: how many exist; slots: how many a
    row uses; routed: whether a router chooses them.
    """

    width_tiles: int
    matrices: int
    slots: int
    routed: bool


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tile counts of every op; all sizes in units of 16 elements unless named otherwise."""

    max_rows: int
    chunk_fragments: int
    hidden_tiles: int
    head_tiles: int
    query_heads: int
    kv_heads: int
    max_splits: int
    vocab_size: int
    layers: tuple[LayerTiling, ...]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads

    @property
    def qkv_tiles(self) -> int:
        """Tiles of Q, K and V rows together: all query heads, then K heads, then V heads."""
        return (self.query_heads + 2 * self.kv_heads) * self.head_tiles

    @property
    def attention_tiles(self) -> int:
        """Tiles of the merged attention output, the K side of the out projection."""
        return self.query_heads * self.head_tiles

    @property
    def vocab_tiles(self) -> int:
        """Tiles of the LM head; the last may be padded with zero rows."""
        return -(-self.vocab_size // FRAGMENT_EDGE)

    @property
    def router_tiles(self) -> int:
        """Tiles of the router of a routed layer (the most of any layer, 0 if none is routed)."""
        experts = max((t.matrices for t in self.layers if t.routed), default=0)
        return -(-experts // FRAGMENT_EDGE)

    @property
    def merge_parts(self) -> int:
        """Parts of MERGE_DIMS values that a head's output is merged in."""
        return self.head_tiles * FRAGMENT_EDGE // MERGE_DIMS

    @property
    def merge_units(self) -> int:
        """Merge tasks a row has in each layer."""
        return self.query_heads * self.merge_parts

    @property
    def page_fragments(self) -> int:
        """Fragments in one page of K or of V of one KV head."""
        return PAGE_TOKENS // FRAGMENT_EDGE * self.head_tiles

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of K or of V of one KV head."""
        return self.page_fragments * FRAGMENT_BYTES

    def chunks(self, fragments: int) -> int:
        """Chunks that a run of fragments takes in the ring; the last may be short."""
        return -(-fragments // self.chunk_fragments)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a full chunk, which is one slot of the ring."""
        return self.chunk_fragments * FRAGMENT_BYTES


def tile(spec: ModelSpec, target: Target, max_rows: int, chunk_fragments: int) -> Tiling:
    """Spec, target and row limit -> tile counts.

    Raises LoweringError MKC204 for a row limit, and MKC201 for a shape, that the kernel can't hold.
    """
    if not 1 <= max_rows <= MAX_ROWS:
        raise LoweringError("MKC204", f"--max-batch {max_rows} is outside 1 to {MAX_ROWS}")
    if len(spec.layers) >= 1 << LAYER_BITS:
        raise LoweringError(
            "MKC201", f"{len(spec.layers)} layers: a program can have {(1 << LAYER_BITS) - 1}"
        )
    attention = spec.attention
    if attention.kv_heads > target.sms:
        raise LoweringError(
            "MKC201", f"{attention.kv_heads} KV heads do not fit {target.sms} SMs of {target.name}"
        )
    layers = []
    for layer in spec.layers:
        matrices, slots = ffn_matrices(layer.ffn)
        width_tiles = layer.ffn.width // FRAGMENT_EDGE
        layers.append(LayerTiling(width_tiles, matrices, slots, isinstance(layer.ffn, ExpertFfn)))
    return Tiling(
        max_rows=max_rows,
        chunk_fragments=chunk_fragments,
        hidden_tiles=spec.hidden_size // FRAGMENT_EDGE,
        head_tiles=attention.head_dim // FRAGMENT_EDGE,
        query_heads=attention.query_heads,
        kv_heads=attention.kv_heads,
        max_splits=target.sms // attention.kv_heads,
        vocab_size=spec.vocab_size,
        layers=tuple(layers),
    )
