#include "scenario.hpp"

#include <algorithm>

namespace epcomm::testing {

namespace {

// Rows of every source at `rank`, in received order, before any limit.
std::vector<Row> rank_rows(const Config& config, const World& world, int rank) {
  std::vector<Row> rows;
  for (int source = 0; source < config.num_ranks; ++source) {
    const Inputs& in = world.inputs[size_t(source)];
    for (int64_t token = 0; token < in.num_tokens; ++token) {
      for (int k = 0; k < config.num_topk; ++k) {
        const int32_t id = in.ids[size_t(token * config.num_topk + k)];
        if (id >= 0 && config.expert_rank[size_t(id)] == rank) {
          rows.push_back({source, token, -1, -1});
          break;
        }
      }
    }
  }
  return rows;
}

// Picks of every local expert at `rank`, padded, before any limit.
std::vector<Row> expert_rows(const Config& config, const World& world, int rank,
                             std::vector<int64_t>* offsets) {
  std::vector<Row> rows;
  offsets->assign(1, 0);
  for (int expert = 0; expert < config.num_experts; ++expert) {
    if (config.expert_rank[size_t(expert)] != rank) continue;
    for (int source = 0; source < config.num_ranks; ++source) {
      const Inputs& in = world.inputs[size_t(source)];
      for (int64_t pick = 0; pick < int64_t(in.ids.size()); ++pick) {
        if (in.ids[size_t(pick)] != expert) continue;
        rows.push_back({source, pick / config.num_topk, int(pick % config.num_topk),
                        config.expert_local[size_t(expert)]});
      }
    }
    while (int64_t(rows.size()) % world.alignment) rows.push_back({});
    offsets->push_back(int64_t(rows.size()));
  }
  return rows;
}

}  // namespace

Config Config::random(uint64_t seed, int num_ranks) {
  Random random(seed);
  Config config;
  config.seed = seed;
  config.num_ranks = num_ranks;
  config.num_experts = int(random.between(1, 3 * num_ranks));
  config.num_topk = int(random.between(1, std::min(config.num_experts, 4)));
  config.hidden = int(random.between(1, 40));
  config.max_tokens = random.between(1, 24);
  config.max_recv = config.max_tokens * num_ranks;
  if (random.one_in(3)) config.max_recv = random.between(1, config.max_recv);
  config.num_slots = int(random.between(1, 3));
  config.num_channels = int(random.between(1, 3));
  config.num_threads = int(random.between(1, 3));
  config.num_scales = int(random.between(1, 3));
  config.push_only = random.one_in(4);
  const bool custom = random.one_in(2);
  std::vector<int32_t> owned(size_t(num_ranks), 0);
  for (int expert = 0; expert < config.num_experts; ++expert) {
    const int owner =
        custom ? int(random.below(num_ranks)) : expert * num_ranks / config.num_experts;
    config.expert_rank.push_back(owner);
    config.expert_local.push_back(owned[size_t(owner)]++);
  }
  config.max_local_experts = *std::max_element(owned.begin(), owned.end());
  return config;
}

HeapShape Config::shape(bool staging) const {
  HeapShape shape{};
  shape.num_ranks = num_ranks;
  shape.num_topk = num_topk;
  shape.num_slots = num_slots;
  shape.num_channels = num_channels;
  shape.max_local_experts = max_local_experts;
  shape.max_tokens_per_rank = max_tokens;
  shape.max_recv_tokens = max_recv;
  shape.row_bytes = int64_t(align_up(uint64_t(hidden) * 4, 16));
  shape.scale_bytes = int64_t(align_up(uint64_t(num_scales) * 4, 16));
  // As little as is allowed, so that it is reused within a call.
  if (staging)
    shape.staging_bytes = int64_t(align_up(entry_record_bytes(num_ranks, max_local_experts), 64));
  return shape;
}

std::string Config::text() const {
  char text[256];
  std::snprintf(text, sizeof text,
                "seed %llu: %d ranks, %d experts, top-%d, hidden %d, max_tokens %lld, max_recv "
                "%lld, %d slots, "
                "%d channels, %d threads%s",
                (unsigned long long)seed, num_ranks, num_experts, num_topk, hidden,
                (long long)max_tokens, (long long)max_recv, num_slots, num_channels, num_threads,
                push_only ? ", push only" : "");
  return text;
}

World World::random(const Config& config, uint64_t seed, bool may_fail) {
  World world;
  for (int attempt = 0;; ++attempt) {
    Random random(mix(seed, uint64_t(attempt)));
    world = World{};
    world.layout = random.one_in(2) ? RowLayout::kRank : RowLayout::kExpert;
    if (world.layout == RowLayout::kExpert && random.one_in(2))
      world.alignment = random.between(2, 9);
    if (random.one_in(3)) world.capacity = random.between(0, config.max_recv);
    world.has_weights = random.one_in(2);
    const bool skewed = random.one_in(4);
    const int favourite = int(random.below(config.num_experts));
    for (int rank = 0; rank < config.num_ranks; ++rank) {
      Inputs in;
      in.num_tokens = random.one_in(5) ? 0 : random.between(0, config.max_tokens);
      for (int64_t pick = 0; pick < in.num_tokens * config.num_topk; ++pick) {
        const int64_t id =
            skewed && !random.one_in(8) ? favourite : random.below(config.num_experts);
        in.ids.push_back(random.one_in(6) ? -1 : int32_t(id));
        in.weights.push_back(float(random.between(-2, 4)));
      }
      world.inputs.push_back(std::move(in));
    }
    // In received order: rows per (token, rank), then what the layout makes of them.
    for (int rank = 0; rank < config.num_ranks && world.error.empty(); ++rank) {
      int64_t travel = int64_t(rank_rows(config, world, rank).size());
      if (world.layout == RowLayout::kRank && world.capacity >= 0)
        travel = std::min(travel, world.capacity);
      if (travel > config.max_recv) world.error = "rank " + std::to_string(rank) + " would receive";
    }
    if (world.error.empty() || may_fail || attempt == 50) break;
  }
  world.delivered.resize(size_t(config.num_ranks));
  for (int rank = 0; rank < config.num_ranks; ++rank) {
    const Inputs& in = world.inputs[size_t(rank)];
    world.delivered[size_t(rank)].assign(in.ids.size(), false);
  }
  for (int rank = 0; rank < config.num_ranks; ++rank) {
    std::vector<int64_t> offsets;
    std::vector<Row> rows = world.layout == RowLayout::kRank
                                ? rank_rows(config, world, rank)
                                : expert_rows(config, world, rank, &offsets);
    if (world.capacity >= 0) {
      rows.resize(size_t(world.capacity));
      for (int64_t& offset : offsets) offset = std::min(offset, world.capacity);
    }
    for (const Row& row : rows) {
      if (row.source < 0) continue;
      for (int k = 0; k < config.num_topk; ++k) {
        const size_t pick = size_t(row.token * config.num_topk + k);
        const int32_t id = world.inputs[size_t(row.source)].ids[pick];
        if (id < 0 || config.expert_rank[size_t(id)] != rank) continue;
        if (row.k < 0 || row.k == k) world.delivered[size_t(row.source)][pick] = true;
      }
    }
    world.rows.push_back(std::move(rows));
    world.expert_offsets.push_back(std::move(offsets));
  }
  return world;
}

float x_value(uint64_t seed, int rank, int64_t token, int column) {
  return float(mix(seed, uint64_t(rank), uint64_t(token)) % 512) + float(column % 7);
}

int32_t scale_value(uint64_t seed, int rank, int64_t token, int column) {
  return int32_t(mix(~seed, uint64_t(rank), uint64_t(token), uint64_t(column)));
}

float y_value(const World& world, int rank, const Config& config, const Row& row, uint64_t x_seed,
              int column) {
  if (row.source < 0) return 1e30f;  // padding and tail: never read
  const float x = x_value(x_seed, row.source, row.token, column);
  if (world.layout == RowLayout::kRank) return x + float(rank + 1);
  return x +
         float(world.inputs[size_t(row.source)].ids[size_t(row.token * config.num_topk + row.k)] +
               1);
}

float carried_value(int source, int64_t token, int k) {
  return float(source * 4096 + token * 8 + k + 1);
}

float bias_value(int column) { return float(column % 5 - 2); }

std::vector<float> combined(const Program& program, const Step& step, int rank) {
  const Config& config = program.config;
  const World& world = program.worlds[size_t(step.world)];
  const Inputs& in = world.inputs[size_t(rank)];
  std::vector<float> out(size_t(in.num_tokens) * size_t(config.hidden));
  for (int64_t token = 0; token < in.num_tokens; ++token) {
    for (int column = 0; column < config.hidden; ++column) {
      float sum = step.bias ? bias_value(column) : 0.0f;
      uint64_t seen = 0;  // ranks, in rank layout
      for (int k = 0; k < config.num_topk; ++k) {
        const size_t pick = size_t(token * config.num_topk + k);
        const int32_t id = in.ids[pick];
        if (id < 0 || !world.delivered[size_t(rank)][pick]) continue;
        const int owner = config.expert_rank[size_t(id)];
        if (world.layout == RowLayout::kRank) {
          if (seen >> owner & 1) continue;
          seen |= uint64_t(1) << owner;
        }
        const float y = y_value(world, owner, config, {rank, token, k, -1}, step.x_seed, column);
        sum += y * (step.apply_weights ? in.weights[pick] : 1.0f);
      }
      out[size_t(token * config.hidden + column)] = sum;
    }
  }
  return out;
}

std::vector<float> carried_back(const Program& program, const Step& step, int rank) {
  const World& world = program.worlds[size_t(step.world)];
  std::vector<float> out(world.inputs[size_t(rank)].ids.size());
  const int topk = program.config.num_topk;
  for (size_t pick = 0; pick < out.size(); ++pick) {
    if (!world.delivered[size_t(rank)][pick]) continue;
    out[pick] = carried_value(rank, int64_t(pick) / topk, int(pick) % topk);
  }
  return out;
}

Program Program::random(uint64_t seed, int num_ranks, int num_steps) {
  Program program;
  program.config = Config::random(seed, num_ranks);
  const Config& config = program.config;
  Random random(mix(seed, 1));
  std::vector<Step> open;  // dispatches whose combine may come: in any order, any number of times
  while (int(program.steps.size()) < num_steps) {
    Step step;
    step.culprit = int(random.below(num_ranks));
    const int64_t die = random.below(20);
    if (die < 8) {
      step.kind = Kind::kDispatch;
      step.world = int(program.worlds.size());
      step.x_seed = random.next();
      step.scales = random.one_in(3);
      program.worlds.push_back(World::random(config, random.next(), random.one_in(6)));
      if (program.worlds.back().error.empty()) open.push_back(step);
    } else if (die < 16) {
      if (open.empty()) continue;
      const size_t which = size_t(random.below(int64_t(open.size())));
      step = open[which];
      const World& world = program.worlds[size_t(step.world)];
      const bool expert = world.layout == RowLayout::kExpert;
      if (random.one_in(5)) {
        step.kind = Kind::kAgain;
        step.x_seed = random.next();
        step.scales = random.one_in(3);
        open[which].x_seed = step.x_seed;
      } else {
        step.kind = Kind::kCombine;
        step.apply_weights = expert && world.has_weights && random.one_in(2);
        step.exact_order = expert && random.one_in(2);
        step.carried = random.one_in(3);
        step.bias = random.one_in(3);
        if (!random.one_in(4)) open.erase(open.begin() + int64_t(which));
      }
    } else if (die == 16) {
      step.kind = Kind::kBarrier;
    } else if (die == 17) {
      step.kind = Kind::kRefuse;
    } else if (die == 18) {
      step.kind = Kind::kBadId;
    } else {
      if (num_ranks == 1) continue;
      step.kind = Kind::kMismatch;
    }
    program.steps.push_back(step);
  }
  return program;
}

}  // namespace epcomm::testing
