// Gives this rank's file descriptors to its peers on the same host and takes theirs, through an
// abstract Unix socket with a random name. Whoever connects must run as the same user and know a
// random secret before it is given anything.
//
// Every rank pulls from every peer: it connects, says who it is and the secret, and gets the
// descriptors. One thread, one poll loop: ranks may come in any order, and connections stay open
// until the end, so that a rank which fails is seen by the others at once.
#pragma once

#include <string>
#include <vector>

#include "common/info.hpp"
#include "common/process.hpp"
#include "common/random.hpp"

namespace epcomm::common {

// How to reach a peer, from its info. Host, network namespace and user only explain failures.
struct PeerAddress {
  bool wanted = false;
  Key socket{};
  Key secret{};
  std::string host;
  uint64_t network_namespace = 0;
  uint64_t user = 0;
};

class FdExchange {
 public:
  static constexpr size_t kMaxFds = 16;

  struct Peer {
    std::vector<UniqueFd> fds;
    Process process;
  };

  struct Request {
    int rank = 0;
    const std::vector<PeerAddress>* addresses = nullptr;  // by rank
    std::vector<int> fds;                                 // given to each peer; borrowed
    double timeout_s = 0;
    bool use_pidfd = true;
    int (*interrupted)(void*) = nullptr;  // as in WaitSpec
    void* interrupted_arg = nullptr;
  };

  // Opens the socket that peers connect to. Before the info leaves this process.
  Status listen();
  void describe(Info* info) const;
  static Status parse(const Info& info, int peer, PeerAddress* out);

  // Collective over the wanted peers. Closes every socket, also on failure.
  Status run(const Request& request, std::vector<Peer>* out);

  void close() noexcept { listener_.reset(); }

 private:
  UniqueFd listener_;
  Key socket_{};
  Key secret_{};
};

}  // namespace epcomm::common
