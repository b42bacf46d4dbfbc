// Opening, registering and closing; connect.cpp has what needs the peers.
#include "common/rdma/rdma.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "common/errors.hpp"
#include "common/random.hpp"
#include "common/rdma/state.hpp"

namespace epcomm::common {
namespace rdma {
namespace {

constexpr uint32_t kLeastDepth = 4;
constexpr uint32_t kSignalBytes = 8;
constexpr uint32_t kHighDepth = 4096;  // from which a device's own arithmetic may be the limit

uint32_t at_least_0(int value) { return value > 0 ? uint32_t(value) : 0; }

bool is_zero(const ibv_gid& gid) {
  return std::all_of(gid.raw, gid.raw + sizeof gid.raw, [](uint8_t byte) { return byte == 0; });
}

// What there is instead of a GID that is not.
std::string gids_of(VerbsProvider& provider, ibv_context* context, int port, int length) {
  std::string text;
  for (int index = 0; index < std::min(length, 64); ++index) {
    ibv_gid gid{};
    if (provider.query_gid(context, uint8_t(port), index, &gid) != 0 || is_zero(gid)) continue;
    if (!text.empty()) text += ", ";
    if (text.size() > 400) return text + "...";
    text += std::to_string(index) + " " + gid_text(gid);
  }
  return text.empty() ? "none" : text;
}

std::string entries_text(uint32_t count) {
  constexpr uint64_t kEntryBytes = 64;  // on most devices
  return std::to_string(count) + " entries, about " + std::to_string(count * kEntryBytes) +
         " bytes";
}

Status check_options(const RdmaOptions& options) {
  if (!options.provider) return error(Code::kInternal, -1, "Rdma::open without a provider");
  if (options.paths.empty()) {
    return error(Code::kUnavailable, -1, "no NIC port to use: see `python -m epcomm info`");
  }
  if (options.num_ranks < 1 || options.num_channels < 1) {
    return error(Code::kInvalidArgument, -1, "num_ranks=%d, num_channels=%d; allowed: 1 or more",
                 options.num_ranks, options.num_channels);
  }
  if (options.depth < kLeastDepth || power_of_two_below(options.depth) != options.depth) {
    return error(Code::kInvalidArgument, -1,
                 "EPCOMM_IB_DEPTH is %u; allowed: a power of two from %u", options.depth,
                 kLeastDepth);
  }
  if (options.mtu != 0 && (options.mtu < 256 || options.mtu > 4096 ||
                           mtu_bytes(mtu_code(options.mtu)) != options.mtu)) {
    return error(Code::kInvalidArgument, -1,
                 "EPCOMM_IB_MTU is %d; allowed: 256, 512, 1024, 2048 or 4096", options.mtu);
  }
  return {};
}

}  // namespace

Status State::open_path(const RdmaPath& asked) {
  const char* const name = asked.device.c_str();
  Path path;
  path.asked = asked;
  const auto known = std::find_if(devices.begin(), devices.end(),
                                  [&](const Device& d) { return d.name == asked.device; });
  path.device = int(known - devices.begin());
  if (known == devices.end()) {
    devices.emplace_back();
    Device& device = devices.back();
    device.name = asked.device;
    errno = 0;
    device.context = provider().open_device(device.name);
    if (!device.context) {
      const int why = errno ? errno : ENODEV;
      Status status = verbs_error(-1, why, "ibv_open_device", device.name, 0, "");
      // Seen in /sys, but not to be had here: others may serve.
      for (const int absent : {ENODEV, ENOENT, ENXIO, EACCES, EPERM}) {
        if (why == absent) status.code = Code::kUnavailable;
      }
      return status;
    }
    if (const int failed = provider().query_device(device.context, &device.attr)) {
      return verbs_error(-1, failed, "ibv_query_device", device.name, 0, "");
    }
    errno = 0;
    device.pd = provider().alloc_pd(device.context);
    if (!device.pd) {
      return verbs_error(-1, errno ? errno : ENOMEM, "ibv_alloc_pd", device.name, 0, "");
    }
  }
  Device& device = devices[size_t(path.device)];

  if (asked.port < 1 || asked.port > device.attr.phys_port_cnt) {
    return error(Code::kUnavailable, -1, "%s has no port %d; it has %d", name, asked.port,
                 int(device.attr.phys_port_cnt));
  }
  if (const int failed = provider().query_port(device.context, uint8_t(asked.port), &path.port)) {
    return verbs_error(-1, failed, "ibv_query_port", device.name, asked.port, "");
  }
  if (path.port.state != IBV_PORT_ACTIVE && path.port.state != IBV_PORT_ACTIVE_DEFER) {
    return error(Code::kUnavailable, -1,
                 "%s port %d is %s, not active; bring its link up or name another with "
                 "EPCOMM_IB_HCA",
                 name, asked.port, port_state_text(path.port.state));
  }
  const int port_mtu = mtu_bytes(path.port.active_mtu);
  if (port_mtu == 0) {
    return error(Code::kInternal, -1, "%s port %d reports MTU code %d", name, asked.port,
                 int(path.port.active_mtu));
  }
  if (options.mtu > port_mtu) {
    return error(Code::kInvalidArgument, -1,
                 "EPCOMM_IB_MTU is %d; %s port %d allows at most %d: its link's MTU is that of the "
                 "network interface, less headers",
                 options.mtu, name, asked.port, port_mtu);
  }
  path.mtu = options.mtu ? options.mtu : port_mtu;
  const int num_pkeys = std::max<int>(path.port.pkey_tbl_len, 1);
  if (options.pkey_index < 0 || options.pkey_index >= num_pkeys) {
    return error(Code::kInvalidArgument, -1,
                 "EPCOMM_IB_PKEY is %d; %s port %d has partition keys 0 to %d", options.pkey_index,
                 name, asked.port, num_pkeys - 1);
  }

  if (path.ethernet() && asked.gid_index < 0) {
    return error(Code::kInvalidArgument, -1, "%s port %d is Ethernet and needs a GID index", name,
                 asked.port);
  }
  const int index = std::max(asked.gid_index, 0);
  const int failed = provider().query_gid(device.context, uint8_t(asked.port), index, &path.gid);
  if (asked.gid_index >= 0 && (failed || is_zero(path.gid))) {
    const std::string there =
        gids_of(provider(), device.context, asked.port, path.port.gid_tbl_len);
    return error(Code::kUnavailable, -1,
                 "%s port %d has no GID of index %d%s; it has: %s; set EPCOMM_IB_GID_INDEX to one",
                 name, asked.port, asked.gid_index,
                 failed ? (" (ibv_query_gid: " + errno_text(failed) + ")").c_str() : "",
                 there.c_str());
  }
  if (failed) path.gid = {};
  paths.push_back(std::move(path));
  return {};
}

Status State::make_queue(Path& path, int index, int number) {
  RdmaQueue& queue = queues[size_t(number)];
  Device& device = device_of(path);
  queue.cq = path.cq;
  if (options.cq_per_qp) {
    errno = 0;
    queue.cq = provider().create_cq(device.context, int(path.depth));
    if (!queue.cq) {
      return verbs_error(-1, errno ? errno : EINVAL, "ibv_create_cq", device.name, path.asked.port,
                         entries_text(path.depth));
    }
  }
  const uint32_t asked_inline = path.max_inline, asked_depth = path.depth;
  const auto tell = [&](const char* what, uint32_t from, uint32_t to) {
    if (from == to) return;
    path.reasons.push_back(std::string(what) + " " + std::to_string(from) + " lowered to " +
                           std::to_string(to) + ": the device refuses more");
  };
  while (true) {
    ibv_qp_init_attr init{};
    init.qp_context = nullptr;
    init.send_cq = queue.cq;
    init.recv_cq = queue.cq;
    init.qp_type = IBV_QPT_RC;
    init.sq_sig_all = 0;
    init.cap.max_send_wr = path.depth;
    init.cap.max_recv_wr = 1;  // never used, but some devices refuse none
    init.cap.max_send_sge = path.max_sge;
    init.cap.max_recv_sge = 1;
    init.cap.max_inline_data = path.max_inline;
    errno = 0;
    queue.qp = provider().create_qp(device.pd, &init);
    if (queue.qp) {
      queue.max_inline = init.cap.max_inline_data;
      tell("inline", asked_inline, path.max_inline);
      tell("depth", asked_depth, path.depth);
      break;
    }
    const int why = errno ? errno : EINVAL;
    // What a device has for one depends on the others; no query tells it. Without atomics signals
    // are inline data.
    const bool atomics = device.attr.atomic_cap != IBV_ATOMIC_NONE;
    if (why == EINVAL && path.max_inline > (atomics ? 0 : kSignalBytes)) {
      path.max_inline = path.max_inline > kSignalBytes ? kSignalBytes : 0;
    } else if ((why == EINVAL && path.depth > 16) || (why == ENOMEM && path.depth > kHighDepth)) {
      // mlx5 counts blocks, several for a work request, and calls too many of them ENOMEM.
      path.depth /= 2;
      path.max_inline = asked_inline;
    } else {
      return verbs_error(-1, why, "ibv_create_qp", device.name, path.asked.port,
                         "peer " + std::to_string(queue.peer) + ", channel " +
                             std::to_string(queue.channel) + ", depth " +
                             std::to_string(path.depth) + ", inline " +
                             std::to_string(path.max_inline) + "; the device has at most " +
                             std::to_string(device.attr.max_qp) + " queue pairs");
    }
  }
  queue.path = index;
  queue.device = device.name;
  queue.port = path.asked.port;
  queue.depth = path.depth;
  queue.max_sge = path.max_sge;
  queue.max_message = uint32_t(
      std::min<uint64_t>(path.port.max_msg_sz ? path.port.max_msg_sz : kMaxMessage, kMaxMessage));
  by_number[size_t(index)][queue.qp->qp_num] = number;

  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.pkey_index = uint16_t(options.pkey_index);
  attr.port_num = uint8_t(path.asked.port);
  attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
  if (device.attr.atomic_cap != IBV_ATOMIC_NONE) attr.qp_access_flags |= IBV_ACCESS_REMOTE_ATOMIC;
  if (options.remote_reads) attr.qp_access_flags |= IBV_ACCESS_REMOTE_READ;
  const int failed = provider().modify_qp(
      queue.qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  if (failed) {
    return verbs_error(
        -1, failed, "ibv_modify_qp to INIT", device.name, path.asked.port,
        "peer " + std::to_string(queue.peer) + ", channel " + std::to_string(queue.channel));
  }
  return {};
}

Status State::open_queues(Path& path, int index) {
  Device& device = device_of(path);
  const auto lower = [&](const char* what, uint64_t from, uint64_t to, const std::string& why) {
    path.reasons.push_back(std::string(what) + " " + std::to_string(from) + " lowered to " +
                           std::to_string(to) + ": " + why);
  };
  path.depth = options.depth;
  path.max_inline = options.max_inline;
  path.max_sge = std::min(options.max_sge, std::max(1u, at_least_0(device.attr.max_sge)));
  if (path.max_sge < options.max_sge) {
    lower("pieces", options.max_sge, path.max_sge, "max_sge of the device");
  }
  const uint32_t max_depth = power_of_two_below(at_least_0(device.attr.max_qp_wr));
  if (path.depth > max_depth) {
    lower("depth", path.depth, max_depth, "max_qp_wr of the device");
    path.depth = max_depth;
  }
  // One completion queue holds what all send queues behind it can have in flight, or completions
  // would be lost.
  const uint64_t sharing = options.cq_per_qp ? 1 : uint64_t(path.num_queues);
  const uint64_t max_entries = at_least_0(device.attr.max_cqe);
  if (sharing * path.depth > max_entries) {
    const uint32_t fits = power_of_two_below(max_entries / std::max<uint64_t>(sharing, 1));
    lower("depth", path.depth, fits,
          "max_cqe=" + std::to_string(max_entries) + " of the device, " + std::to_string(sharing) +
              " queue pairs on one completion queue");
    path.depth = fits;
  }
  if (path.depth < kLeastDepth) {
    return error(
        Code::kUnavailable, -1,
        "%s port %d: %d queue pairs of depth %u do not fit (max_qp_wr %d, max_cqe %d); use "
        "fewer channels or more ports",
        device.name.c_str(), path.asked.port, path.num_queues, kLeastDepth, device.attr.max_qp_wr,
        device.attr.max_cqe);
  }
  if (!options.cq_per_qp && path.num_queues > 0) {
    path.cq_depth = uint32_t(sharing * path.depth);
    errno = 0;
    path.cq = provider().create_cq(device.context, int(path.cq_depth));
    if (!path.cq) {
      return verbs_error(-1, errno ? errno : EINVAL, "ibv_create_cq", device.name, path.asked.port,
                         entries_text(path.cq_depth));
    }
  }
  for (size_t number = 0; number < queues.size(); ++number) {
    if (queues[number].path != index) continue;
    EPCOMM_RETURN_IF_ERROR(make_queue(path, index, int(number)));
  }
  return {};
}

Status State::register_on(Device& device) {
  const bool atomic = device.attr.atomic_cap != IBV_ATOMIC_NONE;
  const int write = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  const uint64_t pinned = uint64_t(devices.size()) * (2 * heap_bytes + sink_bytes);
  int strict = write;
  if (atomic) strict |= IBV_ACCESS_REMOTE_ATOMIC;
  if (options.remote_reads) strict |= IBV_ACCESS_REMOTE_READ;
  const auto attempt = [&](ibv_mr** mr, std::byte* address, uint64_t bytes, int access) {
    errno = 0;
    *mr = provider().reg_mr(device.pd, address, size_t(bytes), access);
    return *mr ? 0 : errno ? errno : EINVAL;
  };
  const auto failure = [&](int why, uint64_t bytes, const char* kind) {
    return verbs_error(-1, why, "ibv_reg_mr", device.name, 0,
                       std::to_string(bytes) + " bytes, " + kind, pinned);
  };
  if (device.attr.max_mr_size && heap_bytes > device.attr.max_mr_size) {
    return error(Code::kOutOfMemory, -1, "%s registers at most %llu bytes; the heap has %llu",
                 device.name.c_str(), static_cast<unsigned long long>(device.attr.max_mr_size),
                 static_cast<unsigned long long>(heap_bytes));
  }
  device.relaxed = options.relaxed_ordering;
  int why = attempt(&device.data, heap, heap_bytes,
                    device.relaxed ? write | int(IBV_ACCESS_RELAXED_ORDERING) : write);
  if (why && why != ENOMEM && device.relaxed) {  // refused, where it should have been ignored
    device.relaxed = false;
    why = attempt(&device.data, heap, heap_bytes, write);
  }
  if (why) return failure(why, heap_bytes, device.relaxed ? "relaxed ordering" : "strict ordering");
  why = attempt(&device.signal, heap, heap_bytes, strict);
  if (why) return failure(why, heap_bytes, "strict ordering");
  why = attempt(&device.sink, sink, sink_bytes, IBV_ACCESS_LOCAL_WRITE);
  if (why) return failure(why, sink_bytes, "sink of atomics");
  return {};
}

void State::unregister(Device& device) noexcept {
  for (ibv_mr** mr : {&device.sink, &device.signal, &device.data}) {
    if (*mr) provider().dereg_mr(*mr);
    *mr = nullptr;
  }
}

void State::destroy_queue(int number) noexcept {
  RdmaQueue& queue = queues[size_t(number)];
  if (queue.qp) {
    by_number[size_t(queue.path)].erase(queue.qp->qp_num);
    provider().destroy_qp(queue.qp);
  }
  if (options.cq_per_qp && queue.cq) provider().destroy_cq(queue.cq);
  queue.qp = nullptr;
  queue.cq = nullptr;
}

void State::close() noexcept {
  for (RdmaQueue& queue : queues) {
    if (!queue.qp) continue;
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_ERR;
    provider().modify_qp(queue.qp, &attr, IBV_QP_STATE);
  }
  for (int number = int(queues.size()) - 1; number >= 0; --number) destroy_queue(number);
  for (auto path = paths.rbegin(); path != paths.rend(); ++path) {
    if (path->cq) provider().destroy_cq(path->cq);
    path->cq = nullptr;
  }
  for (auto device = devices.rbegin(); device != devices.rend(); ++device) {
    unregister(*device);
    if (device->pd) provider().dealloc_pd(device->pd);
    if (device->context) provider().close_device(device->context);
    device->pd = nullptr;
    device->context = nullptr;
  }
  devices.clear();
  std::free(sink);
  sink = nullptr;
}

}  // namespace rdma

using rdma::State;

Rdma::Rdma() : state_(std::make_unique<State>()) {}
Rdma::~Rdma() { close(); }

Status Rdma::open(const RdmaOptions& options) noexcept {
  State& state = *state_;
  const Status status = guarded([&]() -> Status {
    if (state.options.provider) return error(Code::kInternal, -1, "Rdma::open: twice");
    EPCOMM_RETURN_IF_ERROR(rdma::check_options(options));
    state.options = options;
    state.rank = options.rank;
    Key key{};
    EPCOMM_RETURN_IF_ERROR(random_key(&key));
    std::memcpy(&state.psn, key.data(), sizeof state.psn);
    state.psn &= 0xffffff;
    state.devices.reserve(options.paths.size());
    for (const RdmaPath& path : options.paths) EPCOMM_RETURN_IF_ERROR(state.open_path(path));

    const PlanShape shape = state.shape();
    state.queues.resize(size_t(plan_size(shape)));
    state.links.resize(state.queues.size());
    state.by_number.resize(state.paths.size());
    for (int peer = 0; peer < shape.num_ranks; ++peer) {
      for (int channel = 0; channel <= shape.num_channels; ++channel) {
        RdmaQueue& queue = state.queues[size_t(plan_index(shape, peer, channel))];
        queue.peer = peer;
        queue.channel = channel;
        if (peer == options.rank) continue;
        queue.path = plan_path(channel, shape.num_paths);
        ++state.paths[size_t(queue.path)].num_queues;
      }
    }
    for (size_t i = 0; i < state.paths.size(); ++i) {
      EPCOMM_RETURN_IF_ERROR(state.open_queues(state.paths[i], int(i)));
    }
    return {};
  });
  if (!status.ok()) close();
  return status;
}

Status Rdma::register_heap(std::byte* heap, uint64_t bytes) noexcept {
  State& state = *state_;
  if (state.devices.empty()) return error(Code::kInternal, -1, "register_heap: not open");
  if (state.heap) return error(Code::kInternal, -1, "register_heap: twice");
  const long page = sysconf(_SC_PAGESIZE);
  if (size_t(rdma::kSinkStride) * state.paths.size() > size_t(page)) {
    return error(Code::kUnsupported, -1, "%zu paths; allowed: up to %ld", state.paths.size(),
                 page / rdma::kSinkStride);
  }
  state.sink_bytes = uint64_t(page);
  if (state.options.remote_reads) {  // behind the page: a place for each queue pair
    const uint64_t places = state.queues.size() * uint64_t(rdma::kSinkStride);
    state.sink_bytes += (places + uint64_t(page) - 1) / uint64_t(page) * uint64_t(page);
  }
  state.sink = static_cast<std::byte*>(std::aligned_alloc(size_t(page), size_t(state.sink_bytes)));
  if (!state.sink) {
    return error(Code::kOutOfMemory, -1, "no memory for %llu bytes of sinks",
                 static_cast<unsigned long long>(state.sink_bytes));
  }
  std::memset(state.sink, 0, size_t(state.sink_bytes));
  state.heap = heap;
  state.heap_bytes = bytes;
  const Status status = guarded([&]() -> Status {
    for (rdma::Device& device : state.devices) {
      EPCOMM_RETURN_IF_ERROR(state.register_on(device));
    }
    return {};
  });
  if (status.ok()) return status;
  for (auto device = state.devices.rbegin(); device != state.devices.rend(); ++device) {
    state.unregister(*device);
  }
  std::free(state.sink);
  state.sink = nullptr;
  state.heap = nullptr;
  state.heap_bytes = 0;
  return status;
}

const RdmaQueue& Rdma::queue(int peer, int channel) const noexcept {
  return state_->queues[size_t(plan_index(state_->shape(), peer, channel))];
}
int Rdma::num_paths() const noexcept { return int(state_->paths.size()); }
ibv_cq* Rdma::cq(int path) const noexcept { return state_->paths[size_t(path)].cq; }

void Rdma::sink(int path, uint64_t* address, uint32_t* lkey) const noexcept {
  *address = reinterpret_cast<uintptr_t>(state_->sink) + uint64_t(path) * rdma::kSinkStride;
  *lkey = state_->device_of(state_->paths[size_t(path)]).sink->lkey;
}

uint64_t Rdma::read_into(const RdmaQueue& queue) const noexcept {
  const uint64_t index = uint64_t(&queue - state_->queues.data());
  return reinterpret_cast<uintptr_t>(state_->sink) + uint64_t(sysconf(_SC_PAGESIZE)) +
         index * rdma::kSinkStride;
}

VerbsProvider* Rdma::provider() const noexcept { return state_->options.provider.get(); }

int Rdma::queue_of(int path, uint32_t qpn) const noexcept {
  const auto& numbers = state_->by_number[size_t(path)];
  const auto found = numbers.find(qpn);
  return found == numbers.end() ? -1 : found->second;
}

double Rdma::retry_seconds() const noexcept {
  return (state_->retries + 1) * rdma::timer_seconds(state_->timer);
}

double Rdma::try_seconds() const noexcept { return rdma::timer_seconds(state_->timer); }

std::string Rdma::ports_down() const noexcept {
  std::string text;
  guarded([&] {
    for (const rdma::Path& path : state_->paths) {
      const rdma::Device& device = state_->devices[size_t(path.device)];
      ibv_port_attr port{};
      if (state_->provider().query_port(device.context, uint8_t(path.asked.port), &port) != 0 ||
          port.state == IBV_PORT_ACTIVE || port.state == IBV_PORT_ACTIVE_DEFER) {
        continue;
      }
      text += (text.empty() ? "" : ", ") + device.name + " port " +
              std::to_string(path.asked.port) + " is " + rdma::port_state_text(port.state);
    }
    return Status{};
  });
  return text;
}

Status Rdma::break_queue(int peer, int channel) noexcept {
  ibv_qp* qp = queue(peer, channel).qp;
  if (qp == nullptr) return error(Code::kInvalidArgument, peer, "rank %d has no queue pair", peer);
  ibv_qp_attr attr = {};
  attr.qp_state = IBV_QPS_ERR;
  const int failed = state_->provider().modify_qp(qp, &attr, IBV_QP_STATE);
  return failed ? error(Code::kSystem, peer, "ibv_modify_qp to ERR: errno %d", failed) : Status{};
}

void Rdma::close() noexcept {
  if (state_->options.provider) state_->close();
}

// The devices' descriptors were inherited, the objects behind them belong to the parent: the memory
// that describes them is left where it is.
void Rdma::forget() noexcept {
  static_cast<void>(state_.release());
  state_.reset(new State);
}

}  // namespace epcomm::common
