// A consumer warp: what its tasks have at hand, and the steps they share.
#pragma once
#include "multiply.cuh"
#include "packets.cuh"
#include "rules.cuh"

namespace mkc {

// A tile's sums over all warps (for gate and up: of hidden values 2i and of 2i + 1), and 1 / rms of batch rows 2j and
// 2j + 1 of the layer input.
struct Totals {
  float4 first = {}, second = {};
  float2 inverse_rms;
};

template <int ROWS, int SLOTS>
struct Consumer {
  using Shared = SharedMemory<ROWS, SLOTS>;
  static constexpr int kScratchParcels = scratch_words(ROWS) / kWordsPerParcel;

  const Step& step;
  Shared& shared;
  Patience& patience;
  RingConsumer<ROWS, SLOTS>& ring;
  int warp, lane, i, j;  // i = lane / 4, j = lane % 4: the place of this lane in a fragment
  int routed_layers = 0;   // routed layers begun
  int deposits = 0;        // tiles whose sums this warp has begun to deposit

  __device__ Consumer(const Step& s, Shared& m, Patience& p, RingConsumer<ROWS, SLOTS>& r) : step(s), shared(m), patience(p), ring(r) {}

  // Starts an entry. What a task works out from its entry and this lane's place is its own: were it known to be the same
  // for all kinds of task, the compiler would keep every kind's addresses in registers over the whole program.
  __device__ __forceinline__ Entry begin(uint32_t word) {
    const int thread = fresh_thread_index();
    warp = thread / 32, lane = thread % 32, i = lane / 4, j = lane % 4;
    patience.begin(word);
    Entry entry = decode_entry(word);
    asm volatile("" : "+r"(entry.warp), "+r"(entry.layer), "+r"(entry.tile));
    return entry;
  }
  // This warp's scratch, once nobody reads from it what it has lent.
  __device__ __forceinline__ uint32_t* scratch() {
    patience.wait(kWaitWarps, [&] { return load_acquire(&shared.taken[warp]) == load_relaxed(&shared.lent[warp]); });
    return shared.scratch[warp];
  }
  __device__ __forceinline__ uint32_t epoch(int layer) const { return step.epoch + layer; }
  __device__ __forceinline__ bool takes(const Entry& entry, int task) const { return (entry.warp + task) % kConsumerWarps == warp; }
  __device__ __forceinline__ void sync() { named_barrier_sync<1>(kConsumerThreads); }
  // The routing of a layer's FFN, once it is known.
  __device__ __forceinline__ const Routing<ROWS>& routing(const Layer& layer) {
    if (!layer.routed) return shared.routing[kDenseTable];
    patience.wait(kWaitRouting, [&] { return load_acquire(&shared.routed_layers) >= routed_layers; });
    return shared.routing[routed_layers & 1];
  }

  // This warp's place for its part of the next tile's sums; waits until the tile before the last has been finished.
  __device__ __forceinline__ Deposit<ROWS>& open_deposit() {
    patience.wait(kWaitWarps, [&] { return barrier_try_wait(&shared.collected[deposits & 1], (deposits >> 1 & 1) ^ 1); });
    return shared.deposits[deposits & 1][warp];
  }
  __device__ __forceinline__ void close_deposit() {
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.deposited[deposits & 1]);
    deposits++;
  }
  // The sums of the tile deposited last, once all warps' parts are there, in the order of the warps. For the one warp
  // that finishes the tile.
  __device__ __forceinline__ Totals collect(bool is_pair) {
    const int tile = deposits - 1;
    patience.wait(kWaitWarps, [&] { return barrier_try_wait(&shared.deposited[tile & 1], tile >> 1 & 1); });
    Totals totals;
    float2 sum = make_float2(0, 0);
#pragma unroll 4
    for (int w = 0; w < kConsumerWarps; w++) {
      const Deposit<ROWS>& deposit = shared.deposits[tile & 1][w];
      const int pair = min(j, Deposit<ROWS>::kPairs - 1);
      add(totals.first, deposit.sums[0][i][pair]);
      if (is_pair) add(totals.second, deposit.sums[1][i][pair]);
      const float2 squares = *reinterpret_cast<const float2*>(&deposit.squares[2 * j]);
      sum.x += squares.x, sum.y += squares.y;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.collected[tile & 1]);
    totals.inverse_rms = make_float2(rsqrtf(sum.x / (kHiddenTiles * 16) + kNormEpsilon), rsqrtf(sum.y / (kHiddenTiles * 16) + kNormEpsilon));
    return totals;
  }
  // This warp's part of a tile that multiplies the layer input, or of a gate tile and its up tile.
  __device__ __forceinline__ void multiply_layer_input(int first_chunk, const Slicing& slicing, bool is_pair) {
    Accumulator sums;
    const Slice slice = slice_of(slicing, warp);
    const uint32_t* values = &shared.layer_input[warp * kInputSlice][min(i, ROWS - 1)][2 * j];
    if (is_pair) multiply_slice<2, ROWS * kWordsPerParcel>(sums, ring, first_chunk, slice, 0, slice.size, values, false);
    else multiply_slice<1, ROWS * kWordsPerParcel>(sums, ring, first_chunk, slice, 0, slice.size, values, false);
    Deposit<ROWS>& deposit = open_deposit();
    float4 first = sums.total_of_pair(0);
    const float4 second = sums.total_of_pair(1);
    if (!is_pair) add(first, second);
    if (j < Deposit<ROWS>::kPairs) {
      if (is_pair) deposit.sums[1][i][j] = second;
      deposit.sums[0][i][j] = first;
    }
    if (lane < 8) deposit.squares[lane] = shared.slice_squares[warp][lane];
    close_deposit();
  }

  // STAGE: brings this warp's slice of a layer's input to shared memory. Owners send it as x * norm weight; the norm's
  // other factor, 1 / rms(x), is applied to each product, so nothing waits for the sum of squares.
  __device__ __forceinline__ void stage(const Entry& entry) {
    constexpr int kRowLoads = (kInputSlice * kParcelPackets + 31) / 32, kRowsAtOnce = max_of(1, 8 / kRowLoads) < ROWS ? max_of(1, 8 / kRowLoads) : ROWS;
    const int first = warp * kInputSlice, end = min(first + kInputSlice, kHiddenTiles);
#pragma unroll 1
    for (int base = 0; base < ROWS; base += kRowsAtOnce) {
      float squares[kRowsAtOnce][kRowLoads] = {};
      gather_packets<kRowsAtOnce * kRowLoads>(
          patience, epoch(entry.layer),
          [&](int u) {
            const int row = base + u / kRowLoads, tile = first + u % kRowLoads * 8 + i;
            return tile < end && row < step.rows ? layer_input_packet(entry.layer, tile, row) + j : -1;
          },
          [&](int u, uint4 packet) {
            const int row = base + u / kRowLoads, tile = first + u % kRowLoads * 8 + i;
            *reinterpret_cast<uint2*>(&shared.layer_input[tile][row][2 * j]) = make_uint2(packet.x, packet.y);
            squares[u / kRowLoads][u % kRowLoads] = __uint_as_float(packet.z);
          });
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; row++) {
        float sum = 0;
#pragma unroll
        for (int u = 0; u < kRowLoads; u++) sum += squares[row][u];
#pragma unroll
        for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
        if (lane == 0) shared.slice_squares[warp][base + row] = sum;
      }
    }
    __syncwarp();
    if (lane == 0) store_release(&shared.begun_layers[warp], entry.layer + 1);
    if (entry.layer < kLayers && kLayerTable[entry.layer].routed) routed_layers++;
  }

  // Sends an owned tile's residual rows to all SMs as a layer's input. For one warp.
  __device__ __forceinline__ void publish(int layer, int tile, float4 x, uint32_t norm_words) {
    const float weight[2] = {bf16_low(norm_words), bf16_high(norm_words)};
    // Of the packet that this lane sends: its own values' and its neighbour's.
    const float even = x.x * x.x + x.z * x.z, odd = x.y * x.y + x.w * x.w;
    const float squares = (i & 1 ? odd : even) + __shfl_xor_sync(kAllLanes, i & 1 ? even : odd, 4);
    send_parcels(step, pack_bf16(x.x * weight[0], x.z * weight[1]), pack_bf16(x.y * weight[0], x.w * weight[1]), squares, epoch(layer),
                 [&](int row) { return layer_input_packet(layer, tile, row); });
  }
  // The norm weights that publish(layer, tile) needs, two to a lane.
  __device__ __forceinline__ uint32_t norm_words(int layer, int tile) const {
    return reinterpret_cast<const uint32_t*>(step.arena + kNormsOffset)[(layer * kHiddenTiles + tile) * 8 + i];
  }

  // EMBED: the residual rows of an owned tile begin as columns of the tokens' embeddings.
  __device__ __forceinline__ void embed(const Entry& entry) {
    if (!takes(entry, 0)) return;
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
