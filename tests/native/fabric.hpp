// A HostTransport for ranks that are threads of one process: heaps are plain memory.
//
// Near peers are reached by loads and stores; signals are atomic adds. For far peers a put and a
// signal go into a queue per (rank, peer, channel) that its own thread works off later: it reads
// the source only then, copies in pieces of any order, and knows nothing of other queues. So only
// what HostTransport promises holds, as on RDMA queue pairs.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "check.hpp"
#include "epcomm/backend.hpp"

namespace epcomm::testing {

enum class Reach {
  kDirect,  // every peer is near
  kFar,     // none is
  kMixed,   // ranks 2n and 2n + 1 are near each other
};

// A known mistake, planted to see that the tests find it.
enum class Plant {
  kNone,
  kUnordered,  // a signal publishes nothing: a data race
  kOvertake,   // a far signal passes the puts before it
  kNoQuiet,    // quiet() does not wait
};

struct FabricOptions {
  int num_ranks = 1;
  int num_channels = 1;  // of data; there is one more for control words
  uint64_t heap_bytes = 0;
  uint64_t state_word = 0;
  Reach reach = Reach::kDirect;
  uint64_t seed = 0;
  int max_delay_us = 0;  // of a message; now and then ten times that
  Plant plant = Plant::kNone;
};

class Fabric {
 public:
  explicit Fabric(const FabricOptions& options);
  ~Fabric();

  HostTransport* transport(int rank);
  // As if the rank's process had ended: its messages stop, its peers learn of it.
  void kill(int rank);

 private:
  class Endpoint;
  class Link;

  bool near(int a, int b) const {
    return a == b || options_.reach == Reach::kDirect ||
           (options_.reach == Reach::kMixed && a / 2 == b / 2);
  }
  Link& link(int rank, int peer, int channel);

  const FabricOptions options_;
  std::vector<std::unique_ptr<Endpoint>> endpoints_;
  std::vector<std::unique_ptr<Link>> links_;
};

}  // namespace epcomm::testing
