// tiny: one decode step as one kernel, for NVIDIA H200 (sm_90a). Made by mkc.
//
// How to read this file: `decode_step.cuh` has the kernel and its roles; an SM's program (see plan.json) says which
// task comes next, `tasks_*.cuh` what a task does, `ring.cuh` how weights and pages reach it, `packets.cuh` how its
// results reach the other SMs.

// ==== model.cuh =======================================================================================
// The model and its plan as constants: tiny for h200-sxm, up to 8 rows.

namespace mkc {

// ---- shape: a tile is 16 values ----------------------------------------------------------------
constexpr int kSms = 132;
constexpr int kMaxRows = 8;
constexpr int kLayers = 6;
constexpr int kHiddenTiles = 13;
constexpr int kHeadTiles = 4;
constexpr int kQueryHeads = 12;
constexpr int kKvHeads = 2;
constexpr int kGroup = 6;  // query heads that share a KV head: the columns of an attention product
constexpr int kQkvTiles = 64;
constexpr int kAttentionTiles = 48;
constexpr int kRouterTiles = 1;
constexpr int kMaxSplits = 66;
constexpr int kMergeParts = 2;
constexpr int kVocabulary = 1003;
constexpr int kVocabularyTiles = 63;
constexpr float kNormEpsilon = 9.999999974752427e-07f;
constexpr float kLogitScale = 1.0f;

// ---- streaming: a fragment is 512 bytes --------------------------------------------------------
constexpr int kChunkFragments = 32;
constexpr int kWindowChunks = 6;  // that one SM may have in flight

// ---- tracing -----------------------------------------------------------------------------------
constexpr bool kTrace = false;  // whether the kernel records when each warp does what

// ---- packets: first index of each set ----------------------------------------------------------
constexpr int kLayerInputPackets = 0;  // [layer][tile][row] = [7][13][8], 4 each
constexpr int kRouterLogitsPackets = 2912;  // [layer][row][tile] = [6][8][1], 8 each
constexpr int kQkvPackets = 3296;  // [layer][tile][row] = [6][64][8], 4 each
constexpr int kPartialsPackets = 15584;  // [buffer][row][head][part][split] = [2][8][12][2][66], 12 each
constexpr int kMergedPackets = 319712;  // [layer][tile][row] = [6][48][8], 4 each
constexpr int kHiddenPackets = 328928;  // [layer][row][parcel] = [6][8][6], 4 each
constexpr int kCandidatesPackets = 330080;  // [row][sm] = [8][132], 1 each
constexpr int kHiddenParcels = 6;  // that a row may have in a layer

// ---- weights and layers --------------------------------------------------------------------------
constexpr unsigned long long kNormsOffset = 0;
constexpr unsigned long long kHeadOffset = 6409216;
constexpr unsigned long long kEmbeddingOffset = 6409216;
constexpr int kKvGroups = 2;
constexpr int kNoWindow = 0x7fffffff;

struct Layer {
  unsigned long long router, qkv, gate_up, out, down;  // offsets in the arena
  int width_tiles;    // of one FFN matrix
  int experts;        // FFN matrices; 1 for a dense layer
  int slots;          // FFN matrices that a row uses
  bool routed, rope;
  int window;         // tokens that a query sees, its own included
  int kv_group;
  unsigned long long kv_offset, kv_block_bytes;  // of this layer in a block of its KV group
};

__constant__ Layer kLayerTable[kLayers] = {
    { 0ull, 3072ull, 429056ull, 495616ull, 815104ull, 5, 1, 1, false, true, kNoWindow, 0, 0ull, 65536ull },  // 0
    { 848896ull, 856064ull, 1282048ull, 1521664ull, 1841152ull, 3, 6, 2, true, true, 100, 1, 0ull, 131072ull },  // 1
    { 1960960ull, 1968128ull, 2394112ull, 2633728ull, 2953216ull, 3, 6, 2, true, true, 100, 1, 32768ull, 131072ull },  // 2
    { 3073024ull, 3080192ull, 3506176ull, 3745792ull, 4065280ull, 3, 6, 2, true, true, 100, 1, 65536ull, 131072ull },  // 3
    { 4185088ull, 4192256ull, 4618240ull, 4857856ull, 5177344ull, 3, 6, 2, true, false, kNoWindow, 0, 32768ull, 65536ull },  // 4
    { 5297152ull, 5304320ull, 5730304ull, 5969920ull, 6289408ull, 3, 6, 2, true, true, 100, 1, 98304ull, 131072ull },  // 5
};

// Radians per position of each rotated pair.
__constant__ float kInverseFrequencies[kHeadTiles * 8] = {
    1.0f, 0.7131111025810242f, 0.5085274577140808f, 0.362636536359787f,
    0.2586001455783844f, 0.18441061675548553f, 0.13150526583194733f, 0.0937778577208519f,
    0.06687402725219727f, 0.04768861085176468f, 0.034007277339696884f, 0.024250969290733337f,
    0.01729363389313221f, 0.012332282960414886f, 0.008794286288321018f, 0.006271303631365299f,
    0.004472136031836271f, 0.0031891297549009323f, 0.0022742035798728466f, 0.0016217599622905254f,
    0.001156494952738285f, 0.0008247093646787107f, 0.0005881094257347286f, 0.00041938736103475094f,
    0.0002990697685163468f, 0.00021326997375581414f, 0.0001520851656096056f, 0.00010845361975952983f,
    7.733947859378532e-05f, 5.515163502423093e-05f, 3.932924664695747e-05f, 2.804612449835986e-05f,
};

}  // namespace mkc

// ==== ptx.cuh =========================================================================================
// ==== step.cuh ========================================================================================
// ==== slices.cuh ======================================================================================
// ==== shared_memory.cuh ===============================================================================
// ==== ring.cuh ========================================================================================
// ==== rules.cuh =======================================================================================
// ==== producer.cuh ====================================================================================
// ==== packets.cuh =====================================================================================
// ==== routing.cuh =====================================================================================
// ==== helper.cuh ======================================================================================
// ==== multiply.cuh ====================================================================================
// ==== consumer.cuh ====================================================================================
// ==== tasks_attention.cuh =============================================================================
// ==== tasks_owner.cuh =================================================================================
// ==== tasks_products.cuh ==============================================================================
// ==== decode_step.cuh =================================================================================
// ==== entry points: one for each row capacity ===================================================

static_assert(sizeof(mkc::SharedMemory<1, ##>) == ######, "shared memory differs from the plan");
extern "C" __global__ void __launch_bounds__(mkc::kThreads, 1) decode_step_1(const __grid_constant__ mkc::Step step) {
  mkc::decode_step<1, ##>(step);
}

static_assert(sizeof(mkc::SharedMemory<2, ##>) == ######, "shared memory differs from the plan");
extern "C" __global__ void __launch_bounds__(mkc::kThreads, 1) decode_step_2(const __grid_constant__ mkc::Step step) {
  mkc::decode_step<2, ##>(step);
}

static_assert(sizeof(mkc::SharedMemory<4, ##>) == ######, "shared memory differs from the plan");
extern "C" __global__ void __launch_bounds__(mkc::kThreads, 1) decode_step_4(const __grid_constant__ mkc::Step step) {
  mkc::decode_step<4, ##>(step);
}

static_assert(sizeof(mkc::SharedMemory<8, ##>) == ######, "shared memory differs from the plan");
extern "C" __global__ void __launch_bounds__(mkc::kThreads, 1) decode_step_8(const __grid_constant__ mkc::Step step) {
  mkc::decode_step<8, ##>(step);
}
