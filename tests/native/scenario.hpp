// Random programs of calls with what every rank must see in each: the oracle of the engine tests.
// Everything follows from a seed and is made before any rank runs, so ranks only read it. Values
// are small whole numbers: every sum is exact, and its order is the contract suite's business.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "check.hpp"
#include "epcomm/entry.h"

namespace epcomm::testing {

struct Config {
  uint64_t seed = 0;
  int num_ranks = 1, num_experts = 1, num_topk = 1, hidden = 1;
  int64_t max_tokens = 1, max_recv = 1;
  int num_slots = 1, num_channels = 1, num_threads = 1;
  int num_scales = 0;  // int32 columns that travel beside a row, where a step has them
  bool push_only = false;
  std::vector<int32_t> expert_rank;   // owner
  std::vector<int32_t> expert_local;  // id at its owner
  int max_local_experts = 0;

  static Config random(uint64_t seed, int num_ranks);
  HeapShape shape(bool staging) const;
  std::string text() const;
};

// What one rank gives to a dispatch.
struct Inputs {
  int64_t num_tokens = 0;
  std::vector<int32_t> ids;    // [num_tokens, num_topk]
  std::vector<float> weights;  // the same shape
};

// One row of a result: whose token it is. source -1: padding or tail.
struct Row {
  int source = -1;
  int64_t token = -1;
  int k = -1;       // expert layout: the pick
  int expert = -1;  // expert layout: local id
};

// A routing as the oracle sees it: inputs of all ranks, results of all ranks.
struct World {
  RowLayout layout = RowLayout::kRank;
  int64_t alignment = 1, capacity = -1;
  bool has_weights = false;
  std::vector<Inputs> inputs;                        // [rank]
  std::vector<std::vector<Row>> rows;                // [rank] result rows
  std::vector<std::vector<int64_t>> expert_offsets;  // [rank], expert layout
  std::vector<std::vector<bool>> delivered;          // [source] per pick: its row arrived
  std::string error;  // not empty: the call fails on all ranks, and the text has this in it

  static World random(const Config& config, uint64_t seed, bool may_fail);
};

float x_value(uint64_t seed, int rank, int64_t token, int column);
int32_t scale_value(uint64_t seed, int rank, int64_t token, int column);
// What a rank's expert makes of a row.
float y_value(const World& world, int rank, const Config& config, const Row& row, uint64_t x_seed,
              int column);
float carried_value(int source, int64_t token, int k);
float bias_value(int column);

enum class Kind { kDispatch, kAgain, kCombine, kBarrier, kRefuse, kBadId, kMismatch };

// One call of the program, equal on all ranks.
struct Step {
  Kind kind = Kind::kBarrier;
  int world = -1;       // routing: made by kDispatch, used by kAgain and kCombine
  uint64_t x_seed = 0;  // of the rows of the dispatch, or of that which the combine answers
  bool scales = false;
  bool apply_weights = false, exact_order = false, carried = false, bias = false;
  int culprit = 0;  // of a refused call
};

struct Program {
  Config config;
  std::vector<World> worlds;
  std::vector<Step> steps;

  static Program random(uint64_t seed, int num_ranks, int num_steps);
};

// What combine must return at `rank`: [num_tokens, hidden] and [num_tokens, num_topk].
std::vector<float> combined(const Program& program, const Step& step, int rank);
std::vector<float> carried_back(const Program& program, const Step& step, int rank);

}  // namespace epcomm::testing
