// The producer warp walks the SM's program ahead of the consumers and sends for every chunk of it. It stops for three
// things: a full ring, a full window, and the routing.
#pragma once
#include "ring.cuh"
#include "rules.cuh"
#include "tasks_attention.cuh"
#include "tasks_owner.cuh"
#include "tasks_products.cuh"

namespace mkc {

// Block ids of a run of pages, 32 at a time: the next 32 are on their way while these are used.
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

template <int ROWS, int SLOTS>
__device__ __forceinline__ void produce(const Step& step, SharedMemory<ROWS, SLOTS>& shared) {
  Patience patience(step);
  RingProducer<ROWS, SLOTS> ring{shared, patience};
  const uint2* program = step.programs + size_t(blockIdx.x) * step.program_pitch;
  const int lane = threadIdx.x & 31;
  int routed_layers = 0;
  uint2 words = program[lane];  // 32 entries at a time, the next 32 on their way
  uint2 next_words = 32 + lane < step.program_pitch ? program[32 + lane] : make_uint2(END, 0);
  for (int index = 0;; index++) {
    if (index && index % 32 == 0) {
      words = next_words;
      next_words = index + 32 + lane < step.program_pitch ? program[index + 32 + lane] : make_uint2(END, 0);
    }
    const Entry entry = decode_entry(make_uint2(__shfl_sync(kAllLanes, words.x, index % 32), __shfl_sync(kAllLanes, words.y, index % 32)));
    patience.entry = entry;
    if (entry.kind == END) return;
    if (entry.kind == HEAD) {
      for (int tile = entry.tile; tile < kVocabularyTiles; tile += kSms)
        ring.issue_fragments(step.arena + kHeadOffset + uint64_t(tile) * (kHiddenTiles * kFragmentBytes), kHiddenTiles);
      continue;
    }
    if (entry.kind == EMBED || entry.kind == SAMPLE) continue;
    if (entry.layer == kLayers) continue;  // STAGE before the head
    const Layer& layer = kLayerTable[entry.layer];
    const auto routing = [&]() -> const Routing<ROWS>& {
      if (!layer.routed) return shared.routing[kDenseTable];
      patience.wait(kWaitRouting, [&] { return load_acquire(&shared.routed_layers) >= routed_layers; });
      return shared.routing[routed_layers & 1];
    };
    switch (entry.kind) {
      case STAGE:
        if (lane == 0) store_release(&shared.streamed_layers, entry.layer + 1);
        if (layer.routed) routed_layers++;
        break;
      case ROUTER: ring.issue_fragments(step.arena + layer.router + entry.tile * (kHiddenTiles * kFragmentBytes), kHiddenTiles); break;
      case QKV: ring.issue_fragments(step.arena + layer.qkv + uint64_t(entry.tile) * (kHiddenTiles * kFragmentBytes), kHiddenTiles); break;
      case OUT: ring.issue_fragments(step.arena + layer.out + uint64_t(entry.tile) * (kAttentionTiles * kFragmentBytes), kAttentionTiles); break;
      case ATTENTION: {
        const KvGroup& group = step.kv[layer.kv_group];
        for_attention_units(entry.tile, shared.position, step.rows, layer.window, [&](const AttentionUnit& unit) {
          PageIds blocks(group.table + unit.row * group.pitch, unit.page, unit.end_page);
          const ChunkSpan chunks = chunk_span(unit, shared.position[unit.row], layer.window);
          for (int chunk = chunks.begin; chunk < chunks.end; chunk++) {
            const int first = chunk * kChunkTokens, block = blocks[first / kPageTokens];
            const uint8_t* keys = page_address(step, layer, block, unit.kv_head, 0) + first % kPageTokens / 16 * (kHeadTiles * kFragmentBytes);
            ring.issue(keys, kTileChunk * kHeadTiles * kFragmentBytes);
            ring.issue(keys + kPageBytes, kTileChunk * kHeadTiles * kFragmentBytes);
          }
        });
        break;
      }
      case FFN_UP: {
        const Routing<ROWS>& chosen = routing();
        const int tiles = chosen.active * layer.width_tiles;
        for (int task = entry.tile; task < tiles; task += kSms) {
          const uint64_t tile = uint64_t(chosen.expert[task / layer.width_tiles]) * layer.width_tiles + task % layer.width_tiles;
          ring.issue_fragments(step.arena + layer.gate_up + tile * (2 * kHiddenTiles * kFragmentBytes), 2 * kHiddenTiles);
        }
        break;
      }
      case FFN_DOWN: {
        const Routing<ROWS>& chosen = routing();
        for (int active = 0; active < chosen.active; active++) {
          const uint64_t tile = uint64_t(chosen.expert[active]) * kHiddenTiles + entry.tile;
          ring.issue_fragments(step.arena + layer.down + tile * (layer.width_tiles * kFragmentBytes), layer.width_tiles);
        }
        break;
      }
      default: break;
    }
  }
}

}  // namespace mkc
