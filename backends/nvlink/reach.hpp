// What a rank tells its peers before anything is mapped, and what follows from it: pure, and equal
// on all ranks.
#pragma once

#include <string>
#include <vector>

#include "common/fd_exchange.hpp"
#include "common/info.hpp"
#include "nvlink/memory.hpp"

namespace epcomm::nvlink {

constexpr char kName[] = "nvlink";

struct PeerFacts {
  std::string uuid;                  // of its GPU
  std::vector<std::string> blocked;  // as in missing_pairs()
  bool mps = false;                  // its process shares the GPU through CUDA MPS
  Ticket ticket;
  common::PeerAddress address;
};

// What the GPU cannot access among the GPUs that this process sees.
Status blocked_peers(const Gpu& gpu, std::vector<std::string>* out);

Status encode_facts(const PeerFacts& own, const common::FdExchange& exchange, std::string* out);
Status decode_facts(const std::string& bytes, int peer, PeerFacts* out);

// kInvalidArgument or kUnavailable if these ranks cannot share heaps.
Status check_facts(const std::vector<PeerFacts>& facts);

// Whether the links between the GPU and all the others take atomics, as far as this process can
// see: a GPU that is hidden from it counts as one that does not.
Status all_atomics(const Gpu& gpu, const std::vector<PeerFacts>& facts, bool* out);

}  // namespace epcomm::nvlink
