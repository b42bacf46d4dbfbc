// How a wait in a kernel ends. The host reads the same numbers: append, never renumber.
#pragma once

#include "epcomm/base.h"

namespace epcomm::device {

enum WaitCode : int32_t {
  kWaitDone = 0,
  kWaitTimeout = 1,
  kWaitAborted = 2,     // the host ended all waits
  kWaitPeerDead = 3,    // `culprit`'s process ended
  kWaitPeerLeft = 4,    // `culprit` closed its communicator
  kWaitPeerBroken = 5,  // `culprit` gave up after an error of its own
};

// For the error's text.
struct WaitInfo {
  uint64_t seen;  // last value of the word
  uint64_t waited_ns;
  int32_t culprit;  // the rank to blame; the awaited one after a time-out, -1 after an abort
  int32_t reserved;
};

}  // namespace epcomm::device
