// The producer warp walks the SM's program ahead of the consumers and sends for every chunk of it. It stops for three
// things: a full ring, a full window, and the routing.
#pragma once
#include "ring.cuh"
#include "rules.cuh"

namespace mkc {

// Block ids of a run of pages, 32 at a time: the next 32 are on their way while these are used. Nothing waits for the
// first ones before they are used.
struct PageIds {
  const int* table;
  int first, end, lane, current = 0, next = 0;

  __device__ PageIds(const int* t, int begin, int stop) : table(t), first(begin), end(stop), lane(threadIdx.x & 31) {
    current = load(first), next = load(first + 32);
  }
  __device__ __forceinline__ int load(int base) const { return base + lane < end ? table[base + lane] : 0; }
  // Pages must be asked for in order.
  __device__ __forceinline__ int operator[](int page) {
    if (page - first == 32) first += 32, current = next, next = load(first + 32);
    return __shfl_sync(kAllLanes, current, page - first);
  }
};

constexpr int kFirstPages = 4;  // of a split, whose blocks are looked up before the split's turn

// The blocks of the first pages of this SM's splits: lane 4r + p gets that of page p of row r's split. Called before
// another entry's chunks are sent for, so that the lookup costs no time.
template <int ROWS, int SLOTS>
__device__ __forceinline__ int first_blocks(const Step& step, const SharedMemory<ROWS, SLOTS>& shared, const Layer& layer, int rank, int lane) {
  const KvGroup& group = step.kv[layer.kv_group];
  int block = 0;
  for_attention_units(rank, shared.position, step.rows, layer.window, [&](const AttentionUnit& unit) {
    const int page = unit.page + lane % kFirstPages;
    if (lane / kFirstPages == unit.row && page < unit.end_page) block = group.table[unit.row * group.pitch + page];
  });
  return block;
}

// Sends for the pages of this SM's splits, each in chunks of K and V in turn.
template <int ROWS, int SLOTS>
__device__ __forceinline__ void send_pages(const Step& step, SharedMemory<ROWS, SLOTS>& shared, RingProducer<ROWS, SLOTS>& ring, const Layer& layer, int rank, int blocks, int lane) {
  const KvGroup& group = step.kv[layer.kv_group];
  for_attention_units(rank, shared.position, step.rows, layer.window, [&](const AttentionUnit& unit) {
    PageIds more_blocks(group.table + unit.row * group.pitch, unit.page + kFirstPages, unit.end_page);
    const ChunkSpan chunks = chunk_span(unit, shared.position[unit.row], layer.window);
#pragma unroll 1
    for (int chunk = 2 * chunks.begin; chunk < 2 * chunks.end; chunk++) {
      const int first = chunk / 2 * kChunkTokens, page = first / kPageTokens, index = page - unit.page;
      const int block = index < kFirstPages ? __shfl_sync(kAllLanes, blocks, unit.row * kFirstPages + index) : more_blocks[page];
      const uint8_t* address = page_address(step, layer, block, unit.kv_head, chunk % 2);
      if (lane == 0) ring.issue(address + first % kPageTokens / 16 * (kHeadTiles * kFragmentBytes), kTileChunk * kHeadTiles * kFragmentBytes);
    }
  });
}

template <int ROWS, int SLOTS>
__device__ __forceinline__ void produce(const Step& step, SharedMemory<ROWS, SLOTS>& shared) {
  Patience patience(step);
  RingProducer<ROWS, SLOTS> ring{shared, patience};
  Program program(step);
  const int lane = threadIdx.x & 31;
  int routed_layers = 0, blocks = 0;
  while (true) {
    const uint32_t word = program.next();
    const Entry entry = decode_entry(word);
    patience.begin(word);
    if (entry.kind == END) return;
    const Layer& layer = kLayerTable[min(entry.layer, kLayers - 1)];
    if (entry.kind == STAGE && entry.layer < kLayers) {
      if (lane == 0) store_release(&shared.begun_layers[kConsumerWarps], entry.layer + 1);
      if (layer.routed) routed_layers++;
    }
    const uint32_t next = program.peek();
    if (decode_entry(next).kind == ATTENTION) blocks = first_blocks(step, shared, layer, decode_entry(next).tile, lane);
    if (entry.kind == ATTENTION) {
      // Its entry was not at hand when the one before was.
      if (program.index == 1) blocks = first_blocks(step, shared, layer, entry.tile, lane);
      send_pages(step, shared, ring, layer, entry.tile, blocks, lane);
      continue;
    }
    // All others stream tiles of a matrix: `tile` and those `stride` apart, before `end`.
    const bool is_ffn = entry.kind == FFN_UP || entry.kind == FFN_DOWN;
    if (is_ffn && layer.routed) patience.wait(kWaitRouting, [&] { return load_acquire(&shared.routed_layers) >= routed_layers; });
    const Routing<ROWS>& routing = shared.routing[is_ffn && layer.routed ? routed_layers & 1 : kDenseTable];
    Slicing slicing = kRowSlicing;
    const uint8_t* matrix = step.arena;
    int tile = entry.tile, end = entry.tile + 1, stride = 1;
    switch (entry.kind) {
      case ROUTER: matrix += layer.router; break;
      case QKV: matrix += layer.qkv; break;
      case FFN_UP: matrix += layer.gate_up, slicing = kGateUpSlicing, end = routing.active * layer.width_tiles, stride = kSms; break;
      case OUT: matrix += layer.out, slicing = kOutSlicing, end = routing.active ? end : tile; break;
      case FFN_DOWN: matrix += layer.down, slicing = slicing_of(layer.width_tiles, 1), end = tile + routing.active * kHiddenTiles, stride = kHiddenTiles; break;
      case HEAD: matrix += kHeadOffset, end = kVocabularyTiles, stride = kSms; break;
      default: end = tile; break;
    }
    const int tiles_of_expert = entry.kind == FFN_UP ? layer.width_tiles : kHiddenTiles;
    int active = 0, begin = 0;  // the active expert of an FFN tile, and its first tile
#pragma unroll 1
    for (; tile < end; tile += stride) {
      int place = tile;  // experts lie by their ids, and are walked by their place among the active ones
      if (is_ffn) {
        while (tile - begin >= tiles_of_expert) begin += tiles_of_expert, active++;
        place = routing.expert[active] * tiles_of_expert + tile - begin;
      }
      if (lane == 0) ring.issue_tile(matrix + uint64_t(place) * (slicing.fragments * kFragmentBytes), slicing);
    }
  }
}

}  // namespace mkc
