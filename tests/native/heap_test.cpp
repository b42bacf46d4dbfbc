// Where everything lies in the heap, in sizes beyond 2^31 and 2^33: exact, apart, aligned, inside.
//
//   heap_test [--seed S] [--shapes N]

#include <algorithm>
#include <vector>

#include "check.hpp"
#include "epcomm/device/engine.h"
#include "epcomm/entry.h"

namespace epcomm::testing {
namespace {

using Wide = unsigned __int128;  // arithmetic that cannot wrap

struct Region {
  const char* name;
  Wide begin, bytes;
  uint64_t alignment;
};

HeapShape shape_of(int32_t ranks, int32_t topk, int32_t slots, int32_t channels, int32_t experts,
                   int64_t tokens, int64_t recv, int64_t row, int64_t scale, int64_t staging) {
  HeapShape shape{};
  shape.num_ranks = ranks;
  shape.num_topk = topk;
  shape.num_slots = slots;
  shape.num_channels = channels;
  shape.max_local_experts = experts;
  shape.max_tokens_per_rank = tokens;
  shape.max_recv_tokens = recv;
  shape.row_bytes = row;
  shape.scale_bytes = scale;
  shape.staging_bytes = staging;
  return shape;
}

// What a slot must hold at least, and that everything has a place of its own.
void check_shape(const HeapShape& s) {
  const HeapLayout l = heap_layout(s);
  const Wide ranks = Wide(s.num_ranks), slots = Wide(num_physical_slots(s));
  const Wide rows = Wide(l.slot_rows);
  EXPECT(num_physical_slots(s) == s.num_slots + 1, "one slot more than leases");
  EXPECT(l.slot_rows >= s.max_recv_tokens && l.slot_rows >= s.num_topk, "%lld rows",
         (long long)l.slot_rows);
  const int64_t copies = std::min(s.num_ranks, s.num_topk);
  EXPECT(rows >= Wide(s.max_tokens_per_rank) * Wide(copies), "%lld rows", (long long)l.slot_rows);

  std::vector<Region> regions;
  for (int peer = 0; peer < s.num_ranks; ++peer) {
    regions.push_back({"state", state_word(l, peer), 8, kSignalStride});
    regions.push_back({"entry signal", entry_word(l, peer), 8, kSignalStride});
    regions.push_back({"done signal", done_word(l, peer), 8, kSignalStride});
    for (int channel = 0; channel < s.num_channels; ++channel) {
      regions.push_back({"data signal", data_word(l, s, peer, channel), 8, kSignalStride});
    }
    for (int slot = 0; slot < num_physical_slots(s); ++slot) {
      regions.push_back({"credit", credit_word(l, s, peer, slot), 8, kSignalStride});
    }
    for (uint64_t epoch : {uint64_t(6), uint64_t(7)}) {
      const uint64_t bytes = entry_record_bytes(s.num_ranks, s.max_local_experts);
      EXPECT(entry_record(l, peer, epoch) == entry_record(l, peer, epoch + 2),
             "two records take turns");
      regions.push_back({"entry record", entry_record(l, peer, epoch), bytes, kSignalStride});
    }
  }
  for (int channel = 0; channel < s.num_channels && s.staging_bytes; ++channel) {
    regions.push_back({"staging", staging_offset(l, s, channel), Wide(s.staging_bytes), 16});
  }
  for (int slot = 0; slot < num_physical_slots(s); ++slot) {
    const Wide base = slot_offset(l, slot);
    EXPECT(base == Wide(l.slots) + Wide(slot) * Wide(l.slot_stride), "slot %d", slot);
    const Wide payload = rows * Wide(s.row_bytes + s.scale_bytes) + 64;  // scales begin aligned
    regions.push_back({"rows and scales", base + l.slot_payload, payload, 4096});
    regions.push_back({"ids", base + l.slot_idx, rows * Wide(s.num_topk) * 4, kSignalStride});
    regions.push_back(
        {"weights", base + l.slot_weights, rows * Wide(s.num_topk) * 4, kSignalStride});
    regions.push_back({"tokens", base + l.slot_token, rows * 4, kSignalStride});
  }
  std::sort(regions.begin(), regions.end(),
            [](const Region& a, const Region& b) { return a.begin < b.begin; });
  Wide end = 0;
  const char* before = "the beginning";
  for (const Region& region : regions) {
    EXPECT(region.begin % region.alignment == 0, "%s is not aligned to %llu", region.name,
           (unsigned long long)region.alignment);
    EXPECT(region.begin >= end, "%s and %s overlap", before, region.name);
    end = region.begin + region.bytes;
    before = region.name;
  }
  EXPECT(end <= Wide(l.total_bytes), "%s ends behind the heap of %llu bytes", before,
         (unsigned long long)l.total_bytes);
  EXPECT(l.total_bytes % 4096 == 0, "whole pages");
  // No room wasted either: padding is at most a page per part.
  Wide used = 0;
  for (const Region& region : regions)
    used += std::max<Wide>(region.bytes, region.bytes == 8 ? kSignalStride : 0);
  EXPECT(Wide(l.total_bytes) - used <= 4096 * (slots + 3) + 256 * (slots + 2 * ranks + 8),
         "%llu bytes of padding", (unsigned long long)(Wide(l.total_bytes) - used));
}

// Payloads of exactly these sizes and one byte more or less, as a row count or as a row size.
void check_large() {
  const int64_t sizes[] = {(int64_t(1) << 31) - 1, int64_t(1) << 31, (int64_t(1) << 31) + 1,
                           (int64_t(1) << 32) - 1, int64_t(1) << 32, (int64_t(1) << 33),
                           (int64_t(1) << 33) + 1};
  for (const int64_t size : sizes) {
    for (const int32_t slots : {1, 2, 7}) {
      // rows of one size: 14336 bytes is 7168 bf16
      for (const int64_t row : {int64_t(16), int64_t(14336)}) {
        check_shape(shape_of(8, 8, slots, 4, 32, size / row + 1, size / row + 1, row, 0, 0));
        check_shape(shape_of(64, 8, slots, 20, 32, 4096, size / row + 1, row, 224, 1 << 20));
      }
      // as many rows as that, and one row that large
      check_shape(shape_of(2, 1, slots, 1, 1, 1, size, 16, 0, 0));
      check_shape(shape_of(2, 1, slots, 1, 1, 1, 3, size / 16 * 16 + 16, 16, 0));
      check_shape(shape_of(2, 64, slots, 1, 1, 1, size / 256, 16, 16, 0));
    }
  }
  // 300,000 rows of 7168 bf16, and identical tokens that all go to one of 64 ranks
  check_shape(shape_of(8, 8, 2, 8, 32, 4096, 300000, 14336, 224, 0));
  check_shape(shape_of(64, 8, 2, 8, 4, 16384, 64 * 16384, 14336, 224, 0));

  const HeapShape s = shape_of(2, 1, 2, 1, 1, 1, int64_t(1) << 31, 16, 0, 0);
  const HeapLayout l = heap_layout(s);
  EXPECT(l.slot_idx == (uint64_t(1) << 35) + 64, "%llu", (unsigned long long)l.slot_idx);
  EXPECT(l.slot_weights - l.slot_idx == uint64_t(1) << 33, "%llu",
         (unsigned long long)l.slot_weights);
  EXPECT(slot_offset(l, 2) - slot_offset(l, 1) == l.slot_stride && l.slot_stride > uint64_t(1)
                                                                                       << 35,
         "stride");
}

void check_align() {
  for (const uint64_t at : {uint64_t(0), uint64_t(1), uint64_t(63), uint64_t(64), uint64_t(65)}) {
    for (const int bits : {0, 30, 31, 32, 33, 62}) {
      const uint64_t value = (bits ? uint64_t(1) << bits : 0) + at, up = align_up(value, 64);
      EXPECT(up % 64 == 0 && up >= value && up - value < 64, "align_up(%llu)",
             (unsigned long long)value);
    }
  }
}

// Every rank reaches all ranks, itself first, and in no turn do two reach the same.
void check_turns() {
  for (int32_t ranks = 1; ranks <= device::kMaxRanks; ++ranks) {
    std::vector<int> reached(size_t(ranks), -1), turns(size_t(ranks * ranks), 0);
    for (int32_t step = 0; step < ranks; ++step) {
      for (int32_t me = 0; me < ranks; ++me) {
        const int32_t rank = device::rank_in_turn(me, step, ranks);
        EXPECT(rank >= 0 && rank < ranks, "turn %d of rank %d of %d: %d", step, me, ranks, rank);
        EXPECT(step != 0 || rank == me, "rank %d of %d begins with %d", me, ranks, rank);
        EXPECT(reached[size_t(rank)] < step, "rank %d of %d twice in turn %d", rank, ranks, step);
        reached[size_t(rank)] = step;
        ++turns[size_t(me * ranks + rank)];
      }
    }
    EXPECT(std::count(turns.begin(), turns.end(), 1) == int64_t(turns.size()), "%d ranks", ranks);
  }
}

int main(int argc, char** argv) {
  Options options(argc, argv);
  Random random(uint64_t(options.number("seed", 1)));
  const int64_t shapes = options.number("shapes", 400);
  options.finish();
  set_deadline(60);
  check_align();
  check_large();
  check_turns();
  for (int64_t i = 0; i < shapes; ++i) {
    const int32_t ranks = int32_t(random.between(1, 24));
    const int64_t row = 16 * random.between(1, random.one_in(3) ? 100000 : 1024);
    const int64_t tokens = random.between(1, random.one_in(4) ? 1 << 20 : 512);
    const int64_t staging = random.one_in(2) ? 0 : 64 * random.between(16, 4096);
    check_shape(shape_of(ranks, int32_t(random.between(1, 16)), int32_t(random.between(1, 6)),
                         int32_t(random.between(1, 24)), int32_t(random.between(1, 64)), tokens,
                         random.between(1, tokens * ranks), row, 4 * random.between(0, 64),
                         staging));
  }
  std::printf("%lld random shapes and the large ones: all in place\n", (long long)shapes);
  return 0;
}

}  // namespace
}  // namespace epcomm::testing

int main(int argc, char** argv) { return epcomm::testing::main(argc, argv); }
