// What class Rdma keeps, for its own files only.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/rdma/rdma.hpp"

namespace epcomm::common::rdma {

constexpr uint64_t kMaxMessage = 1u << 30;  // what devices take may be 2 GiB or less
constexpr int kSinkStride = 64;

struct Device {
  std::string name;
  ibv_context* context = nullptr;
  ibv_device_attr attr{};
  ibv_pd* pd = nullptr;
  ibv_mr* data = nullptr;    // heap, relaxed ordering where there is such a thing
  ibv_mr* signal = nullptr;  // heap, strict
  ibv_mr* sink = nullptr;
  bool relaxed = false;
};

struct Path {
  RdmaPath asked;
  int device = -1;  // in State::devices
  ibv_port_attr port{};
  ibv_gid gid{};
  int mtu = 0;  // bytes: of the port, or what the options ask
  uint32_t depth = 0;
  uint32_t max_inline = 0;
  uint32_t max_sge = 0;
  int num_queues = 0;
  ibv_cq* cq = nullptr;  // unless there is one per queue pair
  uint32_t cq_depth = 0;
  std::vector<std::string> reasons;  // of what was lowered

  bool ethernet() const noexcept { return port.link_layer == IBV_LINK_LAYER_ETHERNET; }
};

// The other end of a queue pair, and how it was connected.
struct Link {
  std::string device;
  int port = 0;
  uint16_t lid = 0;
  ibv_gid gid{};
  int mtu = 0;
  uint32_t flow_label = 0;
  bool connected = false;
};

struct State {
  RdmaOptions options;
  int rank = -1;
  std::vector<Device> devices;
  std::vector<Path> paths;
  std::vector<RdmaQueue> queues;  // by plan_index(); qp is null where none is wanted
  std::vector<Link> links;        // beside queues
  std::vector<std::unordered_map<uint32_t, int>> by_number;  // one per path
  std::byte* heap = nullptr;
  uint64_t heap_bytes = 0;
  std::byte* sink = nullptr;  // pages of our own
  uint64_t sink_bytes = 0;
  uint32_t psn = 0;  // where the packet numbers of this rank's queue pairs start
  int timer = 0;     // ibv_qp_attr.timeout
  int retries = 0;

  VerbsProvider& provider() const noexcept { return *options.provider; }
  PlanShape shape() const noexcept {
    return {options.num_ranks, options.num_channels, int32_t(paths.size())};
  }
  Device& device_of(const Path& path) noexcept { return devices[size_t(path.device)]; }

  Status open_path(const RdmaPath& asked);
  Status open_queues(Path& path, int index);
  Status make_queue(Path& path, int index, int queue);
  Status register_on(Device& device);
  void unregister(Device& device) noexcept;
  void destroy_queue(int queue) noexcept;
  void close() noexcept;
};

// Sentences ------------------------------------------------------------------------------------

// A failed call with errno, device, port (0: none) and, where the number tells it, the remedy.
// ENOMEM becomes kOutOfMemory. `pinned` are the bytes that the rank's registrations need in all.
Status verbs_error(int peer, int sys_errno, const std::string& call, const std::string& device,
                   int port, const std::string& detail, uint64_t pinned = 0);

// "::ffff:10.77.0.1"
std::string gid_text(const ibv_gid& gid);
const char* link_text(uint8_t link_layer);
const char* port_state_text(ibv_port_state state);
int mtu_bytes(ibv_mtu mtu);
ibv_mtu mtu_code(int bytes);  // of the largest that is not more
uint32_t power_of_two_below(uint64_t value);

// Timers -----------------------------------------------------------------------------------------

struct Timers {
  int timer;    // 4.096 us * 2^timer
  int retries;  // after the first attempt
};
Timers timers_of(double timeout_s);
double timer_seconds(int timer);

}  // namespace epcomm::common::rdma
