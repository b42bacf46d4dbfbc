// Two backends as one: near peers are reached by the first, far ones by the second. Both use one
// heap, which the near one owns, so an offset still names one thing.
//
// Near is who can be given a file descriptor: same kernel, same network namespace, same user, and
// no `node_id` that says otherwise. It is proved when the near backend connects; a near peer that
// cannot be reached is an error, never a silent detour.
#pragma once

#include <memory>
#include <string>

#include "common/segment.hpp"
#include "epcomm/backend.hpp"

namespace epcomm::common {

// Stands for the info of a rank that is not a member's business.
constexpr char kElsewhere[] = "elsewhere";

// What a backend adds so that it can be half of a pair. Its connect() takes kElsewhere for ranks
// that the other member reaches: peer_ptr() of such a rank is null and nobody waits for it.
class PairMember : public Backend {
 public:
  // Near: the heap, owned. Null before alloc_heap().
  virtual Segment* segment() noexcept { return nullptr; }
  // Far: uses this heap instead of alloc_heap(); it outlives this backend.
  virtual Status adopt_heap(Segment* /*segment*/) noexcept {
    return error(Code::kUnsupported, -1, "adopt_heap: not on backend %s", name());
  }
};

// The same object, or null if it cannot be half of a pair.
inline PairMember* as_pair_member(Backend* backend) noexcept {
  return dynamic_cast<PairMember*>(backend);
}

// Null if there is no memory for it. `name` is the pair's word. The members belong to the caller
// and outlive the pair, which closes them.
std::unique_ptr<Backend> make_pair_backend(const std::string& name, PairMember* near,
                                           PairMember* far, const std::string& node_id) noexcept;

}  // namespace epcomm::common
