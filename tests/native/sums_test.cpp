// Combine's sums as the kernels' warps make them, against a loop over ranks: 0 to 40 rows of a
// token, rows of any kind and width, bias, own rows and results with gaps, odd addresses, carried
// scalars. Every piece of a row is read once, and nothing else.
//
//   sums_test [--seed S] [--repeats N] [--one-in N]

#include "warp.hpp"
// Behind what g++ needs to read them.
#include "sums.cuh"

namespace epcomm::testing {
namespace {

using device::kLayoutTokens;
using device::kReduceWarps;

enum Kind { kMixed = 0, kAnyBits, kZeros, kSubnormal, kHuge, kKinds };

template <int kType>
struct Item;  // as formats.h has them
template <>
struct Item<0> {
  using Code = uint32_t;
  static constexpr uint32_t kSign = 0x80000000u, kMantissa = 0x7fffffu, kLargest = 0x7f7fffffu;
  static float read(Code code) { return bits_float(code); }
  static Code write(float value) { return float_bits(value); }
};
template <>
struct Item<1> {
  using Code = uint16_t;
  static constexpr uint32_t kSign = 0x8000u, kMantissa = 0x3ffu, kLargest = 0x7bffu;
  static float read(Code code) { return f16_to_f32(code); }
  static Code write(float value) { return f32_to_f16(value); }
};
template <>
struct Item<2> {
  using Code = uint16_t;
  static constexpr uint32_t kSign = 0x8000u, kMantissa = 0x7fu, kLargest = 0x7f7fu;
  static float read(Code code) { return bf16_to_f32(code); }
  static Code write(float value) { return f32_to_bf16(value); }
};

// Of so different sizes that a sum shows the order of its terms.
float some_float(Random& random) {
  const uint64_t bits = random.next();
  return std::ldexp(float(int(bits % 20001) - 10000), int(bits >> 32 & 15) - 15);
}

template <int kType>
typename Item<kType>::Code some_item(int kind, Random& random) {
  using I = Item<kType>;
  const uint32_t any = uint32_t(random.next());
  uint32_t code = any;
  if (kind == kMixed) code = I::write(some_float(random));
  if (kind == kZeros) code = any & I::kSign;
  if (kind == kSubnormal) code = any & (I::kSign | I::kMantissa);
  if (kind == kHuge) code = (any & I::kSign) | (I::kLargest + (any % 50 == 0));
  return typename I::Code(code);
}

struct Case {
  int most;  // of reduce_tokens: 2, 4 or any
  int ranks;
  int64_t row_bytes;
};

// The memory of all ranks, and what rank `me` is told about it.
template <int kType>
class Job {
 public:
  using I = Item<kType>;
  using Code = typename I::Code;
  static constexpr int64_t kItem = sizeof(Code);

  Job(const Case& given, Random* random) : case_(given), random_(*random) {
    cols_ = case_.row_bytes / kItem;
    tokens_ = case_.row_bytes <= 64 && random_.one_in(3) ? random_.between(200, 2 * kLayoutTokens)
                                                         : random_.between(1, 6);
    me_ = int(random_.below(case_.ranks));
    topk_ = random_.one_in(2) ? case_.ranks : int(random_.between(1, case_.ranks));
    vectors_ = !random_.one_in(5);
    fill_routing();
    fill_rows();
    fill_arguments();
  }

  void run(Warp* warp) {
    Loads loads;
    loads.allow(heaps_, heap_bytes_ * uint64_t(case_.ranks) / 16 * 16);
    loads.allow(own_, own_bytes_ / 16 * 16);
    Loads::current() = &loads;
    const device::Link link{heaps_, heap_bytes_, case_.ranks};
    gridDim.x = unsigned(random_.between(1, 3));
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
      for (int i = 0; i < kReduceWarps; ++i) {
        const auto body = [&](int) {
          if (case_.most == 2) device::reduce_tokens<kType, 2>(args_, link);
          if (case_.most == 4) device::reduce_tokens<kType, 4>(args_, link);
          if (case_.most == device::kAny) device::reduce_tokens<kType, device::kAny>(args_, link);
        };
        warp->run(body, i);
      }
    }
    for (int64_t token = 0; token < tokens_; ++token) {
      check_token(token);
      if (vectors_) check_loads(token, &loads);
    }
    EXPECT(loads.total() == 0, "%lld pieces read that nobody asked for, %s",
           (long long)loads.total(), text().c_str());
    check_gaps();
  }

 private:
  // 16-byte aligned, and exactly so long for the address sanitizer.
  char* take(uint64_t bytes) {
    const uint64_t whole = align_up(bytes ? bytes : 1, 16);
    memory_.emplace_back(std::aligned_alloc(16, whole), &std::free);
    std::memset(memory_.back().get(), kFill, whole);
    return static_cast<char*>(memory_.back().get());
  }

  // Experts by turns; a token's place in the list of each rank that it goes to, by blocks.
  void fill_routing() {
    const int ranks = case_.ranks;
    const int64_t blocks = (tokens_ + kLayoutTokens - 1) / kLayoutTokens;
    ids_.assign(size_t(tokens_ * topk_), -1);
    place_.assign(size_t(tokens_ * ranks), -1);
    base_.assign(size_t(blocks * ranks), 0);
    base_to_.resize(size_t(ranks));
    expert_rank_.resize(size_t(ranks) * 2);
    for (int i = 0; i < 2 * ranks; ++i) expert_rank_[size_t(i)] = i % ranks;
    std::vector<int32_t> in_block(size_t(ranks), 0), before(size_t(ranks), 0);
    for (int64_t token = 0; token < tokens_; ++token) {
      if (token % kLayoutTokens == 0) {
        for (int rank = 0; rank < ranks; ++rank) {
          before[size_t(rank)] += in_block[size_t(rank)];
          in_block[size_t(rank)] = 0;
          base_[size_t(token / kLayoutTokens * ranks + rank)] = before[size_t(rank)];
        }
      }
      // To nobody, to everybody, or so.
      const int64_t fill = random_.one_in(8) ? 0 : random_.one_in(3) ? 100 : random_.below(100);
      for (int k = 0; k < topk_; ++k) {
        if (random_.below(100) >= fill) continue;
        const int expert = fill == 100 ? k : int(random_.below(2 * ranks));
        const int rank = expert_rank_[size_t(expert)];
        ids_[size_t(token * topk_ + k)] = expert;
        int32_t& place = place_[size_t(token * ranks + rank)];
        if (place < 0) place = in_block[size_t(rank)]++;
      }
    }
    rows_ = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      base_to_[size_t(rank)] = random_.below(3);
      const int64_t end = base_to_[size_t(rank)] + before[size_t(rank)] + in_block[size_t(rank)];
      if (end > rows_) rows_ = end;
    }
  }

  int64_t number_of(int64_t token, int rank) const {
    return base_to_[size_t(rank)] + base_[size_t(token / kLayoutTokens * case_.ranks + rank)] +
           place_[size_t(token * case_.ranks + rank)];
  }
  bool goes(int64_t token, int rank) const {
    return place_[size_t(token * case_.ranks + rank)] >= 0;
  }
  char* row_at(int64_t token, int rank) const {
    const int64_t row = number_of(token, rank);
    if (rank == me_) return own_ + own_offset_ + row * own_stride_;
    return heaps_ + uint64_t(rank) * heap_bytes_ + state_.peer_rows[rank] + row * case_.row_bytes;
  }

  // Rows behind a gap in every heap, then the weights of a slot. Own rows are elsewhere.
  void fill_rows() {
    args_.setup.state = &state_;
    weights_at_ = align_up(uint64_t(64 + rows_ * case_.row_bytes), 16);
    slot_stride_ = uint64_t(rows_ * topk_) * 4;
    heap_bytes_ = align_up(weights_at_ + 2 * slot_stride_, 16);
    heaps_ = take(heap_bytes_ * uint64_t(case_.ranks));
    for (int rank = 0; rank < case_.ranks; ++rank) {
      state_.peer_rows[rank] = uint64_t(random_.below(4)) * 16;
      if (!vectors_) state_.peer_rows[rank] += uint64_t(random_.below(16 / kItem) * kItem);
      state_.peer_slot[rank] = int32_t(random_.below(2));
    }
    // One address may be all that is odd.
    own_offset_ = vectors_ ? 0 : random_.below(16 / kItem) * kItem;
    own_stride_ = case_.row_bytes + random_.below(3) * (vectors_ ? 16 : kItem);
    own_bytes_ = uint64_t(own_offset_ + rows_ * own_stride_);
    own_ = take(own_bytes_);
    const int kind = int(random_.below(kKinds));
    for (int64_t token = 0; token < tokens_; ++token) {
      for (int rank = 0; rank < case_.ranks; ++rank) {
        if (!goes(token, rank)) continue;
        char* const row = row_at(token, rank);
        for (int64_t i = 0; i < cols_; ++i) {
          const Code code = some_item<kType>(kind, random_);
          std::memcpy(row + i * kItem, &code, kItem);
        }
      }
    }
  }

  void fill_arguments() {
    device::ReduceArgs& a = args_;
    a.setup.rank = me_;
    a.setup.num_ranks = case_.ranks;
    a.setup.num_topk = topk_;
    a.setup.expert_rank = expert_rank_.data();
    a.routing.place = place_.data();
    a.routing.block_base = base_.data();
    a.routing.base_to = base_to_.data();
    a.routing.ids = ids_.data();
    a.own.data = own_ + own_offset_;
    a.own.row_stride = own_stride_;
    a.num_tokens = tokens_;
    a.num_cols = cols_;
    a.row_bytes = uint64_t(case_.row_bytes);
    a.row_type = kType;
    a.aligned = vectors_ || random_.one_in(2);
    if (!vectors_ && a.aligned) {  // then an odd address must be a peer's
      bool odd = false;
      for (int rank = 0; rank < case_.ranks; ++rank) odd = odd || state_.peer_rows[rank] % 16;
      a.aligned = odd;
    }
    if (random_.one_in(2)) {
      a.bias_stride = random_.one_in(2) ? 0 : cols_ + random_.below(3);
      bias_.resize(size_t(a.bias_stride * (tokens_ - 1) + cols_));
      for (float& value : bias_) value = some_float(random_);
      a.bias = bias_.data();
    }
    a.out_stride = case_.row_bytes + random_.below(3) * (vectors_ ? 16 : kItem);
    out_offset_ = vectors_ ? 0 : random_.below(16 / kItem) * kItem;
    out_ = take(uint64_t(out_offset_ + tokens_ * a.out_stride));
    a.out = out_ + out_offset_;
    if (random_.one_in(2)) {
      a.setup.layout.slots = 16;
      a.setup.layout.slot_stride = slot_stride_;
      a.setup.layout.slot_weights = weights_at_ - 16;
      carried_.assign(size_t(tokens_ * topk_), -1.0f);
      a.carried_out = carried_.data();
      fill_weights();
    }
  }

  // Scalars of a rank's rows, in the slot that it uses.
  char* weights_of(int rank) const {
    return heaps_ + uint64_t(rank) * heap_bytes_ + weights_at_ +
           uint64_t(state_.peer_slot[rank]) * slot_stride_;
  }
  void fill_weights() {
    for (int rank = 0; rank < case_.ranks; ++rank) {
      for (int64_t i = 0; i < rows_ * topk_; ++i) {
        const float value = some_float(random_);
        std::memcpy(weights_of(rank) + i * 4, &value, 4);
      }
    }
  }

  void check_token(int64_t token) {
    for (int64_t i = 0; i < cols_; ++i) {
      float sum = 0.0f;
      for (int rank = 0; rank < case_.ranks; ++rank) {
        if (!goes(token, rank)) continue;
        Code code;
        std::memcpy(&code, row_at(token, rank) + i * kItem, kItem);
        sum += I::read(code);
      }
      if (args_.bias) sum += bias_[size_t(token * args_.bias_stride + i)];
      const Code want = I::write(sum);
      Code seen;
      std::memcpy(&seen, args_.out + token * args_.out_stride + i * kItem, kItem);
      const bool nan = I::read(seen) != I::read(seen);
      EXPECT(sum == sum ? seen == want : nan, "token %lld column %lld is %x, not %x, %s",
             (long long)token, (long long)i, unsigned(seen), unsigned(want), text().c_str());
    }
    for (int k = 0; args_.carried_out && k < topk_; ++k) {
      const int32_t id = ids_[size_t(token * topk_ + k)];
      float want = 0.0f;
      if (id >= 0) {
        const int rank = expert_rank_[size_t(id)];
        std::memcpy(&want, weights_of(rank) + (number_of(token, rank) * topk_ + k) * 4, 4);
      }
      const float seen = carried_[size_t(token * topk_ + k)];
      EXPECT(seen == want, "token %lld scalar %d is %g, not %g, %s", (long long)token, k,
             double(seen), double(want), text().c_str());
    }
  }

  // Each piece of the token's rows was read once.
  void check_loads(int64_t token, Loads* loads) {
    for (int rank = 0; rank < case_.ranks; ++rank) {
      for (int64_t at = 0; goes(token, rank) && at < case_.row_bytes; at += 16) {
        int& count = loads->count(row_at(token, rank) + at);
        EXPECT(count == 1, "token %lld rank %d byte %lld was read %d times, %s", (long long)token,
               rank, (long long)at, count, text().c_str());
        count = 0;
      }
    }
  }

  // Nothing was written but rows of results.
  void check_gaps() {
    const int64_t bytes = out_offset_ + tokens_ * args_.out_stride;
    for (int64_t i = 0; i < bytes; ++i) {
      const int64_t in_row = i - out_offset_;
      if (in_row >= 0 && in_row % args_.out_stride < case_.row_bytes) continue;
      EXPECT(uint8_t(out_[i]) == kFill, "byte %lld of the results, a gap, is %02x, %s",
             (long long)i, uint8_t(out_[i]), text().c_str());
    }
  }

  std::string text() const {
    return "type " + std::to_string(kType) + ", most " + std::to_string(case_.most) + ", ranks " +
           std::to_string(case_.ranks) + ", row bytes " + std::to_string(case_.row_bytes) +
           ", tokens " + std::to_string(tokens_) + (vectors_ ? ", vectors" : ", elements");
  }

  static constexpr uint8_t kFill = 0xa5;
  const Case case_;
  Random& random_;
  int64_t cols_ = 0, tokens_ = 0, rows_ = 0;  // rows: at each rank
  int me_ = 0, topk_ = 0;
  bool vectors_ = false;
  std::vector<int32_t> ids_, place_, base_, expert_rank_;
  std::vector<int64_t> base_to_;
  std::vector<float> bias_, carried_;
  std::vector<std::unique_ptr<void, void (*)(void*)>> memory_;
  char *heaps_ = nullptr, *own_ = nullptr, *out_ = nullptr;
  uint64_t heap_bytes_ = 0, own_bytes_ = 0, weights_at_ = 0, slot_stride_ = 0;
  int64_t own_offset_ = 0, own_stride_ = 0, out_offset_ = 0;
  device::DeviceState state_{};
  device::ReduceArgs args_{};
};

int main(int argc, char** argv) {
  Options options(argc, argv);
  Random random(uint64_t(options.number("seed", 1)));
  const int64_t repeats = options.number("repeats", 1), one_in = options.number("one-in", 1);
  options.finish();
  set_deadline(120);
  Warp warp(&random);
  // What a warp has on its way at once, 14, 7, 5 and 4 pieces of every lane, with and without a
  // rest, and the widths of models.
  const int64_t widths[] = {16,   32,   48,   496,  512,  528,  2032, 2048, 2064, 2560,  2576,
                            3568, 3584, 3600, 5760, 7152, 7168, 7184, 8192, 9216, 14336, 28672};
  std::vector<Case> cases;
  for (const int64_t bytes : widths) {
    for (int ranks = 1; ranks <= 2; ++ranks) cases.push_back({2, ranks, bytes});
    for (int ranks = 1; ranks <= 4; ++ranks) cases.push_back({4, ranks, bytes});
    for (const int ranks : {1, 3, 5, 8}) cases.push_back({device::kAny, ranks, bytes});
    if (bytes > 8192) continue;
    for (const int ranks : {31, 32, 33, 40}) cases.push_back({device::kAny, ranks, bytes});
  }
  int64_t jobs = 0;
  for (int64_t repeat = 0; repeat < repeats; ++repeat) {
    for (const Case& one : cases) {
      if (!random.one_in(one_in)) continue;
      Job<0>(one, &random).run(&warp);
      Job<1>(one, &random).run(&warp);
      Job<2>(one, &random).run(&warp);
      jobs += 3;
    }
  }
  std::printf("%lld combines: as a loop sums, every piece read once\n", (long long)jobs);
  return 0;
}

}  // namespace
}  // namespace epcomm::testing

int main(int argc, char** argv) { return epcomm::testing::main(argc, argv); }
