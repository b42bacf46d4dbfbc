// Timed loops over a HostTransport, in native code, so that what is measured is the transport and
// not the caller's language. Both ends call the same function with the same numbers.
#pragma once

#include <vector>

#include "epcomm/backend.hpp"

namespace epcomm::host {

// Messages to one peer on one channel. Offsets are the same at both ends.
struct Flow {
  int peer = 0;
  int channel = 0;
  uint64_t src = 0;
  uint64_t dst = 0;
  uint64_t bytes = 0;  // 0: the signal alone
  uint64_t word = 0;   // signal word; only the peer adds to the own one
};

// `count` times there and back: put and signal, then the peer's answer. `base` is what both words
// hold now. seconds[i] is a whole round trip; the side that is not `first` only answers.
Status round_trips(HostTransport* transport, const Flow& flow, bool first, uint64_t base,
                   int64_t count, const WaitSpec& spec, double* seconds) noexcept;

// `count` times one put, with or without a signal behind it, until it has been carried out.
Status completions(HostTransport* transport, const Flow& flow, bool signal, int64_t count,
                   const WaitSpec& spec, double* seconds) noexcept;

// `count` messages on every flow, each flow by a thread of its own (the first by the caller), as
// fast as the transport takes them; `*seconds` until all have been carried out.
Status stream(HostTransport* transport, const std::vector<Flow>& flows, bool signal, int64_t count,
              const WaitSpec& spec, double* seconds) noexcept;

}  // namespace epcomm::host
