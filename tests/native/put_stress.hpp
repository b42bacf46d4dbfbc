// Puts and signals between two ranks, both ways on every channel at once: log-uniform sizes from 8
// bytes to 64 KiB, each payload checked when its signal is seen, for any HostTransport.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "check.hpp"
#include "epcomm/backend.hpp"

namespace epcomm::testing {

class PutStress {
 public:
  PutStress(int num_channels, int puts_per_channel, uint64_t seed)
      : channels_(num_channels), puts_(std::max(1, puts_per_channel)), seed_(seed) {}

  // Of each rank. State words lie at 0.
  uint64_t heap_bytes() const { return kFrom + uint64_t(channels_) * 2 * kSlots * kMost; }

  // One rank's part: a thread per channel.
  void run(HostTransport& transport, int me) const {
    run_ranks(channels_, [&](int channel) { run_channel(transport, me, channel); });
  }

 private:
  static constexpr uint64_t kMost = 65536;
  static constexpr int kSlots = 4;          // payloads of a channel that may be on their way
  static constexpr uint64_t kWords = 4096;  // [channel], a payload has arrived
  static constexpr uint64_t kBack = 32768;  // [channel], it has been checked
  static constexpr uint64_t kFrom = 65536;  // [channel] sources, then targets

  struct Put {
    uint64_t bytes, first;  // word i is first + i
  };
  Put put_of(int rank, int channel, int i) const {
    Random random(mix(seed_, uint64_t(rank), uint64_t(channel), uint64_t(i)));
    const double exponent = 3 + 13 * double(random.below(1 << 20)) / (1 << 20);
    return {uint64_t(std::exp2(exponent)) / 8 * 8, random.next()};
  }

  void run_channel(HostTransport& transport, int me, int channel) const {
    const int peer = 1 - me;
    const WaitSpec spec{"stress", "data", 120, nullptr, nullptr};
    const uint64_t source = kFrom + uint64_t(channel) * 2 * kSlots * kMost;
    const uint64_t target = source + kSlots * kMost;
    const uint64_t word = kWords + uint64_t(channel) * kSignalStride;
    const uint64_t back = kBack + uint64_t(channel) * kSignalStride;
    const auto check = [&](int i) {
      EXPECT_OK(transport.wait(peer, word, uint64_t(i), spec));
      const Put put = put_of(peer, channel, i);
      const std::byte* got = transport.heap() + target + uint64_t(i % kSlots) * kMost;
      for (uint64_t w = 0; w < put.bytes / 8; ++w) {
        uint64_t value;
        std::memcpy(&value, got + w * 8, 8);
        EXPECT(value == put.first + w,
               "rank %d, channel %d: put %d of %d bytes has %llx at %d, "
               "expected %llx (seed %llu)",
               me, channel, i, int(put.bytes), (unsigned long long)value, int(w * 8),
               (unsigned long long)(put.first + w), (unsigned long long)seed_);
      }
      EXPECT_OK(transport.signal(peer, channel, back, 1));
    };
    for (int i = 1; i <= puts_; ++i) {
      if (i > kSlots) {
        check(i - kSlots);
        // The target is free, and the source, which is written again.
        EXPECT_OK(transport.wait(peer, back, uint64_t(i - kSlots), spec));
        EXPECT_OK(transport.quiet(peer, channel, spec));
      }
      const Put put = put_of(me, channel, i);
      const uint64_t at = uint64_t(i % kSlots) * kMost;
      for (uint64_t w = 0; w < put.bytes / 8; ++w) {
        const uint64_t value = put.first + w;
        std::memcpy(transport.heap() + source + at + w * 8, &value, 8);
      }
      EXPECT_OK(transport.put_signal(peer, channel, target + at, source + at, put.bytes, word, 1));
    }
    for (int i = std::max(1, puts_ - kSlots + 1); i <= puts_; ++i) check(i);
    EXPECT_OK(transport.wait(peer, back, uint64_t(puts_), spec));
    EXPECT_OK(transport.quiet(peer, channel, spec));
  }

  const int channels_, puts_;
  const uint64_t seed_;
};

}  // namespace epcomm::testing
