// A consumer warp: what its tasks have at hand, and the steps they share.
#pragma once
#include "multiply.cuh"
#include "packets.cuh"
#include "rules.cuh"

namespace mkc {

template <int ROWS, int SLOTS>
struct Consumer {
  using Shared = SharedMemory<ROWS, SLOTS>;

  const Step& step;
  Shared& shared;
  Patience& patience;
  RingConsumer<ROWS, SLOTS>& ring;
  int warp, lane, i, j;  // i = lane / 4, j = lane % 4: the place of this lane in a fragment
  int routed_layers = 0;  // routed layers begun
  int half = 0;           // of shared.sums that is next

  __device__ Consumer(const Step& s, Shared& m, Patience& p, RingConsumer<ROWS, SLOTS>& r) : step(s), shared(m), patience(p), ring(r) {}

  // Starts a task. What a task works out from its entry and this lane's place is its own: were it known to be the same
  // for all kinds of task, the compiler would keep every kind's addresses in registers over the whole program.
  __device__ __forceinline__ Entry begin(Entry entry) {
    const int thread = fresh_thread_index();
    warp = thread / 32, lane = thread % 32, i = lane / 4, j = lane % 4;
    asm volatile("" : "+r"(entry.warp), "+r"(entry.layer), "+r"(entry.tile));
    patience.entry = entry;
    return entry;
  }
  __device__ __forceinline__ uint32_t* scratch() { return shared.scratch[warp]; }
  __device__ __forceinline__ ParcelScratch parcels() { return {scratch()}; }
  __device__ __forceinline__ uint32_t epoch(int layer) const { return step.epoch + layer; }
  __device__ __forceinline__ bool takes(const Entry& entry, int task) const { return (entry.warp + task) % kConsumerWarps == warp; }
  __device__ __forceinline__ void sync() { named_barrier_sync<1>(kConsumerThreads); }
  __device__ __forceinline__ BatchFragments layer_input() {
    return BatchFragments::of(&shared.layer_input[0][0][0], ROWS, i, i < step.rows);
  }
  // The routing of a layer's FFN, once it is known.
  __device__ __forceinline__ const Routing<ROWS>& routing(const Layer& layer) {
    if (!layer.routed) return shared.routing[kDenseTable];
    patience.wait(kWaitRouting, [&] { return load_acquire(&shared.routed_layers) >= routed_layers; });
    return shared.routing[routed_layers & 1];
  }

  // 1 / rms of batch rows 2j and 2j + 1, for the layer input at hand.
  __device__ __forceinline__ float2 inverse_rms() const { return *reinterpret_cast<const float2*>(&shared.inverse_rms[warp][2 * j]); }
  // This lane's place for its part of a tile that all warps share.
  __device__ __forceinline__ float4& shared_sum() { return shared.sums[half][warp][lane]; }
  // Adds up all warps' parts, in the order of the warps, and turns to the other half. The result is warp 0's; all take part.
  __device__ __forceinline__ float4 reduce_to_first_warp() {
    sync();
    float4 total = make_float4(0, 0, 0, 0);
    if (warp == 0)
      for (int w = 0; w < kConsumerWarps; w++) add(total, shared.sums[half][w][lane]);
    half ^= 1;
    return total;
  }

  // STAGE: brings a layer's input to shared memory. Owners send it as x * norm weight; the norm's other factor,
  // 1 / rms(x), is applied to each product, so nothing waits for the sum of squares.
  __device__ __forceinline__ void stage(const Entry& entry) {
    constexpr int kTiles = (kHiddenTiles + kConsumerWarps - 1) / kConsumerWarps, kPackets = ROWS * kParcelPackets;
    constexpr int kLoads = (kTiles * kPackets + 31) / 32, kAtOnce = kLoads < 6 ? kLoads : 6;
    for (int base = 0; base < kLoads * 32; base += kAtOnce * 32) {
      const auto tile_of = [&](int n) { return warp * kTiles + (base + n) / kPackets; };
      const auto row_of = [&](int n) { return (base + n) % kPackets / kParcelPackets; };
      gather_packets<kAtOnce>(
          patience, epoch(entry.layer),
          [&](int n) {
            const int tile = tile_of(n), row = row_of(n);
            const bool exists = base + n < kTiles * kPackets && tile < kHiddenTiles && row < step.rows;
            return exists ? layer_input_packet(entry.layer, tile, row) + (base + n) % kParcelPackets : -1;
          },
          [&](int n, uint4 packet) {
            const int tile = tile_of(n), row = row_of(n), part = (base + n) % kParcelPackets;
            uint32_t* words = &shared.layer_input[tile][row][part * 3];
            words[0] = packet.x, words[1] = packet.y;
            if (part < 2) words[2] = packet.z;
            else shared.squares[row][tile] = __uint_as_float(packet.z);
          });
    }
    sync();
    if (threadIdx.x == 0) store_release(&shared.staged_layers, entry.layer + 1);
    for (int row = 0; row < step.rows; row++) {
      float sum = 0;
      for (int tile = lane; tile < kHiddenTiles; tile += 32) sum += shared.squares[row][tile];
#pragma unroll
      for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
      const float inverse = rsqrtf(sum / (kHiddenTiles * 16) + kNormEpsilon);
      if (lane == 0) shared.inverse_rms[warp][row] = inverse;
    }
    __syncwarp();
    if (entry.layer < kLayers && kLayerTable[entry.layer].routed) routed_layers++;
  }

  // Sends an owned tile's residual rows to all SMs as a layer's input. Warp 0 only.
  __device__ __forceinline__ void publish(int layer, int tile, float4 x, uint32_t norm_words) {
    const float weight[2] = {bf16_low(norm_words), bf16_high(norm_words)};
    float squares[2] = {x.x * x.x + x.z * x.z, x.y * x.y + x.w * x.w};
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      squares[0] += __shfl_xor_sync(kAllLanes, squares[0], offset);
      squares[1] += __shfl_xor_sync(kAllLanes, squares[1], offset);
    }
    parcels().put(step.rows, pack_bf16(x.x * weight[0], x.z * weight[1]), pack_bf16(x.y * weight[0], x.w * weight[1]));
    if (i == 0 && 2 * j < step.rows) parcels().put_extra(2 * j, squares[0]);
    if (i == 0 && 2 * j + 1 < step.rows) parcels().put_extra(2 * j + 1, squares[1]);
    parcels().send(step, step.rows, epoch(layer), [&](int row) { return layer_input_packet(layer, tile, row); });
  }
  // The norm weights that publish(layer, tile) needs, two to a lane.
  __device__ __forceinline__ uint32_t norm_words(int layer, int tile) const {
    return reinterpret_cast<const uint32_t*>(step.arena + kNormsOffset)[(layer * kHiddenTiles + tile) * 8 + i];
  }

  // EMBED: the residual rows of an owned tile begin as columns of the tokens' embeddings.
  __device__ __forceinline__ void embed(const Entry& entry) {
    if (warp != 0) return;
    uint32_t word[2] = {0, 0};
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int row = 2 * j + c;
      if (row >= step.rows || shared.position[row < ROWS ? row : 0] == kIdleRow) continue;
      // Token t is row t % 16 of tile t / 16 of the packed table: see `pair_tiles` in docs/format.md.
      const uint32_t token = step.tokens[row];
      const uint64_t fragment = uint64_t(token / 16) * kHiddenTiles + entry.tile;
      const int word_index = (token % 16 / 2 * 4 + i / 2) * 4 + token % 2 + i % 2 * 2;
      word[c] = reinterpret_cast<const uint32_t*>(step.arena + kEmbeddingOffset)[fragment * (kFragmentBytes / 4) + word_index];
    }
    const float4 x = make_float4(bf16_low(word[0]), bf16_low(word[1]), bf16_high(word[0]), bf16_high(word[1]));
    shared.residual[entry.tile / kSms][lane] = x;
    publish(0, entry.tile, x, norm_words(0, entry.tile));
  }
};

}  // namespace mkc
