// A warp of a host: 32 lanes that take turns between the places where a warp meets, so that g++
// runs text of cuda/. Lanes go in another order in every turn, from a seed: what one writes too
// early, or reads without waiting for it, shows as wrong bytes, and the same way each time.
//
// A lane that does not come to the same place as the others ends the program. Every place orders
// memory here; on a GPU only __syncwarp does, so that one too few beside a shuffle is not found.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "check.hpp"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

#define __device__
#define __forceinline__ inline

// Accesses of 16 bytes must be aligned (the undefined behaviour sanitizer sees it), and may be to
// anything.
struct __attribute__((may_alias, aligned(16))) uint4 {
  uint32_t x, y, z, w;
};
struct __attribute__((may_alias, aligned(8))) uint2 {
  uint32_t x, y;
};
struct int2 {
  int x, y;
};
struct Index {
  unsigned x;
};
inline Index threadIdx, blockIdx, gridDim;

namespace epcomm::testing {

class Warp {
 public:
  static constexpr int kLanes = 32;
  enum Place : int { kEnd = 0, kSync, kVote, kShuffle };

  explicit Warp(Random* random) : random_(random), stacks_(new char[kLanes * kStackBytes]) {
    for (int lane = 0; lane < kLanes; ++lane) {
      Fiber& fiber = lanes_[lane];
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = stacks_.get() + lane * kStackBytes;
      fiber.context.uc_stack.ss_size = kStackBytes;
      fiber.stack = fiber.context.uc_stack.ss_sp;
      fiber.stack_bytes = kStackBytes;
      makecontext(&fiber.context, start, 0);
    }
#ifdef __SANITIZE_THREAD__
    home_.fiber = __tsan_get_current_fiber();
    for (Fiber& lane : lanes_) lane.fiber = __tsan_create_fiber(0);
#endif
  }
  ~Warp() {
#ifdef __SANITIZE_THREAD__
    for (Fiber& lane : lanes_) __tsan_destroy_fiber(lane.fiber);
#endif
  }
  Warp(const Warp&) = delete;
  Warp& operator=(const Warp&) = delete;

  // body(lane) on every lane; threadIdx.x is that of the `warp`-th warp of a block.
  void run(const std::function<void(int)>& body, int warp = 0) {
    body_ = &body;
    current() = this;
    for (Place met = kSync; met != kEnd;) {
      int order[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const int other = int(random_->below(i + 1));
        order[i] = order[other];
        order[other] = i;
      }
      for (const int lane : order) {
        lane_ = lane;
        threadIdx.x = unsigned(warp * kLanes + lane);
        change(&home_, &lanes_[lane]);
      }
      met = place_[0];
      for (int lane = 1; lane < kLanes; ++lane) {
        EXPECT(place_[lane] == met, "lane %d waits at %d, lane 0 at %d", lane, place_[lane], met);
      }
      turn_ ^= 1;
    }
    current() = nullptr;
  }

  // What every lane brought to this place.
  const uint64_t* meet(Place place, uint64_t mine) {
    const int turn = turn_;
    brought_[turn][lane_] = mine;
    leave(place);
    return brought_[turn];
  }
  int lane() const { return lane_; }

  static Warp*& current() {
    static Warp* warp;
    return warp;
  }

 private:
  static constexpr int64_t kStackBytes = 256 * 1024;

  struct Fiber {
    ucontext_t context;
    const void* stack = nullptr;  // the thread's is known once it was left
    size_t stack_bytes = 0;
    void* fiber = nullptr;  // ThreadSanitizer's
  };

  static void start() {
    Warp* const self = current();
    arrived(nullptr, &self->home_);
    for (;;) {
      (*self->body_)(self->lane_);
      self->leave(kEnd);
    }
  }

  void leave(Place place) {
    place_[lane_] = place;
    change(&lanes_[lane_], &home_);
  }

  static void change(Fiber* from, Fiber* to) {
    [[maybe_unused]] void* fake = nullptr;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&fake, to->stack, to->stack_bytes);
#endif
#ifdef __SANITIZE_THREAD__
    __tsan_switch_to_fiber(to->fiber, 0);
#endif
    swapcontext(&from->context, &to->context);
    arrived(fake, nullptr);
  }

  // The first words on a stack. `from`: learn where the stack lies that was left for this one.
  static void arrived([[maybe_unused]] void* fake, [[maybe_unused]] Fiber* from) {
#ifdef __SANITIZE_ADDRESS__
    const void* stack;
    size_t bytes;
    __sanitizer_finish_switch_fiber(fake, &stack, &bytes);
    if (from) from->stack = stack, from->stack_bytes = bytes;
#endif
  }

  Random* random_;
  std::unique_ptr<char[]> stacks_;
  Fiber home_, lanes_[kLanes];
  const std::function<void(int)>* body_ = nullptr;
  int lane_ = 0, turn_ = 0;
  Place place_[kLanes] = {};
  // Two turns: the next may be written before the last lane has read this one.
  uint64_t brought_[2][kLanes] = {};
};

template <typename Value>
Value shuffle(Value value, int from) {
  static_assert(sizeof(Value) <= 8);
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  const uint64_t* const all = Warp::current()->meet(Warp::kShuffle, word);
  std::memcpy(&value, all + from, sizeof value);
  return value;
}

inline unsigned vote(bool mine) {
  const uint64_t* const all = Warp::current()->meet(Warp::kVote, mine);
  unsigned set = 0;
  for (int lane = 0; lane < Warp::kLanes; ++lane) set |= unsigned(all[lane]) << lane;
  return set;
}

inline void expect_whole(unsigned mask) { EXPECT(mask == ~0u, "a part of a warp: %x", mask); }

}  // namespace epcomm::testing

template <typename Value>
Value __shfl_sync(unsigned mask, Value value, int from, int width = 32) {
  epcomm::testing::expect_whole(mask);
  const int lane = epcomm::testing::Warp::current()->lane();
  return epcomm::testing::shuffle(value, lane / width * width + from % width);
}
template <typename Value>
Value __shfl_xor_sync(unsigned mask, Value value, int far) {
  epcomm::testing::expect_whole(mask);
  return epcomm::testing::shuffle(value, epcomm::testing::Warp::current()->lane() ^ far);
}
inline unsigned __ballot_sync(unsigned mask, bool mine) {
  epcomm::testing::expect_whole(mask);
  return epcomm::testing::vote(mine);
}
inline bool __any_sync(unsigned mask, bool mine) { return __ballot_sync(mask, mine) != 0; }
inline void __syncwarp() {
  epcomm::testing::Warp::current()->meet(epcomm::testing::Warp::kSync, 0);
}

inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __double2float_rn(double value) { return float(value); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }
template <typename Value>
Value __ldg(const Value* at) {
  return *at;
}
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t picks) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= uint32_t(bytes >> (picks >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return out;
}
