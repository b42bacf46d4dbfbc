// A software model of mlx5 NICs as a provider of verbs: it executes the very bytes that code would
// give to hardware. For laptops, CI and studies of the control path; never a network.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/rdma/verbs.hpp"
#include "epcomm/status.hpp"

namespace epcomm::softhca {

struct SoftHcaOptions {
  int num_ports = 2;        // devices soft0, soft1, ..., one port each
  double gbps = 0;          // of a port, Gbit/s; 0: as fast as it copies
  double latency_us = 0;    // from the doorbell to the completion, beside the time on the wire
  uint64_t seed = 0;        // of chance; not 0: harmless disorder of every kind (faults.hpp)
  std::string faults;       // a plan (faults.hpp)
  int64_t spin_us = -1;     // before an idle engine yields; < 0: from the cores
  bool null_mover = false;  // completions without moving bytes: the control path alone
};

// kInvalidArgument names what is wrong with the options or the plan.
Status make_softhca(const SoftHcaOptions& options,
                    std::shared_ptr<common::VerbsProvider>* out) noexcept;

// "verbs": libibverbs; "soft": this model, for which `soft` is.
Status open_provider(const std::string& name, const SoftHcaOptions& soft,
                     std::shared_ptr<common::VerbsProvider>* out) noexcept;

}  // namespace epcomm::softhca
